// The operations of `rows.h` on tensors of rows.
//
// Rows are addressed by two indices, (token, head) for the norms of queries and keys, so that slices of a fused
// projection are read in place; the elements of a row are contiguous, and so are outputs.
#include "rows.h"

#include <algorithm>

namespace {

struct Operand {
    const void* data;
    int64_t outer_stride, inner_stride;  // in elements
};

struct Rows {
    Operand x;
    Operand other;  // norm: weight [size]; gated SiLU: the second factor; functions of one element: null
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

template <typename T, typename Function>
void for_rows(const Rows& a, Function f) {
    const int64_t total = a.outer * a.inner;
#pragma omp parallel for num_threads(a.threads) if (a.threads > 1)
    for (int64_t i = 0; i < total; i++) f(i / a.inner, i % a.inner, (T*)a.out + i * a.size);
}

template <typename T>
void norm(const Rows& a) {
    for_rows<T>(a, [&](int64_t outer, int64_t inner, T* out) {
        rows::norm_row(row_of<T>(a.x, outer, inner), (const T*)a.other.data, out, a.size, (float)a.epsilon);
    });
}

template <typename T>
void offset_norm(const Rows& a) {
    for_rows<T>(a, [&](int64_t outer, int64_t inner, T* out) {
        rows::offset_norm_row(row_of<T>(a.x, outer, inner), (const T*)a.other.data, out, a.size, (float)a.epsilon);
    });
}

template <typename T>
void single_norm(const Rows& a) {
    for_rows<T>(a, [&](int64_t outer, int64_t inner, T* out) {
        rows::single_norm_row(row_of<T>(a.x, outer, inner), (const T*)a.other.data, out, a.size, (float)a.epsilon);
    });
}

struct NormGradients {
    Operand x;
    const void *weight, *grad;  // [size], [outer, inner, size]
    void* grad_x;               // [outer, inner, size], or null
    float* grad_weights;        // zeros [outer * inner / chunk, rounded up; size], to be added up, or null
    int64_t outer, inner, size;
    int64_t chunk;  // rows whose gradients of the weight one thread adds up, in their order
    int64_t is_bf16;
    int64_t threads;
    double epsilon, offset;  // added to the weight
};

template <typename T>
void norm_gradients(const NormGradients& a) {
    const int64_t total = a.outer * a.inner;
#pragma omp parallel for num_threads(a.threads) if (a.threads > 1)
    for (int64_t begin = 0; begin < total; begin += a.chunk) {
        float* grad_weight = a.grad_weights ? a.grad_weights + begin / a.chunk * a.size : nullptr;
        for (int64_t i = begin; i < std::min(begin + a.chunk, total); i++)
            rows::norm_gradients_row(row_of<T>(a.x, i / a.inner, i % a.inner), (const T*)a.weight,
                                     (const T*)a.grad + i * a.size, a.grad_x ? (T*)a.grad_x + i * a.size : nullptr,
                                     grad_weight, a.size, (float)a.epsilon, (float)a.offset);
    }
}

template <typename T>
void activate(const Rows& a) {
    for_rows<T>(a, [&](int64_t outer, int64_t inner, T* out) {
        const T* other = a.other.data ? row_of<T>(a.other, outer, inner) : nullptr;
        rows::activate_row(row_of<T>(a.x, outer, inner), other, out, a.size);
    });
}

template <typename T>
void sigmoid(const Rows& a) {
    for_rows<T>(a, [&](int64_t outer, int64_t inner, T* out) {
        rows::sigmoid_row(row_of<T>(a.x, outer, inner), out, a.size);
    });
}

template <typename T>
void softplus(const Rows& a) {
    for_rows<T>(a, [&](int64_t outer, int64_t inner, T* out) {
        rows::softplus_row(row_of<T>(a.x, outer, inner), out, a.size);
    });
}

template <typename T>
void l2_normalise(const Rows& a) {
    const int64_t total = a.outer * a.inner;
#pragma omp parallel for num_threads(a.threads) if (a.threads > 1)
    for (int64_t i = 0; i < total; i++)
        rows::l2_normalise_row(row_of<T>(a.x, i / a.inner, i % a.inner), (float*)a.out + i * a.size, a.size, (float)a.epsilon);
}

struct GatedNorm {
    Operand x, gate;
    const float* weight;  // [size]
    void* out;            // [outer, inner, size]
    int64_t outer, inner, size;
    int64_t group;  // elements that are normalised together; divides `size`
    int64_t is_bf16, is_gate_bf16;
    int64_t threads;
    double epsilon;
    rows::GatedNormRule rule;
};

template <typename T, typename G>
void gated_norm(const GatedNorm& a) {
    const int64_t total = a.outer * a.inner;
#pragma omp parallel for num_threads(a.threads) if (a.threads > 1)
    for (int64_t i = 0; i < total; i++) {
        const T* x = row_of<T>(a.x, i / a.inner, i % a.inner);
        const G* gate = row_of<G>(a.gate, i / a.inner, i % a.inner);
        for (int64_t first = 0; first < a.size; first += a.group) {
            const auto run = a.rule.is_sigmoid ? rows::gated_norm_group<true, T, G> : rows::gated_norm_group<false, T, G>;
            run(x + first, gate + first, a.weight + first, (T*)a.out + i * a.size + first, a.group, (float)a.epsilon, a.rule);
        }
    }
}

struct GatedNormGradients {
    Operand x, gate;
    const void* grad;     // [outer, inner, size], dense, of the type of x
    const float* weight;  // [size]
    void *grad_x, *grad_gate;  // as `grad`, each of the type of its tensor
    float* grad_weights;  // zeros [outer * inner / chunk, rounded up; size], to be added up
    int64_t outer, inner, size, group;
    int64_t chunk;  // rows whose gradients of the weight one thread adds up, in their order
    int64_t is_bf16, is_gate_bf16;
    int64_t threads;
    double epsilon;
    rows::GatedNormRule rule;
};

template <typename T, typename G>
void gated_norm_gradients(const GatedNormGradients& a) {
    const int64_t total = a.outer * a.inner;
    const auto run = a.rule.is_sigmoid ? rows::gated_norm_gradients_group<true, T, G> : rows::gated_norm_gradients_group<false, T, G>;
#pragma omp parallel for num_threads(a.threads) if (a.threads > 1)
    for (int64_t begin = 0; begin < total; begin += a.chunk)
        for (int64_t i = begin; i < std::min(begin + a.chunk, total); i++)
            for (int64_t first = 0; first < a.size; first += a.group) {
                const int64_t place = i * a.size + first;
                run(row_of<T>(a.x, i / a.inner, i % a.inner) + first, row_of<G>(a.gate, i / a.inner, i % a.inner) + first,
                    a.weight + first, (const T*)a.grad + place, (T*)a.grad_x + place, (G*)a.grad_gate + place,
                    a.grad_weights + begin / a.chunk * a.size + first, a.group, (float)a.epsilon, a.rule);
            }
}

struct L2Gradients {
    Operand x;
    const float* grad;  // [outer, inner, size], dense
    void* grad_x;       // the same, of the type of x
    int64_t outer, inner, size, is_bf16, threads;
    double epsilon;
};

template <typename T>
void l2_gradients(const L2Gradients& a) {
    const int64_t total = a.outer * a.inner;
#pragma omp parallel for num_threads(a.threads) if (a.threads > 1)
    for (int64_t i = 0; i < total; i++)
        rows::l2_gradient_row(row_of<T>(a.x, i / a.inner, i % a.inner), a.grad + i * a.size, (T*)a.grad_x + i * a.size, a.size,
                              (float)a.epsilon);
}

}  // namespace

extern "C" void rows_norm(const Rows* a) { a->is_bf16 ? norm<bf16>(*a) : norm<float>(*a); }
extern "C" void rows_offset_norm(const Rows* a) { a->is_bf16 ? offset_norm<bf16>(*a) : offset_norm<float>(*a); }
extern "C" void rows_single_norm(const Rows* a) { a->is_bf16 ? single_norm<bf16>(*a) : single_norm<float>(*a); }
extern "C" void rows_norm_gradients(const NormGradients* a) {
    a->is_bf16 ? norm_gradients<bf16>(*a) : norm_gradients<float>(*a);
}
extern "C" void rows_activate(const Rows* a) { a->is_bf16 ? activate<bf16>(*a) : activate<float>(*a); }
extern "C" void rows_sigmoid(const Rows* a) { a->is_bf16 ? sigmoid<bf16>(*a) : sigmoid<float>(*a); }
extern "C" void rows_softplus(const Rows* a) { a->is_bf16 ? softplus<bf16>(*a) : softplus<float>(*a); }
extern "C" void rows_l2_normalise(const Rows* a) { a->is_bf16 ? l2_normalise<bf16>(*a) : l2_normalise<float>(*a); }
extern "C" void rows_gated_norm(const GatedNorm* a) {
    if (a->is_bf16)
        a->is_gate_bf16 ? gated_norm<bf16, bf16>(*a) : gated_norm<bf16, float>(*a);
    else
        a->is_gate_bf16 ? gated_norm<float, bf16>(*a) : gated_norm<float, float>(*a);
}
extern "C" void rows_gated_norm_gradients(const GatedNormGradients* a) {
    if (a->is_bf16)
        a->is_gate_bf16 ? gated_norm_gradients<bf16, bf16>(*a) : gated_norm_gradients<bf16, float>(*a);
    else
        a->is_gate_bf16 ? gated_norm_gradients<float, bf16>(*a) : gated_norm_gradients<float, float>(*a);
}
extern "C" void rows_l2_gradients(const L2Gradients* a) { a->is_bf16 ? l2_gradients<bf16>(*a) : l2_gradients<float>(*a); }
