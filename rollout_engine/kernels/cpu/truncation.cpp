// Top-k, top-p and min-p without sorting the vocabulary. All three keep a prefix of the tokens sorted by (logit, then
// id), so each row needs one thing: where that prefix ends.
//
// Tokens go into bins by their distance from the largest logit; a bin knows how many it holds and, in float64, their
// mass. A walk from the first bin on counts, or gathers, enough; only the tokens of the bin where it ends are sorted.
// Every row is cut alone, so the number of threads does not matter.
#include <omp.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <functional>

#include "vec.h"

using vec::F;
using vec::LANES;

namespace {

constexpr int BINS = 1024;
constexpr double DEPTH = 40.0;  // the bins reach down to e^-40 of the largest weight; the last takes the rest
constexpr int BLOCK = 256;      // tokens binned at once

struct Truncation {
    float* logits;  // [rows, vocab_size], cut in place; no NaN
    int64_t rows, vocab_size, stride;
    const double* temperature;  // [rows], above 0
    const int64_t* top_k;       // 0 keeps all
    const double* top_p;
    const double* min_p;
    float* candidate;  // [threads, vocab_size], scratch
    int64_t threads;
};

// Tokens above `floor` stay, and of the `ties` tokens equal to it the first `kept`; `mass` is that of all that stay.
struct Edge {
    float floor;
    int64_t kept, ties;
    double mass;
};

// exp for x <= 0 as plain arithmetic, so that loops over it become vector code; below -708 it stays at exp(-708).
// 2^n p(r) with |r| <= ln2 / 2, p the Taylor polynomial of degree 13: relative error below 1e-15.
inline double exp_nonpositive(double x) {
    const double round = 6755399441055744.0;  // 1.5 * 2^52: adding it leaves the nearest integer in the low bits
    x = x < -708.0 ? -708.0 : x;
    const double shifted = x * 1.4426950408889634 + round;
    const double n = shifted - round;
    const double r = (x - n * 0.6931471803691238) - n * 1.9082149292705877e-10;
    double p = 1.0 / 6227020800.0;
    p = p * r + 1.0 / 479001600.0;
    p = p * r + 1.0 / 39916800.0;
    p = p * r + 1.0 / 3628800.0;
    p = p * r + 1.0 / 362880.0;
    p = p * r + 1.0 / 40320.0;
    p = p * r + 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    uint64_t bits, exponent;
    memcpy(&exponent, &shifted, sizeof exponent);
    memcpy(&bits, &p, sizeof bits);
    bits += exponent << 52;
    memcpy(&p, &bits, sizeof p);
    return p;
}

struct Row {
    const float* logits;
    int64_t size;
    float* candidate;
    float top;
    double inverse_temperature;
    float bins_per_logit;
    int64_t count[BINS] = {};
    double mass[BINS] = {};

    Row(const float* logits, int64_t size, double temperature, bool with_mass, float* candidate)
        : logits(logits), size(size), candidate(candidate), inverse_temperature(std::min(1.0 / temperature, DBL_MAX)) {
        float low;
        extremes(&low);
        bins_per_logit = (float)((BINS - 1) / std::min((double)top - low, DEPTH * temperature));
        for (int64_t start = 0; start < size; start += BLOCK) {
            const int n = (int)std::min<int64_t>(BLOCK, size - start);
            int bin[BLOCK];
            bins_of(start, n, bin);
            for (int i = 0; i < n; i++) count[bin[i]]++;
            if (!with_mass) continue;
            double weights[BLOCK];
            for (int i = 0; i < n; i++) weights[i] = exp_nonpositive(exponent(logits[start + i]));
            for (int i = 0; i < n; i++) mass[bin[i]] += weights[i];
        }
    }

    double total() const {
        double sum = 0.0;
        for (int bin = 0; bin < BINS; bin++) sum += mass[bin];
        return sum;
    }

    // From the most likely token down, until `max_count` tokens stay or their mass reaches `max_mass`.
    Edge walk(int64_t max_count, double max_mass) {
        int64_t counted = 0;
        double gathered = 0.0;
        int bin = 0, last = BINS - 1;
        while (!count[last]) last--;
        for (; bin < last && counted + count[bin] < max_count && gathered + mass[bin] < max_mass; bin++) {
            counted += count[bin];
            gathered += mass[bin];
        }
        return walk_bin(bin, counted, gathered, max_count, max_mass);
    }

    // The lowest logit at least `share` times as likely as the largest, by bisection over float32's ordered bits.
    float floor_of(double share) const {
        uint32_t below = key_of(-INFINITY), reached = key_of(top);
        while (reached - below > 1) {
            const uint32_t middle = below + (reached - below) / 2;
            (weight(value_of(middle)) >= share ? reached : below) = middle;
        }
        return value_of(reached);
    }

   private:
    double exponent(float logit) const { return ((double)logit - top) * inverse_temperature; }
    double weight(float logit) const { return std::exp(exponent(logit)); }

    void extremes(float* low) {
        F highest = vec::set1(-INFINITY), lowest = vec::set1(INFINITY);
        int64_t t = 0;
        for (; t + LANES <= size; t += LANES) {
            const F x = vec::load(logits + t);
            highest = vec::max(x, highest);
            lowest = vec::min(x, lowest);
        }
        top = vec::max(highest);
        *low = -vec::max(-lowest);
        for (; t < size; t++) top = std::max(top, logits[t]), *low = std::min(*low, logits[t]);
    }

    // Never decreases from one logit to a lower one, and equal logits share a bin. All equal: 0 * inf, the last bin.
    void bins_of(int64_t start, int n, int* bin) const {
        for (int i = 0; i < n; i++) {
            const float depth = (top - logits[start + i]) * bins_per_logit;
            bin[i] = (int)(depth < BINS - 1 ? depth : (float)(BINS - 1));
        }
    }

    // `walk` inside the bin where it ends: by groups of equal logits.
    Edge walk_bin(int chosen, int64_t counted, double gathered, int64_t max_count, double max_mass) {
        const int64_t members = count[chosen];
        int64_t found = 0;
        for (int64_t start = 0; found < members; start += BLOCK) {
            const int n = (int)std::min<int64_t>(BLOCK, size - start);
            int bin[BLOCK];
            bins_of(start, n, bin);
            for (int i = 0; i < n && found < members; i++) {
                candidate[found] = logits[start + i];  // always written, kept where the next line counts it
                found += bin[i] == chosen;
            }
        }
        std::sort(candidate, candidate + members, std::greater<float>());
        Edge edge = {};
        for (int64_t first = 0, end; first < members; first = end) {
            for (end = first + 1; end < members && candidate[end] == candidate[first];) end++;
            edge = take(candidate[first], end - first, counted, gathered, max_count, max_mass);
            counted += edge.kept;
            gathered = edge.mass;
            if (counted >= max_count || gathered >= max_mass) break;
        }
        return edge;
    }

    // Of `ties` equal tokens as many as it takes.
    Edge take(float logit, int64_t ties, int64_t counted, double gathered, int64_t max_count, double max_mass) const {
        const double each = weight(logit);
        int64_t kept = std::min(ties, max_count - counted);
        if (gathered + kept * each >= max_mass) {
            int64_t enough = (int64_t)std::max(0.0, std::floor((max_mass - gathered) / each));
            while (enough > 0 && gathered + (enough - 1) * each >= max_mass) enough--;
            while (gathered + enough * each < max_mass) enough++;
            kept = std::min(kept, enough);
        }
        return {logit, kept, ties, gathered + kept * each};
    }

    static uint32_t key_of(float value) {
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        return bits ^ ((uint32_t)((int32_t)bits >> 31) | 0x80000000u);
    }

    static float value_of(uint32_t key) {
        const uint32_t bits = key ^ (key >> 31 ? 0x80000000u : 0xFFFFFFFFu);
        float value;
        memcpy(&value, &bits, sizeof value);
        return value;
    }
};

Edge find_edge(const Truncation& a, int64_t i, float* candidate) {
    const bool by_mass = a.top_p[i] < 1.0;
    const int64_t max_count = a.top_k[i] ? std::min(a.top_k[i], a.vocab_size) : a.vocab_size;
    Row row(a.logits + i * a.stride, a.vocab_size, a.temperature[i], by_mass, candidate);
    Edge edge = {-INFINITY, 0, 0, by_mass ? row.total() : 0.0};  // everything
    if (max_count < a.vocab_size) edge = row.walk(max_count, INFINITY);
    if (by_mass) edge = row.walk(max_count, a.top_p[i] * edge.mass);
    if (a.min_p[i] > 0.0) {
        const float floor = row.floor_of(a.min_p[i]);
        if (floor > edge.floor) edge = {floor, 0, 0, 0.0};
    }
    return edge;
}

void cut(float* logits, int64_t size, const Edge& edge) {
    for (int64_t t = 0; t < size; t++) logits[t] = logits[t] < edge.floor ? -INFINITY : logits[t];
    int64_t surplus = edge.ties - edge.kept;  // of the ties, the last ones by id
    for (int64_t t = size; surplus > 0 && t-- > 0;)
        if (logits[t] == edge.floor) logits[t] = -INFINITY, surplus--;
}

}  // namespace

extern "C" void truncation_cut(const Truncation* args) {
    const Truncation a = *args;
#pragma omp parallel for schedule(dynamic) num_threads(a.threads) if (a.threads > 1)
    for (int64_t i = 0; i < a.rows; i++) {
        const Edge edge = find_edge(a, i, a.candidate + omp_get_thread_num() * a.vocab_size);
        cut(a.logits + i * a.stride, a.vocab_size, edge);
    }
}
