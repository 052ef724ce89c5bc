// One token of a recurrence with a state (`kernels.recurrence`), for one head and a block of columns of its state S [K, V]:
//
//     P = exp(g) * S    u = beta (v - P^T k)  by the delta rule, else  beta v    S = P + k u^T    o = S^T (scale q) + skip v
//
// float32 inside. Columns of S do not depend on one another, and a sum over K has one order, k = 0, 1, 2, ..., so the bits
// of a column depend on the tokens before it in its sequence alone.
#pragma once

#include <algorithm>

#include "carved.h"
#include "rows.h"
#include "state_chunks.h"
#include "team.h"

namespace recurrence {

using vec::F;
using vec::LANES;

#ifdef __AVX512F__
constexpr int VECTORS = 4;  // of a block's row: three sums of as many vectors stay in registers
#else
constexpr int VECTORS = 2;
#endif
constexpr int WIDTH = VECTORS * LANES;  // columns of a block

// float32 or bfloat16 [T, heads, channels], dense in the last dimension; strides are in elements.
struct Operand {
    const void* data;
    int64_t token, head, half;

    // The first n <= 16 values from `channel` on; zeros past them.
    LAMBDA_INLINE F at(int64_t t, int64_t number, int64_t channel, int n) const {
        const int64_t place = t * token + number * head + channel;
        return half ? rows::load_first((const bf16*)data + place, n) : rows::load_first((const float*)data + place, n);
    }

    // 1 / the length of `size` channels.
    float inverse_length(int64_t t, int64_t number, int64_t size, float epsilon) const {
        const int64_t place = t * token + number * head;
        return half ? rows::inverse_length((const bf16*)data + place, size, epsilon)
                    : rows::inverse_length((const float*)data + place, size, epsilon);
    }
};

// Mirrored in recurrence.py.
struct Inputs {
    Operand q, k, v;         // [T, G, K], [T, G, K], [T, H, V]
    const float *log_decay;  // [T, H], or [T, H, K] with `by_channel`
    const float *beta, *skip;  // [T, H]; [H] or null
    StateChunks chunks;
    int32_t num_heads, num_groups, key_size, value_size;  // H, G, K, V
    int32_t by_channel, delta, num_threads;
    float scale;
    int32_t normalises;  // q and k are divided by their lengths first, as by `rows::l2_normalise_row`
    float key_epsilon;

    int64_t padded_key() const { return (key_size + LANES - 1) / LANES * LANES; }
    float beta_of(int64_t t, int head) const { return beta[t * num_heads + head]; }
};

// x in every lane, without the addition of `set1`: these stand in the innermost loops.
VEC_INLINE F broadcast(float x) { return x - F{}; }

// Columns of vector i in a block of `width`: 0 to 16.
VEC_INLINE int lanes_of(int width, int i) { return std::min(std::max(width - i * LANES, 0), LANES); }

// The vectors along K of one token and head.
struct Token {
    float *key, *query, *decay, *decayed_key;  // [padded K]: k, scale q, exp(g), exp(g) k

    void prepare(const Inputs& in, int64_t t, int head) const {
        const int group = head / (in.num_heads / in.num_groups);
        const float* log_decays = in.log_decay + (t * in.num_heads + head) * (in.by_channel ? in.key_size : 1);
        const F scale = vec::set1(in.scale);
        F of_query = vec::set1(1.0f), of_key = of_query;
        if (in.normalises) {
            of_query = vec::set1(in.q.inverse_length(t, group, in.key_size, in.key_epsilon));
            of_key = vec::set1(in.k.inverse_length(t, group, in.key_size, in.key_epsilon));
        }
        F factor = in.by_channel ? F{} : vec::exp(vec::set1(*log_decays));
        for (int k = 0; k < in.key_size; k += LANES) {
            const int n = std::min(LANES, in.key_size - k);
            if (in.by_channel) factor = vec::exp(rows::load_first(log_decays + k, n));
            const F keys = vec::product(in.k.at(t, group, k, n), of_key);
            vec::store(key + k, keys);
            vec::store(query + k, vec::product(vec::product(in.q.at(t, group, k, n), of_query), scale));
            vec::store(decay + k, factor);
            vec::store(decayed_key + k, vec::product(factor, keys));
        }
    }
};

// `width` values of v.
VEC_INLINE void load_values(const Inputs& in, int64_t t, int head, int column, int width, F (&v)[VECTORS]) {
#pragma GCC unroll 4
    for (int i = 0; i < VECTORS; i++) {
        const int n = lanes_of(width, i);
        v[i] = n ? in.v.at(t, head, column + i * LANES, n) : F{};
    }
}

// Rows of WIDTH floats, `row` apart.
struct Place {
    float* data;
    int64_t row;

    float* at(int k, int i) const { return data + k * row + i * LANES; }
};

// Sums in registers: arrays whose address is passed on would be memory in the loops.
struct Sums {
    F of[VECTORS];

    explicit LAMBDA_INLINE Sums(const F (&from)[VECTORS]) {
#pragma GCC unroll 4
        for (int i = 0; i < VECTORS; i++) of[i] = from[i];
    }
    LAMBDA_INLINE void store(F (&to)[VECTORS]) const {
#pragma GCC unroll 4
        for (int i = 0; i < VECTORS; i++) to[i] = of[i];
    }
};

// recalled = P^T k of a token, P = exp(g) * S.
VEC_INLINE void recall(Place state, int key_size, const Token& token, F (&recalled)[VECTORS]) {
    const float* keys = token.decayed_key;
    Sums sums(recalled);
    for (int k = 0; k < key_size; k++) {
        const F key = broadcast(keys[k]);
#pragma GCC unroll 4
        for (int i = 0; i < VECTORS; i++) sums.of[i] = vec::fma(key, vec::load(state.at(k, i)), sums.of[i]);
    }
    sums.store(recalled);
}

// One pass over a state: `to` becomes exp(g) * `from` + k u^T, and `out` gets to^T (scale q). With RECALL, `recalled` gets
// the values that the next token recalls of it: the bits of `recall`. With AHEAD, `ahead` is asked for: the state that is read next.
template <bool OUT, bool RECALL, bool AHEAD = false>
VEC_INLINE void advance(Place from, Place to, int key_size, const Token& token, const Token& next, const F (&u)[VECTORS],
                        F (&out)[VECTORS], F (&recalled)[VECTORS], Place ahead = {}) {
    const float *decays = token.decay, *keys = token.key, *queries = token.query, *next_keys = next.decayed_key;
    const Sums values(u);
    Sums read(out), next_read(recalled);
    for (int k = 0; k < key_size; k++) {
        const F decay = broadcast(decays[k]), key = broadcast(keys[k]);
        const F query = broadcast(queries[k]), next_key = broadcast(next_keys[k]);
#pragma GCC unroll 4
        for (int i = 0; i < VECTORS; i++) {
            if (AHEAD) __builtin_prefetch(ahead.at(k, i), 0, 2);
            const F state = vec::fma(key, values.of[i], vec::product(decay, vec::load(from.at(k, i))));
            vec::store(to.at(k, i), state);
            if (OUT) read.of[i] = vec::fma(query, state, read.of[i]);
            if (RECALL) next_read.of[i] = vec::fma(next_key, state, next_read.of[i]);
        }
    }
    read.store(out);
    next_read.store(recalled);
}

// Copies `width` columns of `rows` rows.
inline void copy_columns(const float* from, int64_t from_row, float* to, int64_t to_row, int rows, int width) {
    for (int k = 0; k < rows; k++) memcpy(to + k * to_row, from + k * from_row, width * sizeof(float));
}

}  // namespace recurrence

// Mirrored in recurrence.py.
struct RecurrenceCall {
    recurrence::Inputs in;
    float* states;      // [S, H, K, V]; null if no slot is named
    void* out;          // [T, H, V] of v's type; heads are dense
    char* scratch;      // `recurrence_scratch` bytes for each thread
    int64_t out_token;  // elements from one token to the next
};

extern "C" int64_t recurrence_scratch(const RecurrenceCall* call);

// Every thread of a team calls this with the same `call`; returns once all of `out` and all states are written.
void recurrence_in_team(const RecurrenceCall& call, Team& team);
