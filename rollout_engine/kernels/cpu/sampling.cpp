// Rows of logits: log-probs of tokens, draws of a token by a uniform number, and the uniform numbers themselves.
//
//     weight  = exp((logit - max) * (1 / temperature))   float32, in chunks of 128 tokens
//     total   = sum of chunk sums, left to right         float32 within a chunk, float64 across chunks
//     logprob = (logit - max) / temperature - log total  float64, rounded to float32 once
//
// Nothing of a row's size is stored but its chunk sums: a draw finds the chunk by them and weighs that chunk again.
// `weigh_chunk` is the only place that computes weights, and is not inlined, so each time it gives the same bits.
// With truncation the same sums are computed again without the weights of cut tokens. With a mask a row is drawn again, as a
// row with -inf at the tokens that it forbids would be, bit for bit; its statistics and log-prob stay those of the whole row.
// A row that is scored over its support is such a row too, so its log-prob has the bits of a draw from these tokens.
#include <algorithm>
#include <cmath>
#include <vector>

#include "grammar.h"
#include "largest.h"
#include "openmp.h"
#include "truncation.h"
#include "vec.h"

using vec::F;
using vec::LANES;
using truncation::Edge;

namespace {

constexpr int CHUNK = 128;

struct Rows {
    const void* logits;  // [rows, vocab_size] float32, or bfloat16
    int64_t is_bf16, rows, vocab_size, stride;
    const float* temperature;  // [rows], normal numbers above 0
    int64_t* token;            // [rows], given or drawn
    float* maximum;            // [rows], out; NaN for a row with NaN, +inf, or nothing but -inf; given to draw again
    double* log_total;         // [rows], out; NaN likewise; given to draw again
    float* logprob;            // [rows], out: of `token`
    const double* uniform;     // draw: [rows], in [0, 1); null: those of seed and position
    const uint64_t *seed, *position;  // draw: [rows]
    const uint8_t* greedy;     // draw: [rows], take the first of the most likely instead
    double* mass;              // draw: [threads, chunks], scratch
    const double* rule_temperature;  // draw: [rows], above 0 where a rule cuts; null: no row is truncated
    const int64_t* top_k;            // [rows], 0 keeps all
    const double* top_p;             // [rows]
    const double* min_p;             // [rows]
    float* candidate;                // [threads, vocab_size], scratch
    double* kept_log_total;          // [rows], out: of the tokens that stay; not finite where none does. Null, as the next
                                     // two, where no row is truncated
    float* floor;                    // [rows], out: see truncation::Edge
    int64_t* last_tie;               // [rows], out
    const uint32_t* mask;            // [masks, mask_words], a bit for each token, 1 where it is allowed; null: a first draw
    int64_t mask_words;
    const int64_t* mask_row;         // [rows], row of `mask`; negative: not drawn again
    float* masked;                   // [threads, vocab_size], scratch; null unless rows are truncated and masked
    const float* grad;         // gradient: [rows], of `logprob`
    void* grad_logits;         // gradient: [rows, vocab_size], out, contiguous, in the dtype of the logits
    const int64_t* support_start;  // score, gradient: [rows + 1], places in `support`; null: every row has all tokens
    const int32_t* support;        // the tokens of each row, ascending; a row without any has all
    int64_t threads;
};

// exp without subnormal results, which take the CPU a hundred times as long: below e^-87 there is no weight. A row's
// total is at least 1, so this is far under what a uniform number of 53 bits can select.
VEC_INLINE F weight_of(F logit, float maximum, float inverse_temperature) {
    const F lowest = vec::set1(-87.0f);
    const F x = (logit - maximum) * inverse_temperature;
    const F w = vec::exp(vec::max(lowest, x));  // NaN stays
    return vec::select(x < lowest, F{}, w);
}

// Sixteen tokens of a mask, from a multiple of 16.
VEC_INLINE vec::I allowed_lanes(const uint32_t* mask, int64_t token) {
    constexpr int32_t BIT[LANES] = {1,       1 << 1,  1 << 2,  1 << 3,  1 << 4,  1 << 5,  1 << 6,  1 << 7,
                                    1 << 8,  1 << 9,  1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 15};
    vec::I bit;
    vec::read(BIT, bit);
    return ((vec::I{} + (int32_t)(mask[token / 32] >> (token % 32))) & bit) == bit;
}

// Weights of n <= CHUNK tokens, zeros after them, where the edge cuts and where the mask, if any, forbids; returns their
// sum. `edge.last_tie` and `mask` count from this chunk's first token.
template <typename T>
__attribute__((noinline)) float weigh_chunk(const T* logits, int n, float maximum, float inverse_temperature,
                                            const Edge& edge, const uint32_t* mask, float* weights) {
    F sum = {};
    const F floor = vec::set1(edge.floor);
    const vec::I lane = vec::lane_numbers();
    for (int i = 0; i < CHUNK; i += LANES) {
        F w = {};
        if (i < n) {
            const int here = std::min(LANES, n - i);
            const F x = here == LANES ? vec::load(logits + i) : vec::load(logits + i, here);
            w = weight_of(x, maximum, inverse_temperature);
            if (i + LANES - 1 <= edge.last_tie)
                w = vec::select(x < floor, F{}, w);
            else if (i > edge.last_tie)
                w = vec::select(x <= floor, F{}, w);
            else
                w = vec::select((x < floor) | ((x == floor) & (lane > (int)edge.last_tie - i)), F{}, w);
            if (here < LANES) w = vec::select(lane >= here, F{}, w);
            if (mask) w = vec::select(allowed_lanes(mask, i), w, F{});
        }
        vec::store(weights + i, w);
        sum += w;
    }
    return vec::sum(sum);
}

// The largest logit among tokens that the mask allows, in a row without NaN.
template <typename T>
float largest_allowed(const T* logits, int64_t size, const uint32_t* mask) {
    const F lowest = vec::set1(-INFINITY);
    F top = lowest;
    for (int64_t t = 0; t < size; t += LANES) {
        if (!(mask[t / 32] >> t % 32 & 0xFFFF)) continue;
        const int here = (int)std::min<int64_t>(LANES, size - t);
        const F x = here == LANES ? vec::load(logits + t) : vec::load(logits + t, here);
        vec::I allowed = allowed_lanes(mask, t);
        if (here < LANES) allowed = allowed & (vec::lane_numbers() < here);
        top = vec::max(vec::select(allowed, x, lowest), top);
    }
    return vec::max(top);
}

template <typename T>
struct Row {
    const T* logits;
    int64_t size;
    float temperature, inverse_temperature, maximum;
    const uint32_t* mask = nullptr;

    Row(const Rows& a, int64_t i) : Row(a, i, largest((const T*)a.logits + i * a.stride, a.vocab_size)) {}

    Row(const Rows& a, int64_t i, float largest_logit)
        : logits((const T*)a.logits + i * a.stride),
          size(a.vocab_size),
          temperature(a.temperature[i]),
          inverse_temperature(1.0f / temperature),
          maximum(largest_logit) {}

    // Forgets all tokens that the mask does not allow.
    void mask_with(const uint32_t* bits) {
        mask = bits;
        maximum = largest_allowed(logits, size, bits);
    }

    bool allows(int64_t token) const { return !mask || (mask[token / 32] >> token % 32 & 1); }
    bool is_usable() const { return maximum == maximum; }  // else there is nothing to draw, or nothing that can be

    // The total weight of tokens kept by the edge and the mask; `mass`, where given, receives the cumulative weight of
    // chunks.
    double total(const Edge& edge, double* mass) const {
        double total = 0.0;
        float weights[CHUNK];
        for (int64_t t = 0; t < size; t += CHUNK) {
            const int n = (int)std::min<int64_t>(CHUNK, size - t);
            if (!mask || allows_any(t, n)) total += weigh(t, edge, weights);
            if (mass) mass[t / CHUNK] = total;
        }
        return total;
    }

    float weigh(int64_t start, const Edge& edge, float* weights) const {
        const int n = (int)std::min<int64_t>(CHUNK, size - start);
        const Edge here = {edge.floor, edge.last_tie == INT64_MAX ? INT64_MAX : edge.last_tie - start};
        const uint32_t* allowed = mask ? mask + start / 32 : nullptr;
        return weigh_chunk(logits + start, n, maximum, inverse_temperature, here, allowed, weights);
    }

    bool allows_any(int64_t start, int n) const {
        uint32_t any = 0;
        for (int i = 0; i < n; i += 32) any |= mask[(start + i) / 32];
        return any;
    }

    // Statistics of the whole row.
    void finish(const Rows& a, int64_t i, double total) {
        if (!(total > 0.0)) maximum = NAN;
        a.maximum[i] = maximum;
        a.log_total[i] = std::log(total);
    }

    void finish_token(const Rows& a, int64_t i) const {
        const float scaled = (vec::to_float(logits[a.token[i]]) - maximum) / temperature;
        a.logprob[i] = (float)(scaled - a.log_total[i]);
    }

    int64_t first_of_the_largest() const {
        for (int64_t t = 0; t < size; t++)
            if (vec::to_float(logits[t]) == maximum && allows(t)) return t;
        return 0;  // unreachable: the maximum is among them
    }

    // Inverse CDF: first the chunk, by `mass`, then the token among its weights. u < 1 keeps u * total below the total,
    // so the chunk found has weight, and so has the token.
    int64_t locate(double u, const double* mass, const Edge& edge) const {
        const int64_t chunks = (size + CHUNK - 1) / CHUNK;
        const double target = u * mass[chunks - 1];
        const int64_t chunk = std::min<int64_t>(std::upper_bound(mass, mass + chunks, target) - mass, chunks - 1);
        const double before = chunk ? mass[chunk - 1] : 0.0;
        float weights[CHUNK];
        double inside[CHUNK], end = 0.0;
        weigh(chunk * CHUNK, edge, weights);
        for (int i = 0; i < CHUNK; i++) inside[i] = end += weights[i];
        const double wanted = (target - before) / (mass[chunk] - before) * end;
        int token = 0, last_with_weight = 0;  // rounding may carry `wanted` up to the end
        for (int i = 0; i < CHUNK; i++) token += inside[i] <= wanted, last_with_weight += inside[i] < end;
        return chunk * CHUNK + std::min(token, last_with_weight);
    }

    // (one-hot - softmax) / temperature * grad, from the saved row statistics; 0 for tokens that the mask, if any, forbids.
    static void gradient(const Rows& a, int64_t i, const uint32_t* mask, T* out) {
        const T* logits = (const T*)a.logits + i * a.stride;
        const int64_t size = a.vocab_size, token = a.token[i];
        const float scale = a.grad[i] / a.temperature[i];
        const float shrink = -scale / (float)std::exp(a.log_total[i]);
        const float inverse_temperature = 1.0f / a.temperature[i];
        float weights[CHUNK];
        for (int64_t start = 0; start < size; start += CHUNK) {
            const int n = (int)std::min<int64_t>(CHUNK, size - start);
            weigh_chunk(logits + start, n, a.maximum[i], inverse_temperature, truncation::EVERYTHING,
                        mask ? mask + start / 32 : nullptr, weights);
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

// Philox 4x32-10 (see kernels/rng.py): key = seed, counter = position; 53 bits of the first two words, in [0, 1).
double uniform_of(uint64_t seed, uint64_t position) {
    uint32_t c0 = (uint32_t)position, c1 = (uint32_t)(position >> 32), c2 = 0, c3 = 0;
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        const uint64_t a = 0xD2511F53ull * c0, b = 0xCD9E8D57ull * c2;
        c0 = (uint32_t)(b >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)b;
        c2 = (uint32_t)(a >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)a;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return (double)(((uint64_t)c0 << 32 | c1) >> 11) * 0x1p-53;
}

double uniform_of_row(const Rows& a, int64_t i) { return a.uniform ? a.uniform[i] : uniform_of(a.seed[i], a.position[i]); }

// A thread's memory; see `Rows`.
struct Scratch {
    double* mass;  // [chunks]
    float *candidate, *masked;
};

// The edge of what the rules keep of the allowed tokens, of which there are some.
template <typename T>
Edge find_edge(const Row<T>& row, const truncation::Rules& rules, const Scratch& scratch) {
    if (!row.mask) return truncation::find_edge(row.logits, row.size, rules, scratch.candidate);
    for (int64_t t = 0; t < row.size; t++) scratch.masked[t] = row.allows(t) ? vec::to_float(row.logits[t]) : -INFINITY;
    return truncation::find_edge(scratch.masked, row.size, rules, scratch.candidate);
}

// Draws a token from what the rules leave of a row, whose weights `scratch.mass` describes. `log_total` is theirs, under
// the maximum of the whole row, which is the row's own less `shift`.
template <typename T>
void pick(const Rows& a, int64_t i, const Row<T>& row, double u, double log_total, double shift, const Scratch& scratch) {
    Edge edge = truncation::EVERYTHING;
    if (a.rule_temperature) {
        const truncation::Rules rules = {a.rule_temperature[i], a.top_k[i], a.top_p[i], a.min_p[i]};
        if (row.is_usable() && !rules.keep_all()) {
            edge = find_edge(row, rules, scratch);
            log_total = std::log(row.total(edge, scratch.mass)) + shift;
        }
        a.kept_log_total[i] = log_total;
        a.floor[i] = edge.floor;
        a.last_tie[i] = edge.last_tie;
    }
    if (row.is_usable()) a.token[i] = a.greedy[i] ? row.first_of_the_largest() : row.locate(u, scratch.mass, edge);
}

// Returns whether the row can be drawn from.
template <typename T>
bool draw_row(const Rows& a, int64_t i, const Scratch& scratch) {
    Row<T> row(a, i);
    row.finish(a, i, row.total(truncation::EVERYTHING, scratch.mass));
    a.token[i] = 0;
    pick(a, i, row, uniform_of_row(a, i), a.log_total[i], 0.0, scratch);
    row.finish_token(a, i);
    return row.is_usable();
}

// Draws a row again, of the tokens that a mask allows. Where it allows none that can be drawn, the token is -1.
template <typename T>
void redraw_row(const Rows& a, int64_t i, const uint32_t* mask, double u, const Scratch& scratch) {
    const Row<T> whole(a, i, a.maximum[i]);
    if (!whole.is_usable()) return;
    Row<T> row = whole;
    row.mask_with(mask);
    const double shift = ((double)row.maximum - whole.maximum) / whole.temperature;
    const double total = row.total(truncation::EVERYTHING, scratch.mass);
    if (!(total > 0.0)) row.maximum = NAN;
    a.token[i] = -1;
    pick(a, i, row, u, std::log(total) + shift, shift, scratch);
    if (row.is_usable()) whole.finish_token(a, i);
}

// The memory of the thread that asks.
Scratch own_scratch(const Rows& a) {
    const int64_t thread = omp_get_thread_num(), start = thread * a.vocab_size;
    return {
        a.mass + thread * ((a.vocab_size + CHUNK - 1) / CHUNK),
        a.candidate ? a.candidate + start : nullptr,
        a.masked ? a.masked + start : nullptr,
    };
}

// Draws rows, or with masks those that have one again. Returns how many cannot be drawn from; with masks 0.
template <typename T>
int64_t draw(const Rows& a) {
    int64_t unusable = 0;
#pragma omp parallel for schedule(dynamic) num_threads(a.threads) if (a.threads > 1) reduction(+ : unusable)
    for (int64_t i = 0; i < a.rows; i++) {
        const Scratch scratch = own_scratch(a);
        if (!a.mask)
            unusable += !draw_row<T>(a, i, scratch);
        else if (a.mask_row[i] >= 0)
            redraw_row<T>(a, i, a.mask + a.mask_row[i] * a.mask_words, uniform_of_row(a, i), scratch);
    }
    return unusable;
}

// Added to a position for the uniform number of a second draw, as in model/sampling/sampler.py.
constexpr uint64_t SECOND_DRAW = 1ull << 62;

// Draws rows again whose tokens grammars refuse.
struct Restriction {
    const Rows* rows;  // with seeds and positions
    const grammar::Arguments* grammars;
    const int64_t* row_at;       // [places], the row that is drawn there; negative: none
    const uint8_t* tries_first;  // [rows]: 0 where its token does not count; null: all do
    uint32_t* masks;             // [threads, words], scratch
};

template <typename T>
void restrict_rows(const Restriction& r) {
    const Rows& a = *r.rows;
    const grammar::Arguments& g = *r.grammars;
#pragma omp parallel num_threads(g.threads) if (g.threads > 1)
    {
        grammar::Stopwatch watch;
        uint32_t* mask = r.masks + omp_get_thread_num() * g.words;
        const Scratch scratch = own_scratch(a);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < g.sequences; i++) {
            grammar::Sequence(g, i, watch).follow([&](int64_t place, grammar::Sequence& at) {
                const int64_t row = r.row_at[place];
                if (row < 0) return grammar::ALLOWED;
                const bool is_tried = !r.tries_first || r.tries_first[row];
                const grammar::Verdict verdict = at.judge(is_tried ? a.token[row] : -1, mask);
                if (verdict == grammar::NOT_ALLOWED) {
                    const uint64_t position = a.position[row] + (is_tried ? SECOND_DRAW : 0);
                    redraw_row<T>(a, row, mask, uniform_of(a.seed[row], position), scratch);
                }
                return verdict;
            });
        }
    }
}

// A thread's mask of one row's support after the other.
struct SupportMask {
    std::vector<uint32_t> bits;

    explicit SupportMask(const Rows& a) : bits(a.support_start ? (a.vocab_size + 31) / 32 : 0) {}

    // The mask of row i until the next call; null where it has all tokens.
    const uint32_t* of(const Rows& a, int64_t i) {
        if (!a.support_start || a.support_start[i] == a.support_start[i + 1]) return nullptr;
        std::fill(bits.begin(), bits.end(), 0);
        for (int64_t k = a.support_start[i]; k < a.support_start[i + 1]; k++)
            bits[a.support[k] / 32] |= 1u << (a.support[k] % 32);
        return bits.data();
    }
};

template <typename T>
void score(const Rows& a) {
#pragma omp parallel num_threads(a.threads) if (a.threads > 1)
    {
        SupportMask support(a);
#pragma omp for
        for (int64_t i = 0; i < a.rows; i++) {
            const uint32_t* mask = support.of(a, i);
            Row<T> row = mask ? Row<T>(a, i, 0.0f) : Row<T>(a, i);
            if (mask) row.mask_with(mask);
            row.finish(a, i, row.total(truncation::EVERYTHING, nullptr));
            row.finish_token(a, i);
        }
    }
}

template <typename T>
void gradient(const Rows& a) {
#pragma omp parallel num_threads(a.threads) if (a.threads > 1)
    {
        SupportMask support(a);
#pragma omp for
        for (int64_t i = 0; i < a.rows; i++)
            Row<T>::gradient(a, i, support.of(a, i), (T*)a.grad_logits + i * a.vocab_size);
    }
}

// Rows whose tokens within an edge are counted, or listed.
struct Kept {
    const void* logits;  // [.., vocab_size] float32, or bfloat16
    int64_t is_bf16, rows, vocab_size, stride;
    const int64_t* row;       // [rows], of the logits
    const float* floor;       // [rows], see truncation::Edge
    const int64_t* last_tie;  // [rows]
    int64_t* count;           // [rows], out, if `ids` is null
    const int64_t* start;     // [rows], place of a row's first id in `ids`
    int32_t* ids;             // out, ascending in each row
    int64_t threads;
};

// Which of sixteen tokens from `token` on an edge keeps. A token without probability, of logit -inf, is never kept.
VEC_INLINE vec::I kept_lanes(F x, int64_t token, const Edge& edge) {
    const F floor = vec::set1(edge.floor);
    const vec::I some = x > vec::set1(-INFINITY);
    if (token + LANES - 1 <= edge.last_tie) return (x >= floor) & some;
    if (token > edge.last_tie) return (x > floor) & some;
    return ((x > floor) | ((x == floor) & (vec::lane_numbers() <= (int)(edge.last_tie - token)))) & some;
}

// Lists the tokens of a row within an edge, or counts them if `ids` is null. Returns their number.
template <typename T>
int64_t list_kept(const T* logits, int64_t size, const Edge& edge, int32_t* ids) {
    constexpr int BLOCK = 4 * LANES;
    int64_t found = 0;
    for (int64_t start = 0; start < size; start += BLOCK) {
        int32_t kept[BLOCK] = {};
        vec::I any = {};
        for (int i = 0; i < BLOCK && start + i < size; i += LANES) {
            const int here = (int)std::min<int64_t>(LANES, size - start - i);
            const F x = here == LANES ? vec::load(logits + start + i) : vec::load(logits + start + i, here);
            vec::I lanes = kept_lanes(x, start + i, edge);
            if (here < LANES) lanes = lanes & (vec::lane_numbers() < here);
            any = any | lanes;
            vec::write(kept + i, lanes);
        }
        int32_t lanes[LANES], some = 0;
        vec::write(lanes, any);
        for (int i = 0; i < LANES; i++) some |= lanes[i];
        if (!some) continue;  // most blocks
        int32_t listed[BLOCK];
        int num = 0;
        for (int i = 0; i < BLOCK; i++) {  // a mask's lanes are 0 and -1
            listed[num] = (int32_t)(start + i);
            num -= kept[i];
        }
        if (ids) memcpy(ids + found, listed, num * sizeof(int32_t));
        found += num;
    }
    return found;
}

template <typename T>
void list_rows(const Kept& a) {
#pragma omp parallel for schedule(dynamic) num_threads(a.threads) if (a.threads > 1)
    for (int64_t i = 0; i < a.rows; i++) {
        const T* logits = (const T*)a.logits + a.row[i] * a.stride;
        const int64_t found =
            list_kept(logits, a.vocab_size, {a.floor[i], a.last_tie[i]}, a.ids ? a.ids + a.start[i] : nullptr);
        if (!a.ids) a.count[i] = found;
    }
}

}  // namespace

extern "C" int64_t sampling_draw(const Rows* a) { return a->is_bf16 ? draw<bf16>(*a) : draw<float>(*a); }
extern "C" void sampling_score(const Rows* a) { a->is_bf16 ? score<bf16>(*a) : score<float>(*a); }
extern "C" void sampling_gradient(const Rows* a) { a->is_bf16 ? gradient<bf16>(*a) : gradient<float>(*a); }

extern "C" void sampling_kept(const Kept* a) { a->is_bf16 ? list_rows<bf16>(*a) : list_rows<float>(*a); }

extern "C" void sampling_restrict(const Restriction* r) {
    r->rows->is_bf16 ? restrict_rows<bf16>(*r) : restrict_rows<float>(*r);
}

extern "C" void sampling_uniforms(const uint64_t* seeds, const uint64_t* positions, int64_t n, double* uniforms) {
    for (int64_t i = 0; i < n; i++) uniforms[i] = uniform_of(seeds[i], positions[i]);
}
