// Writes what `gemm.cpp` has summed: scales codes, adds the bias, rounds once.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "gemm.h"
#include "panels.h"
#include "vec.h"

namespace {

using namespace panels;

using Call = GemmCall;

char* out_of(const Call& call, int64_t row, int64_t column) {
    return call.out + (row * call.out_stride + column) * (call.is_bf16 && !call.float32_out ? 2 : 4);
}

template <typename T>
VEC_INLINE void store_panel(T* out, vec::F left, vec::F right) {
    vec::store(out, left);
    vec::store(out + vec::LANES, right);
}

#ifdef __AVX512BF16__
VEC_INLINE void store_panel(bf16* out, vec::F left, vec::F right) {
    _mm512_storeu_si512(out, (__m512i)_mm512_cvtne2ps_pbh(right, left));
}
#endif

// Scales sums of codes, adds the bias in float32, rounds once to Out, writes those columns of the panel that exist.
template <typename T, typename Out = T>
VEC_INLINE void write_columns(vec::F left, vec::F right, const Call& call, int64_t row, int64_t column) {
    const int64_t count = std::min(PANEL, call.out_features - column);
    Out* out = reinterpret_cast<Out*>(out_of(call, row, column));
    if (call.scales) {
        left = vec::product(left, vec::load(call.scales + column));
        right = vec::product(right, vec::load(call.scales + column + vec::LANES));
    }
    if (call.bias) {
        const T* bias = static_cast<const T*>(call.bias) + column;
        T padded[PANEL];
        if (count < PANEL) {
            std::memset(padded, 0, sizeof padded);
            std::memcpy(padded, bias, count * sizeof(T));
            bias = padded;
        }
        left += vec::load(bias);
        right += vec::load(bias + vec::LANES);
    }
    if (count == PANEL) {
        store_panel(out, left, right);
    } else {
        Out padded[PANEL];
        store_panel(padded, left, right);
        std::memcpy(out, padded, count * sizeof(Out));
    }
}

VEC_INLINE void write_row(vec::F left, vec::F right, const Call& call, int64_t row, int64_t column) {
    if (call.is_bf16 && call.float32_out)
        write_columns<bf16, float>(left, right, call, row, column);
    else if (call.is_bf16)
        write_columns<bf16>(left, right, call, row, column);
    else
        write_columns<float>(left, right, call, row, column);
}

// Requests the lines that these rows of a panel will be written to, while they are multiplied.
VEC_INLINE void prefetch_out(const Call& call, int64_t row, int64_t rows, int64_t panel) {
    const char* out = out_of(call, row, panel * PANEL);
    const int64_t stride = out_of(call, row + 1, panel * PANEL) - out;
    for (int64_t r = 0; r < rows; ++r, out += stride) {
        __builtin_prefetch(out, 1);
        __builtin_prefetch(out + 64, 1);
    }
}

// Rows from `row` on of a panel, from their sums [rows, PANEL].
__attribute__((noinline)) void write_rows(const float* sums, int64_t rows, const Call& call, int64_t row, int64_t panel) {
    for (int64_t r = 0; r < rows; ++r, sums += PANEL)
        write_row(vec::load(sums), vec::load(sums + vec::LANES), call, row + r, panel * PANEL);
}

}  // namespace
