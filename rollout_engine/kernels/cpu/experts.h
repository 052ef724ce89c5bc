// The parts of a mixture of experts around its products. An entry is one expert of one token: entry i is expert i % k of
// token i / k, in the order of the experts' numbers, in which their outputs are added.
#pragma once

#include <algorithm>
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

// Scores of a row of logits, float32: their sigmoid, or their softmax.
template <typename T>
void scores_row(const T* logits, float* out, int64_t size, bool is_sigmoid) {
    if (is_sigmoid) return convert(logits, out, size, [](F x) LAMBDA_INLINE { return rows::sigmoid(x); });
    convert(logits, out, size, [](F x) LAMBDA_INLINE { return x; });
    float largest = -std::numeric_limits<float>::infinity();
    for (int64_t i = 0; i < size; i++) largest = out[i] > largest ? out[i] : largest;
    convert(out, out, size, [=](F x) LAMBDA_INLINE { return vec::exp(x - vec::set1(largest)); });
    const float total = rows::sum_over(
        size, [=](F sum, int64_t i, int n) LAMBDA_INLINE { return sum + rows::load_first(out + i, n); });
    convert(out, out, size, [=](F x) LAMBDA_INLINE { return x / vec::set1(total); });
}

// The way a router turns scores into weights of experts: `Routing` of modules/experts.py; mirrored in decoder.py.
struct Routing {
    int64_t num_experts, top_k;
    int64_t num_groups, top_groups;  // experts are chosen from these groups only; 1 and 1: from all
    const void* bias;                // [num_experts], added to scores for the choice; or null
    float scaling, added, least;     // of normalised weights: the sum plus `added`, but at least `least`, divides
    int32_t is_sigmoid;
    int32_t is_precise;     // logits are float32 sums
    int32_t is_normalised;  // divided by their sum, added from the largest choice to the smallest
    int32_t is_rounded;     // to the type of the model
    int32_t is_bias_bf16;   // else float32
    int32_t sums_two;       // the score of a group is the sum of its two largest, else its largest
    int32_t is_stepwise;    // scores, their sum, shares and products are rounded each
};

// Integers in the order of numbers, NaN above all; GONE is below all.
constexpr int32_t GONE = std::numeric_limits<int32_t>::min();
inline int32_t ranking(float x) {
    int32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (x != x) return std::numeric_limits<int32_t>::max();
    return bits < 0 ? bits ^ 0x7fffffff : bits;
}

// The place of the largest, of equal ones the first.
inline int32_t best_of(const int32_t* left, int64_t size) {
    int32_t best = 0;
    for (int32_t i = 1; i < size; i++) best = left[i] > left[best] ? i : best;
    return best;
}

// The largest of a group's choices, or the sum of its two largest; NaN if one is.
inline float group_score(const float* choices, int64_t size, bool sums_two) {
    float first = -std::numeric_limits<float>::infinity(), second = first;
    for (int64_t i = 0; i < size; i++) {
        const float x = choices[i];
        if (x != x) return x;
        second = x > first ? first : (x > second ? x : second);
        first = x > first ? x : first;
    }
    return sums_two ? first + second : first;
}

// A number rounded to the type of the model.
template <typename T>
float rounded_number(float x) {
    T rounded;
    rows::store_first(&rounded, vec::set1(x), 1);
    return vec::to_float(rounded);
}

// The k experts with the largest choices (scores plus bias), of equal ones those of the lower numbers; `chosen` [k], from
// the largest to the smallest, `experts` and `weights` [k], in the order of their numbers. `choices` and `left`
// [num_experts] are scratch.
template <typename T>
void choose_row(const Routing& r, const float* scores, float* choices, int32_t* left, int32_t* chosen, int32_t* experts,
                float* weights) {
    const auto step = [&r](float x) { return r.is_stepwise ? rounded_number<T>(x) : x; };
    for (int64_t i = 0; i < r.num_experts; i++) {
        choices[i] = step(scores[i]);
        if (r.bias) choices[i] += r.is_bias_bf16 ? vec::to_float(((const bf16*)r.bias)[i]) : ((const float*)r.bias)[i];
    }
    if (r.num_groups > 1) {
        const int64_t size = r.num_experts / r.num_groups;
        for (int64_t g = 0; g < r.num_groups; g++) left[g] = ranking(group_score(choices + g * size, size, r.sums_two));
        for (int64_t i = 0; i < r.top_groups; i++) left[best_of(left, r.num_groups)] = GONE;
        for (int64_t g = r.num_groups - 1; g >= 0; g--) {  // from the last, because `left` is written over
            const bool is_in = left[g] == GONE;
            for (int64_t i = g * size; i < (g + 1) * size; i++) left[i] = is_in ? ranking(choices[i]) : GONE;
        }
    } else {
        for (int64_t i = 0; i < r.num_experts; i++) left[i] = ranking(choices[i]);
    }
    float total = 0;
    for (int64_t slot = 0; slot < r.top_k; slot++) {
        const int32_t best = best_of(left, r.num_experts);
        left[best] = GONE, chosen[slot] = best;
        total = slot ? total + step(scores[best]) : step(scores[best]);
    }
    total = std::max(step(step(total) + r.added), r.least);
    for (int64_t slot = 0; slot < r.top_k; slot++) {
        float weight = step(scores[chosen[slot]]);
        if (r.is_normalised) weight = step(weight / total);
        weight *= r.scaling;
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
