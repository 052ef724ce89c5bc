// Operations on a row of activations: RMSNorm, SiLU, SiLU times a second operand, rotation by position, sum. One pass
// each; float32 inside; rounded where the Hugging Face modules round. A row's bits depend on that row alone.
#pragma once

#include <cmath>

#include "vec.h"

namespace rows {

using vec::F;
using vec::LANES;

// Rounded to the type of a row and back.
VEC_INLINE F rounded(F x, const float*) { return x; }
VEC_INLINE F rounded(F x, const bf16*) {  // like to_bf16, without leaving the vector
    const vec::U bits = (vec::U)x;
    const F result = (F)((bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u);
    return vec::select(x == x, result, x);
}

#define LAMBDA_INLINE __attribute__((always_inline))

// f(vector of a, vector of b) over a row; the last, shorter vector is padded with zeros and computed like the others.
template <typename T, typename Function>
VEC_INLINE void map(const T* a, const T* b, T* out, int64_t size, Function f) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) vec::store(out + i, f(vec::load(a + i), vec::load(b + i)));
    const int rest = (int)(size - i);
    if (rest) vec::store(out + i, f(vec::load(a + i, rest), vec::load(b + i, rest)), rest);
}

// weight * round(x / sqrt(mean(x^2) + epsilon)): the formula of Llama, Qwen2 and Qwen3 in transformers.
template <typename T>
void norm_row(const T* x, const T* weight, T* out, int64_t size, float epsilon) {
    F squares[4] = {};  // element i goes to sum (i / 16) % 4, so the order is that of `size` alone
    int64_t i = 0;
    for (; i + 4 * LANES <= size; i += 4 * LANES)
        for (int k = 0; k < 4; k++) {
            const F v = vec::load(x + i + k * LANES);
            squares[k] = vec::fma(v, v, squares[k]);
        }
    for (int k = 0; i < size; i += LANES, k++) {
        const F v = i + LANES <= size ? vec::load(x + i) : vec::load(x + i, (int)(size - i));
        squares[k] = vec::fma(v, v, squares[k]);
    }
    const float mean = vec::sum((squares[0] + squares[1]) + (squares[2] + squares[3])) / size;
    const float scale = 1.0f / std::sqrt(mean + epsilon);
    map(x, weight, out, size, [=](F v, F w) LAMBDA_INLINE { return w * rounded(v * scale, x); });
}

VEC_INLINE F silu(F x) { return x / (1.0f + vec::exp(-x)); }

template <typename T>
void activate_row(const T* x, const T* other, T* out, int64_t size) {
    if (other)
        map(x, other, out, size, [x](F gate, F up) LAMBDA_INLINE { return rounded(silu(gate), x) * up; });
    else
        map(x, x, out, size, [](F v, F) LAMBDA_INLINE { return silu(v); });
}

// x + y, rounded, over `x`.
template <typename T>
void add_row(T* x, const T* y, int64_t size) {
    map(x, y, x, size, [](F a, F b) LAMBDA_INLINE { return a + b; });
}

VEC_INLINE F product(F a, F b, const float*) { return vec::product(a, b); }
VEC_INLINE F product(F a, F b, const bf16* type) { return rounded(a * b, type); }

// x * cos + (-x2, x1) * sin over `x` = (x1, x2), each product and the sum rounded: rotary positions (Su et al. 2021) as
// transformers computes them.
template <typename T>
void rotate_row(T* x, const T* cos, const T* sin, int64_t size) {
    const int64_t half = size / 2;
    for (int64_t i = 0; i < half; i += LANES) {
        const int n = (int)(half - i < LANES ? half - i : LANES);
        auto at = [n](const T* p) LAMBDA_INLINE { return n == LANES ? vec::load(p) : vec::load(p, n); };
        const F low = at(x + i), high = at(x + half + i);
        const F new_low = product(low, at(cos + i), x) - product(high, at(sin + i), x);
        const F new_high = product(high, at(cos + half + i), x) + product(low, at(sin + half + i), x);
        if (n == LANES)
            vec::store(x + i, new_low), vec::store(x + half + i, new_high);
        else
            vec::store(x + i, new_low, n), vec::store(x + half + i, new_high, n);
    }
}

}  // namespace rows
