// Products for registers of fewer than sixteen floats, of float32 or bfloat16 weights with float32 rows.
//
// A block is a few rows by sixteen or 32 columns, whose sums stay in registers: at most twelve of AVX2's sixteen. Weights
// pass through the first-level cache in pieces, each multiplied by every row of a part before the next one; between pieces
// sums lie in memory. An element's chain of accumulations is the same for every division.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "int8.h"
#include "panels.h"
#include "vec.h"

namespace registers {

using panels::PANEL;

constexpr int64_t DEPTH = 128;      // of a piece: 16 KiB of a panel in float32
constexpr int64_t PART_ROWS = 128;  // the sums of a panel take 16 KiB
constexpr int64_t FEW_ROWS = 16;    // by which bfloat16 weights are multiplied at once; for more they are widened first

// A unit is float, or int32_t that holds two bfloat16, each made a float in a register.
template <typename Unit>
constexpr bool is_pair = std::is_same<Unit, int32_t>::value;
template <typename Unit>
constexpr int max_rows = is_pair<Unit> ? 4 : 6;

// Rows of x, `stride` elements apart.
struct Operand {
    const float* first;
    int64_t stride;
};

// Elements from a row of a float32 copy to the next: an odd number of cache lines, which map to different sets of a cache.
inline int64_t staged_stride(int64_t in_features) { return (panels::divided_up(in_features, 16) | 1) * 16; }

VEC_INLINE vec::F weight_of(vec::F unit, int) { return unit; }
VEC_INLINE vec::F weight_of(vec::I unit, int k) { return (vec::F)(k == 0 ? unit << 16 : unit & (int32_t)0xffff0000); }

// sums[ROWS, 32] += x[ROWS, K] @ `units` > 0 of 16 * VECTORS columns of a panel.
template <typename Unit, int ROWS, int VECTORS>
void block(const Unit* b, int64_t units, Operand x, float* sums) {
    constexpr int64_t AHEAD = 32 * PANEL;  // 4 KiB: the hardware alone fetches too late
    constexpr int HALF = 3;                // rows from each of two pointers: so addresses stay in registers
    constexpr int PER_UNIT = is_pair<Unit> ? 2 : 1;
    typedef typename std::conditional<is_pair<Unit>, vec::I, vec::F>::type Units;
    const float *upper = x.first, *lower = upper + HALF * x.stride;
    vec::F sum[ROWS][VECTORS];
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
        for (int i = 0; i < VECTORS; ++i) sum[r][i] = vec::load(sums + r * PANEL + i * vec::LANES);
    do {
        Units columns[VECTORS];
#pragma GCC unroll 2
        for (int i = 0; i < VECTORS; ++i) {
            __builtin_prefetch(b + AHEAD + i * vec::LANES);
            vec::read(b + i * vec::LANES, columns[i]);
        }
#pragma GCC unroll 2
        for (int k = 0; k < PER_UNIT; ++k)
#pragma GCC unroll 6
            for (int r = 0; r < ROWS; ++r) {
                const vec::F value = r < HALF ? upper[r * x.stride + k] : lower[(r - HALF) * x.stride + k];
#pragma GCC unroll 2
                for (int i = 0; i < VECTORS; ++i) sum[r][i] = vec::fma(value, weight_of(columns[i], k), sum[r][i]);
            }
        b += PANEL, upper += PER_UNIT, lower += PER_UNIT;
    } while (--units);
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
        for (int i = 0; i < VECTORS; ++i) vec::store(sums + r * PANEL + i * vec::LANES, sum[r][i]);
}

template <typename Unit, int ROWS = max_rows<Unit>>
VEC_INLINE void block_of(int64_t rows, const Unit* b, int64_t units, Operand x, float* sums) {
    if constexpr (ROWS > 1)
        if (rows < ROWS) return block_of<Unit, ROWS - 1>(rows, b, units, x, sums);
    if constexpr (2 * ROWS <= max_rows<Unit>) {
        block<Unit, ROWS, 2>(b, units, x, sums);
    } else {
        block<Unit, ROWS, 1>(b, units, x, sums);
        block<Unit, ROWS, 1>(b + vec::LANES, units, x, sums + vec::LANES);
    }
}

// sums[rows, 32] += x[rows, K] @ a piece of a panel, in blocks of nearly equal height.
template <typename Unit>
void piece(const Unit* b, int64_t units, Operand x, int64_t rows, float* sums) {
    for (int64_t blocks = panels::divided_up(rows, max_rows<Unit>), count; blocks > 0; --blocks) {
        count = panels::divided_up(rows, blocks);
        block_of(count, b, units, x, sums);
        rows -= count, x.first += count * x.stride, sums += count * PANEL;
    }
}

// Units of two bfloat16 -> two rows of float32.
inline void widen(const int32_t* packed, int64_t units, float* out) {
    for (int64_t i = 0; i < units; ++i, packed += PANEL, out += 2 * PANEL)
        for (int64_t column = 0; column < PANEL; column += vec::LANES) {
            __builtin_prefetch(packed + 32 * PANEL + column);
            vec::I pair;
            vec::read(packed + column, pair);
            vec::store(out + column, weight_of(pair, 0));
            vec::store(out + PANEL + column, weight_of(pair, 1));
        }
}

// sums[rows, 32] = x[rows, K] @ one panel of `units`; at most PART_ROWS rows.
inline void panel(const char* packed, int64_t units, bool is_bf16, bool is_int8, Operand x, int64_t rows, float* sums) {
    alignas(64) float wide[DEPTH * PANEL];
    std::memset(sums, 0, rows * PANEL * sizeof(float));
    const int64_t per_unit = is_bf16 ? 2 : 1, units_a_piece = DEPTH / per_unit;
    const int64_t unit_bytes = PANEL * (is_int8 ? per_unit : 4);
    for (int64_t u = 0, count; u < units; u += count, packed += count * unit_bytes, x.first += count * per_unit) {
        count = std::min(units_a_piece, units - u);
        const int32_t* weights = reinterpret_cast<const int32_t*>(packed);
        if (is_int8) {
            int8::widen_to_rows(reinterpret_cast<const int8_t*>(packed), count, is_bf16, wide);
            piece(wide, per_unit * count, x, rows, sums);
        } else if (!is_bf16) {
            piece(reinterpret_cast<const float*>(packed), count, x, rows, sums);
        } else if (rows <= FEW_ROWS) {
            piece(weights, count, x, rows, sums);
        } else {
            widen(weights, count, wide);
            piece(wide, 2 * count, x, rows, sums);
        }
    }
}

}  // namespace registers
