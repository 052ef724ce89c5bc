// Entropy of rows of logits at a temperature, and its gradient, in float64: a result is the exact value rounded once, so it
// hardly depends on the order of sums.
//
//     x = (logit - max) / temperature     a token with x = 0 weighs 1
//     m = how many do                     r = sum of e^x over the others     s = sum of -x e^x over the others
//     log total = log m + log1p(r / m)
//     entropy   = log total + s / (m + r)
//
// No term is below 0, so nothing cancels: a row in which one token has nearly all of the mass keeps all its digits, and no
// entropy is negative. A row is computed alone, from its first token to its last.
#include <cmath>
#include <limits>

#include "largest.h"
#include "openmp.h"
#include "truncation.h"
#include "vec.h"

namespace {

// As many doubles as a register holds: compilers compare wider vectors one number at a time.
#ifdef __AVX512F__
constexpr int DOUBLES = 8;
#else
constexpr int DOUBLES = 4;
#endif
typedef double D __attribute__((vector_size(8 * DOUBLES)));
typedef uint64_t Bits __attribute__((vector_size(8 * DOUBLES)));
typedef float Narrow __attribute__((vector_size(4 * DOUBLES)));

constexpr int BLOCK = 256;
constexpr double LOWEST = -708.0;  // e^LOWEST is a normal number, and nothing next to the smallest float32

struct Rows {
    const void* logits;  // [., vocab_size] float32, or bfloat16
    int64_t is_bf16, rows, vocab_size, stride;
    const int64_t* row;        // [rows], index of each row of the logits
    const float* temperature;  // [rows], normal numbers above 0
    double* figures;           // [rows, 3]: maximum, log total, entropy; NaN for a row with NaN, +inf, or nothing but -inf
    const float* grad;         // gradient: [rows], of the entropies; `figures` are given
    void* grad_logits;         // gradient: [rows, vocab_size], out, contiguous, in the dtype of the logits
    int64_t threads;
};

struct Sums {
    D ties = {}, rest = {}, weighted = {};
};

// BLOCK logits from `start`, -inf past the end; returns how many are real.
template <typename T>
int read(const T* logits, int64_t size, int64_t start, float* x) {
    const int n = (int)std::min<int64_t>(BLOCK, size - start);
    for (int i = 0; i < BLOCK; i += vec::LANES) {
        if (i + vec::LANES <= n) {
            vec::store(x + i, vec::load(logits + start + i));
        } else {
            for (int k = i; k < i + vec::LANES; k++) x[k] = k < n ? vec::to_float(logits[start + k]) : -INFINITY;
        }
    }
    return n;
}

// (logit - maximum) / temperature of a few tokens, LOWEST at least; NaN stays.
VEC_INLINE D depth_of(const float* x, double maximum, double inverse_temperature) {
    Narrow narrow;
    memcpy(&narrow, x, sizeof narrow);
    const D depth = (__builtin_convertvector(narrow, D) - maximum) * inverse_temperature;
    return depth < LOWEST ? D{} + LOWEST : depth;
}

// The only place that weighs for sums, and not inlined: the dtype of the logits does not change its bits.
__attribute__((noinline)) void add_block(const float* x, double maximum, double inverse_temperature, Sums& sums) {
    D ties = sums.ties, rest = sums.rest, weighted = sums.weighted;
    for (int i = 0; i < BLOCK; i += DOUBLES) {
        const D depth = depth_of(x + i, maximum, inverse_temperature);
        const D weight = truncation::exp_nonpositive<D, Bits>(depth);
        ties += depth == 0.0 ? D{} + 1.0 : D{};
        rest += depth == 0.0 ? D{} : weight;
        weighted = vec::fma_doubles(weight, -depth, weighted);
    }
    sums = {ties, rest, weighted};
}

double sum_of(const D& lanes) {
    double sum = 0.0;
    for (int i = 0; i < DOUBLES; i++) sum += lanes[i];
    return sum;
}

template <typename T>
void compute_row(const Rows& a, int64_t i) {
    const T* logits = (const T*)a.logits + a.row[i] * a.stride;
    const double maximum = largest(logits, a.vocab_size), inverse_temperature = 1.0 / a.temperature[i];
    Sums sums;
    float x[BLOCK];
    for (int64_t start = 0; start < a.vocab_size; start += BLOCK) {
        read(logits, a.vocab_size, start, x);
        add_block(x, maximum, inverse_temperature, sums);
    }
    const double ties = sum_of(sums.ties), rest = sum_of(sums.rest), weighted = sum_of(sums.weighted);
    const double log_total = std::log(ties) + std::log1p(rest / ties);
    double* figures = a.figures + 3 * i;
    figures[0] = maximum;
    figures[1] = log_total;
    figures[2] = log_total + weighted / (ties + rest);
    if (figures[2] != figures[2]) figures[0] = figures[1] = figures[2] = std::numeric_limits<double>::quiet_NaN();
}

// Of a few tokens: -probability * (log-prob + entropy) * scale.
VEC_INLINE D slope_of(D depth, double log_total, double entropy, double scale) {
    const D logprob = depth - log_total;
    return truncation::exp_nonpositive<D, Bits>(logprob) * (logprob + entropy) * -scale;
}

template <typename T>
void gradient_row(const Rows& a, int64_t i) {
    const T* logits = (const T*)a.logits + a.row[i] * a.stride;
    T* out = (T*)a.grad_logits + i * a.vocab_size;
    const double *figures = a.figures + 3 * i, inverse_temperature = 1.0 / a.temperature[i];
    const double scale = a.grad[i] * inverse_temperature;
    float x[BLOCK];
    for (int64_t start = 0; start < a.vocab_size; start += BLOCK) {
        const int n = read(logits, a.vocab_size, start, x);
        for (int k = 0; k < BLOCK; k += DOUBLES) {
            const D depth = depth_of(x + k, figures[0], inverse_temperature);
            const Narrow slope = __builtin_convertvector(slope_of(depth, figures[1], figures[2], scale), Narrow);
            memcpy(x + k, &slope, sizeof slope);
        }
        for (int k = 0; k < n; k += vec::LANES) {
            if (k + vec::LANES <= n)
                vec::store(out + start + k, vec::load(x + k));
            else
                vec::store(out + start + k, vec::load(x + k), n - k);
        }
    }
}

template <typename T>
void compute(const Rows& a) {
#pragma omp parallel for num_threads(a.threads) if (a.threads > 1)
    for (int64_t i = 0; i < a.rows; i++) compute_row<T>(a, i);
}

template <typename T>
void gradient(const Rows& a) {
#pragma omp parallel for num_threads(a.threads) if (a.threads > 1)
    for (int64_t i = 0; i < a.rows; i++) gradient_row<T>(a, i);
}

}  // namespace

extern "C" void entropy_compute(const Rows* a) { a->is_bf16 ? compute<bf16>(*a) : compute<float>(*a); }
extern "C" void entropy_gradient(const Rows* a) { a->is_bf16 ? gradient<bf16>(*a) : gradient<float>(*a); }
