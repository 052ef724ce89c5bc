// Gradients of `kernels.convolution`, whose chunks are sequences from zeros. With p the sum before f, dp = dy f'(p), and
//
//     dx[t, c] = sum over j of weight[c, j] dp[t + (W - 1) - j, c]    dweight[c, j] = sum over t of dp[t, c] x[t - (W - 1) + j, c]
//
// float32 inside. A work item is a block of channels, through all chunks, so sums have one order on any number of threads.
#include <algorithm>

#include "carved.h"
#include "openmp.h"
#include "rows.h"
#include "state_chunks.h"

// Mirrored in convolution.py.
struct ConvolutionBackwardCall {
    const void *x, *grad;       // [T, C] of one type, dense in the last dimension
    const float *weight, *bias;  // [C, W], [C] or null
    void* grad_x;               // [T, C], of x's type, dense
    float *grad_weight, *grad_bias;  // [C, W], [C]
    char* scratch;              // `convolution_backward_scratch` bytes for each thread
    int64_t x_token, grad_token;
    StateChunks chunks;
    int32_t num_channels, width;  // C, W
    int32_t half, silu, num_threads;
};

namespace {

using vec::F;
using vec::LANES;

constexpr int BLOCK = 512;  // channels of a work item

struct Scratch : Carved {
    float *weight, *bias;            // [W][BLOCK]; [BLOCK]
    float *grad_weight, *grad_bias;  // the same
    float* grads;                    // [W][BLOCK]: dp of the last tokens

    Scratch(const ConvolutionBackwardCall& c, char* memory) : Carved(memory) {
        const int64_t size = (int64_t)c.width * BLOCK;
        take(weight, size), take(bias, BLOCK), take(grad_weight, size), take(grad_bias, BLOCK), take(grads, size);
    }
};

template <typename T>
struct Item {
    const ConvolutionBackwardCall& c;
    const Scratch& s;
    int first_channel, count;

    void run() const {
        std::fill_n(s.bias, BLOCK, 0.0f);
        if (c.bias) std::copy_n(c.bias + first_channel, count, s.bias);
        for (int j = 0; j < c.width; j++)
            for (int i = 0; i < count; i++) s.weight[j * BLOCK + i] = c.weight[(int64_t)(first_channel + i) * c.width + j];
        std::fill_n(s.grad_weight, (int64_t)c.width * BLOCK, 0.0f);
        std::fill_n(s.grad_bias, BLOCK, 0.0f);
        for (int64_t n = 0; n < c.chunks.num_chunks; n++) run_chunk(c.chunks.starts()[n], c.chunks.starts()[n + 1]);
        std::copy_n(s.grad_bias, count, c.grad_bias + first_channel);
        for (int i = 0; i < count; i++)
            for (int j = 0; j < c.width; j++)
                c.grad_weight[(int64_t)(first_channel + i) * c.width + j] = s.grad_weight[j * BLOCK + i];
    }

    // dp of a token, and then dx of the first of the W tokens that end there.
    void run_chunk(int64_t first, int64_t end) const {
        for (int64_t t = first; t < end + c.width - 1; t++) {
            if (t < end)
                c.silu ? find_grads<true>(t, first) : find_grads<false>(t, first);
            else
                std::fill_n(grads_of(t), BLOCK, 0.0f);
            if (t - (c.width - 1) >= first && t - (c.width - 1) < end) leave(t - (c.width - 1));
        }
    }

    float* grads_of(int64_t t) const { return s.grads + t % c.width * BLOCK; }

    template <bool SILU>
    void find_grads(int64_t t, int64_t first) const {
        const int skipped = (int)std::max<int64_t>(0, first - (t - (c.width - 1)));  // inputs before the sequence are zeros
        const T* inputs = (const T*)c.x + (t - (c.width - 1)) * c.x_token + first_channel;
        const T* grad = (const T*)c.grad + t * c.grad_token + first_channel;
        float* to = grads_of(t);
        for (int i = 0; i < count; i += LANES) {
            const int lanes = std::min(LANES, count - i);
            F of_sum = rows::load_first(grad + i, lanes);
            if (SILU) {
                F sum = vec::load(s.bias + i);
                for (int j = skipped; j < c.width; j++)
                    sum = vec::fma(vec::load(s.weight + j * BLOCK + i), rows::load_first(inputs + j * c.x_token + i, lanes), sum);
                const F gate = rows::sigmoid(sum);
                of_sum = vec::product(of_sum, vec::product(gate, vec::fma(sum, 1.0f - gate, vec::set1(1.0f))));
            }
            vec::store(to + i, of_sum);
            vec::store(s.grad_bias + i, vec::load(s.grad_bias + i) + of_sum);
            for (int j = skipped; j < c.width; j++) {
                float* sums = s.grad_weight + j * BLOCK + i;
                vec::store(sums, vec::fma(of_sum, rows::load_first(inputs + j * c.x_token + i, lanes), vec::load(sums)));
            }
        }
    }

    void leave(int64_t t) const {
        T* out = (T*)c.grad_x + t * c.num_channels + first_channel;
        for (int i = 0; i < count; i += LANES) {
            F sum = {};
            for (int j = 0; j < c.width; j++)
                sum = vec::fma(vec::load(s.weight + j * BLOCK + i), vec::load(grads_of(t + c.width - 1 - j) + i), sum);
            rows::store_first(out + i, sum, std::min(LANES, count - i));
        }
    }
};

template <typename T>
void run(const ConvolutionBackwardCall& c) {
    const int num_blocks = (c.num_channels + BLOCK - 1) / BLOCK;
#pragma omp parallel num_threads(c.num_threads) if (c.num_threads > 1)
    {
        const Scratch scratch(c, c.scratch + omp_get_thread_num() * Scratch(c, nullptr).bytes());
#pragma omp for schedule(dynamic)
        for (int i = 0; i < num_blocks; i++)
            Item<T>{c, scratch, i * BLOCK, std::min(BLOCK, c.num_channels - i * BLOCK)}.run();
    }
}

}  // namespace

extern "C" {

int64_t convolution_backward_scratch(const ConvolutionBackwardCall* c) { return Scratch(*c, nullptr).bytes(); }

void convolution_backward(const ConvolutionBackwardCall* c) { c->half ? run<bf16>(*c) : run<float>(*c); }
}
