// Indexers of sparse attention (DeepSeek-V3.2): which positions of its context each query attends to.
//
//     score[t, s] = sum over h of weight[t, h] * relu(scale * (q[t, h] . k[s]))       s <= position of t
//
// and the `topk` highest are chosen, of equal ones the lowest positions; NaN is above all numbers. Every lane is a position:
// a score is summed over the channels (bfloat16 in pairs, as in attention), then over the heads, one after the other in
// float32, whatever its tile, the block size, the other rows and the threads are, so its bits follow from the query and
// the key alone.
#include <algorithm>
#include <cstring>
#include <vector>

#include "attention_turn.h"
#include "team.h"
#include "vec.h"

// Dense, but for the block tables. Mirrored in indexer.py.
struct IndexerCall {
    const void* q;                  // [T, H, D]
    const float* weights;           // [T, H]
    const void* keys;               // [num_blocks, block_size, D]
    const int32_t* blocks;          // block tables
    const int64_t* block_starts;    // [N] in `blocks`
    const int64_t* token_starts;    // [N + 1] in the flat batch
    const int64_t* first_position;  // [N] of each chunk
    int32_t* slots;                 // [T, width], out: block * block_size + offset, ascending by position, then -1
    int64_t width, num_blocks, num_entries;  // num_entries: of `blocks`
    int32_t num_sequences, block_size, num_heads, dim, topk;
    int32_t half;  // bfloat16, else float32
    int32_t num_threads;
    float scale;
};

namespace {

using vec::F;
using vec::I;
using vec::LANES;

constexpr int TILE = 64;  // positions, counted from 0
constexpr int VECTORS = TILE / LANES;
constexpr int ITEM_TOKENS = 8;  // that read a tile of keys together

struct Item {
    int32_t seq, first, count;  // tokens [first, first + count) of the sequence's chunk
};

// Channels in a unit of four bytes.
template <typename T>
constexpr int per_unit = 4 / sizeof(T);

VEC_INLINE F step(F acc, I a, I b, float) { return vec::fma((F)a, (F)b, acc); }
VEC_INLINE F step(F acc, I a, I b, bf16) { return vec::dot_pairs(acc, a, b); }

// Unit number `d` of a row of `dim` channels, with zeros past them.
template <typename T>
int32_t unit_at(const T* row, int d, int dim) {
    int32_t unit = 0;
    const int first = d * per_unit<T>;
    memcpy(&unit, row + first, std::min(per_unit<T>, dim - first) * sizeof(T));
    return unit;
}

// A number whose order is that of scores.
uint32_t rank_of(float score) {
    if (score != score) return UINT32_MAX;
    score += 0.0f;  // -0.0 becomes 0.0
    uint32_t bits;
    memcpy(&bits, &score, sizeof bits);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

template <typename T>
struct Work {
    const IndexerCall& c;
    const int steps;                 // units of a row
    std::vector<int32_t> turned, q;  // units [steps, TILE] and [tokens, H, steps]
    std::vector<float> scores;       // [tokens, positions]
    std::vector<uint32_t> ranks;
    int64_t stride = 0;  // of `scores`

    explicit Work(const IndexerCall& call)
        : c(call), steps((call.dim + per_unit<T> - 1) / per_unit<T>), turned((size_t)steps * TILE) {}

    int64_t slot(int seq, int64_t position) const {
        return (int64_t)c.blocks[c.block_starts[seq] + position / c.block_size] * c.block_size + position % c.block_size;
    }

    // The keys of a tile, one unit of all positions after the other; those past the last position repeat it.
    void turn(int seq, int64_t tile, int64_t num_positions) {
        const T* keys[TILE];
        for (int i = 0; i < TILE; i++)
            keys[i] = (const T*)c.keys + slot(seq, std::min(tile * TILE + i, num_positions - 1)) * c.dim;
        for (int first = 0; first < TILE; first += LANES) {
            uint32_t* to = (uint32_t*)turned.data() + first;
            int d = 0;
            for (const int whole = c.dim / per_unit<T> / LANES * LANES; d < whole; d += LANES) {
                const uint32_t* from[LANES];
                for (int i = 0; i < LANES; i++) from[i] = (const uint32_t*)(keys[first + i] + d * per_unit<T>);
                tiles::turn_square(from, to + (size_t)d * TILE, TILE);
            }
            for (; d < steps; d++)
                for (int i = 0; i < LANES; i++) to[(size_t)d * TILE + i] = unit_at(keys[first + i], d, c.dim);
        }
    }

    // Adds the scores of N heads over the tile to `total`.
    template <int N>
    void add_heads(const int32_t* query, const float* weights, F* total) const {
        F acc[N][VECTORS] = {};
        for (int d = 0; d < steps; d++) {
            I keys[VECTORS];
            for (int i = 0; i < VECTORS; i++) vec::read(turned.data() + (size_t)d * TILE + i * LANES, keys[i]);
            for (int h = 0; h < N; h++) {
                const I x = I{} + query[h * steps + d];
                for (int i = 0; i < VECTORS; i++) acc[h][i] = step(acc[h][i], keys[i], x, T{});
            }
        }
        for (int h = 0; h < N; h++)
            for (int i = 0; i < VECTORS; i++) {
                const F scaled = vec::product(acc[h][i], vec::set1(c.scale));
                total[i] = vec::fma(vec::set1(weights[h]), vec::max(F{}, scaled), total[i]);  // keeps NaN
            }
    }

    void score_tile(int row, int64_t token, int64_t tile) {
        const int32_t* query = q.data() + (size_t)row * c.num_heads * steps;
        const float* weights = c.weights + token * c.num_heads;
        F total[VECTORS] = {};
        int h = 0;
        for (; h + 4 <= c.num_heads; h += 4) add_heads<4>(query + (size_t)h * steps, weights + h, total);
        for (; h < c.num_heads; h++) add_heads<1>(query + (size_t)h * steps, weights + h, total);
        for (int i = 0; i < VECTORS; i++) vec::store(scores.data() + row * stride + tile * TILE + i * LANES, total[i]);
    }

    void choose(int row, int seq, int64_t token, int64_t num_positions) {
        const float* score = scores.data() + row * stride;
        int32_t* to = c.slots + token * c.width;
        int64_t found = 0;
        if (num_positions <= c.topk) {
            for (; found < num_positions; found++) to[found] = slot(seq, found);
        } else {
            ranks.resize(num_positions);
            for (int64_t i = 0; i < num_positions; i++) ranks[i] = rank_of(score[i]);
            std::nth_element(ranks.begin(), ranks.begin() + (num_positions - c.topk), ranks.end());
            const uint32_t least = ranks[num_positions - c.topk];
            int64_t equal = c.topk;  // how many of the least chosen rank are chosen
            for (int64_t i = num_positions - c.topk; i < num_positions; i++) equal -= ranks[i] > least;
            for (int64_t i = 0; i < num_positions; i++) {
                const uint32_t rank = rank_of(score[i]);
                if (rank > least || (rank == least && equal-- > 0)) to[found++] = slot(seq, i);
            }
        }
        std::fill(to + found, to + c.width, -1);
    }

    void run(const Item& item) {
        const int64_t begin = c.token_starts[item.seq] + item.first, first = c.first_position[item.seq] + item.first;
        const int64_t num_positions = first + item.count, num_tiles = (num_positions + TILE - 1) / TILE;
        if (num_positions > c.topk) {
            stride = num_tiles * TILE;
            scores.resize((size_t)item.count * stride);
            q.resize((size_t)item.count * c.num_heads * steps);
            for (size_t i = 0; i < q.size(); i++)
                q[i] = unit_at((const T*)c.q + (begin * c.num_heads + i / steps) * c.dim, i % steps, c.dim);
            for (int64_t tile = 0; tile < num_tiles; tile++) {
                turn(item.seq, tile, num_positions);
                for (int row = 0; row < item.count; row++)
                    if (first + row >= c.topk && tile * TILE <= first + row) score_tile(row, begin + row, tile);
            }
        }
        for (int row = 0; row < item.count; row++) choose(row, item.seq, begin + row, first + row + 1);
    }
};

template <typename T>
void choose_all(const IndexerCall& c, const std::vector<Item>& items, Team& team) {
    Work<T> work(c);
#pragma omp for schedule(dynamic) nowait
    for (size_t i = 0; i < items.size(); i++) work.run(items[i]);
    team.meet();
}

// The first sequence whose table does not cover its chunk by blocks of the pool; -1: none.
int32_t first_wrong(const IndexerCall& c) {
    for (int32_t seq = 0; seq < c.num_sequences; seq++) {
        const int64_t start = c.block_starts[seq], length = c.token_starts[seq + 1] - c.token_starts[seq];
        if (start < 0 || length < 0 || c.first_position[seq] < 0) return seq;
        const int64_t num_read = length ? (c.first_position[seq] + length - 1) / c.block_size + 1 : 0;
        if (num_read > c.num_entries - start) return seq;
        for (const int32_t* block = c.blocks + start; block < c.blocks + start + num_read; block++)
            if (*block < 0 || *block >= c.num_blocks) return seq;
    }
    return -1;
}

}  // namespace

// Returns -1, or the first sequence whose columns are invalid; nothing is chosen then.
extern "C" int32_t indexer_choose(const IndexerCall* c) {
    if (const int32_t wrong = first_wrong(*c); wrong >= 0) return wrong;
    std::vector<Item> items;
    for (int32_t seq = 0; seq < c->num_sequences; seq++) {
        const int32_t length = c->token_starts[seq + 1] - c->token_starts[seq];
        for (int32_t first = 0; first < length; first += ITEM_TOKENS)
            items.push_back({seq, first, std::min(ITEM_TOKENS, length - first)});
    }
    Team::run(c->num_threads, [&](Team& team) {
        c->half ? choose_all<bf16>(*c, items, team) : choose_all<float>(*c, items, team);
    });
    return -1;
}
