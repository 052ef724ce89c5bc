// Scores of routers' logits, for modules; steps compute it in decoder.cpp, by the same function.
#include "experts.h"

#include "openmp.h"

namespace {

template <typename T>
void scores(const T* logits, float* out, int64_t rows, int64_t size, bool is_sigmoid, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; row++) experts::scores_row(logits + row * size, out + row * size, size, is_sigmoid);
}

}  // namespace

// `logits` and `out` [rows, size].
extern "C" void experts_scores(const void* logits, float* out, int64_t rows, int64_t size, int64_t is_bf16,
                               int64_t is_sigmoid, int64_t threads) {
    is_bf16 ? scores((const bf16*)logits, out, rows, size, is_sigmoid, threads)
            : scores((const float*)logits, out, rows, size, is_sigmoid, threads);
}
