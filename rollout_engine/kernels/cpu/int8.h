// Weights as int8 codes: a weight is code * scale, with one float32 scale for each output column.
//
// A panel of codes has one byte for each element of the panel of weights (`panels.h`), in the same order. Codes are whole
// numbers up to 127, which both float32 and bfloat16 hold: read as units they multiply like weights, and the sums are
// multiplied by the scales at the end.
#pragma once

#include <cstdint>
#include <type_traits>

#include "panels.h"
#include "vec.h"

namespace int8 {

using panels::PANEL;

inline int64_t elements_per_unit(bool is_bf16) { return is_bf16 ? 2 : 1; }

// Bytes of a panel of codes.
inline int64_t panel_bytes(int64_t in_features, bool is_bf16) {
    return panels::padded_units(in_features, is_bf16) * PANEL * elements_per_unit(is_bf16);
}

VEC_INLINE vec::F floats(const int8_t* codes) {
#ifdef __AVX512F__
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)codes)));
#else
    vec::Byte bytes;
    vec::read(codes, bytes);
    return vec::converted<vec::F>(vec::converted<vec::I>(bytes));
#endif
}

// The codes of sixteen columns, with two in a row of each: those that come first, and those that follow them.
VEC_INLINE void paired_floats(const int8_t* codes, vec::F& first, vec::F& second) {
    vec::Half bits;
    vec::read(codes, bits);
    const vec::I both = (vec::I)vec::converted<vec::U>(bits) << 16;
    first = vec::converted<vec::F>((both << 8) >> 24);
    second = vec::converted<vec::F>(both >> 24);
}

// Sixteen columns of a unit: floats, or pairs of bfloat16.
VEC_INLINE vec::I columns(const int8_t* codes, float) { return (vec::I)floats(codes); }
VEC_INLINE vec::I columns(const int8_t* codes, int32_t) {
#ifdef __AVX512BF16__
    return (vec::I)_mm512_cvtne2ps_pbh((__m512)floats(codes + vec::LANES), (__m512)floats(codes));
#else
    vec::F first, second;
    paired_floats(codes, first, second);
    return (vec::I)((vec::U)first >> 16) | ((vec::I)second & (int32_t)0xffff0000);
#endif
}

// Codes of `units` -> units of weights.
template <typename Unit>
void widen(const int8_t* codes, int64_t units, int32_t* out) {
    constexpr int64_t ELEMENTS = std::is_same<Unit, int32_t>::value ? 2 : 1;
    for (int64_t i = 0; i < units * PANEL; i += vec::LANES, codes += ELEMENTS * vec::LANES) {
        __builtin_prefetch(codes + 2048);
        vec::write(out + i, columns(codes, Unit()));
    }
}

// Codes of `units` -> a row of float32 for each element of a unit.
inline void widen_to_rows(const int8_t* codes, int64_t units, bool is_bf16, float* out) {
    for (int64_t i = 0; i < units; ++i)
        for (int64_t column = 0; column < PANEL; column += vec::LANES) {
            __builtin_prefetch(codes + 2048);
            if (is_bf16) {
                vec::F first, second;
                paired_floats(codes, first, second);
                vec::store(out + 2 * i * PANEL + column, first);
                vec::store(out + (2 * i + 1) * PANEL + column, second);
                codes += 2 * vec::LANES;
            } else {
                vec::store(out + i * PANEL + column, floats(codes));
                codes += vec::LANES;
            }
        }
}

}  // namespace int8
