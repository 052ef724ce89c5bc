// Gradients of a trainer's attention over whole sequences, by FlashAttention's backward (Dao et al. 2022): weights are
// computed again, tile by tile, from the log-sum-exp of their row.
//
//     S = scale q k^T      P = exp(S - lse)      dP = dO v^T      dS = P (dP - delta)      delta = sum(dO * O) of a row
//     dq = scale dS k      dk = scale dS^T q     dv = P^T dO
//
// A work item is one KV head of one sequence: 64 keys at a time, and for each of these all rows, (query token, query head
// of the KV head), that see any. Items share nothing, and sums run in one order, so gradients do not depend on threads,
// or on what else is in the batch. All is computed in float32. Rows, keys and channels are padded with zeros to whole
// vectors, so that one product has to know no remainders.
#include <algorithm>
#include <cstring>
#include <limits>

#include "carved.h"
#include "openmp.h"
#include "vec.h"

namespace {

using vec::F;
using vec::I;
using vec::LANES;

constexpr int KEYS = 64;   // of a tile
constexpr int ROWS = 64;   // computed together, at most: their scores and inputs stay in the second-level cache
constexpr int HEIGHT = 8;  // rows of a product whose sums stay in registers
#ifdef __AVX512F__
constexpr int WIDTH = 2;  // and vectors of each
#else
constexpr int WIDTH = 1;
#endif

int padded(int size, int to) { return (size + to - 1) / to * to; }

}  // namespace

// Strides are in elements; the last dimension is dense. Mirrored in attention_backward.py.
struct AttentionBackwardCall {
    const int64_t* starts;                      // [N + 1]: tokens of each sequence in the flat batch
    const void *q, *k, *v, *out, *grad;         // [T, H, dk], [T, Hk, dk], [T, Hk, dv], [T, H, dv] twice
    const float* lse;                           // [T, H]
    const int32_t* reach;                       // [T], or null, as in attention.h
    float *grad_q, *grad_k, *grad_v;            // as q, k, v, dense; grad_q is zeros
    char* scratch;                              // num_threads * attention_backward_scratch()
    int64_t q_token, q_head, k_token, k_head, v_token, v_head, out_token, out_head, grad_token, grad_head;
    int32_t num_sequences, num_heads, num_kv_heads, dk, dv;
    int32_t half;  // bfloat16, else float32
    int32_t num_threads, sliding_window;
    float scale, softcap;
};

namespace {

using Call = AttentionBackwardCall;

// Working memory of a thread; rows have `dk` or `dv` channels, padded.
struct Scratch : Carved {
    int dk, dv, group, rows;
    float *keys, *keys_across, *values_across;  // [KEYS, dk] times scale, [dk, KEYS], [dv, KEYS]
    float *grad_keys, *grad_values;             // [KEYS, dk], [KEYS, dv]
    float *query, *grad_out;                    // [rows, dk] times scale, [rows, dv]
    float *weights, *grad_scores;               // [rows, KEYS]
    float* grad_query;                          // [rows, dk]
    float *lse, *delta;                         // [rows]
    int* token;                                 // [rows]: position of each

    Scratch(char* memory, const Call& c)
        : Carved(memory), dk(padded(c.dk, LANES)), dv(padded(c.dv, LANES)), group(c.num_heads / c.num_kv_heads),
          rows(padded(std::max(ROWS, group), HEIGHT)) {
        take(keys, KEYS * dk), take(keys_across, dk * KEYS), take(values_across, dv * KEYS);
        take(grad_keys, KEYS * dk), take(grad_values, KEYS * dv);
        take(query, rows * dk), take(grad_out, rows * dv);
        take(weights, rows * KEYS), take(grad_scores, rows * KEYS), take(grad_query, rows * dk);
        take(lse, rows), take(delta, rows), take(token, rows);
    }
};

// --- products -----------------------------------------------------------------------------------------------------------

// A matrix whose element (i, j) is at[i * row + j * column].
struct Left {
    const float* at;
    int64_t row, column;
};

// A matrix of dense rows, `row` elements apart.
template <typename T>
struct Rows {
    T* at;
    int64_t row;
};

template <int VECTORS, bool ADDS>
VEC_INLINE void block(Left a, Rows<const float> b, Rows<float> out, int depth) {
    F sums[HEIGHT][VECTORS];
    for (int r = 0; r < HEIGHT; r++)
        for (int i = 0; i < VECTORS; i++) sums[r][i] = ADDS ? vec::load(out.at + r * out.row + i * LANES) : F{};
    for (int k = 0; k < depth; k++, a.at += a.column, b.at += b.row) {
        F columns[VECTORS];
        for (int i = 0; i < VECTORS; i++) columns[i] = vec::load(b.at + i * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < HEIGHT; r++)
            for (int i = 0; i < VECTORS; i++) sums[r][i] = vec::fma(F{} + a.at[r * a.row], columns[i], sums[r][i]);
    }
    for (int r = 0; r < HEIGHT; r++)
        for (int i = 0; i < VECTORS; i++) vec::store(out.at + r * out.row + i * LANES, sums[r][i]);
}

// out[height, width] = a[height, depth] @ b[depth, width], or added to it. Heights are whole HEIGHTs, widths whole vectors.
template <bool ADDS>
void multiply(Left a, Rows<const float> b, Rows<float> out, int height, int width, int depth) {
    for (int i = 0; i < height; i += HEIGHT) {
        const Left rows = {a.at + i * a.row, a.row, a.column};
        float* to = out.at + i * out.row;
        int j = 0;
        for (; j + WIDTH * LANES <= width; j += WIDTH * LANES)
            block<WIDTH, ADDS>(rows, {b.at + j, b.row}, {to + j, out.row}, depth);
        for (; j < width; j += LANES) block<1, ADDS>(rows, {b.at + j, b.row}, {to + j, out.row}, depth);
    }
}

// --- rows in and out ------------------------------------------------------------------------------------------------------

// `size` elements times `factor`, then zeros up to a whole vector.
template <typename T>
void read_row(const T* from, int size, float factor, float* to) {
    for (int i = 0; i < size; i += LANES) {
        const F x = i + LANES <= size ? vec::load(from + i) : vec::load(from + i, size - i);
        vec::store(to + i, vec::product(x, vec::set1(factor)));
    }
}

void write_row(const float* from, int size, float* to) { memcpy(to, from, size * sizeof(float)); }

void add_row(const float* from, int size, float* to) {
    for (int i = 0; i < size; i++) to[i] += from[i];
}

// [rows, size] -> [size, KEYS], with zeros for keys past the last row up to a whole vector.
void turn(const float* from, int rows, int size, float* to) {
    const int width = padded(rows, LANES);
    for (int i = 0; i < size; i++)
        for (int r = 0; r < width; r++) to[i * KEYS + r] = r < rows ? from[r * size + i] : 0;
}

// --- one work item --------------------------------------------------------------------------------------------------------

template <typename T>
struct Item {
    const Call& c;
    const Scratch& s;
    int64_t start;
    int length, kv_head;

    Item(const Call& call, const Scratch& scratch, int64_t sequence, int head)
        : c(call), s(scratch), start(c.starts[sequence]), length(c.starts[sequence + 1] - start), kv_head(head) {}

    void run() const {
        for (int first = 0; first < length; first += KEYS) run_tile(first, std::min(KEYS, length - first));
    }

    // Keys [first, first + count) of the sequence, and all rows that see one of them.
    void run_tile(int first, int count) const {
        read_keys(first, count);
        memset(s.grad_keys, 0, KEYS * s.dk * sizeof(float));
        memset(s.grad_values, 0, KEYS * s.dv * sizeof(float));
        const int most_tokens = std::max(1, ROWS / s.group);
        const int64_t end = c.sliding_window ? std::min<int64_t>(length, (int64_t)first + count - 1 + c.sliding_window) : length;
        int begin = first;
        while (begin > 0 && last(begin - 1) >= first) begin--;
        for (int token = begin; token < end; token += most_tokens)
            run_rows(first, count, token, std::min<int64_t>(most_tokens, end - token));
        for (int i = 0; i < count; i++) {
            const int64_t place = (start + first + i) * c.num_kv_heads + kv_head;
            write_row(s.grad_keys + i * s.dk, c.dk, c.grad_k + place * c.dk);
            write_row(s.grad_values + i * s.dv, c.dv, c.grad_v + place * c.dv);
        }
    }

    // Keys as rows, and keys and values across.
    void read_keys(int first, int count) const {
        for (int i = 0; i < count; i++) {
            const int64_t token = start + first + i;
            read_row((const T*)c.v + token * c.v_token + kv_head * c.v_head, c.dv, 1, s.grad_values + i * s.dv);
            read_row((const T*)c.k + token * c.k_token + kv_head * c.k_head, c.dk, 1, s.keys + i * s.dk);
        }
        turn(s.grad_values, count, s.dv, s.values_across);
        turn(s.keys, count, s.dk, s.keys_across);
        for (int i = 0; i < count * s.dk; i += LANES)
            vec::store(s.keys + i, vec::product(vec::load(s.keys + i), vec::set1(c.scale)));
    }

    // Rows of `num_tokens` tokens from `token` on.
    void run_rows(int first, int count, int token, int num_tokens) const {
        const int num_rows = num_tokens * s.group, height = padded(num_rows, HEIGHT);
        const int num_seen = std::min(count, last(token + num_tokens - 1) + 1 - first);  // by the last row, at most
        const int width = padded(num_seen, LANES), key_height = padded(num_seen, HEIGHT);
        read_rows(token, num_rows, height);
        multiply<false>({s.query, s.dk, 1}, {s.keys_across, KEYS}, {s.weights, KEYS}, height, width, s.dk);
        multiply<false>({s.grad_out, s.dv, 1}, {s.values_across, KEYS}, {s.grad_scores, KEYS}, height, width, s.dv);
        for (int row = 0; row < height; row++) weigh(row, first, width);
        multiply<true>({s.weights, 1, KEYS}, {s.grad_out, s.dv}, {s.grad_values, s.dv}, key_height, s.dv, num_rows);
        multiply<true>({s.grad_scores, 1, KEYS}, {s.query, s.dk}, {s.grad_keys, s.dk}, key_height, s.dk, num_rows);
        multiply<false>({s.grad_scores, KEYS, 1}, {s.keys, s.dk}, {s.grad_query, s.dk}, height, s.dk, num_seen);
        for (int row = 0; row < num_rows; row++) add_row(s.grad_query + row * s.dk, c.dk, c.grad_q + place(row) * c.dk);
    }

    // Position of the last key that a token sees; it never falls from one token to the next.
    int last(int token) const { return token + (c.reach ? c.reach[start + token] : 0); }

    // Of a row's token and head in tensors [T, H].
    int64_t place(int row) const { return (start + s.token[row]) * c.num_heads + kv_head * s.group + row % s.group; }

    // Rows past the last one see nothing.
    void read_rows(int token, int num_rows, int height) const {
        for (int row = 0; row < num_rows; row++) {
            s.token[row] = token + row / s.group;
            const int64_t at = start + s.token[row];
            const int head = kv_head * s.group + row % s.group;
            float *query = s.query + row * s.dk, *grad = s.grad_out + row * s.dv;
            read_row((const T*)c.q + at * c.q_token + head * c.q_head, c.dk, c.scale, query);
            read_row((const T*)c.grad + at * c.grad_token + head * c.grad_head, c.dv, 1, grad);
            s.lse[row] = c.lse[place(row)];
            s.delta[row] = product_with(grad, (const T*)c.out + at * c.out_token + head * c.out_head);
        }
        for (int row = num_rows; row < height; row++) {
            memset(s.query + row * s.dk, 0, s.dk * sizeof(float));
            memset(s.grad_out + row * s.dv, 0, s.dv * sizeof(float));
            s.token[row] = -1;
            s.lse[row] = s.delta[row] = 0;
        }
    }

    float product_with(const float* grad, const T* out) const {
        F total = {};
        for (int i = 0; i < c.dv; i += LANES)
            total = vec::fma(vec::load(grad + i), i + LANES <= c.dv ? vec::load(out + i) : vec::load(out + i, c.dv - i), total);
        return vec::sum(total);
    }

    // Weights from scores, and gradients of scores from those of weights; zeros where the row does not see the key.
    void weigh(int row, int first, int width) const {
        const int64_t token = s.token[row];  // -1: none
        const int64_t high = token < 0 ? -1 : last(token) - first;  // last key of the tile that it sees, and first
        const int64_t low = c.sliding_window ? token - first - c.sliding_window + 1 : 0;
        float *weights = s.weights + row * KEYS, *grads = s.grad_scores + row * KEYS;
        for (int i = 0; i < width; i += LANES) {
            F score = vec::load(weights + i), slope = vec::set1(1);
            if (c.softcap != 0) {
                const F tanh = 1.0f - 2.0f / (vec::exp(vec::product(score, vec::set1(2 / c.softcap))) + 1.0f);
                score = vec::product(tanh, vec::set1(c.softcap));
                slope = 1.0f - vec::product(tanh, tanh);
            }
            const I key = vec::lane_numbers() + i;
            const I is_seen = (key >= (int32_t)std::max<int64_t>(low, 0)) & (key <= (int32_t)high);
            const F weight = vec::select(is_seen, vec::exp(score - s.lse[row]), F{});
            const F grad = vec::product(weight, vec::load(grads + i) - s.delta[row]);
            vec::store(weights + i, weight);
            vec::store(grads + i, vec::select(is_seen, vec::product(grad, slope), F{}));
        }
    }
};

template <typename T>
void run_items(const Call& c) {
    const int64_t num_items = (int64_t)c.num_sequences * c.num_kv_heads;
#pragma omp parallel num_threads(c.num_threads)
    {
        const Scratch scratch(c.scratch + omp_get_thread_num() * Scratch(nullptr, c).bytes(), c);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < num_items; i++) Item<T>(c, scratch, i / c.num_kv_heads, i % c.num_kv_heads).run();
    }
}

}  // namespace

extern "C" {

// Bytes of scratch a thread needs.
int64_t attention_backward_scratch(const AttentionBackwardCall* c) { return Scratch(nullptr, *c).bytes(); }

void attention_backward(const AttentionBackwardCall* c) { c->half ? run_items<bf16>(*c) : run_items<float>(*c); }
}
