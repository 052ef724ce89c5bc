// `kernels.convolution`: out[t, c] = f(bias[c] + sum over j of weight[c, j] * x[t - (W - 1) + j, c]), f SiLU or nothing.
//
// A sum is float32, in the order of j, and rounded once, after f. The inputs before a chunk are those of its source slot, or
// zeros. A work item is a block of channels, through all chunks.
#include <algorithm>

#include "carved.h"
#include "openmp.h"
#include "rows.h"
#include "state_chunks.h"

// Mirrored in convolution.py.
struct ConvolutionCall {
    const void* x;       // [T, C], dense in the last dimension
    const float* weight;  // [C, W]
    const float* bias;    // [C] or null
    void* states;         // [S, W - 1, C], dense; null if no slot is named
    void* out;            // [T, C], dense
    char* scratch;        // `convolution_scratch` bytes for each thread
    int64_t x_token;
    StateChunks chunks;
    int32_t num_channels, width;  // C, W
    int32_t half, silu, num_threads;
};

namespace {

using vec::F;
using vec::LANES;

constexpr int BLOCK = 512;  // channels of a work item

template <typename T>
struct Scratch : Carved {
    float *weight, *bias;  // [W][BLOCK]; [BLOCK]
    T* tail;               // [W - 1][BLOCK]: inputs before a chunk
    const T** rows;        // [W]: inputs of a token, oldest first

    Scratch(const ConvolutionCall& c, char* memory) : Carved(memory) {
        take(weight, (int64_t)c.width * BLOCK);
        take(bias, BLOCK);
        take(tail, (int64_t)(c.width - 1) * BLOCK);
        take(rows, c.width);
    }
};

template <typename T>
struct Item {
    const ConvolutionCall& c;
    const Scratch<T>& s;
    int first_channel, count;

    void run() const {
        std::fill_n(s.bias, BLOCK, 0.0f);
        if (c.bias) std::copy_n(c.bias + first_channel, count, s.bias);
        for (int i = 0; i < count; i++)
            for (int j = 0; j < c.width; j++) s.weight[j * BLOCK + i] = c.weight[(int64_t)(first_channel + i) * c.width + j];
        for (int64_t n = 0; n < c.chunks.num_chunks; n++) run_chunk(n);
    }

    void run_chunk(int64_t n) const {
        const int64_t first = c.chunks.starts()[n], end = c.chunks.starts()[n + 1], source = c.chunks.sources()[n];
        if (first == end) return;
        for (int row = 0; row < c.width - 1; row++)  // a copy: a write of the chunk may be to the same slot
            if (source >= 0)
                std::copy_n(slot(source, row), count, s.tail + row * BLOCK);
            else
                std::fill_n(s.tail + row * BLOCK, BLOCK, T{});
        for (int64_t t = first; t < end; t++) {
            for (int j = 0; j < c.width; j++) s.rows[j] = input(t - (c.width - 1) + j, first);
            c.silu ? convolve<true>(t) : convolve<false>(t);
        }
        for (int64_t w = c.chunks.write_starts()[n]; w < c.chunks.write_starts()[n + 1]; w++)
            for (int row = 0; row < c.width - 1; row++) {
                const T* from = input(c.chunks.write_ends()[w] - (c.width - 1) + row, first);
                std::copy_n(from, count, slot(c.chunks.write_slots()[w], row));
            }
    }

    T* slot(int64_t number, int row) const {
        return (T*)c.states + (number * (c.width - 1) + row) * c.num_channels + first_channel;
    }

    // The block's inputs at `t`, at most W - 1 before `first`, the chunk's first token.
    const T* input(int64_t t, int64_t first) const {
        return t < first ? s.tail + (t - first + c.width - 1) * BLOCK : (const T*)c.x + t * c.x_token + first_channel;
    }

    template <bool SILU>
    void convolve(int64_t t) const {
        T* out = (T*)c.out + t * c.num_channels + first_channel;
        for (int i = 0; i < count; i += LANES) {
            const int lanes = std::min(LANES, count - i);
            F sum = vec::load(s.bias + i);
            for (int j = 0; j < c.width; j++)
                sum = vec::fma(vec::load(s.weight + j * BLOCK + i), rows::load_first(s.rows[j] + i, lanes), sum);
            rows::store_first(out + i, SILU ? rows::silu(sum) : sum, lanes);
        }
    }
};

template <typename T>
void run(const ConvolutionCall& c) {
    const int num_blocks = (c.num_channels + BLOCK - 1) / BLOCK;
#pragma omp parallel num_threads(c.num_threads) if (c.num_threads > 1)
    {
        const Scratch<T> scratch(c, c.scratch + omp_get_thread_num() * Scratch<T>(c, nullptr).bytes());
#pragma omp for schedule(dynamic)
        for (int i = 0; i < num_blocks; i++)
            Item<T>{c, scratch, i * BLOCK, std::min(BLOCK, c.num_channels - i * BLOCK)}.run();
    }
}

}  // namespace

extern "C" {

int64_t convolution_scratch(const ConvolutionCall* c) {
    return c->half ? Scratch<bf16>(*c, nullptr).bytes() : Scratch<float>(*c, nullptr).bytes();
}

void convolution_run(const ConvolutionCall* c) { c->half ? run<bf16>(*c) : run<float>(*c); }
}
