// Operations on a row of activations: RMSNorm and its gradients, RMSNorm with a gate, L2 norm, sigmoid, softplus, SiLU, SiLU or
// sigmoid times a second operand, rotation by position, product, sum. float32 inside; rounded where the Hugging Face modules
// round. A row's bits depend on that row alone.
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

// Sum over the elements of a row; f(so far, first, n) adds elements [first, first + n) to a vector of sums. Element i goes
// to sum (i / 16) % 4, so the order is that of `size` alone.
template <typename Function>
VEC_INLINE float sum_over(int64_t size, Function f) {
    F sums[4] = {};
    int64_t i = 0;
    for (; i + 4 * LANES <= size; i += 4 * LANES)
        for (int k = 0; k < 4; k++) sums[k] = f(sums[k], i + k * LANES, LANES);
#pragma GCC unroll 4  // else `sums` would be memory
    for (int k = 0; k < 4; k++, i += LANES)
        if (i < size) sums[k] = f(sums[k], i, size - i < LANES ? (int)(size - i) : LANES);
    return vec::sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// The first `n` <= 16 elements. Their names differ from those of `vec`, which argument-dependent lookup would find too.
template <typename T>
VEC_INLINE F load_first(const T* p, int n) {
    return n == LANES ? vec::load(p) : vec::load(p, n);
}

template <typename T>
VEC_INLINE void store_first(T* p, F x, int n) {
    n == LANES ? vec::store(p, x) : vec::store(p, x, n);
}

template <typename T>
VEC_INLINE float sum_of_squares(const T* x, int64_t size) {
    return sum_over(size, [=](F sum, int64_t i, int n) LAMBDA_INLINE {
        const F v = load_first(x + i, n);
        return vec::fma(v, v, sum);
    });
}

// 1 / sqrt(mean(x^2) + epsilon)
template <typename T>
VEC_INLINE float inverse_rms(const T* x, int64_t size, float epsilon) {
    return 1.0f / std::sqrt(sum_of_squares(x, size) / size + epsilon);
}

// weight * round(x / sqrt(mean(x^2) + epsilon)): the formula of Llama, Qwen2 and Qwen3 in transformers.
template <typename T>
void norm_row(const T* x, const T* weight, T* out, int64_t size, float epsilon) {
    const float scale = inverse_rms(x, size, epsilon);
    map(x, weight, out, size, [=](F v, F w) LAMBDA_INLINE { return w * rounded(v * scale, x); });
}

// (1 + weight) * x / sqrt(mean(x^2) + epsilon), rounded once: the formula of Gemma and Qwen3.5 in transformers.
template <typename T>
void offset_norm_row(const T* x, const T* weight, T* out, int64_t size, float epsilon) {
    const F scale = vec::set1(inverse_rms(x, size, epsilon));
    map(x, weight, out, size, [=](F v, F w) LAMBDA_INLINE { return vec::product(vec::product(v, scale), 1.0f + w); });
}

// weight * x / sqrt(mean(x^2) + epsilon), rounded once: the formula of Nemotron-H and OLMo 2 in transformers.
template <typename T>
void single_norm_row(const T* x, const T* weight, T* out, int64_t size, float epsilon) {
    const F scale = vec::set1(inverse_rms(x, size, epsilon));
    map(x, weight, out, size, [=](F v, F w) LAMBDA_INLINE { return vec::product(vec::product(v, scale), w); });
}

// Gradients of y = (offset + w) n, n = x s, s = 1 / rms, with w for the first factor: dx = s (w dy - n mean(n w dy)), and
// dw += dy n. Either may be null.
template <typename T>
void norm_gradients_row(const T* x, const T* weight, const T* grad, T* grad_x, float* grad_weight, int64_t size,
                        float epsilon, float offset) {
    const float scale = inverse_rms(x, size, epsilon);
    const float mean = sum_over(size, [=](F sum, int64_t i, int n) LAMBDA_INLINE {
        const F inner = vec::product(load_first(grad + i, n), offset + load_first(weight + i, n));
        return vec::fma(inner, vec::product(load_first(x + i, n), vec::set1(scale)), sum);
    }) / size;
    for (int64_t i = 0; i < size; i += LANES) {
        const int n = size - i < LANES ? (int)(size - i) : LANES;
        const F dy = load_first(grad + i, n), normal = vec::product(load_first(x + i, n), vec::set1(scale));
        if (grad_weight) store_first(grad_weight + i, vec::fma(dy, normal, load_first(grad_weight + i, n)), n);
        if (!grad_x) continue;
        const F inner = vec::product(dy, offset + load_first(weight + i, n));
        store_first(grad_x + i, vec::product(vec::fma(normal, vec::set1(-mean), inner), vec::set1(scale)), n);
    }
}

VEC_INLINE F sigmoid(F x) { return 1.0f / (1.0f + vec::exp(-x)); }
VEC_INLINE F silu(F x) { return x / (1.0f + vec::exp(-x)); }

// log(1 + u) of 0 <= u <= 1 to about 2 ulp: 2 atanh(s), s = u / (2 + u) <= 1/3, by its series.
VEC_INLINE F log_of_one_plus(F u) {
    const F s = u / (2.0f + u), square = vec::product(s, s), twice = s + s;
    F series = vec::set1(1.0f / 17);
    for (int odd = 15; odd > 1; odd -= 2) series = vec::fma(series, square, vec::set1(1.0f / odd));
    return vec::fma(vec::product(twice, square), series, twice);
}

// log(1 + exp(x)), and x itself above 20, as in torch.
VEC_INLINE F softplus(F x) {
    const F positive = vec::max(x, F{}), distance = vec::max(x, -x);
    return vec::select(x > 20.0f, x, positive + log_of_one_plus(vec::exp(-distance)));
}

// x / sqrt(sum(x^2) + epsilon), float32.
template <typename T>
VEC_INLINE float inverse_length(const T* x, int64_t size, float epsilon) {
    return 1.0f / std::sqrt(sum_of_squares(x, size) + epsilon);
}

template <typename T>
void l2_normalise_row(const T* x, float* out, int64_t size, float epsilon) {
    const F scale = vec::set1(inverse_length(x, size, epsilon));
    for (int64_t i = 0; i < size; i += LANES) {
        const int n = size - i < LANES ? (int)(size - i) : LANES;
        store_first(out + i, vec::product(load_first(x + i, n), scale), n);
    }
}

// Gradient of y = x s, s = 1 / sqrt(sum(x^2) + epsilon): dx = s (dy - y sum(y dy)).
template <typename T>
void l2_gradient_row(const T* x, const float* grad, T* grad_x, int64_t size, float epsilon) {
    const F scale = vec::set1(inverse_length(x, size, epsilon));
    const float inner = sum_over(size, [=](F sum, int64_t i, int n) LAMBDA_INLINE {
        return vec::fma(vec::product(load_first(x + i, n), scale), load_first(grad + i, n), sum);
    });
    for (int64_t i = 0; i < size; i += LANES) {
        const int n = size - i < LANES ? (int)(size - i) : LANES;
        const F y = vec::product(load_first(x + i, n), scale), dy = load_first(grad + i, n);
        store_first(grad_x + i, vec::product(vec::fma(y, vec::set1(-inner), dy), scale), n);
    }
}

// How a gate and a norm are combined. Mirrored in rows.py.
struct GatedNormRule {
    int32_t is_gate_first;  // the norm of x * f(gate), else the norm of x, times f(gate)
    int32_t is_sigmoid;     // f, else SiLU
    int32_t is_rounded;     // the norm, before and after the weight, to the type of x
};

// Norm and gate of `size` elements, one group of a row; rounded to the type of x at the end.
template <bool SIGMOID, typename T, typename G>
void gated_norm_group(const T* x, const G* gate, const float* weight, T* out, int64_t size, float epsilon, GatedNormRule rule) {
    const auto gate_at = [=](int64_t i, int n) LAMBDA_INLINE {
        const F g = load_first(gate + i, n);
        return SIGMOID ? sigmoid(g) : silu(g);
    };
    const auto value_at = [=](int64_t i, int n) LAMBDA_INLINE {
        const F v = load_first(x + i, n);
        return rule.is_gate_first ? vec::product(v, gate_at(i, n)) : v;
    };
    const float squares = sum_over(size, [=](F sum, int64_t i, int n) LAMBDA_INLINE {
        const F v = value_at(i, n);
        return vec::fma(v, v, sum);
    });
    const F scale = vec::set1(1.0f / std::sqrt(squares / size + epsilon));
    for (int64_t i = 0; i < size; i += LANES) {
        const int n = size - i < LANES ? (int)(size - i) : LANES;
        const F normal = vec::product(value_at(i, n), scale), w = load_first(weight + i, n);
        const F weighed = rule.is_rounded ? rounded(w * rounded(normal, x), x) : vec::product(w, normal);
        store_first(out + i, rule.is_gate_first ? weighed : vec::product(weighed, gate_at(i, n)), n);
    }
}

// Gradients of y = w n(h) f(gate), h = x, or of y = w n(h), h = x f(gate), n = h s and s = 1 / rms, without their roundings: with
// dn the gradient of n, dh = s (dn - n mean(n dn)). dw is added to `grad_weight`.
template <bool SIGMOID, typename T, typename G>
void gated_norm_gradients_group(const T* x, const G* gate, const float* weight, const T* grad, T* grad_x, G* grad_gate,
                                float* grad_weight, int64_t size, float epsilon, GatedNormRule rule) {
    struct Element {
        F x, gate, factor, input, weight, of_weighed;  // h and d(w n)
    };
    const auto at = [=](int64_t i, int n) LAMBDA_INLINE {
        const F value = load_first(x + i, n), g = load_first(gate + i, n), f = SIGMOID ? sigmoid(g) : silu(g);
        const F dy = load_first(grad + i, n);
        return Element{value, g, f, rule.is_gate_first ? vec::product(value, f) : value, load_first(weight + i, n),
                       rule.is_gate_first ? dy : vec::product(dy, f)};
    };
    const float squares = sum_over(size, [=](F sum, int64_t i, int n) LAMBDA_INLINE {
        const F h = at(i, n).input;
        return vec::fma(h, h, sum);
    });
    const F scale = vec::set1(1.0f / std::sqrt(squares / size + epsilon));
    const float mean = sum_over(size, [=](F sum, int64_t i, int n) LAMBDA_INLINE {
        const Element e = at(i, n);
        return vec::fma(vec::product(e.of_weighed, e.weight), vec::product(e.input, scale), sum);
    }) / size;
    for (int64_t i = 0; i < size; i += LANES) {
        const int n = size - i < LANES ? (int)(size - i) : LANES;
        const Element e = at(i, n);
        const F normal = vec::product(e.input, scale), of_normal = vec::product(e.of_weighed, e.weight);
        const F of_input = vec::product(vec::fma(normal, vec::set1(-mean), of_normal), scale);
        const F s = sigmoid(e.gate), slope = SIGMOID ? vec::product(s, 1.0f - s)
                                                     : vec::product(s, vec::fma(e.gate, 1.0f - s, vec::set1(1.0f)));
        const F of_factor = rule.is_gate_first ? vec::product(of_input, e.x)
                                               : vec::product(load_first(grad + i, n), vec::product(e.weight, normal));
        store_first(grad_x + i, rule.is_gate_first ? vec::product(of_input, e.factor) : of_input, n);
        store_first(grad_gate + i, vec::product(of_factor, slope), n);
        store_first(grad_weight + i, vec::fma(e.of_weighed, normal, load_first(grad_weight + i, n)), n);
    }
}

template <typename T>
void sigmoid_row(const T* x, T* out, int64_t size) {
    map(x, x, out, size, [](F v, F) LAMBDA_INLINE { return sigmoid(v); });
}

template <typename T>
void softplus_row(const T* x, T* out, int64_t size) {
    map(x, x, out, size, [](F v, F) LAMBDA_INLINE { return softplus(v); });
}

// x * sigmoid(gate), rounded after each of the two, over `x`.
template <typename T>
void gate_row(T* x, const T* gate, int64_t size) {
    map(x, gate, x, size, [x](F v, F g) LAMBDA_INLINE { return v * rounded(sigmoid(g), x); });
}

template <typename T>
void activate_row(const T* x, const T* other, T* out, int64_t size) {
    if (other)
        map(x, other, out, size, [x](F gate, F up) LAMBDA_INLINE { return rounded(silu(gate), x) * up; });
    else
        map(x, x, out, size, [](F v, F) LAMBDA_INLINE { return silu(v); });
}

VEC_INLINE F product(F a, F b, const float*) { return vec::product(a, b); }
VEC_INLINE F product(F a, F b, const bf16* type) { return rounded(a * b, type); }

// max(x, 0)^2, rounded.
template <typename T>
void squared_relu_row(const T* x, T* out, int64_t size) {
    map(x, x, out, size, [](F v, F) LAMBDA_INLINE {
        const F positive = vec::max(F{}, v);  // NaN stays
        return vec::product(positive, positive);
    });
}

// x + y, rounded, over `x`.
template <typename T>
void add_row(T* x, const T* y, int64_t size) {
    map(x, y, x, size, [](F a, F b) LAMBDA_INLINE { return a + b; });
}

// x + factor * y, rounded after each of the two, over `x`.
template <typename T>
void add_multiple_row(T* x, const T* y, float factor, int64_t size) {
    const F by = vec::set1(factor);
    map(x, y, x, size, [x, by](F a, F b) LAMBDA_INLINE { return a + product(b, by, x); });
}

// a * b, rounded; `out` may be one of them.
template <typename T>
void multiply_row(const T* a, const T* b, T* out, int64_t size) {
    map(a, b, out, size, [](F u, F v) LAMBDA_INLINE { return vec::product(u, v); });
}

// factor * x, rounded, of a factor that is not, over `x`.
template <typename T>
void multiply_row(T* x, float factor, int64_t size) {
    const F by = vec::set1(factor);
    map(x, x, x, size, [by](F v, F) LAMBDA_INLINE { return vec::product(v, by); });
}

// A row as another type.
template <typename A, typename B>
void convert_row(const A* x, B* out, int64_t size) {
    for (int64_t i = 0; i < size; i += LANES) {
        const int n = size - i < LANES ? (int)(size - i) : LANES;
        store_first(out + i, load_first(x + i, n), n);
    }
}

// x * cos + (-x2, x1) * sin over `x` = (x1, x2), each product and the sum rounded: rotary positions (Su et al. 2021) as
// transformers computes them.
template <typename T>
void rotate_row(T* x, const T* cos, const T* sin, int64_t size) {
    const int64_t half = size / 2;
    for (int64_t i = 0; i < half; i += LANES) {
        const int n = (int)(half - i < LANES ? half - i : LANES);
        const F low = load_first(x + i, n), high = load_first(x + half + i, n);
        const F new_low = product(low, load_first(cos + i, n), x) - product(high, load_first(sin + i, n), x);
        const F new_high = product(high, load_first(cos + half + i, n), x) + product(low, load_first(sin + half + i, n), x);
        store_first(x + i, new_low, n), store_first(x + half + i, new_high, n);
    }
}

// x * factor, rounded, over `x`.
template <typename T>
void scale_row(T* x, T factor, int64_t size) {
    const F by = vec::set1(vec::sum(vec::load(&factor, 1)));  // the other elements are zeros
    map(x, x, x, size, [by](F v, F) LAMBDA_INLINE { return v * by; });
}

}  // namespace rows
