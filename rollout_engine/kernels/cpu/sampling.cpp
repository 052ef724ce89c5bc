// Rows of logits: how likely a token is, which token a uniform number selects, and the uniform numbers themselves.
//
//     weight  = exp((logit - max) * (1 / temperature))   float32, in chunks of 128 tokens
//     total   = sum of chunk sums, left to right         float32 within a chunk, float64 across chunks
//     logprob = (logit - max) / temperature - log total  float64, rounded to float32 once
//
// Nothing of a row's size is stored but its chunk sums: a draw finds the chunk by them and weighs that chunk again.
// `weigh_chunk` is the only place that computes weights, and is not inlined, so both times it gives the same bits.
#include <omp.h>

#include <algorithm>
#include <cmath>

#include "vec.h"

using vec::F;
using vec::LANES;

namespace {

constexpr int CHUNK = 128;

struct Rows {
    const void* logits;  // [rows, vocab_size] float32, or bfloat16
    int64_t is_bf16, rows, vocab_size, stride;
    const float* temperature;  // [rows], normal numbers above 0
    int64_t* token;            // [rows], given or drawn
    float* maximum;            // [rows], out; NaN for a row with NaN, +inf, or nothing but -inf
    double* log_total;         // [rows], out; NaN likewise
    float* logprob;            // [rows], out: of `token`
    const double* uniform;     // draw: [rows], in [0, 1)
    const uint8_t* greedy;     // draw: [rows], take the first of the most likely instead
    double* mass;              // draw: [threads, chunks], scratch
    const float* grad;         // gradient: [rows], of `logprob`
    void* grad_logits;         // gradient: [rows, vocab_size], out, contiguous, in the dtype of the logits
    int64_t threads;
};

// exp without subnormal results, which take the CPU a hundred times as long: below e^-87 there is no weight. A row's
// total is at least 1, so this is far under what a uniform number of 53 bits can select.
VEC_INLINE F weight_of(F logit, float maximum, float inverse_temperature) {
    const F lowest = vec::set1(-87.0f);
    const F x = (logit - maximum) * inverse_temperature;
    const F w = vec::exp(vec::max(lowest, x));  // NaN stays
    return x < lowest ? F{} : w;
}

// Weights of n <= CHUNK tokens, zeros after them; returns their sum.
template <typename T>
__attribute__((noinline)) float weigh_chunk(const T* logits, int n, float maximum, float inverse_temperature,
                                            float* weights) {
    F sum = {};
    for (int i = 0; i < CHUNK; i += LANES) {
        F w = {};
        if (i + LANES <= n) {
            w = weight_of(vec::load(logits + i), maximum, inverse_temperature);
        } else if (i < n) {
            float padded[LANES];
            vec::store(padded, weight_of(vec::load(logits + i, n - i), maximum, inverse_temperature));
            w = vec::load(padded, n - i);
        }
        vec::store(weights + i, w);
        sum += w;
    }
    return vec::sum(sum);
}

// The largest logit; NaN is passed over, the total shows it.
template <typename T>
float largest(const T* logits, int64_t size) {
    const F lowest = vec::set1(-INFINITY);
    F top[4] = {lowest, lowest, lowest, lowest};
    int64_t t = 0;
    for (; t + 4 * LANES <= size; t += 4 * LANES)
        for (int i = 0; i < 4; i++) top[i] = vec::max(vec::load(logits + t + i * LANES), top[i]);
    float result = vec::max(vec::max(vec::max(top[0], top[1]), vec::max(top[2], top[3])));
    for (; t < size; t++) result = std::max(result, vec::to_float(logits[t]));
    return result;
}

template <typename T>
struct Row {
    const T* logits;
    int64_t size;
    float temperature, inverse_temperature, maximum;
    double total, log_total;

    // `mass`, where given, receives the mass of all chunks up to and including each.
    Row(const Rows& a, int64_t i, double* mass)
        : logits((const T*)a.logits + i * a.stride),
          size(a.vocab_size),
          temperature(a.temperature[i]),
          inverse_temperature(1.0f / temperature),
          maximum(largest(logits, size)),
          total(0.0) {
        float weights[CHUNK];
        for (int64_t t = 0; t < size; t += CHUNK) {
            total += weigh(t, weights);
            if (mass) mass[t / CHUNK] = total;
        }
        if (!(total > 0.0)) maximum = NAN;
        log_total = std::log(total);
        a.maximum[i] = maximum;
        a.log_total[i] = log_total;
    }

    float weigh(int64_t start, float* weights) const {
        return weigh_chunk(logits + start, (int)std::min<int64_t>(CHUNK, size - start), maximum, inverse_temperature,
                           weights);
    }

    float logprob(int64_t token) const {
        const float scaled = (vec::to_float(logits[token]) - maximum) / temperature;
        return (float)(scaled - log_total);
    }

    int64_t first_of_the_largest() const {
        for (int64_t t = 0; t < size; t++)
            if (vec::to_float(logits[t]) == maximum) return t;
        return 0;  // a broken row
    }

    // Inverse CDF: first the chunk, by `mass`, then the token among its weights. u < 1 keeps u * total below the total,
    // so the chunk found has weight, and so has the token.
    int64_t locate(double u, const double* mass) const {
        const int64_t chunks = (size + CHUNK - 1) / CHUNK;
        const double target = u * total;
        const int64_t chunk = std::min<int64_t>(std::upper_bound(mass, mass + chunks, target) - mass, chunks - 1);
        const double before = chunk ? mass[chunk - 1] : 0.0;
        float weights[CHUNK];
        double inside[CHUNK], end = 0.0;
        weigh(chunk * CHUNK, weights);
        for (int i = 0; i < CHUNK; i++) inside[i] = end += weights[i];
        const double wanted = (target - before) / (mass[chunk] - before) * end;
        int token = 0, last_with_weight = 0;  // rounding may carry `wanted` up to the end
        for (int i = 0; i < CHUNK; i++) token += inside[i] <= wanted, last_with_weight += inside[i] < end;
        return std::min(chunk * CHUNK + std::min(token, last_with_weight), size - 1);  // NaN rows land anywhere
    }

    // (one-hot - softmax) / temperature * grad, from saved figures.
    static void gradient(const Rows& a, int64_t i, T* out) {
        const T* logits = (const T*)a.logits + i * a.stride;
        const int64_t size = a.vocab_size, token = a.token[i];
        const float scale = a.grad[i] / a.temperature[i];
        const float shrink = -scale / (float)std::exp(a.log_total[i]);
        const float inverse_temperature = 1.0f / a.temperature[i];
        float weights[CHUNK];
        for (int64_t start = 0; start < size; start += CHUNK) {
            const int n = (int)std::min<int64_t>(CHUNK, size - start);
            weigh_chunk(logits + start, n, a.maximum[i], inverse_temperature, weights);
            for (int k = 0; k < CHUNK; k++) weights[k] *= shrink;
            if (start <= token && token < start + n) weights[token - start] += scale;
            for (int k = 0; k < n; k += LANES) {
                if (k + LANES <= n)
                    vec::store(out + start + k, vec::load(weights + k));
                else
                    vec::store(out + start + k, vec::load(weights + k), n - k);
            }
        }
    }
};

template <typename T>
void draw(const Rows& a) {
    const int64_t chunks = (a.vocab_size + CHUNK - 1) / CHUNK;
#pragma omp parallel num_threads(a.threads) if (a.threads > 1)
    {
        double* mass = a.mass + omp_get_thread_num() * chunks;
#pragma omp for
        for (int64_t i = 0; i < a.rows; i++) {
            const Row<T> row(a, i, mass);
            a.token[i] = a.greedy[i] ? row.first_of_the_largest() : row.locate(a.uniform[i], mass);
            a.logprob[i] = row.logprob(a.token[i]);
        }
    }
}

template <typename T>
void score(const Rows& a) {
#pragma omp parallel for num_threads(a.threads) if (a.threads > 1)
    for (int64_t i = 0; i < a.rows; i++) a.logprob[i] = Row<T>(a, i, nullptr).logprob(a.token[i]);
}

template <typename T>
void gradient(const Rows& a) {
#pragma omp parallel for num_threads(a.threads) if (a.threads > 1)
    for (int64_t i = 0; i < a.rows; i++) Row<T>::gradient(a, i, (T*)a.grad_logits + i * a.vocab_size);
}

}  // namespace

extern "C" void sampling_draw(const Rows* a) { a->is_bf16 ? draw<bf16>(*a) : draw<float>(*a); }
extern "C" void sampling_score(const Rows* a) { a->is_bf16 ? score<bf16>(*a) : score<float>(*a); }
extern "C" void sampling_gradient(const Rows* a) { a->is_bf16 ? gradient<bf16>(*a) : gradient<float>(*a); }

// Philox 4x32-10 (see kernels/rng.py): key = seed, counter = position; 53 bits of the first two words, in [0, 1).
extern "C" void sampling_uniforms(const uint64_t* seeds, const uint64_t* positions, int64_t n, double* uniforms) {
    for (int64_t i = 0; i < n; i++) {
        uint32_t c0 = (uint32_t)positions[i], c1 = (uint32_t)(positions[i] >> 32), c2 = 0, c3 = 0;
        uint32_t k0 = (uint32_t)seeds[i], k1 = (uint32_t)(seeds[i] >> 32);
        for (int round = 0; round < 10; round++) {
            const uint64_t a = 0xD2511F53ull * c0, b = 0xCD9E8D57ull * c2;
            c0 = (uint32_t)(b >> 32) ^ c1 ^ k0;
            c1 = (uint32_t)b;
            c2 = (uint32_t)(a >> 32) ^ c3 ^ k1;
            c3 = (uint32_t)a;
            k0 += 0x9E3779B9u;
            k1 += 0xBB67AE85u;
        }
        uniforms[i] = (double)(((uint64_t)c0 << 32 | c1) >> 11) * 0x1p-53;
    }
}
