// The short convolution of a layer (LFM2), between the product before it and the one behind:
//
//     y = C * convolution(B * x)
//
// B, C and x are columns of the product, in the order of the module. Values are rounded where the modules round.
#pragma once

#include "convolution.h"
#include "openmp.h"
#include "rows.h"
#include "team.h"

// Mirrored in short_convolution.py.
struct ShortConvolution {
    ChannelRun run;              // all channels; their columns are those of B
    int64_t inputs, gates;       // first columns of x, and of C
    const void *weight, *bias;   // [C, W], [C] or null, of the model's type
    void* tails;                 // [S, W - 1, C], of the model's type
    int64_t width;               // W
};

// One step of such a layer.
template <typename T>
struct ShortConvolutionCall {
    const ShortConvolution& net;
    StateChunks chunks;
    T* projected;  // [T, columns], with `projected_token`; the columns of B get B * x
    T* mixed;      // [T, C], scratch as the next
    char* scratch;
    T* out;        // [T, C], with `out_token`
    int64_t projected_token, out_token, num_tokens;
    int32_t num_threads;

    ConvolutionCall convolution() const {
        ConvolutionCall call = {};
        call.x = projected, call.x_token = projected_token, call.out = mixed;
        call.weight = net.weight, call.bias = net.bias, call.states = net.tails;
        call.scratch = scratch, call.chunks = chunks, call.runs = &net.run, call.num_runs = 1;
        call.num_channels = net.run.count, call.width = net.width;
        call.half = call.half_weights = sizeof(T) == 2, call.silu = false, call.num_threads = num_threads;
        return call;
    }

    int64_t scratch_bytes() const {
        const ConvolutionCall convolved = convolution();
        return convolution_scratch(&convolved);
    }

    // Every thread of a team calls this with the same call; returns once all of `out` and all states are written.
    void run_in_team(Team& team) const {
        const int64_t size = net.run.count;
#pragma omp for schedule(static) nowait
        for (int64_t t = 0; t < num_tokens; t++) {
            T* row = projected + t * projected_token;
            rows::multiply_row(row + net.run.column, row + net.inputs, row + net.run.column, size);
        }
        team.meet();
        convolution_in_team(convolution(), team);
#pragma omp for schedule(static) nowait
        for (int64_t t = 0; t < num_tokens; t++)
            rows::multiply_row(projected + t * projected_token + net.gates, mixed + t * size, out + t * out_token, size);
        team.meet();
    }
};
