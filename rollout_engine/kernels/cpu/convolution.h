// The convolution of `convolution.cpp`, for kernels that call it inside a parallel region of their own.
#pragma once

#include <cstdint>

#include "state_chunks.h"
#include "team.h"

// Channels of a convolution whose inputs are neighbours: [channel, channel + count) of the one, from `column` on of the other.
struct ChannelRun {
    int64_t channel, column, count;
};

// Mirrored in convolution.py.
struct ConvolutionCall {
    const void* x;       // [T, columns], dense in the last dimension
    const void* weight;  // [C, W]
    const void* bias;    // [C] or null
    void* states;        // [S, W - 1, C] of x's type, dense; null if no slot is named
    void* out;           // [T, C] of x's type, dense
    char* scratch;       // `convolution_scratch` bytes for each thread
    int64_t x_token;
    StateChunks chunks;
    const ChannelRun* runs;  // that cover all channels
    int64_t num_runs;
    int32_t num_channels, width;  // C, W
    int32_t half, half_weights, silu, num_threads;
};

extern "C" int64_t convolution_scratch(const ConvolutionCall* call);

// Every thread of a team calls this with the same `call`; returns once all of `out` and all states are written.
void convolution_in_team(const ConvolutionCall& call, Team& team);
