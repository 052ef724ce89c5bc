// Turns rows of latents, one a position, into the layouts of a tile's keys and values.
#pragma once

#include <algorithm>

#include "attention_tile.h"

namespace tiles {

// to[i * stride + r] = from[r][i] for 16 units of 16 rows.
VEC_INLINE void turn_square(const uint32_t* const* from, uint32_t* to, int64_t stride) {
#ifdef __AVX512F__
    __m512i x[LANES], y[LANES];
    for (int r = 0; r < LANES; r++) x[r] = _mm512_loadu_si512(from[r]);
    for (int r = 0; r < LANES; r += 2) {
        y[r] = _mm512_unpacklo_epi32(x[r], x[r + 1]);
        y[r + 1] = _mm512_unpackhi_epi32(x[r], x[r + 1]);
    }
    for (int r = 0; r < LANES; r += 4)  // x[r + i]: unit 4 q + i of rows r..r + 3, in quarter q
        for (int i = 0; i < 2; i++) {
            x[r + 2 * i] = _mm512_unpacklo_epi64(y[r + i], y[r + 2 + i]);
            x[r + 2 * i + 1] = _mm512_unpackhi_epi64(y[r + i], y[r + 2 + i]);
        }
    for (int i = 0; i < 4; i++) {
        const __m512i low = _mm512_shuffle_i32x4(x[i], x[4 + i], 0x88), high = _mm512_shuffle_i32x4(x[8 + i], x[12 + i], 0x88);
        const __m512i low2 = _mm512_shuffle_i32x4(x[i], x[4 + i], 0xdd), high2 = _mm512_shuffle_i32x4(x[8 + i], x[12 + i], 0xdd);
        _mm512_storeu_si512(to + i * stride, _mm512_shuffle_i32x4(low, high, 0x88));
        _mm512_storeu_si512(to + (8 + i) * stride, _mm512_shuffle_i32x4(low, high, 0xdd));
        _mm512_storeu_si512(to + (4 + i) * stride, _mm512_shuffle_i32x4(low2, high2, 0x88));
        _mm512_storeu_si512(to + (12 + i) * stride, _mm512_shuffle_i32x4(low2, high2, 0xdd));
    }
#else
    for (int i = 0; i < LANES; i++)
        for (int r = 0; r < LANES; r++) memcpy(to + i * stride + r, from[r] + i, 4);
#endif
}

// rows[TILE] of dk channels -> [steps, TILE] units.
template <typename T>
void turn_keys(const T* const* rows, const Sizes<T>& z, uint32_t* to) {
    for (int first = 0; first < TILE; first += LANES) {
        const uint32_t* from[LANES];
        int step = 0;
        for (const int whole = z.dk / per_unit<T> / LANES * LANES; step < whole; step += LANES) {
            for (int r = 0; r < LANES; r++) from[r] = (const uint32_t*)(rows[first + r] + step * per_unit<T>);
            turn_square(from, to + (int64_t)step * TILE + first, TILE);
        }
        for (; step < z.steps; step++)
            for (int r = 0; r < LANES; r++) {
                uint32_t unit = 0;
                const int begin = step * per_unit<T>, size = std::min(per_unit<T>, z.dk - begin);
                memcpy(&unit, rows[first + r] + begin, size * sizeof(T));
                to[(int64_t)step * TILE + first + r] = unit;
            }
    }
}

// rows[TILE], of which the first dv channels are read -> [TILE / per_unit, dv] units.
inline void turn_values(const float* const* rows, int dv, uint32_t* to) {
    for (int key = 0; key < TILE; key++) memcpy(to + (int64_t)key * dv, rows[key], dv * sizeof(float));
}

inline void turn_values(const bf16* const* rows, int dv, uint32_t* to) {
    for (int key = 0; key < TILE; key += 2, to += dv) {
        const bf16 *even = rows[key], *odd = rows[key + 1];
        int i = 0;
        for (; i + LANES <= dv; i += LANES) {
            vec::Half low, high;
            vec::read(even + i, low), vec::read(odd + i, high);
            vec::write(to + i, vec::converted<vec::U>(low) | vec::converted<vec::U>(high) << 16);
        }
        for (; i < dv; i++) to[i] = even[i].bits | (uint32_t)odd[i].bits << 16;
    }
}

}  // namespace tiles
