// Gradients of `kernels.recurrence`, whose chunks are sequences from zeros. With P, u, S and o as in recurrence.h, e = v - P^T k
// by the delta rule, else v, and dS the gradient of S that later tokens have left, for each token from the last to the first
//
//     dS += (scale q) do^T          d(scale q) = S do         du = dS^T k       dbeta = du . e      dv = beta du + skip do
//     dm = -beta du, or 0           dk = dS u + P dm          dP = dS + k dm^T  dg = sum(dP * P)    dS = exp(g) * dP
//
// where m = P^T k, and the sum of dg is over V, and over K too if a head has one g. The forward has kept the states at which
// its chunks write; those between two of them are computed again. A work item is a sequence and a head, so sums have one
// order on any number of threads.
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

struct Scratch : Carved {
    float* states;  // [most_tokens][K][WIDTH]: before each token of a part
    float* errors;  // [most_tokens][WIDTH]: e of each
    float* grad_state;  // [K][WIDTH]
    float *grad_query, *grad_key, *grad_decay;  // [padded K]
    Token tokens[2];

    Scratch(const RecurrenceBackwardCall& c, char* memory) : Carved(memory) {
        const int64_t tile = (int64_t)c.in.key_size * WIDTH;
        take(states, c.most_tokens * tile);
        take(errors, c.most_tokens * WIDTH);
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
    int64_t sequence;
    int head, column, width;

    Place state(int64_t number) const { return {s.states + number * in.key_size * WIDTH, WIDTH}; }

    // All columns, a block at a time; in each, the parts between kept states, last one first.
    static void run(const RecurrenceBackwardCall& c, const Scratch& s, int64_t sequence, int head) {
        const Inputs& in = c.in;
        const int64_t first = in.chunks.starts()[sequence], first_write = in.chunks.write_starts()[sequence];
        for (int column = 0; column < in.value_size; column += WIDTH) {
            const Item item{c, in, s, sequence, head, column, std::min(WIDTH, in.value_size - column)};
            std::fill_n(s.grad_state, (int64_t)in.key_size * WIDTH, 0.0f);
            int64_t end = in.chunks.starts()[sequence + 1];
            for (int64_t write = in.chunks.write_starts()[sequence + 1]; write-- > first_write;) {
                const int64_t begin = in.chunks.write_ends()[write];
                item.run_part(begin, end, in.chunks.write_slots()[write]);
                end = begin;
            }
            item.run_part(first, end, -1);
        }
    }

    void run_part(int64_t begin, int64_t end, int64_t slot) const {
        if (begin == end) return;
        recompute(begin, end, slot);
        for (int64_t t = end; t-- > begin;) reverse(t, t - begin);
    }

    // States before each token of [begin, end), and its e, from the state kept in `slot`; -1: from zeros.
    void recompute(int64_t begin, int64_t end, int64_t slot) const {
        std::fill_n(s.states, (int64_t)in.key_size * WIDTH, 0.0f);
        if (slot >= 0) {
            const float* kept = c.kept + (slot * in.num_heads + head) * in.key_size * in.value_size + column;
            copy_columns(kept, in.value_size, s.states, WIDTH, in.key_size, width);
        }
        Token now = s.tokens[0], next = s.tokens[1];
        now.prepare(in, begin, head);
        F recalled[VECTORS] = {};
        if (DELTA) recall(state(0), in.key_size, now, recalled);
        for (int64_t t = begin; t < end; t++) {
            F v[VECTORS], u[VECTORS], out[VECTORS], next_recalled[VECTORS] = {};
            load_values(in, t, head, column, width, v);
            const F beta = vec::set1(in.beta_of(t, head));
            for (int i = 0; i < VECTORS; i++) {
                const F error = DELTA ? v[i] - recalled[i] : v[i];
                vec::store(s.errors + (t - begin) * WIDTH + i * LANES, error);
                u[i] = vec::product(beta, error);
            }
            if (t + 1 == end) return;
            next.prepare(in, t + 1, head);
            advance<false, DELTA>(state(t - begin), state(t + 1 - begin), in.key_size, now, next, u, out, next_recalled);
            std::swap(now, next);
            for (int i = 0; i < VECTORS; i++) recalled[i] = next_recalled[i];
        }
    }

    // Gradients of token t, number `number` of its part.
    void reverse(int64_t t, int64_t number) const {
        const Token& token = s.tokens[0];
        token.prepare(in, t, head);
        F u[VECTORS], grad[VECTORS], grad_u[VECTORS] = {}, grad_recalled[VECTORS];
        const F beta = vec::set1(in.beta_of(t, head));
        for (int i = 0; i < VECTORS; i++) {
            const int n = lanes_of(width, i);
            grad[i] = n ? c.grad.at(t, head, column + i * LANES, n) : F{};
            u[i] = vec::product(beta, vec::load(s.errors + number * WIDTH + i * LANES));
        }
        read_back(state(number), token, u, grad, grad_u);
        for (int i = 0; i < VECTORS; i++) grad_recalled[i] = -vec::product(beta, grad_u[i]);
        const float grad_decay = write_back(state(number), token, u, grad_recalled);
        const int64_t place = t * in.num_heads + head;
        add(c.grad_q + place * in.key_size, s.grad_query, in.key_size);
        add(c.grad_k + place * in.key_size, s.grad_key, in.key_size);
        if (in.by_channel)
            add(c.grad_decay + place * in.key_size, s.grad_decay, in.key_size);
        else
            c.grad_decay[place] += grad_decay;
        finish_values(t, number, grad, grad_u);
    }

    // dS += (scale q) do^T, d(scale q) = S do, du = dS^T k.
    LAMBDA_INLINE void read_back(Place before, const Token& token, const F (&u)[VECTORS], const F (&grad)[VECTORS],
                                 F (&grad_u)[VECTORS]) const {
        const float *decays = token.decay, *keys = token.key, *queries = token.query;
        const Place grad_state{s.grad_state, WIDTH};
        float* grad_query = s.grad_query;
        const Sums values(u), grads(grad);
        Sums sums(grad_u);
        for (int k = 0; k < in.key_size; k++) {
            const F decay = broadcast(decays[k]), key = broadcast(keys[k]), query = broadcast(queries[k]);
            F of_query = {};
#pragma GCC unroll 4
            for (int i = 0; i < VECTORS; i++) {
                const F after = vec::fma(key, values.of[i], vec::product(decay, vec::load(before.at(k, i))));
                of_query = vec::fma(after, grads.of[i], of_query);
                const F of_state = vec::fma(query, grads.of[i], vec::load(grad_state.at(k, i)));
                vec::store(grad_state.at(k, i), of_state);
                sums.of[i] = vec::fma(key, of_state, sums.of[i]);
            }
            grad_query[k] = vec::sum(of_query) * in.scale;
        }
        sums.store(grad_u);
    }

    // dk = dS u + P dm, dP = dS + k dm^T, dg = sum(dP * P), dS = exp(g) * dP. Returns dg of a head.
    LAMBDA_INLINE float write_back(Place before, const Token& token, const F (&u)[VECTORS],
                                   const F (&grad_recalled)[VECTORS]) const {
        const float *decays = token.decay, *keys = token.key;
        const Place grad_state{s.grad_state, WIDTH};
        float *grad_key = s.grad_key, *grad_decay = s.grad_decay;
        const Sums values(u), errors(grad_recalled);
        F of_decay = {};
        for (int k = 0; k < in.key_size; k++) {
            const F decay = broadcast(decays[k]), key = broadcast(keys[k]);
            F of_key = {};
            if (in.by_channel) of_decay = F{};
#pragma GCC unroll 4
            for (int i = 0; i < VECTORS; i++) {
                const F decayed = vec::product(decay, vec::load(before.at(k, i)));
                F of_state = vec::load(grad_state.at(k, i));
                of_key = vec::fma(of_state, values.of[i], of_key);
                if (DELTA) {
                    of_key = vec::fma(decayed, errors.of[i], of_key);
                    of_state = vec::fma(key, errors.of[i], of_state);
                }
                of_decay = vec::fma(of_state, decayed, of_decay);
                vec::store(grad_state.at(k, i), vec::product(decay, of_state));
            }
            grad_key[k] = vec::sum(of_key);
            if (in.by_channel) grad_decay[k] = vec::sum(of_decay);
        }
        return vec::sum(of_decay);
    }

    // dv = beta du + skip do, and this block's part of dbeta and dskip.
    void finish_values(int64_t t, int64_t number, const F (&grad)[VECTORS], const F (&grad_u)[VECTORS]) const {
        const int64_t place = t * in.num_heads + head;
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
