// The parts of a mixture of experts around its products. An entry is one expert of one token: entry i is expert i % k of
// token i / k, in the order of the experts' numbers, in which their outputs are added.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#include "rows.h"
#include "vec.h"

namespace experts {

using vec::F;
using vec::LANES;

// f(vector of a) over a row, written to `out` as another type.
template <typename A, typename B, typename Function>
VEC_INLINE void convert(const A* a, B* out, int64_t size, Function f) {
    for (int64_t i = 0; i < size; i += LANES) {
        const int n = (int)(size - i < LANES ? size - i : LANES);
        rows::store_first(out + i, f(rows::load_first(a + i, n)), n);
    }
}

// Softmax of a row of logits, float32.
template <typename T>
void probabilities_row(const T* logits, float* out, int64_t size) {
    convert(logits, out, size, [](F x) LAMBDA_INLINE { return x; });
    float largest = -std::numeric_limits<float>::infinity();
    for (int64_t i = 0; i < size; i++) largest = out[i] > largest ? out[i] : largest;
    convert(out, out, size, [=](F x) LAMBDA_INLINE { return vec::exp(x - vec::set1(largest)); });
    const float total = rows::sum_over(
        size, [=](F sum, int64_t i, int n) LAMBDA_INLINE { return sum + rows::load_first(out + i, n); });
    convert(out, out, size, [=](F x) LAMBDA_INLINE { return x / vec::set1(total); });
}

// The way a router turns probabilities into weights of experts: `Routing` of modules/experts.py.
struct Routing {
    int64_t num_experts, top_k;
    int32_t is_normalised;  // divided by their sum, added from the largest to the smallest
    int32_t is_rounded;     // to the type of the logits
};

// The k most probable experts, of equal ones those of the lower numbers; `chosen` [k], from the largest to the smallest,
// `experts` and `weights` [k], in the order of their numbers. `left` [num_experts] is scratch.
template <typename T>
void choose_row(const Routing& r, const float* probabilities, int32_t* left, int32_t* chosen, int32_t* experts,
                float* weights) {
    // Numbers that are not negative are in the order of their bits. NaN is above all, so k experts are found in any case.
    for (int64_t i = 0; i < r.num_experts; i++) {
        memcpy(left + i, probabilities + i, sizeof *left);
        left[i] &= 0x7fffffff;
    }
    float total = 0;
    for (int64_t slot = 0; slot < r.top_k; slot++) {
        int32_t best = 0;
        for (int32_t i = 1; i < r.num_experts; i++) best = left[i] > left[best] ? i : best;
        left[best] = -1, chosen[slot] = best;
        total = slot ? total + probabilities[best] : probabilities[best];
    }
    for (int64_t slot = 0; slot < r.top_k; slot++) {
        float weight = probabilities[chosen[slot]];
        if (r.is_normalised) weight /= total;
        int64_t place = slot;
        for (; place && experts[place - 1] > chosen[slot]; place--)
            experts[place] = experts[place - 1], weights[place] = weights[place - 1];
        experts[place] = chosen[slot], weights[place] = weight;
    }
    const T* type = nullptr;
    if (r.is_rounded) convert(weights, weights, r.top_k, [=](F x) LAMBDA_INLINE { return rows::rounded(x, type); });
}

// Sorts `count` entries by expert: `places` [count] of each, and `starts` [num_experts + 1], the first of each expert.
inline void sort(const int32_t* experts, int64_t count, int64_t num_experts, int32_t* places, int32_t* starts) {
    memset(starts, 0, (num_experts + 1) * sizeof *starts);
    for (int64_t i = 0; i < count; i++) places[i] = starts[experts[i]]++;  // among those of its expert
    for (int64_t e = 0, first = 0; e <= num_experts; e++) first += std::exchange(starts[e], (int32_t)first);
    for (int64_t i = 0; i < count; i++) places[i] += starts[experts[i]];
}

// The sum of a token's outputs [places, size], `stride` apart, each times its weight; rounded after each step.
template <typename T>
void add_row(const T* outputs, const int32_t* places, const float* weights, int64_t top_k, T* out, int64_t size,
             int64_t stride) {
    for (int64_t slot = 0; slot < top_k; slot++) {
        const T* output = outputs + places[slot] * stride;
        const F weight = vec::set1(weights[slot]);
        rows::map(output, out, out, size, [=](F y, F total) LAMBDA_INLINE {
            const F part = rows::rounded(vec::product(y, weight), out);
            return slot ? total + part : part;
        });
    }
}

}  // namespace experts
