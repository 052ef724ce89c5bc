// The gated delta rule of a layer (Yang et al. 2024; Qwen3-Next, Qwen3.5), between the products before it and the one behind:
//
//     mixed = silu(convolution(q, k, v))    beta = sigmoid(b)    g = rate * softplus(a + bias)
//     the recurrence over q / |q|, k / |k|, v, g, beta           norm(its output) * silu(z)
//
// q, k, v, z, b and a are columns of the products, in the order of the module. Values are rounded where the modules round.
#pragma once

#include "convolution.h"
#include "openmp.h"
#include "recurrence.h"
#include "rows.h"
#include "team.h"

// Mirrored in delta_net.py.
struct DeltaNet {
    const ChannelRun* runs;                 // of the convolution's inputs, among the columns
    const int64_t *gates, *betas, *decays;  // [H]: columns of z, the first of a head; of b; of a
    const void *conv_weight, *conv_bias;    // [C, W], [C] or null, of the model's type
    void* tails;                            // [S, W - 1, C], of the model's type
    float* states;                          // [S, H, K, V]
    const float *rates, *biases, *norm_weight;  // [H], [H], [V]
    int64_t num_runs;
    int32_t num_channels, width;                           // C, W
    int32_t num_heads, num_groups, key_size, value_size;  // H, G, K, V
    float scale, key_epsilon, norm_epsilon, beta_factor;  // the last multiplies sigmoid(b)
    rows::GatedNormRule norm;
};

// One step of such a layer.
template <typename T>
struct DeltaCall {
    const DeltaNet& net;
    StateChunks chunks;
    const T* projected;  // [T, columns], with `projected_token`
    T* mixed;            // [T, C], scratch as the next two
    float *decays, *betas;  // [T, H]
    T* out;              // [T, H V], with `out_token`
    char* scratch;
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
        in.q = {mixed, net.num_channels, net.key_size, IS_HALF};
        in.k = {mixed + keys, net.num_channels, net.key_size, IS_HALF};
        in.v = {mixed + 2 * keys, net.num_channels, net.value_size, IS_HALF};
        in.log_decay = decays, in.beta = betas, in.chunks = chunks;
        in.num_heads = net.num_heads, in.num_groups = net.num_groups;
        in.key_size = net.key_size, in.value_size = net.value_size;
        in.delta = true, in.num_threads = num_threads, in.scale = net.scale;
        in.normalises = true, in.key_epsilon = net.key_epsilon;
        call.states = net.states, call.out = out, call.out_token = out_token, call.scratch = scratch;
        return call;
    }

    int64_t scratch_bytes() const {
        const ConvolutionCall convolved = convolution();
        const RecurrenceCall recurred = recurrence();
        return std::max(convolution_scratch(&convolved), recurrence_scratch(&recurred));
    }

    // Every thread of a team calls this with the same call; returns once all of `out` and all states are written.
    void run_in_team(Team& team) const {
#pragma omp for schedule(static) nowait
        for (int64_t t = 0; t < num_tokens; t++) find_gates(t);
        convolution_in_team(convolution(), team);
        recurrence_in_team(recurrence(), team);
#pragma omp for schedule(static) nowait
        for (int64_t t = 0; t < num_tokens; t++) {
            T* x = out + t * out_token;
            const T* row = projected + t * projected_token;
            for (int h = 0; h < net.num_heads; h++, x += net.value_size)
                rows::gated_norm_group<false>(x, row + net.gates[h], net.norm_weight, x, net.value_size, net.norm_epsilon,
                                              net.norm);
        }
        team.meet();
    }

  private:
    static constexpr bool IS_HALF = sizeof(T) == 2;

    // beta and g of a token's heads.
    void find_gates(int64_t t) const {
        using namespace rows;
        const T* row = projected + t * projected_token;
        for (int h = 0; h < net.num_heads; h += LANES) {
            const int n = std::min(LANES, net.num_heads - h);
            float b[LANES] = {}, a[LANES] = {};
            for (int i = 0; i < n; i++) {
                b[i] = vec::to_float(row[net.betas[h + i]]);
                a[i] = vec::to_float(row[net.decays[h + i]]);
            }
            const F step = softplus(vec::load(a) + load_first(net.biases + h, n));
            const F beta = rounded(sigmoid(vec::load(b)), row);
            store_first(betas + t * net.num_heads + h, rounded(vec::product(beta, vec::set1(net.beta_factor)), row), n);
            store_first(decays + t * net.num_heads + h, vec::product(load_first(net.rates + h, n), step), n);
        }
    }
};
