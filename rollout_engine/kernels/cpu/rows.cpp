// Operations on rows of activations: RMSNorm, SiLU, and SiLU times a second operand. One pass each; float32 inside;
// rounded where the Hugging Face modules round. A row's bits depend on that row alone.
//
// Rows are addressed by two indices, (token, head) for the norms of queries and keys, so that slices of a fused
// projection are read in place; the elements of a row are neighbours. Outputs are contiguous.
#include <cmath>

#include "vec.h"

using vec::F;
using vec::LANES;

namespace {

struct Operand {
    const void* data;
    int64_t outer_stride, inner_stride;  // in elements
};

struct Rows {
    Operand x;
    Operand other;  // norm: weight [size]; gated SiLU: the second factor; SiLU: null
    void* out;      // [outer, inner, size]
    int64_t outer, inner, size;
    int64_t is_bf16;
    int64_t threads;
    double epsilon;
};

template <typename T>
const T* row_of(const Operand& x, int64_t outer, int64_t inner) {
    return (const T*)x.data + outer * x.outer_stride + inner * x.inner_stride;
}

// Rounded to the type of a row and back.
VEC_INLINE F rounded(F x, const float*) { return x; }
VEC_INLINE F rounded(F x, const bf16*) {  // like to_bf16, without leaving the vector
    const vec::U bits = (vec::U)x;
    const F result = (F)((bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u);
    return x == x ? result : x;
}

#define LAMBDA_INLINE __attribute__((always_inline))

// f(vector of a, vector of b) over a row; the last, shorter vector is computed like the others, with zeros behind it.
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

template <typename T, typename Function>
void for_rows(const Rows& a, Function f) {
    const int64_t total = a.outer * a.inner;
#pragma omp parallel for num_threads(a.threads) if (a.threads > 1)
    for (int64_t i = 0; i < total; i++) f(i / a.inner, i % a.inner, (T*)a.out + i * a.size);
}

template <typename T>
void norm(const Rows& a) {
    for_rows<T>(a, [&](int64_t outer, int64_t inner, T* out) {
        norm_row(row_of<T>(a.x, outer, inner), (const T*)a.other.data, out, a.size, (float)a.epsilon);
    });
}

template <typename T>
void activate(const Rows& a) {
    for_rows<T>(a, [&](int64_t outer, int64_t inner, T* out) {
        const T* other = a.other.data ? row_of<T>(a.other, outer, inner) : nullptr;
        activate_row(row_of<T>(a.x, outer, inner), other, out, a.size);
    });
}

}  // namespace

extern "C" void rows_norm(const Rows* a) { a->is_bf16 ? norm<bf16>(*a) : norm<float>(*a); }
extern "C" void rows_activate(const Rows* a) { a->is_bf16 ? activate<bf16>(*a) : activate<float>(*a); }
