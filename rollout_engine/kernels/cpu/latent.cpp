// The two products of multi-head latent attention (DeepSeek-V2) that take the place of expanded keys and values:
//
//     absorb   out[t, h, r] = sum over n of q[t, h, n] * weight[h, n, r]        and out[t, h, R + p] = q[t, h, N + p]
//     expand   out[t, h, v] = sum over r of x[t, h, r] * weight[h, N + v, r]
//
// `weight` [H, N + V, R] is the plain matrix by which a latent of R channels becomes N channels of a key without position
// and V of a value, for each head. A sum has one order, in float32, and is rounded once: bits of a row do not depend on the
// other rows, nor on threads. bfloat16 is multiplied in pairs, as in attention.
#include <algorithm>
#include <cstring>
#include <type_traits>

#include "openmp.h"
#include "vec.h"

// Strides are in elements; the last dimension is dense. Mirrored in latent.py.
struct LatentCall {
    const void *x, *weight;  // [T, H, N + P] or [T, H, R]; [H, N + V, R], dense
    void* out;               // [T, H, R + P] or [T, H, V], dense
    int64_t x_token, x_head;
    int32_t num_tokens, num_heads, rank, nope, rope, value;  // T, H, R, N, P, V
    int32_t half;                                            // bfloat16, else float32
    int32_t num_threads;
};

namespace {

using vec::F;
using vec::I;
using vec::LANES;

constexpr int BLOCK = 32;  // tokens of a work item, for which a head's weight stays in the L2 cache

template <typename T>
constexpr int per_unit = 4 / sizeof(T);

VEC_INLINE F step(F acc, I a, I b, float) { return vec::fma((F)a, (F)b, acc); }
VEC_INLINE F step(F acc, I a, I b, bf16) { return vec::dot_pairs(acc, a, b); }

// Up to one unit's elements, then zeros.
template <typename T>
VEC_INLINE int32_t unit_at(const T* p, int count) {
    int32_t unit = 0;
    if (count >= per_unit<T>)
        memcpy(&unit, p, sizeof unit);
    else
        memcpy(&unit, p, count * sizeof(T));
    return unit;
}

// Sixteen columns of one row of the weight (float32), or of two, in pairs; those past `count` rows or `width` columns are zeros.
VEC_INLINE I columns_at(const float* p, int64_t, int, int width) {
    return (I)(width == LANES ? vec::load(p) : vec::load(p, width));
}
VEC_INLINE I columns_at(const bf16* p, int64_t row, int count, int width) {
    vec::Half low = {}, high = {};
    if (width == LANES) {
        vec::read(p, low);
        if (count > 1) vec::read(p + row, high);
    } else {
        memcpy(&low, p, width * sizeof(bf16));
        if (count > 1) memcpy(&high, p + row, width * sizeof(bf16));
    }
    return (I)(vec::converted<vec::U>(low) | vec::converted<vec::U>(high) << 16);
}

// Sixteen units of a row, zeros past `count` elements.
template <typename T>
VEC_INLINE I units_at(const T* p, int count) {
    I x = {};
    if (count >= LANES * per_unit<T>)
        vec::read(p, x);
    else
        memcpy(&x, p, count * sizeof(T));
    return x;
}

// Calls visit(first, constant number) for parts of `count`: of eight, four, two and one.
template <typename Visit>
VEC_INLINE void in_parts(int count, Visit visit) {
    int r = 0;
    for (; count - r >= 8; r += 8) visit(r, std::integral_constant<int, 8>());
    if (count - r >= 4) visit(r, std::integral_constant<int, 4>()), r += 4;
    if (count - r >= 2) visit(r, std::integral_constant<int, 2>()), r += 2;
    if (count - r >= 1) visit(r, std::integral_constant<int, 1>());
}

template <typename T>
struct Item {
    const LatentCall& c;
    int head, first, count;  // tokens [first, first + count)
    const T* weight = (const T*)c.weight + (int64_t)head * (c.nope + c.value) * c.rank;

    const T* x(int token) const { return (const T*)c.x + (first + token) * c.x_token + head * c.x_head; }
    T* out(int token, int width) const { return (T*)c.out + ((int64_t)(first + token) * c.num_heads + head) * width; }

    // R tokens from `token` on, up to VECTORS * 16 columns from `column` on.
    template <int R, int VECTORS>
    void absorb_few(int token, int column, int width) const {
        F acc[R][VECTORS] = {};
        for (int n = 0; n < c.nope; n += per_unit<T>) {
            const int left = c.nope - n;
            I columns[VECTORS];
            for (int i = 0; i < VECTORS; i++)
                columns[i] = columns_at(weight + (int64_t)n * c.rank + column + i * LANES, c.rank, left, width - i * LANES < LANES ? width - i * LANES : LANES);
            for (int r = 0; r < R; r++) {
                const I unit = I{} + unit_at(x(token + r) + n, left);
                for (int i = 0; i < VECTORS; i++) acc[r][i] = step(acc[r][i], columns[i], unit, T{});
            }
        }
        for (int r = 0; r < R; r++)
            for (int i = 0; i < VECTORS; i++) {
                T* to = out(token + r, c.rank + c.rope) + column + i * LANES;
                const int here = width - i * LANES;
                here >= LANES ? vec::store(to, acc[r][i] + 0.0f) : vec::store(to, acc[r][i] + 0.0f, here);
            }
    }

    void absorb() const {
        in_parts(count, [&](int token, auto few) {
            int column = 0;
            for (; column + 2 * LANES <= c.rank; column += 2 * LANES) absorb_few<few, 2>(token, column, 2 * LANES);
            for (; column < c.rank; column += LANES) absorb_few<few, 1>(token, column, std::min(LANES, c.rank - column));
        });
        for (int token = 0; token < count; token++)
            memcpy(out(token, c.rank + c.rope) + c.rank, x(token) + c.nope, c.rope * sizeof(T));
    }

    // R tokens from `token` on, C channels of the value from `channel` on.
    template <int R, int C>
    void expand_few(int token, int channel) const {
        constexpr int WIDTH = LANES * per_unit<T>;
        const T* rows = weight + (int64_t)(c.nope + channel) * c.rank;
        F acc[R][C] = {};
        for (int r = 0; r < c.rank; r += WIDTH) {
            const int left = c.rank - r;
            I columns[C];
            for (int i = 0; i < C; i++) columns[i] = units_at(rows + (int64_t)i * c.rank + r, left);
            for (int t = 0; t < R; t++) {
                const I units = units_at(x(token + t) + r, left);
                for (int i = 0; i < C; i++) acc[t][i] = step(acc[t][i], units, columns[i], T{});
            }
        }
        for (int t = 0; t < R; t++) {
            float sums[C];
            for (int i = 0; i < C; i++) sums[i] = vec::sum(acc[t][i]) + 0.0f;
            put(sums, C, out(token + t, c.value) + channel);
        }
    }

    static void put(const float* from, int count, float* to) { memcpy(to, from, count * sizeof(float)); }
    static void put(const float* from, int count, bf16* to) { vec::store(to, vec::load(from, count), count); }

    void expand() const {
        for (int token = 0; token < count;) {
            const bool four = count - token >= 4;
            int channel = 0;
            for (; channel + 4 <= c.value; channel += 4) four ? expand_few<4, 4>(token, channel) : expand_few<1, 4>(token, channel);
            for (; channel < c.value; channel++) four ? expand_few<4, 1>(token, channel) : expand_few<1, 1>(token, channel);
            token += four ? 4 : 1;
        }
    }
};

template <typename T, typename Work>
void run(const LatentCall& c, Work work) {
    const int64_t blocks = (c.num_tokens + BLOCK - 1) / BLOCK, num_items = blocks * c.num_heads;
#pragma omp parallel for schedule(dynamic) num_threads(c.num_threads) if (c.num_threads > 1)
    for (int64_t i = 0; i < num_items; i++) {
        const int first = i % blocks * BLOCK;
        work(Item<T>{c, (int)(i / blocks), first, std::min(BLOCK, c.num_tokens - first)});
    }
}

}  // namespace

extern "C" {

void latent_absorb(const LatentCall* c) {
    c->half ? run<bf16>(*c, [](const auto& item) { item.absorb(); }) : run<float>(*c, [](const auto& item) { item.absorb(); });
}

void latent_expand(const LatentCall* c) {
    c->half ? run<bf16>(*c, [](const auto& item) { item.expand(); }) : run<float>(*c, [](const auto& item) { item.expand(); });
}
}
