// `kernels.convolution`: out[t, c] = f(bias[c] + sum over j of weight[c, j] * x[t - (W - 1) + j, c]), f SiLU or nothing.
//
// A sum is float32, in the order of j, and rounded once, after f. The inputs before a chunk are those of its source slot, or
// zeros. A work item is a block of channels, through all chunks.
#include "convolution.h"

#include <algorithm>

#include "carved.h"
#include "openmp.h"
#include "rows.h"

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
    int64_t first_channel, column;  // of the outputs, and of the inputs
    int count;

    void run() const {
        c.half_weights ? load_weights<bf16>() : load_weights<float>();
        for (int64_t n = 0; n < c.chunks.num_chunks; n++) run_chunk(n);
    }

    template <typename W>
    void load_weights() const {
        const W* weight = (const W*)c.weight + first_channel * c.width;
        for (int i = 0; i < count; i++) {
            s.bias[i] = c.bias ? vec::to_float(((const W*)c.bias)[first_channel + i]) : 0.0f;
            for (int j = 0; j < c.width; j++) s.weight[j * BLOCK + i] = vec::to_float(weight[i * c.width + j]);
        }
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
            c.silu ? convolve_token<true>(t) : convolve_token<false>(t);
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
        return t < first ? s.tail + (t - first + c.width - 1) * BLOCK : (const T*)c.x + t * c.x_token + column;
    }

    template <bool SILU>
    void convolve_token(int64_t t) const {
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

// Blocks of channels whose inputs are neighbours.
int64_t blocks_of(const ChannelRun& run) { return (run.count + BLOCK - 1) / BLOCK; }

template <typename T>
void convolve(const ConvolutionCall& c, Team& team) {
    int64_t num_blocks = 0;
    for (int64_t i = 0; i < c.num_runs; i++) num_blocks += blocks_of(c.runs[i]);
    const Scratch<T> scratch(c, c.scratch + omp_get_thread_num() * Scratch<T>(c, nullptr).bytes());
#pragma omp for schedule(dynamic) nowait
    for (int64_t i = 0; i < num_blocks; i++) {
        const ChannelRun* run = c.runs;
        int64_t block = i;
        for (; block >= blocks_of(*run); run++) block -= blocks_of(*run);
        const int64_t first = block * BLOCK;
        Item<T>{c, scratch, run->channel + first, run->column + first, (int)std::min<int64_t>(BLOCK, run->count - first)}.run();
    }
    team.meet();
}

}  // namespace

void convolution_in_team(const ConvolutionCall& c, Team& team) {
    c.half ? convolve<bf16>(c, team) : convolve<float>(c, team);
}

extern "C" {

int64_t convolution_scratch(const ConvolutionCall* c) {
    return c->half ? Scratch<bf16>(*c, nullptr).bytes() : Scratch<float>(*c, nullptr).bytes();
}

void convolution_run(const ConvolutionCall* c) {
    Team::run(c->num_threads, [&](Team& team) { convolution_in_team(*c, team); });
}
}
