// x [R, K] @ W[N, K]^T + bias -> [R, N]; a row has the same bits in any batch, at any place, on any number of threads.
//
// Each output element is one chain of float32 accumulations over K, first to last, whatever the blocking around it:
// rows are independent by construction. Threads divide columns and rows, never K. `panels.h` is the layout of weights.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "amx.h"
#include "gemm.h"
#include "gemm_output.h"
#include "int8.h"
#include "openmp.h"
#include "panels.h"
#include "vec.h"

#ifndef __AVX512F__
#include "gemm_registers.h"
#endif

namespace {

using namespace panels;

constexpr int64_t CACHED_BYTES = 1 << 20;       // rows that stay in the second-level cache while panels pass by
constexpr int64_t PRODUCTS_A_THREAD = 1 << 17;  // fewer are done before another thread has woken up

// Division of a team's work: every part of the rows is multiplied by every panel. There are several parts where panels
// alone would not occupy all threads, or where all rows would not fit the cache. Bits do not depend on it.
struct Cut {
    int64_t panels, parts, rows_a_part;
};

Cut cut_of(const Call& call, int64_t row_multiple) {
    Cut cut;
    const int64_t threads = omp_get_num_threads();
    cut.panels = divided_up(call.out_features, PANEL);
    const int64_t bytes = call.rows * padded_units(call.in_features, call.is_bf16) * 4;
    const int64_t for_threads = threads == 1 ? 1 : divided_up(4 * threads, cut.panels);
    cut.parts = std::max(for_threads, divided_up(bytes, CACHED_BYTES));
    cut.rows_a_part = divided_up(divided_up(call.rows, cut.parts), row_multiple) * row_multiple;
    cut.parts = divided_up(call.rows, cut.rows_a_part);
    return cut;
}

// Shares of each thread's work: while a thread is preempted, the others take its shares.
constexpr int64_t SHARES = 32;
constexpr int64_t PRODUCTS_TO_SHARE = 1 << 26;  // fewer take less time than it takes to agree on who does what

// Adds adapters to what the calling thread has written: rows [begin, end) of a panel.
VEC_INLINE void adapt(const Call& call, int64_t panel, int64_t begin, int64_t end) {
    if (call.adapters)
        adapters_up(*call.adapters, {begin, end, panel * PANEL, std::min((panel + 1) * PANEL, call.out_features)});
}

const char* packed_panel(const Call& call, int64_t panel) {
    const int64_t bytes = call.scales ? int8::panel_bytes(call.in_features, call.is_bf16)
                                      : padded_units(call.in_features, call.is_bf16) * PANEL * 4;
    return static_cast<const char*>(call.packed) + panel * bytes;
}

int useful_threads(const Call& call) {
    const int64_t products = call.rows * call.in_features * call.out_features;
    return static_cast<int>(std::clamp<int64_t>(products / PRODUCTS_A_THREAD, 1, call.num_threads));
}

// ---- vectors: float32 everywhere, bfloat16 where there is no AMX

#ifdef __AVX512F__

constexpr int64_t LINE = 64;

// The panel as units of weights: where it is, or widened from its codes into memory of the calling thread.
const int32_t* weights_of(const Call& call, int64_t panel) {
    const char* packed = packed_panel(call, panel);
    if (!call.scales) return reinterpret_cast<const int32_t*>(packed);
    const int64_t units = padded_units(call.in_features, call.is_bf16);
    char* own = call.staging + gemm_copy_bytes(call.rows, call.in_features, call.is_bf16);
    int32_t* out = reinterpret_cast<int32_t*>(own) + omp_get_thread_num() * units * PANEL;
    const int8_t* codes = reinterpret_cast<const int8_t*>(packed);
    call.is_bf16 ? int8::widen<int32_t>(codes, units, out) : int8::widen<float>(codes, units, out);
    return out;
}

constexpr int MAX_ROWS = 12;  // by two vectors: 24 accumulators of 32 registers

// Sixteen columns of a unit, packed or as codes.
template <typename Unit>
VEC_INLINE vec::I columns(const Unit* packed) {
    vec::I found;
    vec::read(packed, found);
    return found;
}
template <typename Unit>
VEC_INLINE vec::I columns(const int8_t* codes) {
    return int8::columns(codes, Unit());
}

VEC_INLINE vec::F accumulated(vec::F sum, float a, vec::I b) { return vec::fma(a - vec::F{}, (vec::F)b, sum); }
VEC_INLINE vec::F accumulated(vec::F sum, int32_t a, vec::I b) { return vec::dot_pairs(sum, a - vec::I{}, b); }

// ROWS rows from `row` on, one panel `b`, all of K. Unit is float, or int32_t that holds two bfloat16; Packed the same, or
// int8_t for codes.
template <typename Unit, typename Packed, int ROWS>
void vector_block(const Call& call, const char* x, int64_t stride, const void* panel_of_b, int64_t panel, int64_t row) {
    constexpr bool IS_BF16 = std::is_same<Unit, int32_t>::value;
    constexpr int64_t ELEMENTS = std::is_same<Packed, int8_t>::value && IS_BF16 ? 2 : 1;  // of `b`, in a unit
    constexpr int64_t AHEAD = 4096 / sizeof(Packed);  // the hardware alone fetches too late
    const int64_t units = whole_units(call.in_features, IS_BF16);
    const Packed* b = static_cast<const Packed*>(panel_of_b);
    // Two pointers, half of the rows from each: with twelve, addresses and sums would not stay in registers.
    constexpr int HALF = (MAX_ROWS + 1) / 2;
    const char *upper = x + row * stride, *lower = upper + HALF * stride;
    if constexpr (ROWS == MAX_ROWS) prefetch_out(call, row, ROWS, panel);
    vec::F left[ROWS] = {}, right[ROWS] = {};
    for (int64_t u = 0; u < units; ++u, b += ELEMENTS * PANEL, upper += sizeof(Unit), lower += sizeof(Unit)) {
        __builtin_prefetch(b + AHEAD);
        if constexpr (sizeof(Packed) > 1) __builtin_prefetch(b + AHEAD + vec::LANES);
        const vec::I left_columns = columns<Unit>(b), right_columns = columns<Unit>(b + ELEMENTS * vec::LANES);
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; ++r) {
            Unit value;
            std::memcpy(&value, r < HALF ? upper + r * stride : lower + (r - HALF) * stride, sizeof value);
            left[r] = accumulated(left[r], value, left_columns);
            right[r] = accumulated(right[r], value, right_columns);
        }
    }
    alignas(64) float sums[ROWS * PANEL];
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r) {
        vec::store(sums + r * PANEL, left[r]);
        vec::store(sums + r * PANEL + vec::LANES, right[r]);
    }
    write_rows(sums, ROWS, call, row, panel);
}

typedef void (*VectorBlock)(const Call&, const char*, int64_t, const void*, int64_t, int64_t);

template <typename Unit, typename Packed, int ROWS = MAX_ROWS>
VectorBlock vector_block_of(int64_t rows) {
    if constexpr (ROWS == 1)
        return vector_block<Unit, Packed, 1>;
    else
        return rows == ROWS ? vector_block<Unit, Packed, ROWS> : vector_block_of<Unit, Packed, ROWS - 1>(rows);
}

// Rows in place, or copied where that is faster to read. An odd number of bfloat16 leaves half a unit at the end of a row.
// And rows an even number of cache lines apart, as in most models, map to few sets of the L1 cache. With adapters the threads
// have met afterwards, here and below.
struct Rows {
    const char* first;
    int64_t stride;
};

Rows staged(const Call& call, Team& team) {
    const int64_t row_bytes = 2 * call.in_features, stride = divided_up(row_bytes, LINE) * LINE;
    const int64_t apart = stride / LINE % 2 ? stride : stride + LINE;
#pragma omp for schedule(static) nowait
    for (int64_t row = 0; row < call.rows; ++row) {
        char* out = call.staging + row * apart;
        std::memcpy(out, call.x + row * 2 * call.x_stride, row_bytes);
        if (call.in_features % 2) std::memset(out + row_bytes, 0, 2);
    }
    team.meet();
    return {call.staging, apart};
}

// Rows [begin, end) of one panel, in blocks of nearly equal height. One block alone widens codes as it reads them.
void vector_panel(const Call& call, Rows x, int64_t panel, int64_t begin, int64_t end) {
    const bool reads_codes = call.scales && end - begin <= MAX_ROWS;
    const void* b = reads_codes ? packed_panel(call, panel) : static_cast<const void*>(weights_of(call, panel));
    for (int64_t blocks = divided_up(end - begin, MAX_ROWS), rows; blocks > 0; --blocks, begin += rows) {
        rows = divided_up(end - begin, blocks);
        const VectorBlock block =
            call.is_bf16 ? (reads_codes ? vector_block_of<int32_t, int8_t>(rows) : vector_block_of<int32_t, int32_t>(rows))
                         : (reads_codes ? vector_block_of<float, int8_t>(rows) : vector_block_of<float, float>(rows));
        block(call, x.first, x.stride, b, panel, begin);
    }
}

Rows rows_of(const Call& call, Team& team) {
    const int64_t stride = call.x_stride * (call.is_bf16 ? 2 : 4);
    const bool is_better = call.rows > MAX_ROWS && stride % (8 * LINE) == 0;
    if (call.is_bf16 && (call.in_features % 2 || is_better)) return staged(call, team);
    if (call.adapters) team.meet();
    return {call.x, stride};
}

#else

using Rows = registers::Operand;

// Rows in place, or a copy in float32, with zeros where K ends and an odd number of cache lines apart.
Rows rows_of(const Call& call, Team& team) {
    if (!call.is_bf16) {
        if (call.adapters) team.meet();
        return {reinterpret_cast<const float*>(call.x), call.x_stride};
    }
    const int64_t stride = registers::staged_stride(call.in_features);
#pragma omp for schedule(static) nowait
    for (int64_t row = 0; row < call.rows; ++row) {
        const bf16* x = reinterpret_cast<const bf16*>(call.x) + row * call.x_stride;
        float* out = reinterpret_cast<float*>(call.staging) + row * stride;
        int64_t k = 0;
        for (; k + vec::LANES <= call.in_features; k += vec::LANES) vec::store(out + k, vec::load(x + k));
        if (k < call.in_features) vec::store(out + k, vec::load(x + k, static_cast<int>(call.in_features - k)));
    }
    team.meet();
    return {reinterpret_cast<const float*>(call.staging), stride};
}

// Rows [begin, end) of one panel.
void vector_panel(const Call& call, Rows x, int64_t panel, int64_t begin, int64_t end) {
    alignas(64) float sums[registers::PART_ROWS * PANEL];
    const char* packed = packed_panel(call, panel);
    const int64_t units = whole_units(call.in_features, call.is_bf16);
    for (int64_t count; begin < end; begin += count) {
        count = std::min(registers::PART_ROWS, end - begin);
        const Rows part = {x.first + begin * x.stride, x.stride};
        registers::panel(packed, units, call.is_bf16, call.scales, part, count, sums);
        write_rows(sums, count, call, begin, panel);
    }
}

#endif

void run_on_vectors(const Call& call, Team& team) {
    const Rows x = rows_of(call, team);
    const Cut cut = cut_of(call, 1);
    const int64_t count = cut.parts * cut.panels, chunk = count / (SHARES * omp_get_num_threads());
    auto multiply = [&](int64_t i) {
        const int64_t begin = i / cut.panels * cut.rows_a_part;
        const int64_t end = std::min(begin + cut.rows_a_part, call.rows);
        vector_panel(call, x, i % cut.panels, begin, end);
        adapt(call, i % cut.panels, begin, end);
    };
    if (chunk == 0 || call.rows * call.in_features * call.out_features < PRODUCTS_TO_SHARE) {
#pragma omp for schedule(static) nowait
        for (int64_t i = 0; i < count; ++i) multiply(i);
    } else {
#pragma omp for schedule(dynamic, chunk) nowait
        for (int64_t i = 0; i < count; ++i) multiply(i);
    }
    team.meet();
}

// ---- AMX: bfloat16

#if HAS_AMX

constexpr int64_t TILE_ROWS = 16, TILE = TILE_ROWS * UNIT_BLOCK;

// TILES * 16 rows by one panel, all of K. `a`: [TILES][units / 16][16][16] units. Every sixteen units prefetch `lines`
// cache lines from `next` on, which keeps memory busy while the current panel is reused.
template <int TILES>
void tile_block(const int32_t* a, const int32_t* b, int64_t units, const char* next, int64_t lines, float* sums) {
    const int32_t* lower = a + units * TILE_ROWS;
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (TILES == 2) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t u = 0; u < units; u += UNIT_BLOCK, a += TILE, lower += TILE, b += UNIT_BLOCK * PANEL) {
        for (int64_t line = 0; line < lines; ++line, next += 64) _mm_prefetch(next, _MM_HINT_T1);
        _tile_loadd(4, a, 64);
        _tile_loadd(6, b, 128);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b + UNIT_BLOCK, 128);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (TILES == 2) {
            _tile_loadd(5, lower, 64);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, 128);
    _tile_stored(1, sums + UNIT_BLOCK, 128);
    if constexpr (TILES == 2) {
        _tile_stored(2, sums + TILE_ROWS * PANEL, 128);
        _tile_stored(3, sums + TILE_ROWS * PANEL + UNIT_BLOCK, 128);
    }
}

// Rows [begin, end) of one panel, begin a multiple of 16; every block prefetches a share of the next panel.
void tile_panel(const Call& call, int64_t panel, bool is_last, int64_t begin, int64_t end) {
    alignas(64) float sums[2 * TILE_ROWS * PANEL];
    const int64_t units = padded_units(call.in_features, true), blocks = divided_up(end - begin, 2 * TILE_ROWS);
    const int32_t* b = weights_of(call, panel);
    // Several blocks of rows read this panel again from the cache and have time for the next one; a single block reads
    // straight from memory, and looks 8 KiB ahead.
    const int64_t lines = (blocks > 1 && is_last) || call.scales ? 0 : divided_up(2 * UNIT_BLOCK, blocks);
    const char* next = reinterpret_cast<const char*>(b + (blocks > 1 ? units : 4 * UNIT_BLOCK) * PANEL);
    for (int64_t row = begin; row < end; row += 2 * TILE_ROWS, next += lines * units / UNIT_BLOCK * 64) {
        const int32_t* a = reinterpret_cast<const int32_t*>(call.staging) + row * units;
        if (row + TILE_ROWS < end)
            tile_block<2>(a, b, units, next, lines, sums);
        else
            tile_block<1>(a, b, units, next, lines, sums);
        write_rows(sums, std::min(2 * TILE_ROWS, end - row), call, row, panel);
    }
}

// Sixteen rows of x in tile order, [units / 16][16][16]; zeros where rows or K end.
void stage_tile(const Call& call, int64_t tile) {
    const int64_t units = padded_units(call.in_features, true), row_bytes = 2 * call.in_features;
    char* out = call.staging + tile * units * TILE_ROWS * 4;
    for (int64_t r = 0; r < TILE_ROWS; ++r, out += 64) {
        const int64_t row = tile * TILE_ROWS + r, available = row < call.rows ? row_bytes : 0;
        const char* x = call.x + row * 2 * call.x_stride;
        int64_t byte = 0;
        for (; byte + 64 <= available; byte += 64) std::memcpy(out + byte * TILE_ROWS, x + byte, 64);
        for (; byte < units * 4; byte += 64) {
            const int64_t rest = std::clamp<int64_t>(available - byte, 0, 64);
            if (rest) std::memcpy(out + byte * TILE_ROWS, x + byte, rest);
            std::memset(out + byte * TILE_ROWS + rest, 0, 64 - rest);
        }
    }
}

void run_on_tiles(const Call& call, Team& team) {
    static const amx::Config config;
    const Cut cut = cut_of(call, 2 * TILE_ROWS);
    const int64_t tiles = divided_up(call.rows, TILE_ROWS);
#pragma omp for schedule(static) nowait
    for (int64_t tile = 0; tile < tiles; ++tile) stage_tile(call, tile);
    team.meet();
    _tile_loadconfig(&config);
#pragma omp for collapse(2) schedule(static) nowait
    for (int64_t part = 0; part < cut.parts; ++part)
        for (int64_t panel = 0; panel < cut.panels; ++panel) {
            const int64_t begin = part * cut.rows_a_part, end = std::min(begin + cut.rows_a_part, call.rows);
            tile_panel(call, panel, panel + 1 == cut.panels, begin, end);
            adapt(call, panel, begin, end);
        }
    _tile_release();
    team.meet();
}

#else
void run_on_tiles(const Call&, Team&) {}
#endif

}  // namespace

extern "C" {

// Instruction set of products: 4 AMX, 3 AVX512_BF16, 2 AVX-512, 1 AVX2 with FMA, 0 any other.
int32_t gemm_level(int32_t is_bf16) {
    if (is_bf16 && amx::granted()) return 4;
#ifdef __AVX512BF16__
    if (is_bf16) return 3;
#endif
#if defined(__AVX512F__)
    return 2;
#elif defined(__AVX2__) && defined(__FMA__)
    return 1;
#else
    return 0;
#endif
}

// Bytes of `Call::staging`.
int64_t gemm_staging(const Call* call) {
    return gemm_staging_bytes(call->rows, call->in_features, call->is_bf16, call->scales, call->num_threads);
}

void gemm_run(const Call* call) {
    Team::run(useful_threads(*call), [&](Team& team) { gemm_in_team(*call, team); });
}
}

void gemm_in_team(const GemmCall& call, Team& team) {
    if (call.rows == 0) return;
    if (call.is_bf16 && amx::granted())
        run_on_tiles(call, team);
    else
        run_on_vectors(call, team);
}
