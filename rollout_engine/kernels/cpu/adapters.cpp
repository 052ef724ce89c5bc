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

namespace {

using vec::F;

#ifdef __AVX512F__
constexpr int ROWS = 4, CHAINS = 4;  // 16 accumulators of 32 registers
#else
constexpr int ROWS = 2, CHAINS = 2;  // 8 accumulators of 16 registers, where a vector is two
#endif

constexpr int64_t LOW_COLUMNS = 16, PANEL = 32;  // columns of A and of B that are stored together
constexpr int64_t AHEAD = 2048;                  // elements: the hardware alone fetches too late
constexpr int64_t DEPTH = 256;                   // rows of A, and values of x, at once
constexpr int64_t COLUMNS = 4 * PANEL;           // of `out`, to one piece of work, where rows get nothing but adapters

VEC_INLINE F broadcast(float x) { return x - F{}; }  // -0.0 stays

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
            const AdapterBlock block = present(batch.blocks[i % batch.num_blocks], c.begin, c.end);
            const AdapterPart& part = part_of(block, index);
            if (!part.a || lane >= part.rank) continue;
            int row = 0;
            for (; row + ROWS <= block.count; row += ROWS) down_rows<ROWS>(block, row, part, index, lane);
            for (; row + 2 <= block.count; row += 2) down_rows<2>(block, row, part, index, lane);
            for (; row < block.count; row++) down_rows<1>(block, row, part, index, lane);
        }
    }

    void up(Rectangle in) const {
        for (int64_t i = 0; i < batch.num_blocks; i++) {
            const AdapterBlock block = present(batch.blocks[i], c.begin + in.begin, c.begin + in.end);
            for (int64_t index = 0; block.count && index < table.num_parts; index++) {
                const AdapterPart& part = part_of(block, index);
                if (!part.a) continue;
                const int64_t from = std::max(in.from - part.column, int64_t(0));
                const int64_t to = std::min(in.to - part.column, part.size);
                up_part(block, part, index, from, to);
            }
        }
    }

  private:
    const AdapterPart& part_of(const AdapterBlock& block, int64_t index) const {
        return table.parts[block.slot * table.num_parts + index];
    }

    // Those of a block's rows that are in [begin, end).
    AdapterBlock present(AdapterBlock block, int64_t begin, int64_t end) const {
        while (block.count && batch.rows[block.first] < begin) block.first++, block.count--;
        while (block.count && batch.rows[block.first + block.count - 1] >= end) block.count--;
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
        const T* a = (const T*)part.a + lane * table.in_features;
        F sums[N][CHAINS] = {};
        float wide[N][DEPTH];
        for (int64_t k = 0, count; k < table.in_features; k += count, a += count * LOW_COLUMNS) {
            count = std::min(DEPTH, table.in_features - k);
            const float* x[N];
            for (int r = 0; r < N; r++) x[r] = widened(x_of(block, row + r) + k, count, wide[r]);
            down_piece<N>(a, x, count, sums);
        }
        for (int r = 0; r < N; r++) {
            F sum = sums[r][0];
            for (int i = 1; i < CHAINS; i++) sum += sums[r][i];
            vec::store(low_of(block, row + r, index) + lane, sum);
        }
    }

    template <int N>
    VEC_INLINE void down_piece(const T* a, const float* const (&x)[N], int64_t count, F (&sums)[N][CHAINS]) {
        int64_t k = 0;
        for (; k + CHAINS <= count; k += CHAINS)
#pragma GCC unroll 4
            for (int i = 0; i < CHAINS; i++) add_products<N>(a + (k + i) * LOW_COLUMNS, x, k + i, i, sums);
        for (int i = 0; k < count; k++, i++) add_products<N>(a + k * LOW_COLUMNS, x, k, i, sums);
    }

    template <int N>
    VEC_INLINE void add_products(
        const T* a, const float* const (&x)[N], int64_t k, int chain, F (&sums)[N][CHAINS]) {
        __builtin_prefetch(a + AHEAD);
        const F weights = vec::load(a);
#pragma GCC unroll 4
        for (int r = 0; r < N; r++) sums[r][chain] = vec::fma(broadcast(x[r][k]), weights, sums[r][chain]);
    }

    static const float* widened(const float* x, int64_t, float*) { return x; }
    static const float* widened(const bf16* x, int64_t count, float* out) {
        int64_t k = 0;
        for (; k + vec::LANES <= count; k += vec::LANES) vec::store(out + k, vec::load(x + k));
        for (; k < count; k++) out[k] = vec::to_float(x[k]);
        return out;
    }

    // out += scale * low B, of columns [from, to) of B, panel by panel.
    void up_part(const AdapterBlock& block, const AdapterPart& part, int64_t index, int64_t from, int64_t to) const {
        for (int64_t next; from < to; from = next) {
            next = std::min(to, (from / PANEL + 1) * PANEL);
            int row = 0;
            for (; row + 4 <= block.count; row += 4) up_rows<4>(block, row, part, index, from, next);
            for (; row + 2 <= block.count; row += 2) up_rows<2>(block, row, part, index, from, next);
            for (; row < block.count; row++) up_rows<1>(block, row, part, index, from, next);
        }
    }

    template <int N>
    void up_rows(
        const AdapterBlock& block, int row, const AdapterPart& part, int64_t index, int64_t from, int64_t to) const {
        if (N < 4 && to - from == PANEL) return up_columns<N, PANEL / vec::LANES>(block, row, part, index, from, PANEL);
        for (; from < to; from += vec::LANES)
            up_columns<N, 1>(block, row, part, index, from, std::min<int64_t>(vec::LANES, to - from));
    }

    // Of V vectors of columns of B, n columns in all: fewer only where it is a single one.
    template <int N, int V>
    void up_columns(
        const AdapterBlock& block, int row, const AdapterPart& part, int64_t index, int64_t from, int64_t n) const {
        const T* b = (const T*)part.b + from / PANEL * PANEL * part.rank + from % PANEL;
        const bool is_whole = V > 1 || n == vec::LANES;
        const float* low[N];
        F sums[N][V] = {};
        for (int r = 0; r < N; r++) low[r] = low_of(block, row + r, index);
        for (int64_t k = 0; k < part.rank; k++, b += PANEL)
#pragma GCC unroll 2
            for (int v = 0; v < V; v++) {
                __builtin_prefetch(b + v * vec::LANES + AHEAD);
                const F weights = is_whole ? vec::load(b + v * vec::LANES) : vec::load(b, (int)n);
#pragma GCC unroll 4
                for (int r = 0; r < N; r++) sums[r][v] = vec::fma(broadcast(low[r][k]), weights, sums[r][v]);
            }
        const F scale = broadcast(part.scale);
#pragma GCC unroll 4
        for (int r = 0; r < N; r++) {
            T* out = out_of(block, row + r, part) + from;
#pragma GCC unroll 2
            for (int v = 0; v < V; v++) {
                const F delta = vec::product(sums[r][v], scale);
                if (is_whole)
                    vec::store(out + v * vec::LANES, vec::load(out + v * vec::LANES) + delta);
                else
                    vec::store(out, vec::load(out, (int)n) + delta, (int)n);
            }
        }
    }
};

}  // namespace

void adapters_down_in_team(const AdapterCall& call) {
    call.is_bf16 ? Worker<bf16>(call).down() : Worker<float>(call).down();
}

void adapters_up(const AdapterCall& call, Rectangle in) {
    call.is_bf16 ? Worker<bf16>(call).up(in) : Worker<float>(call).up(in);
}

extern "C" void adapters_run(const AdapterCall* call) {
    const int64_t num_columns = call->table->out_features;
    Team::run(call->num_threads, [&](Team& team) {
        adapters_down_in_team(*call);
        team.meet();
#pragma omp for schedule(static) nowait
        for (int64_t from = 0; from < num_columns; from += COLUMNS)
            adapters_up(*call, {0, call->end - call->begin, from, std::min(from + COLUMNS, num_columns)});
    });
}
