// Mamba 2's recurrence of a layer (Dao and Gu 2024; Bamba, Granite 4), between the product before it and the one behind:
//
//     x, B, C = silu(convolution(x, B, C))    s = clamp(softplus(dt + bias))
//     S = exp(s A) S + s B x^T    y = S^T C + D x    norm(y * silu(gate)), or norm(y) * silu(gate), in groups of channels
//
// The gate, x, B, C and dt are columns of the product, in the order of the module. Values are rounded where the modules
// round: x and y are float32, all before them has the model's type.
#pragma once

#include "convolution.h"
#include "openmp.h"
#include "recurrence.h"
#include "rows.h"
#include "team.h"

// Mirrored in mamba.py.
struct Mamba {
    const ChannelRun* runs;  // of the convolution's inputs, among the columns: first x, then B, then C
    const int64_t* steps;    // [H], columns of dt
    const void *conv_weight, *conv_bias;  // [C, W], [C] or null, of the model's type
    void* tails;                          // [S, W - 1, C], of the model's type
    float* states;                        // [S, H, K, V]
    const float *rates, *biases, *skips;  // [H]: A; the bias of dt, rounded to the model's type; D
    const float* norm_weight;             // [H V]
    int64_t num_runs, gates;              // gates: the first column of those of all channels of x
    int32_t num_channels, width;                          // C, W
    int32_t num_heads, num_groups, key_size, value_size;  // H, G, K, V
    int32_t norm_size;                                    // channels that are normed together
    float lowest, highest, norm_epsilon;                  // limits of a step, in the model's type
    rows::GatedNormRule norm;
};

// One step of such a layer.
template <typename T>
struct MambaCall {
    const Mamba& net;
    StateChunks chunks;
    const T* projected;  // [T, columns], with `projected_token`
    T* mixed;            // [T, C], scratch as the next four
    float *decays, *steps;  // [T, H]
    float* values;          // [T, H V]: x, over which y is written
    char* scratch;
    T* out;  // [T, H V], with `out_token`
    int64_t projected_token, out_token, num_tokens;
    int32_t num_threads;

    ConvolutionCall convolution() const {
        ConvolutionCall call = {};
        call.x = projected, call.x_token = projected_token, call.out = mixed;
        call.weight = net.conv_weight, call.bias = net.conv_bias, call.states = net.tails;
        call.scratch = scratch, call.chunks = chunks, call.runs = net.runs, call.num_runs = net.num_runs;
        call.num_channels = net.num_channels, call.width = net.width;
        call.half = call.half_weights = IS_HALF, call.silu = true, call.num_threads = num_threads;
        return call;
    }

    RecurrenceCall recurrence() const {
        RecurrenceCall call = {};
        recurrence::Inputs& in = call.in;
        const int64_t keys = (int64_t)net.num_groups * net.key_size;
        in.k = {mixed + num_values(), net.num_channels, net.key_size, IS_HALF};
        in.q = {mixed + num_values() + keys, net.num_channels, net.key_size, IS_HALF};
        in.v = {values, num_values(), net.value_size, false};
        in.log_decay = decays, in.beta = steps, in.skip = net.skips, in.chunks = chunks;
        in.num_heads = net.num_heads, in.num_groups = net.num_groups;
        in.key_size = net.key_size, in.value_size = net.value_size;
        in.num_threads = num_threads, in.scale = 1.0f;
        call.states = net.states, call.out = values, call.out_token = num_values(), call.scratch = scratch;
        return call;
    }

    int64_t scratch_bytes() const {
        const ConvolutionCall convolved = convolution();
        const RecurrenceCall recurred = recurrence();
        return std::max(convolution_scratch(&convolved), recurrence_scratch(&recurred));
    }

    // Every thread of a team calls this with the same call; returns once all of `out` and all states are written.
    void run_in_team(Team& team) const {
        convolution_in_team(convolution(), team);
        const int64_t size = num_values();
#pragma omp for schedule(static) nowait
        for (int64_t t = 0; t < num_tokens; t++) {
            find_steps(t);
            rows::convert_row(mixed + t * net.num_channels, values + t * size, size);
        }
        team.meet();
        recurrence_in_team(recurrence(), team);
#pragma omp for schedule(static) nowait
        for (int64_t t = 0; t < num_tokens; t++) {
            float* y = values + t * size;
            const T* gate = projected + t * projected_token + net.gates;
            for (int64_t c = 0; c < size; c += net.norm_size)
                rows::gated_norm_group<false>(y + c, gate + c, net.norm_weight + c, y + c, net.norm_size, net.norm_epsilon,
                                              net.norm);
            rows::convert_row(y, out + t * out_token, size);
        }
        team.meet();
    }

  private:
    static constexpr bool IS_HALF = sizeof(T) == 2;

    int64_t num_values() const { return (int64_t)net.num_heads * net.value_size; }

    // The steps of a token's heads, and the logarithms of their decays.
    void find_steps(int64_t t) const {
        using namespace rows;
        const T* row = projected + t * projected_token;
        for (int h = 0; h < net.num_heads; h += LANES) {
            const int n = std::min(LANES, net.num_heads - h);
            float dt[LANES] = {};
            for (int i = 0; i < n; i++) dt[i] = vec::to_float(row[net.steps[h + i]]);
            const F biased = rounded(vec::load(dt) + load_first(net.biases + h, n), row);
            const F step = rounded(softplus(biased), row);
            const F limited = vec::min(vec::set1(net.highest), vec::max(vec::set1(net.lowest), step));  // NaN stays
            store_first(steps + t * net.num_heads + h, limited, n);
            store_first(decays + t * net.num_heads + h, vec::product(limited, load_first(net.rates + h, n)), n);
        }
    }
};
