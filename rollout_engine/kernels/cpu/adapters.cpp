// Low-rank adapters (LoRA, Hu et al. 2021) of many rows at once, each row under its own adapter, or none:
//
//     out[row] = round(out[row] + scale * (x[row] A) B)        in float32 from x to the sum, rounded once
//
// Rows of one adapter are computed in blocks, which read its matrices once. Each element is a fixed number of float32
// chains over K, then one over the rank, whatever the block around it: a row's bits depend on that row alone.
#include <algorithm>
#include <cstdint>

#include "openmp.h"
#include "team.h"
#include "vec.h"

#if defined(__FMA__) && !defined(__AVX512F__)
#include <immintrin.h>
#endif

extern "C" {

// One adapter's matrices for one linear layer. Mirrored in adapters.py.
struct AdapterPart {
    const void* a;  // [in_features, rank]; null where the adapter leaves this layer alone
    const void* b;  // [rank, size]
    int64_t rank;   // padded with zeros to a multiple of 16
    int64_t column, size;  // of the layer's outputs within `out`
    float scale;
};

// Rows [first, first + count) of `AdapterCall::rows`, all of one adapter.
struct AdapterBlock {
    int32_t first, count, slot;
};

struct AdapterCall {
    const char* x;             // rows of in_features
    char* out;                 // rows that hold the outputs of all parts
    const AdapterPart* parts;  // [slots, num_parts]
    const AdapterBlock* blocks;
    const int32_t* rows;       // row numbers of x and out
    float* low;                // [length of rows, num_parts, max_rank]: x A
    int64_t x_stride, out_stride;  // elements
    int64_t num_blocks, num_parts, in_features, max_rank;
    int32_t is_bf16, num_threads;
};
}

namespace {

#ifdef __AVX512F__
using vec::F;
using vec::fma, vec::load, vec::product, vec::store;
constexpr int LANES = vec::LANES;
constexpr int ROWS = 4, CHAINS = 4;  // 16 accumulators of 32 registers
#else
// Eight floats: compilers keep vectors wider than a register in memory.
typedef float F __attribute__((vector_size(32)));
typedef uint32_t U __attribute__((vector_size(32)));
typedef uint16_t Half __attribute__((vector_size(16)));
constexpr int LANES = 8;
constexpr int ROWS = 4, CHAINS = 2;  // 8 accumulators of 16 registers

// Fused always: a compiler fuses a * b + c in one place and not in another.
VEC_INLINE F fma(F a, F b, F c) {
#ifdef __FMA__
    return _mm256_fmadd_ps(a, b, c);
#else
    for (int i = 0; i < LANES; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#endif
}
VEC_INLINE F product(F a, F b) {  // rounded even where it feeds a sum
    F result = a * b;
    __asm__("" : "+m"(result));
    return result;
}
VEC_INLINE F load(const float* p) {
    F x;
    memcpy(&x, p, sizeof x);
    return x;
}
VEC_INLINE F load(const bf16* p) {
    Half x;
    memcpy(&x, p, sizeof x);
    return (F)(__builtin_convertvector(x, U) << 16);
}
VEC_INLINE void store(float* p, F x) { memcpy(p, &x, sizeof x); }
VEC_INLINE void store(bf16* p, F x) {  // to nearest, ties to even; NaN stays NaN
    const U bits = (U)x;
    U rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    rounded = x == x ? rounded : U{} + 0x7fc0;
    const Half half = __builtin_convertvector(rounded, Half);
    memcpy(p, &half, sizeof half);
}
template <typename T>
VEC_INLINE F load(const T* p, int n) {
    T padded[LANES] = {};
    memcpy(padded, p, n * sizeof(T));
    return load(padded);
}
template <typename T>
VEC_INLINE void store(T* p, F x, int n) {
    T padded[LANES];
    store(padded, x);
    memcpy(p, padded, n * sizeof(T));
}
#endif

VEC_INLINE F set1(float x) { return F{} + x; }

constexpr int64_t COLUMNS = 256;  // of one piece of work in the second product

template <typename T>
struct Worker {
    const AdapterCall& c;
    Team& team;

    void run() const {
        const int64_t pieces = c.num_blocks * c.num_parts;
#pragma omp for schedule(static) nowait
        for (int64_t i = 0; i < pieces; i++) {
            const AdapterBlock& block = c.blocks[i / c.num_parts];
            const int64_t index = i % c.num_parts;
            const AdapterPart& part = c.parts[block.slot * c.num_parts + index];
            if (part.a) down(block, part, index);
        }
        team.meet();
#pragma omp for schedule(static) nowait
        for (int64_t i = 0; i < pieces; i++) {
            const AdapterBlock& block = c.blocks[i / c.num_parts];
            const int64_t index = i % c.num_parts;
            const AdapterPart& part = c.parts[block.slot * c.num_parts + index];
            if (part.a)
                for (int64_t from = 0; from < part.size; from += COLUMNS)
                    up(block, part, index, from, std::min(from + COLUMNS, part.size));
        }
        team.meet();
    }

  private:
    const T* x_of(const AdapterBlock& block, int row) const {
        return (const T*)c.x + c.rows[block.first + row] * c.x_stride;
    }
    T* out_of(const AdapterBlock& block, int row, const AdapterPart& part) const {
        return (T*)c.out + c.rows[block.first + row] * c.out_stride + part.column;
    }
    float* low_of(const AdapterBlock& block, int row, int64_t index) const {
        return c.low + ((block.first + row) * c.num_parts + index) * c.max_rank;
    }

    void down(const AdapterBlock& block, const AdapterPart& part, int64_t index) const {
        for (int row = 0; row < block.count; row += ROWS)
            for (int64_t lane = 0; lane < part.rank; lane += LANES) {
                if (block.count - row >= ROWS)
                    down_rows<ROWS>(block, row, part, index, lane);
                else
                    for (int one = row; one < block.count; one++) down_rows<1>(block, one, part, index, lane);
            }
    }

    // low = x A, of a vector of columns of A. Chain i adds rows i, i + CHAINS, ... of A.
    template <int N>
    void down_rows(const AdapterBlock& block, int row, const AdapterPart& part, int64_t index, int64_t lane) const {
        const T* a = (const T*)part.a + lane;
        const T* x[N];
        F sums[N][CHAINS] = {};
        for (int r = 0; r < N; r++) x[r] = x_of(block, row + r);
        int64_t k = 0;
        for (; k + CHAINS <= c.in_features; k += CHAINS)
#pragma GCC unroll 4
            for (int i = 0; i < CHAINS; i++) {
                const F weights = load(a + (k + i) * part.rank);
#pragma GCC unroll 4
                for (int r = 0; r < N; r++)
                    sums[r][i] = fma(set1(vec::to_float(x[r][k + i])), weights, sums[r][i]);
            }
        for (int i = 0; k < c.in_features; k++, i++) {
            const F weights = load(a + k * part.rank);
            for (int r = 0; r < N; r++) sums[r][i] = fma(set1(vec::to_float(x[r][k])), weights, sums[r][i]);
        }
        for (int r = 0; r < N; r++) {
            F sum = sums[r][0];
            for (int i = 1; i < CHAINS; i++) sum += sums[r][i];
            store(low_of(block, row + r, index) + lane, sum);
        }
    }

    void up(const AdapterBlock& block, const AdapterPart& part, int64_t index, int64_t from, int64_t to) const {
        for (int row = 0; row < block.count; row += ROWS)
            for (int64_t column = from; column < to; column += LANES) {
                const int n = (int)std::min<int64_t>(LANES, to - column);
                if (block.count - row >= ROWS)
                    up_rows<ROWS>(block, row, part, index, column, n);
                else
                    for (int one = row; one < block.count; one++) up_rows<1>(block, one, part, index, column, n);
            }
    }

    // out += scale * low B, of n <= LANES columns of B.
    template <int N>
    void up_rows(
        const AdapterBlock& block, int row, const AdapterPart& part, int64_t index, int64_t column, int n) const {
        const T* b = (const T*)part.b + column;
        const float* low[N];
        F sums[N] = {};
        for (int r = 0; r < N; r++) low[r] = low_of(block, row + r, index);
        for (int64_t k = 0; k < part.rank; k++, b += part.size) {
            const F weights = n == LANES ? load(b) : load(b, n);
#pragma GCC unroll 4
            for (int r = 0; r < N; r++) sums[r] = fma(set1(low[r][k]), weights, sums[r]);
        }
        const F scale = set1(part.scale);
        for (int r = 0; r < N; r++) {
            T* out = out_of(block, row + r, part) + column;
            if (n == LANES)
                store(out, load(out) + product(sums[r], scale));
            else
                store(out, load(out, n) + product(sums[r], scale), n);
        }
    }
};

}  // namespace

extern "C" void adapters_run(const AdapterCall* call) {
    Team::run(call->num_threads, [&](Team& team) {
        call->is_bf16 ? Worker<bf16>{*call, team}.run() : Worker<float>{*call, team}.run();
    });
}
