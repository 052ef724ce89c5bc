// Low-rank adapters (LoRA, Hu et al. 2021) of many rows at once, each row under its own adapter, or none:
//
//     out[row] = round(out[row] + scale * (x[row] A) B)        in float32 from x to the sum, rounded once
//
// Rows of one adapter are computed in blocks, which read its matrices once. Each element is a fixed number of float32
// chains over K, then one over the rank, whatever the block around it: a row's bits depend on that row alone.
#include "adapters.h"

#include <algorithm>

#include "openmp.h"
#include "vec.h"

#if defined(__FMA__) && !defined(__AVX512F__)
#include <immintrin.h>
#endif

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
constexpr int ROWS = 2, CHAINS = 2;  // 8 accumulators of 16 registers, two vectors of each row's chain

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

constexpr int64_t LOW_COLUMNS = 16;  // of A, to one piece of work: ranks are multiples of it
constexpr int LOW_VECTORS = LOW_COLUMNS / LANES;
constexpr int64_t DEPTH = 256;    // rows of A, and values of x, at once
constexpr int64_t COLUMNS = 256;  // of `out`, to one piece of work

template <typename T>
struct Worker {
    const AdapterCall& c;
    const AdapterTable& table;
    const AdapterRows& batch;

    explicit Worker(const AdapterCall& call) : c(call), table(*call.table), batch(*call.rows) {}

    // Neighbours are blocks of rows, so that every thread gets half of each part's.
    void down() const {
        const int64_t groups = table.max_rank / LOW_COLUMNS, count = table.num_parts * groups * batch.num_blocks;
#pragma omp for schedule(static, 1) nowait
        for (int64_t i = 0; i < count; i++) {
            const int64_t index = i / batch.num_blocks / groups, lane = i / batch.num_blocks % groups * LOW_COLUMNS;
            const AdapterBlock block = present(batch.blocks[i % batch.num_blocks]);
            const AdapterPart& part = part_of(block, index);
            if (!part.a || lane >= part.rank) continue;
            int row = 0;
            for (; row + ROWS <= block.count; row += ROWS) down_rows<ROWS>(block, row, part, index, lane);
            for (; row < block.count; row++) down_rows<1>(block, row, part, index, lane);
        }
    }

    // Neighbours are blocks of rows, which read the same columns of B.
    void up() const {
        const int64_t count = (table.out_features + COLUMNS - 1) / COLUMNS * batch.num_blocks;
#pragma omp for schedule(static) nowait
        for (int64_t i = 0; i < count; i++) {
            const AdapterBlock block = present(batch.blocks[i % batch.num_blocks]);
            const int64_t begin = i / batch.num_blocks * COLUMNS, end = begin + COLUMNS;
            for (int64_t index = 0; index < table.num_parts; index++) {
                const AdapterPart& part = part_of(block, index);
                if (!part.a) continue;
                const int64_t from = std::max(begin - part.column, int64_t(0));
                up(block, part, index, from, std::min(end - part.column, part.size));
            }
        }
    }

  private:
    const AdapterPart& part_of(const AdapterBlock& block, int64_t index) const {
        return table.parts[block.slot * table.num_parts + index];
    }

    // Those rows of a block that are in this call.
    AdapterBlock present(AdapterBlock block) const {
        while (block.count && batch.rows[block.first] < c.begin) block.first++, block.count--;
        while (block.count && batch.rows[block.first + block.count - 1] >= c.end) block.count--;
        return block;
    }

    const T* x_of(const AdapterBlock& block, int row) const {
        return (const T*)c.x + (batch.rows[block.first + row] - c.begin) * c.x_stride;
    }
    T* out_of(const AdapterBlock& block, int row, const AdapterPart& part) const {
        return (T*)c.out + (batch.rows[block.first + row] - c.begin) * c.out_stride + part.column;
    }
    float* low_of(const AdapterBlock& block, int row, int64_t index) const {
        return c.low + ((block.first + row) * table.num_parts + index) * table.max_rank;
    }

    // low = x A, of LOW_COLUMNS columns of A. Chain i adds rows i, i + CHAINS, ... of A.
    template <int N>
    void down_rows(const AdapterBlock& block, int row, const AdapterPart& part, int64_t index, int64_t lane) const {
        const T* a = (const T*)part.a + lane;
        F sums[N][CHAINS][LOW_VECTORS] = {};
        float wide[N][DEPTH];
        for (int64_t k = 0, count; k < table.in_features; k += count, a += count * part.rank) {
            count = std::min(DEPTH, table.in_features - k);
            const float* x[N];
            for (int r = 0; r < N; r++) x[r] = widened(x_of(block, row + r) + k, count, wide[r]);
            down_piece<N>(a, part.rank, x, count, sums);
        }
        for (int r = 0; r < N; r++)
            for (int v = 0; v < LOW_VECTORS; v++) {
                F sum = sums[r][0][v];
                for (int i = 1; i < CHAINS; i++) sum += sums[r][i][v];
                store(low_of(block, row + r, index) + lane + v * LANES, sum);
            }
    }

    template <int N>
    VEC_INLINE void down_piece(
        const T* a, int64_t rank, const float* const (&x)[N], int64_t count, F (&sums)[N][CHAINS][LOW_VECTORS]) {
        int64_t k = 0;
        for (; k + CHAINS <= count; k += CHAINS)
#pragma GCC unroll 4
            for (int i = 0; i < CHAINS; i++) add_products<N>(a + (k + i) * rank, x, k + i, i, sums);
        for (int i = 0; k < count; k++, i++) add_products<N>(a + k * rank, x, k, i, sums);
    }

    template <int N>
    VEC_INLINE void add_products(
        const T* a, const float* const (&x)[N], int64_t k, int chain, F (&sums)[N][CHAINS][LOW_VECTORS]) {
#pragma GCC unroll 2
        for (int v = 0; v < LOW_VECTORS; v++) {
            const F weights = load(a + v * LANES);
#pragma GCC unroll 4
            for (int r = 0; r < N; r++) sums[r][chain][v] = fma(set1(x[r][k]), weights, sums[r][chain][v]);
        }
    }

    static const float* widened(const float* x, int64_t, float*) { return x; }
    static const float* widened(const bf16* x, int64_t count, float* out) {
        int64_t k = 0;
        for (; k + LANES <= count; k += LANES) store(out + k, load(x + k));
        for (; k < count; k++) out[k] = vec::to_float(x[k]);
        return out;
    }

    // out += scale * low B, of columns [from, to) of B.
    void up(const AdapterBlock& block, const AdapterPart& part, int64_t index, int64_t from, int64_t to) const {
        int row = 0;
        for (; row + 4 <= block.count; row += 4) up_rows<4>(block, row, part, index, from, to);
        for (; row + 2 <= block.count; row += 2) up_rows<2>(block, row, part, index, from, to);
        for (; row < block.count; row++) up_rows<1>(block, row, part, index, from, to);
    }

    template <int N>
    void up_rows(
        const AdapterBlock& block, int row, const AdapterPart& part, int64_t index, int64_t from, int64_t to) const {
        constexpr int VECTORS = 8 / N;  // 8 accumulators
        for (; from + VECTORS * LANES <= to; from += VECTORS * LANES)
            up_columns<N, VECTORS>(block, row, part, index, from, LANES);
        for (; from < to; from += LANES)
            up_columns<N, 1>(block, row, part, index, from, (int)std::min<int64_t>(LANES, to - from));
    }

    // Of V vectors of columns of B; n < LANES: of its first n columns.
    template <int N, int V>
    void up_columns(
        const AdapterBlock& block, int row, const AdapterPart& part, int64_t index, int64_t column, int n) const {
        const T* b = (const T*)part.b + column;
        const float* low[N];
        F sums[N][V] = {};
        for (int r = 0; r < N; r++) low[r] = low_of(block, row + r, index);
        for (int64_t k = 0; k < part.rank; k++, b += part.size)
#pragma GCC unroll 8
            for (int v = 0; v < V; v++) {
                const F weights = V > 1 || n == LANES ? load(b + v * LANES) : load(b, n);
#pragma GCC unroll 4
                for (int r = 0; r < N; r++) sums[r][v] = fma(set1(low[r][k]), weights, sums[r][v]);
            }
        const F scale = set1(part.scale);
        for (int r = 0; r < N; r++)
            for (int v = 0; v < V; v++) {
                T* out = out_of(block, row + r, part) + column + v * LANES;
                if (V > 1 || n == LANES)
                    store(out, load(out) + product(sums[r][v], scale));
                else
                    store(out, load(out, n) + product(sums[r][v], scale), n);
            }
    }
};

}  // namespace

void adapters_down_in_team(const AdapterCall& call) {
    call.is_bf16 ? Worker<bf16>(call).down() : Worker<float>(call).down();
}

void adapters_up_in_team(const AdapterCall& call, Team& team) {
    call.is_bf16 ? Worker<bf16>(call).up() : Worker<float>(call).up();
    team.meet();
}

extern "C" void adapters_run(const AdapterCall* call) {
    Team::run(call->num_threads, [&](Team& team) {
        adapters_down_in_team(*call);
        team.meet();
        adapters_up_in_team(*call, team);
    });
}
