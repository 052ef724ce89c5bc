// Gradients of `kernels.recurrence`, whose chunks are sequences from zeros. With P, u, S and o as in recurrence.h, e = v - P^T k
// by the delta rule, else v, and dS the gradient of S that later tokens have left, for each token from the last to the first
//
//     dS += (scale q) do^T          d(scale q) = S do         du = dS^T k       dbeta = du . e      dv = beta du + skip do
//     dm = -beta du, or 0           dk = dS u + P dm          dP = dS + k dm^T  dg = sum(dP * P)    dS = exp(g) * dP
//
// where m = P^T k, and the sum of dg is over V, and over K too if a head has one g. The forward has kept the states at which
// its chunks write; those between two of them are computed again, of a few tokens at a time, so that they stay in the cache.
// One pass over dS and the state before a token does the last line of that token and the first of the one before it, whose S
// is the same state. A work item is a sequence and a head, so sums have one order on any number of threads.
#include "openmp.h"
#include "recurrence.h"

// Gradients are float32 and dense; all but those of v and skip are added up, and begin as zeros. Mirrored in recurrence.py.
struct RecurrenceBackwardCall {
    recurrence::Inputs in;
    const float* kept;          // [W, H, K, V], by slot: states that the forward has written
    recurrence::Operand grad;   // [T, H, V]
    float *grad_q, *grad_k;     // [T, H, K]: of each head, to be added up over those of a group
    float *grad_v, *grad_decay, *grad_beta, *grad_skip;  // [T, H, V]; as log_decay; [T, H]; [N, H] or null
    char* scratch;              // `recurrence_backward_scratch` bytes for each thread
    int64_t most_tokens;        // between two states that are kept
};

namespace {

using namespace recurrence;

constexpr int GROUP = 8;  // tokens whose states are kept at once

struct Scratch : Carved {
    float* marks;   // [most_tokens / GROUP][K][WIDTH]: before each group of tokens between two kept states
    float* states;  // [GROUP][K][WIDTH]: behind each token of a group
    float* errors;  // [GROUP][WIDTH]: e of each
    float* grad_state;  // [K][WIDTH]
    float *grad_query, *grad_key, *grad_decay;  // [padded K]
    Token tokens[GROUP + 1];  // those of a group, and the one before them

    Scratch(const RecurrenceBackwardCall& c, char* memory) : Carved(memory) {
        const int64_t tile = (int64_t)c.in.key_size * WIDTH;
        take(marks, (c.most_tokens + GROUP - 1) / GROUP * tile);
        take(states, GROUP * tile);
        take(errors, GROUP * WIDTH);
        take(grad_state, tile);
        for (float** vector : {&grad_query, &grad_key, &grad_decay}) take(*vector, c.in.padded_key());
        for (Token& token : tokens)
            for (float** vector : {&token.key, &token.query, &token.decay, &token.decayed_key}) take(*vector, c.in.padded_key());
    }
};

// to += from, `size` values.
void add(float* to, const float* from, int size) {
    rows::map(to, from, to, size, [](F a, F b) LAMBDA_INLINE { return a + b; });
}

template <bool DELTA>
struct Item {
    const RecurrenceBackwardCall& c;
    const Inputs& in;
    const Scratch& s;
    int64_t sequence, first, end;  // tokens [first, end)
    int head, column, width;
    F grad[VECTORS], grad_u[VECTORS];  // do and du of the token that is next

    // All columns, a block at a time; in each, the parts between kept states, last one first.
    static void run(const RecurrenceBackwardCall& c, const Scratch& s, int64_t sequence, int head) {
        const Inputs& in = c.in;
        const int64_t first = in.chunks.starts()[sequence], end = in.chunks.starts()[sequence + 1];
        const int64_t first_write = in.chunks.write_starts()[sequence];
        for (int column = 0; column < in.value_size && first < end; column += WIDTH) {
            Item item{c, in, s, sequence, first, end, head, column, std::min(WIDTH, in.value_size - column), {}, {}};
            std::fill_n(s.grad_state, (int64_t)in.key_size * WIDTH, 0.0f);
            int64_t stop = end;
            for (int64_t write = in.chunks.write_starts()[sequence + 1]; write-- > first_write;) {
                const int64_t begin = in.chunks.write_ends()[write];
                item.run_part(begin, stop, in.chunks.write_slots()[write]);
                stop = begin;
            }
            item.run_part(first, stop, -1);
        }
    }

  private:
    int64_t tile() const { return (int64_t)in.key_size * WIDTH; }
    Place mark(int64_t group) const { return {s.marks + group * tile(), WIDTH}; }
    Place behind(int64_t number) const { return {s.states + number * tile(), WIDTH}; }
    const Token& token(int64_t t) const { return s.tokens[t % (GROUP + 1)]; }

    // Tokens [begin, stop), whose first state is kept in `slot`; -1: zeros.
    void run_part(int64_t begin, int64_t stop, int64_t slot) {
        if (begin == stop) return;
        std::fill_n(s.marks, tile(), 0.0f);
        if (slot >= 0) {
            const float* kept = c.kept + (slot * in.num_heads + head) * in.key_size * in.value_size + column;
            copy_columns(kept, in.value_size, s.marks, WIDTH, in.key_size, width);
        }
        const int64_t last = (stop - begin - 1) / GROUP;
        for (int64_t group = 0; group < last; group++)
            recompute<false>(begin + group * GROUP, begin + (group + 1) * GROUP, group);
        for (int64_t group = last; group >= 0; group--) {
            const int64_t t = begin + group * GROUP;
            run_group(t, std::min(t + GROUP, stop), group);
        }
    }

    // States behind tokens [begin, stop), and e of each; without KEEPS only the state behind the last, the next mark.
    template <bool KEEPS>
    void recompute(int64_t begin, int64_t stop, int64_t group) const {
        Place state = mark(group);
        token(begin).prepare(in, begin, head);
        F recalled[VECTORS] = {};
        if (DELTA) recall(state, in.key_size, token(begin), recalled);
        for (int64_t t = begin; t < stop; t++) {
            F v[VECTORS], u[VECTORS], out[VECTORS], next_recalled[VECTORS] = {};
            load_values(in, t, head, column, width, v);
            const F beta = vec::set1(in.beta_of(t, head));
            for (int i = 0; i < VECTORS; i++) {
                const F error = DELTA ? v[i] - recalled[i] : v[i];
                if (KEEPS) vec::store(s.errors + (t - begin) * WIDTH + i * LANES, error);
                u[i] = vec::product(beta, error);
            }
            const Place to = KEEPS ? behind(t - begin) : mark(group + 1);
            if (t + 1 < stop) {
                token(t + 1).prepare(in, t + 1, head);
                advance<false, DELTA>(state, to, in.key_size, token(t), token(t + 1), u, out, next_recalled);
            } else if (!KEEPS || stop == end) {
                advance<false, false>(state, to, in.key_size, token(t), token(t), u, out, next_recalled);
            }
            state = to;
            for (int i = 0; i < VECTORS; i++) recalled[i] = next_recalled[i];
        }
    }

    // Gradients of tokens [begin, stop), the last one first.
    void run_group(int64_t begin, int64_t stop, int64_t group) {
        recompute<true>(begin, stop, group);
        if (stop == end) enter(behind(stop - 1 - begin));
        for (int64_t t = stop; t-- > begin;) {
            const int64_t number = t - begin;
            const Place before = number ? behind(number - 1) : mark(group);
            finish_values(t, number);
            F u[VECTORS], grad_recalled[VECTORS];
            const F beta = vec::set1(in.beta_of(t, head));
            for (int i = 0; i < VECTORS; i++) {
                u[i] = vec::product(beta, vec::load(s.errors + number * WIDTH + i * LANES));
                grad_recalled[i] = -vec::product(beta, grad_u[i]);
            }
            if (t == first) {
                const float grad_decay = turn_back<false>(before, token(t), token(t), u, grad_recalled);
                add_gradients(t, grad_decay);
                return;
            }
            if (!number) token(t - 1).prepare(in, t - 1, head);
            load_gradient(t - 1);
            const float grad_decay = turn_back<true>(before, token(t), token(t - 1), u, grad_recalled);
            add_gradients(t, grad_decay);
            add(c.grad_q + place_of(t - 1) * in.key_size, s.grad_query, in.key_size);
        }
    }

    int64_t place_of(int64_t t) const { return t * in.num_heads + head; }

    void load_gradient(int64_t t) {
        for (int i = 0; i < VECTORS; i++) {
            const int n = lanes_of(width, i);
            grad[i] = n ? c.grad.at(t, head, column + i * LANES, n) : F{};
        }
    }

    // Those of k and g of token t, which the last pass has found.
    void add_gradients(int64_t t, float grad_decay) const {
        add(c.grad_k + place_of(t) * in.key_size, s.grad_key, in.key_size);
        if (in.by_channel)
            add(c.grad_decay + place_of(t) * in.key_size, s.grad_decay, in.key_size);
        else
            c.grad_decay[place_of(t)] += grad_decay;
    }

    // Of the last token: dS = (scale q) do^T, d(scale q) = S do, du = dS^T k.
    void enter(Place after) {
        const int64_t t = end - 1;
        load_gradient(t);
        const float *keys = token(t).key, *queries = token(t).query;
        const Place grad_state{s.grad_state, WIDTH};
        float* grad_query = s.grad_query;
        const F zeros[VECTORS] = {};
        const Sums grads(grad);
        Sums sums(zeros);
        for (int k = 0; k < in.key_size; k++) {
            const F key = broadcast(keys[k]), query = broadcast(queries[k]);
            F of_query = {};
#pragma GCC unroll 4
            for (int i = 0; i < VECTORS; i++) {
                of_query = vec::fma(vec::load(after.at(k, i)), grads.of[i], of_query);
                const F of_state = vec::product(query, grads.of[i]);
                vec::store(grad_state.at(k, i), of_state);
                sums.of[i] = vec::fma(key, of_state, sums.of[i]);
            }
            grad_query[k] = vec::sum(of_query) * in.scale;
        }
        sums.store(grad_u);
        add(c.grad_q + place_of(t) * in.key_size, grad_query, in.key_size);
    }

    // dk = dS u + P dm, dP = dS + k dm^T, dg = sum(dP * P), dS = exp(g) * dP of a token; returns dg of a head. With PREVIOUS,
    // for the token before it, whose S is `before`: dS += (scale q) do^T, d(scale q) = S do, du = dS^T k.
    template <bool PREVIOUS>
    LAMBDA_INLINE float turn_back(Place before, const Token& token, const Token& previous, const F (&u)[VECTORS],
                                  const F (&grad_recalled)[VECTORS]) {
        const float *decays = token.decay, *keys = token.key, *last_keys = previous.key, *last_queries = previous.query;
        const Place grad_state{s.grad_state, WIDTH};
        float *grad_key = s.grad_key, *grad_decay = s.grad_decay, *grad_query = s.grad_query;
        const F zeros[VECTORS] = {};
        const Sums values(u), errors(grad_recalled), grads(grad);
        Sums sums(zeros);
        F of_decay = {};
        for (int k = 0; k < in.key_size; k++) {
            const F decay = broadcast(decays[k]), key = broadcast(keys[k]);
            const F last_key = broadcast(last_keys[k]), last_query = broadcast(last_queries[k]);
            F of_key = {}, of_query = {};
            if (in.by_channel) of_decay = F{};
#pragma GCC unroll 4
            for (int i = 0; i < VECTORS; i++) {
                const F state = vec::load(before.at(k, i)), decayed = vec::product(decay, state);
                F of_state = vec::load(grad_state.at(k, i));
                of_key = vec::fma(of_state, values.of[i], of_key);
                if (DELTA) {
                    of_key = vec::fma(decayed, errors.of[i], of_key);
                    of_state = vec::fma(key, errors.of[i], of_state);
                }
                of_decay = vec::fma(of_state, decayed, of_decay);
                of_state = vec::product(decay, of_state);
                if (PREVIOUS) {
                    of_query = vec::fma(state, grads.of[i], of_query);
                    of_state = vec::fma(last_query, grads.of[i], of_state);
                    sums.of[i] = vec::fma(last_key, of_state, sums.of[i]);
                }
                vec::store(grad_state.at(k, i), of_state);
            }
            grad_key[k] = vec::sum(of_key);
            if (PREVIOUS) grad_query[k] = vec::sum(of_query) * in.scale;
            if (in.by_channel) grad_decay[k] = vec::sum(of_decay);
        }
        if (PREVIOUS) sums.store(grad_u);
        return vec::sum(of_decay);
    }

    // dv = beta du + skip do, and this block's part of dbeta and dskip.
    void finish_values(int64_t t, int64_t number) const {
        const int64_t place = place_of(t);
        const F beta = vec::set1(in.beta_of(t, head)), skip = vec::set1(in.skip ? in.skip[head] : 0.0f);
        F of_beta = {}, of_skip = {}, v[VECTORS];
        load_values(in, t, head, column, width, v);
        for (int i = 0; i < VECTORS; i++) {
            of_beta = vec::fma(grad_u[i], vec::load(s.errors + number * WIDTH + i * LANES), of_beta);
            of_skip = vec::fma(grad[i], v[i], of_skip);
            F of_value = vec::product(beta, grad_u[i]);
            if (in.skip) of_value = vec::fma(skip, grad[i], of_value);
            const int n = lanes_of(width, i);
            if (n) rows::store_first(c.grad_v + place * in.value_size + column + i * LANES, of_value, n);
        }
        c.grad_beta[place] += vec::sum(of_beta);
        if (in.skip) c.grad_skip[sequence * in.num_heads + head] += vec::sum(of_skip);
    }
};

}  // namespace

extern "C" {

int64_t recurrence_backward_scratch(const RecurrenceBackwardCall* c) { return Scratch(*c, nullptr).bytes(); }

void recurrence_backward(const RecurrenceBackwardCall* c) {
    const Inputs& in = c->in;
#pragma omp parallel num_threads(in.num_threads) if (in.num_threads > 1)
    {
        const Scratch scratch(*c, c->scratch + omp_get_thread_num() * Scratch(*c, nullptr).bytes());
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < in.chunks.num_chunks * in.num_heads; i++) {
            const int64_t sequence = i / in.num_heads;
            const int head = i % in.num_heads;
            in.delta ? Item<true>::run(*c, scratch, sequence, head) : Item<false>::run(*c, scratch, sequence, head);
        }
    }
}
}
