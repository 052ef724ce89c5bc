// Scores, weights and weighted values of a few rows over one tile of keys and values, with vectors.
//
// Rows process a tile in batches: all of them its keys, then all of them its values, so that each stays in the L1 cache.
// Meanwhile each prefetches a share of the next tile, which spreads the memory traffic evenly.
#pragma once

#include <algorithm>
#include <type_traits>

#include "attention.h"
#include "carved.h"
#include "vec.h"

namespace tiles {

using vec::F;
using vec::I;
using vec::LANES;

constexpr int TILE = ATTENTION_TILE;
constexpr int TILE_VECTORS = TILE / LANES;
#ifdef __AVX512F__
constexpr int ROWS = 4;         // rows that share each load of K or V: 16 accumulators of 32 registers
#else
constexpr int ROWS = 1;         // 8 accumulators of AVX2's 16 registers
#endif
constexpr int BATCH = 32;       // rows that meet all keys of a tile, then all its values: each stays in the L1 cache
constexpr int FETCH_STEPS = 8;  // computed for each small burst of prefetches
constexpr int AMX_ROWS = 16;
constexpr float LOWEST = -3.40282347e38f;

template <typename T>
constexpr int per_unit = 4 / sizeof(T);

template <typename T>
struct Sizes {
    int dk, dv, steps, padded_dv, group;
    explicit Sizes(const AttentionCall& c)
        : dk(c.dk), dv(c.dv), steps((c.dk + per_unit<T> - 1) / per_unit<T>),
          padded_dv((c.dv + LANES - 1) / LANES * LANES), group(c.num_heads / c.num_kv_heads) {}
};

// Addresses of the four sixteen-key parts of a tile.
struct Tile {
    const uint32_t *k[TILE_VECTORS], *v[TILE_VECTORS];
    int64_t k_step;  // units from one step to the next
    int num_parts;   // that hold anything: the others repeat the last
};

// Working memory of a thread: the state of one item's rows.
struct Scratch : Carved {
    uint32_t* q;     // [rows, steps] units
    uint32_t* k;     // [steps] units
    float* out;      // [rows, padded_dv]
    float* total;    // [rows, 16]: sum of weights, by lane
    float* top;      // [rows]: largest score so far
    int32_t* position;
    int32_t* last;      // [rows]: position of the last key that it sees; it never falls within a sequence
    float* scores;      // [BATCH, TILE]
    uint32_t* weights;  // [BATCH, TILE / per_unit] units
    float* mixed;       // [AMX_ROWS, TILE]
    uint32_t *k_tile, *v_tile;  // a tile of latents, or from blocks of fewer than sixteen, as if from one of 64

    template <typename T>
    Scratch(char* memory, const Sizes<T>& z) : Carved(memory) {
        const int64_t rows = (int64_t)ATTENTION_ITEM_TOKENS * z.group + AMX_ROWS;  // AMX reads past the last ones
        take(q, rows * z.steps), take(k, z.steps), take(out, rows * z.padded_dv), take(total, rows * LANES), take(top, rows);
        take(position, rows), take(last, rows), take(scores, BATCH * TILE), take(weights, BATCH * TILE);
        take(mixed, AMX_ROWS * TILE);
        take(k_tile, (int64_t)z.steps * TILE), take(v_tile, (int64_t)z.dv * TILE);
    }
};

VEC_INLINE I load_units(const uint32_t* p) {
    I x;
    vec::read(p, x);
    return x;
}

VEC_INLINE F step(F acc, I vector, uint32_t unit, float) { return vec::fma((F)vector, (F)(I{} + (int32_t)unit), acc); }
VEC_INLINE F step(F acc, I vector, uint32_t unit, bf16) { return vec::dot_pairs(acc, vector, I{} + (int32_t)unit); }

VEC_INLINE void fetch(const void* p) { __builtin_prefetch(p, 0, 2); }

// Prefetch every `stride`-th cache line of the next tile, from number `first` on: several calls divide it. Line l is
// part l % 4 of step l / 4.
struct Fetch {
    const Tile* next;  // or null
    int first, stride;

    // All of it falls to one call, whose rows are too few to hide much arithmetic on addresses.
    bool is_sole() const { return next && stride == 1; }
};

// Scores [R, TILE] before scaling: sums over channels in their order.
template <typename T, int R>
VEC_INLINE void dot(const uint32_t* q, int steps, const Tile& tile, Fetch ahead, float* scores) {
    F acc[R][TILE_VECTORS] = {};
    auto add = [&](int e) {
        for (int i = 0; i < TILE_VECTORS; i++) {
            const I k = load_units(tile.k[i] + e * tile.k_step);
            for (int r = 0; r < R; r++) acc[r][i] = step(acc[r][i], k, q[r * steps + e], T{});
        }
    };
    if (ahead.is_sole()) {
        for (int e = 0; e < steps; e++) {
            for (int i = 0; i < TILE_VECTORS; i++) fetch(ahead.next->k[i] + e * ahead.next->k_step);
            add(e);
        }
    } else {
        int line = ahead.next ? ahead.first : steps * TILE_VECTORS;
        for (int d = 0, stop; d < steps; d = stop) {
            stop = std::min(d + FETCH_STEPS, steps);
            for (; line < stop * TILE_VECTORS; line += ahead.stride)
                if (line % TILE_VECTORS < ahead.next->num_parts)
                    fetch(ahead.next->k[line % TILE_VECTORS] + line / TILE_VECTORS * ahead.next->k_step);
            for (int e = d; e < stop; e++) add(e);
        }
    }
    for (int r = 0; r < R; r++)
        for (int i = 0; i < TILE_VECTORS; i++) vec::store(scores + r * TILE + i * LANES, acc[r][i]);
}

// Keys [low, high) of a tile.
struct Span {
    int low, high;

    bool empty() const { return low >= high; }

    static Span around(const Span* spans, int count) {
        Span all = {TILE, 0};
        for (int i = 0; i < count; i++)
            if (!spans[i].empty()) all = {std::min(all.low, spans[i].low), std::max(all.high, spans[i].high)};
        return all;
    }
};

// Keys of tile number j that each of `count` rows may see.
inline void look(const AttentionCall& c, const Scratch& s, int row, int count, int64_t j, Span* seen) {
    for (int r = 0; r < count; r++) {
        const int64_t begin = s.position[row + r] + 1 - c.sliding_window - j * TILE;
        seen[r].high = std::clamp<int64_t>(s.last[row + r] + 1 - j * TILE, 0, TILE);
        seen[r].low = c.sliding_window ? std::clamp<int64_t>(begin, 0, TILE) : 0;
    }
}

// A row's scores, scaled and capped, with -inf for keys that it does not see; their largest.
VEC_INLINE float prepare(float* scores, Span seen, float scale, float softcap) {
    const I lane = vec::lane_numbers();
    const F hidden = vec::set1(-__builtin_inff());
    const bool sees_all = seen.low == 0 && seen.high == TILE;
    F highest = hidden;
    for (int i = 0; i < TILE_VECTORS; i++) {
        F s = vec::product(vec::load(scores + i * LANES), vec::set1(scale));
        if (softcap != 0.0f)  // tanh
            s = vec::product(vec::set1(softcap), 1.0f - 2.0f / (vec::exp(vec::product(s, vec::set1(2.0f / softcap))) + 1.0f));
        if (!sees_all) {
            const I key = lane + i * LANES;
            s = vec::select((key >= seen.low) & (key < seen.high), s, hidden);
        }
        vec::store(scores + i * LANES, s);
        highest = vec::max(highest, s);
    }
    return vec::max(highest);
}

// Weights of up to sixteen rows from their scores; `rescale` receives the factors for earlier tiles.
// Not inlined, so that it rounds alike for every caller.
template <typename T>
__attribute__((noinline)) void weigh(float* scores, T* weights, const Span* seen, int count, float scale, float softcap,
                                     float* top, float* total, float* rescale) {
    float new_top[LANES] = {}, old_top[LANES] = {};
    for (int r = 0; r < count; r++) {
        old_top[r] = top[r];
        top[r] = new_top[r] = std::max(old_top[r], prepare(scores + r * TILE, seen[r], scale, softcap));
    }
    vec::store(rescale, vec::exp(vec::load(old_top) - vec::load(new_top)));
    for (int r = 0; r < count; r++) {
        F sum = {};
        for (int i = 0; i < TILE_VECTORS; i++) {
            const F weight = vec::exp(vec::load(scores + r * TILE + i * LANES) - new_top[r]);
            vec::store_normal(weights + r * TILE + i * LANES, weight);
            sum = sum + weight;
        }
        vec::store(total + r * LANES, vec::fma(vec::load(total + r * LANES), vec::set1(rescale[r]), sum));
    }
}

// `weigh` for `count` rows from `row` on.
template <typename T>
VEC_INLINE void weigh_rows(const AttentionCall& c, const Scratch& s, const Span* seen, int row, int count,
                           float* rescale) {
    for (int r = 0; r < count; r += LANES)
        weigh<T>(s.scores + r * TILE, (T*)s.weights + r * TILE, seen + r, std::min(LANES, count - r), c.scale,
                 c.softcap, s.top + row + r, s.total + (int64_t)(row + r) * LANES, rescale + r);
}

// out[r] = out[r] * rescale[r] + weights[r] @ V over the key steps [low, high), in their order; `width` columns of V,
// which are whole VECTORS unless IS_PART.
template <typename T, int R, int VECTORS, bool IS_PART = false>
VEC_INLINE void mix(float* out, int out_row, const uint32_t* weights, const float* rescale, const Tile& tile,
                    Fetch ahead, int column, int width, int dv, int low, int high) {
    constexpr int steps = LANES / per_unit<T>;  // of each part of the tile
    F acc[R][VECTORS];
    for (int r = 0; r < R; r++)
        for (int i = 0; i < VECTORS; i++)
            acc[r][i] = vec::load(out + r * out_row + column + i * LANES) * rescale[r];
    auto add = [&](const uint32_t* v, int key) {
        for (int i = 0; i < VECTORS; i++) {
            const I value = IS_PART ? (I)vec::load((const float*)v, width) : load_units(v + i * LANES);
            for (int r = 0; r < R; r++) acc[r][i] = step(acc[r][i], value, weights[r * (TILE / per_unit<T>) + key], T{});
        }
    };
    const bool is_sole = ahead.is_sole();
    const int num_lines = ahead.next ? std::min(high, ahead.next->num_parts * steps) * VECTORS : 0;
    int line = ahead.first + low * VECTORS;
    for (int key = low, stop; key < high; key = stop) {
        const int part = key / steps;
        stop = std::min((part + 1) * steps, high);
        const int64_t first = (int64_t)(key % steps) * dv + column;
        const uint32_t* v = tile.v[part] + first;
        if (is_sole) {
            const uint32_t* next = ahead.next->v[part] + first;
            for (int e = key; e < stop; e++, v += dv, next += dv) {
                for (int i = 0; i < VECTORS; i++) fetch(next + i * LANES);
                add(v, e);
            }
            continue;
        }
        for (; line < std::min(stop * VECTORS, num_lines); line += ahead.stride)
            fetch(ahead.next->v[part] + line / VECTORS % steps * dv + column + line % VECTORS * LANES);
        for (int e = key; e < stop; e++, v += dv) add(v, e);
    }
    for (int key = high; is_sole && key < ahead.next->num_parts * steps; key++)
        for (int i = 0; i < VECTORS; i++) fetch(ahead.next->v[key / steps] + key % steps * dv + column + i * LANES);
    for (int r = 0; r < R; r++)
        for (int i = 0; i < VECTORS; i++) vec::store(out + r * out_row + column + i * LANES, acc[r][i]);
}

// `mix` for R rows from `row` on, columns from `column` on: four vectors of them, or all that are left.
template <typename T, int R>
void mix_rows(const Sizes<T>& z, const Scratch& s, int row, const uint32_t* weights, const float* rescale,
              const Tile& tile, Fetch ahead, int column, Span seen) {
    const int low = seen.low / per_unit<T>, high = (seen.high + per_unit<T> - 1) / per_unit<T>;
    float* out = s.out + (int64_t)row * z.padded_dv;
    auto mixed = [&](auto vectors, auto is_part, int width) {
        mix<T, R, vectors, is_part>(out, z.padded_dv, weights, rescale, tile, ahead, column, width, z.dv, low, high);
        column += width;
    };
    const std::integral_constant<int, 4> four;
    const std::integral_constant<int, 2> two;
    const std::integral_constant<int, 1> one;
    if (column + 4 * LANES <= z.dv) return mixed(four, std::false_type(), 4 * LANES);
    if (column + 2 * LANES <= z.dv) mixed(two, std::false_type(), 2 * LANES);
    if (column + LANES <= z.dv) mixed(one, std::false_type(), LANES);
    if (column < z.dv) mixed(one, std::true_type(), z.dv - column);
}

// Calls visit(first row, constant number of rows) for parts of `count` rows.
template <typename Visit>
VEC_INLINE void each_few(int count, Visit visit) {
    int r = 0;
    for (; count - r >= ROWS; r += ROWS) visit(r, std::integral_constant<int, ROWS>());
    if (count - r == 3) visit(r, std::integral_constant<int, 3>());
    if (count - r == 2) visit(r, std::integral_constant<int, 2>());
    if (count - r == 1) visit(r, std::integral_constant<int, 1>());
}

// Tile number j for up to BATCH rows from `row` on.
template <typename T>
void attend_batch(const AttentionCall& c, const Sizes<T>& z, const Scratch& s, int row, int count, int64_t j,
                  const Tile& tile, Fetch ahead) {
    Span seen[BATCH];
    look(c, s, row, count, j, seen);
    if (Span::around(seen, count).empty()) return;
    each_few(count, [&](int r, auto few) {
        if (Span::around(seen + r, few).empty()) return;
        const Fetch part = {ahead.next, ahead.first + r / ROWS, ahead.stride};
        dot<T, few>(s.q + (int64_t)(row + r) * z.steps, z.steps, tile, part, s.scores + r * TILE);
    });
    float rescale[BATCH];
    weigh_rows<T>(c, s, seen, row, count, rescale);
    for (int column = 0; column < z.dv; column += 4 * LANES)
        each_few(count, [&](int r, auto few) {
            const Span around = Span::around(seen + r, few);
            if (around.empty()) return;
            const Fetch part = {ahead.next, ahead.first + r / ROWS, ahead.stride};
            mix_rows<T, few>(z, s, row + r, s.weights + r * (TILE / per_unit<T>), rescale + r, tile, part, column, around);
        });
}

}  // namespace tiles
