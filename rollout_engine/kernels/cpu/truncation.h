// Top-k, top-p and min-p without sorting the vocabulary. All three keep a prefix of the tokens sorted by (logit, then
// id), so a row needs only the end of that prefix.
//
// Tokens go into bins by their distance from the largest logit; a bin records their number and, in float64, their mass.
// A walk from the first bin stops where a limit is reached; only the tokens of that bin are sorted.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <functional>

#include "vec.h"

namespace truncation {

using vec::F;
using vec::LANES;

constexpr int BINS = 1024;
constexpr double DEPTH = 40.0;  // the bins reach down to e^-40 of the largest weight; the last takes the rest
constexpr int BLOCK = 256;      // tokens binned at once

struct Rules {
    double temperature;  // above 0
    int64_t top_k;       // 0 and less keep all
    double top_p, min_p;

    bool keep_all() const { return top_k <= 0 && top_p >= 1.0 && min_p <= 0.0; }
};

// Tokens above `floor` are kept, and those equal to it with ids up to `last_tie`.
struct Edge {
    float floor;
    int64_t last_tie;
};

constexpr Edge EVERYTHING = {-INFINITY, INT64_MAX};

typedef double D __attribute__((vector_size(64)));
typedef uint64_t Bits __attribute__((vector_size(64)));

// e^x for x <= 0; below -708 it is e^-708, negligible beside the largest weight, 1.
// 2^n p(r) with |r| <= ln2 / 2, p the Taylor polynomial of degree 11: relative error below 1e-14.
template <typename V, typename B>
VEC_INLINE V exp_nonpositive(V x) {
    const double round = 6755399441055744.0;  // 1.5 * 2^52: adding it leaves the nearest integer in the low bits
    x = x < -708.0 ? V{} - 708.0 : x;
    const V shifted = vec::fma_doubles(x, V{} + 1.4426950408889634, V{} + round);
    const V n = shifted - round;
    V r = vec::fma_doubles(n, V{} - 0.6931471803691238, x);
    r = vec::fma_doubles(n, V{} - 1.9082149292705877e-10, r);
    V p = V{} + 1.0 / 39916800.0;
    for (const double term : {1.0 / 3628800.0, 1.0 / 362880.0, 1.0 / 40320.0, 1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0,
                              1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0})
        p = vec::fma_doubles(p, r, V{} + term);
    return (V)((B)p + ((B)shifted << 52));
}

// End of a walk: the first `kept` of the `ties` tokens equal to `logit` are kept; `mass` is that of all kept tokens.
struct End {
    float logit;
    int64_t kept, ties;
    double mass;
};

template <typename T>
struct Row {
    const T* logits;
    int64_t size;
    float* candidate;  // [size], scratch
    float top, bins_per_logit;
    double inverse_temperature;
    int32_t count[BINS] = {};
    double mass[BINS] = {};

    Row(const T* logits, int64_t size, double temperature, bool with_mass, float* candidate)
        : logits(logits), size(size), candidate(candidate), inverse_temperature(std::min(1.0 / temperature, DBL_MAX)) {
        const double range = (double)top_and_range();
        bins_per_logit = (float)((BINS - 1) / std::min(range, DEPTH * temperature));
        for (int64_t start = 0; start < size; start += BLOCK) {
            float x[BLOCK];
            int32_t bin[BLOCK];
            const int n = read(start, x);
            bins_of(x, bin);
            for (int i = 0; i < n; i++) count[bin[i]]++;
            if (!with_mass) continue;
            double weights[BLOCK];
            weigh(x, weights);
            for (int i = 0; i < n; i++) mass[bin[i]] += weights[i];
        }
    }

    double total() const {
        double sum = 0.0;
        for (int bin = 0; bin < BINS; bin++) sum += mass[bin];
        return sum;
    }

    // From the most likely token down, until `max_count` tokens are kept or their mass reaches `max_mass`.
    End walk(int64_t max_count, double max_mass) const {
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

    int64_t id_of_tie(float logit, int64_t index) const {
        for (int64_t t = 0; t < size; t++)
            if (vec::to_float(logits[t]) == logit && index-- == 0) return t;
        return size;
    }

   private:
    double weight(float logit) const { return std::exp(((double)logit - top) * inverse_temperature); }

    // BLOCK logits from `start`, -inf past the end; returns how many are real.
    int read(int64_t start, float* x) const {
        const int n = (int)std::min<int64_t>(BLOCK, size - start);
        for (int i = 0; i < BLOCK; i += LANES) {
            if (i + LANES <= n) {
                vec::store(x + i, vec::load(logits + start + i));
            } else {
                for (int k = i; k < i + LANES; k++) x[k] = k < n ? vec::to_float(logits[start + k]) : -INFINITY;
            }
        }
        return n;
    }

    float top_and_range() {
        F highest = vec::set1(-INFINITY), lowest = vec::set1(INFINITY);
        int64_t t = 0;
        for (; t + LANES <= size; t += LANES) {
            const F x = vec::load(logits + t);
            highest = vec::max(x, highest);
            lowest = vec::min(x, lowest);
        }
        top = vec::max(highest);
        float low = -vec::max(-lowest);
        for (; t < size; t++) {
            top = std::max(top, vec::to_float(logits[t]));
            low = std::min(low, vec::to_float(logits[t]));
        }
        return top - low;
    }

    // Never decreases from one logit to a lower one, and equal logits share a bin. All equal: 0 * inf, the last bin.
    void bins_of(const float* x, int32_t* bin) const {
        for (int i = 0; i < BLOCK; i += LANES) {
            const F depth = (top - vec::load(x + i)) * bins_per_logit;
            const F last = vec::set1(BINS - 1);
            const vec::I chosen = vec::converted<vec::I>(vec::select(depth < last, depth, last));
            vec::write(bin + i, chosen);
        }
    }

    void weigh(const float* x, double* weights) const {
        typedef float Eight __attribute__((vector_size(32)));
        for (int i = 0; i < BLOCK; i += 8) {
            Eight narrow;
            memcpy(&narrow, x + i, sizeof narrow);
            const D w = exp_nonpositive<D, Bits>((__builtin_convertvector(narrow, D) - (double)top) * inverse_temperature);
            memcpy(weights + i, &w, sizeof w);
        }
    }

    // `walk` inside the bin where it ends: by groups of equal logits.
    End walk_bin(int chosen, int64_t counted, double gathered, int64_t max_count, double max_mass) const {
        const int64_t members = collect(chosen);
        std::sort(candidate, candidate + members, std::greater<float>());
        End end = {};
        for (int64_t first = 0, next; first < members; first = next) {
            for (next = first + 1; next < members && candidate[next] == candidate[first];) next++;
            end = take(candidate[first], next - first, counted, gathered, max_count, max_mass);
            counted += end.kept;
            gathered = end.mass;
            if (counted >= max_count || gathered >= max_mass) break;
        }
        return end;
    }

    int64_t collect(int chosen) const {
        int64_t found = 0;
        for (int64_t start = 0; found < count[chosen]; start += BLOCK) {
            float x[BLOCK];
            int32_t bin[BLOCK];
            const int n = read(start, x);
            bins_of(x, bin);
            for (int first = 0; first < n; first += LANES) {
                int32_t any = 0;  // most vectors hold none
                for (int i = first; i < first + LANES; i++) any |= bin[i] == chosen;
                if (!any) continue;
                for (int i = first; i < std::min(n, first + LANES); i++)
                    if (bin[i] == chosen) candidate[found++] = x[i];
            }
        }
        return found;
    }

    // Of `ties` equal tokens as many as it takes.
    End take(float logit, int64_t ties, int64_t counted, double gathered, int64_t max_count, double max_mass) const {
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

// The edge of what the rules keep of a row without NaN, at least one token. `candidate` [size] is scratch.
template <typename T>
Edge find_edge(const T* logits, int64_t size, const Rules& rules, float* candidate) {
    const bool by_mass = rules.top_p < 1.0;
    const int64_t max_count = rules.top_k > 0 ? std::min(rules.top_k, size) : size;
    const Row<T> row(logits, size, rules.temperature, by_mass, candidate);
    End end = {-INFINITY, 0, 0, by_mass ? row.total() : 0.0};  // everything
    if (max_count < size) end = row.walk(max_count, INFINITY);
    if (by_mass) end = row.walk(max_count, rules.top_p * end.mass);
    const float floor = rules.min_p > 0.0 ? row.floor_of(rules.min_p) : -INFINITY;
    if (floor > end.logit || end.kept == end.ties) return {std::max(floor, end.logit), INT64_MAX};
    return {end.logit, end.kept ? row.id_of_tie(end.logit, end.kept - 1) : -1};
}

}  // namespace truncation
