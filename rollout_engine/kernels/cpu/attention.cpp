// Attention over paged KV, read in place: decode, prefill and both in one flat batch; and the plan of a step's work.
//
// A row is one (query token, query head). Each row runs an online softmax (Milakov and Gimelshein 2018; FlashAttention,
// Dao et al. 2022) over tiles of 64 positions counted from 0, in float32. Rows that share a KV head are computed
// together, and so are sequences whose tables begin alike, so that KV is read once; but no row's arithmetic looks at
// another row, at the block size or at the thread count, so neither do its bits. A tile in which a row sees nothing
// leaves that row as it was: only the sign of a zero may change, and results end with `+ 0.0`.
//
// Pool of one layer: keys [num_blocks, Hk, steps, block_size] of 4-byte units, one float32 or two bfloat16 of
// neighbouring channels, so that a vector holds one step of sixteen keys and no sum runs across lanes;
// values [num_blocks, Hk, block_size, dv].
#include <algorithm>

#include "vec.h"

namespace {

using vec::F;
using vec::I;
using vec::LANES;

constexpr int TILE = 64;
constexpr int TILE_VECTORS = TILE / LANES;
constexpr int ITEM_TOKENS = 32;  // query tokens of one work item at most: their state stays in the L2 cache
constexpr int ROWS = 4;          // rows that share each load of K or V: 16 accumulators of 32 registers
constexpr float LOWEST = -3.40282347e38f;

struct Item {
    int32_t first_member, num_members;  // in `members`
    int32_t first_token, num_tokens;    // of each member's chunk
    int32_t shared_tiles;               // read once for all members
};

}  // namespace

extern "C" {

// One step's sequences; the same for all layers. Mirrored in attention.py.
struct AttentionPlan {
    const int32_t* blocks;          // block tables, end to end
    const int64_t* block_starts;    // [N + 1] in `blocks`
    const int64_t* token_starts;    // [N + 1] in the flat batch
    const int64_t* first_position;  // [N] of each chunk
    int32_t* members;               // [N], out
    Item* items;                    // [N + num_tokens / 32], out
    int32_t num_sequences, block_size, num_items, items_wanted;
};

// One layer. Strides are in elements; the last dimension is dense.
struct AttentionCall {
    const AttentionPlan* plan;
    const void *q, *k, *v;  // [T, H, dk], [T, Hk, dk], [T, Hk, dv]
    void* out;              // [T, H, dv], dense
    float* lse;             // [T, H] log-sum-exp, or null
    void *keys, *values;    // the pool
    const float* sinks;     // [H] one more logit for each head, or null
    char* scratch;          // num_threads * attention_scratch()
    int64_t q_token, q_head, k_token, k_head, v_token, v_head;
    int32_t num_tokens, num_heads, num_kv_heads, dk, dv;
    int32_t half;  // bfloat16, else float32
    int32_t num_threads, sliding_window;
    float scale, softcap;
};
}

namespace {

// --- the plan ----------------------------------------------------------------------------------------------------------

int64_t table_length(const AttentionPlan& p, int s) { return p.block_starts[s + 1] - p.block_starts[s]; }
int64_t chunk_length(const AttentionPlan& p, int s) { return p.token_starts[s + 1] - p.token_starts[s]; }

// Whole tiles that two decoding sequences both read and both hold in the same blocks.
int common_tiles(const AttentionPlan& p, int a, int b) {
    const int32_t *x = p.blocks + p.block_starts[a], *y = p.blocks + p.block_starts[b];
    const int64_t longest = std::min(p.first_position[a], p.first_position[b]) + 1;
    const int64_t limit = longest / TILE * (TILE / p.block_size);
    return (std::mismatch(x, x + limit, y).first - x) / (TILE / p.block_size);
}

// Decoding sequences from `first` on that had best be read together: one joins while no fewer tiles are saved with it.
int group_end(const AttentionPlan& p, int first, int num_decoding, int limit, int* shared) {
    int end = first + 1;
    *shared = 0;
    for (int64_t tiles = 1 << 30; end < num_decoding && end - first < limit; end++) {
        const int64_t with = std::min<int64_t>(tiles, common_tiles(p, p.members[end - 1], p.members[end]));
        const int64_t members = end - first;
        if (!with || (members > 1 && with * members < tiles * (members - 1))) break;
        *shared = tiles = with;
    }
    return end;
}

void make_plan(AttentionPlan& p) {
    int num_decoding = 0, num_others = p.num_sequences;
    for (int s = 0; s < p.num_sequences; s++) p.members[chunk_length(p, s) == 1 ? num_decoding++ : --num_others] = s;
    std::sort(p.members, p.members + num_decoding, [&p](int a, int b) {
        const int32_t *x = p.blocks + p.block_starts[a], *y = p.blocks + p.block_starts[b];
        const int64_t n = std::min(table_length(p, a), table_length(p, b));
        const int64_t same = std::mismatch(x, x + n, y).first - x;
        return same < n ? x[same] < y[same] : a < b;
    });
    // Large groups are cut so that no thread goes without work.
    const int limit = std::clamp(num_decoding / std::max(1, p.items_wanted), 1, ITEM_TOKENS);
    p.num_items = 0;
    for (int m = 0, end, shared; m < num_decoding; m = end) {
        end = group_end(p, m, num_decoding, limit, &shared);
        p.items[p.num_items++] = {m, end - m, 0, 1, shared};
    }
    for (int m = num_decoding; m < p.num_sequences; m++) {
        const int length = chunk_length(p, p.members[m]);
        for (int t = 0; t < length; t += ITEM_TOKENS)
            p.items[p.num_items++] = {m, 1, t, std::min(ITEM_TOKENS, length - t), 0};
    }
}

// --- one tile --------------------------------------------------------------------------------------------------------

template <typename T>
constexpr int channels_per_step = 4 / sizeof(T);

template <typename T>
struct Sizes {
    int dk, dv, steps, padded_dv, group;
    explicit Sizes(const AttentionCall& c)
        : dk(c.dk), dv(c.dv), steps((c.dk + channels_per_step<T> - 1) / channels_per_step<T>),
          padded_dv((c.dv + LANES - 1) / LANES * LANES), group(c.num_heads / c.num_kv_heads) {}
};

// Where the four sixteen-key parts of a tile lie.
template <typename T>
struct Tile {
    const uint32_t* k[TILE_VECTORS];
    const T* v[TILE_VECTORS];
    int64_t k_step;  // units from one step to the next
};

// A thread's memory: the state of one item's rows.
struct Scratch {
    uint32_t* q;     // [rows, steps] units
    float* out;      // [rows, padded_dv]
    float* total;    // [rows, 16]: sum of weights, by lane
    float* top;      // [rows]: largest score so far
    int32_t* position;
    float* weights;  // [ROWS, TILE]
    uint32_t* k_tile;  // [steps, TILE] units: a tile gathered from blocks of fewer than sixteen
    void* v_tile;      // [TILE, dv]

    template <typename T>
    Scratch(char* memory, const Sizes<T>& z) : base_(memory) {
        const int64_t rows = (int64_t)ITEM_TOKENS * z.group;
        take(q, rows * z.steps), take(out, rows * z.padded_dv), take(total, rows * LANES), take(top, rows);
        take(position, rows), take(weights, ROWS * TILE), take(k_tile, (int64_t)z.steps * TILE);
        T* values;
        take(values, (int64_t)TILE * z.dv);
        v_tile = values;
    }
    int64_t bytes() const { return bytes_; }

  private:
    char* base_;
    int64_t bytes_ = 0;
    template <typename P>
    void take(P*& pointer, int64_t count) {
        pointer = reinterpret_cast<P*>(base_ + bytes_);
        bytes_ += (count * sizeof(P) + 63) / 64 * 64;
    }
};

VEC_INLINE F step(F acc, I k, uint32_t q, float) { return vec::fma((F)k, (F)(I{} + (int32_t)q), acc); }
VEC_INLINE F step(F acc, I k, uint32_t q, bf16) { return vec::dot_pairs(acc, k, I{} + (int32_t)q); }

VEC_INLINE void fetch(const void* p) { __builtin_prefetch(p, 0, 2); }

// Scores [R, TILE] before scaling: sums over channels in their order.
template <typename T, int R>
VEC_INLINE void dot(const uint32_t* q, int steps, const Tile<T>& tile, const Tile<T>* next, float* scores) {
    F acc[R][TILE_VECTORS] = {};
    for (int d = 0; d < steps; d++) {
        for (int i = 0; i < TILE_VECTORS; i++) {
            I k;
            memcpy(&k, tile.k[i] + d * tile.k_step, sizeof k);
            for (int r = 0; r < R; r++) acc[r][i] = step(acc[r][i], k, q[r * steps + d], T{});
        }
        if (next)
            for (int i = 0; i < TILE_VECTORS; i++) fetch(next->k[i] + d * next->k_step);
    }
    for (int r = 0; r < R; r++)
        for (int i = 0; i < TILE_VECTORS; i++) vec::store(scores + r * TILE + i * LANES, acc[r][i]);
}

// Scores of one row become weights, of the keys [low, high) it may see; returns the factor for what came before.
// Compiled once, so that it rounds alike for every caller.
__attribute__((noinline)) float weigh(float* scores, int low, int high, float scale, float softcap, float& top,
                                      float* total) {
    const I lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const F hidden = vec::set1(-__builtin_inff());
    F score[TILE_VECTORS], highest = hidden;
    for (int i = 0; i < TILE_VECTORS; i++) {
        F s = vec::load(scores + i * LANES) * scale;
        if (softcap != 0.0f) s = softcap * (1.0f - 2.0f / (vec::exp(s * (2.0f / softcap)) + 1.0f));  // tanh
        const I key = lane + i * LANES;
        score[i] = (key >= low) & (key < high) ? s : hidden;
        highest = vec::max(highest, score[i]);
    }
    const float new_top = std::max(top, vec::max(highest));
    const float rescale = vec::exp(vec::set1(top - new_top))[0];
    F sum = {};
    for (int i = 0; i < TILE_VECTORS; i++) {
        const F weight = vec::exp(score[i] - new_top);
        vec::store(scores + i * LANES, weight);
        sum = sum + weight;
    }
    vec::store(total, vec::fma(vec::load(total), vec::set1(rescale), sum));
    top = new_top;
    return rescale;
}

// out[r] = out[r] * rescale[r] + weights[r] @ V over keys [low, high), in their order, for V vectors of `width` floats.
template <typename T, int R, int VECTORS>
VEC_INLINE void mix(float* out, int out_row, const float* weights, const float* rescale, const Tile<T>& tile,
                    const Tile<T>* next, int column, int width, int dv, int low, int high) {
    F acc[R][VECTORS];
    for (int r = 0; r < R; r++)
        for (int i = 0; i < VECTORS; i++)
            acc[r][i] = vec::load(out + r * out_row + column + i * LANES) * rescale[r];
    for (int key = low; key < high; key++) {
        const int64_t offset = (int64_t)(key % LANES) * dv + column;
        const T* v = tile.v[key / LANES] + offset;
        F value[VECTORS];
        for (int i = 0; i < VECTORS; i++) value[i] = VECTORS > 1 ? vec::load(v + i * LANES) : vec::load(v, width);
        for (int r = 0; r < R; r++) {
            const F weight = vec::set1(weights[r * TILE + key]);
            for (int i = 0; i < VECTORS; i++) acc[r][i] = vec::fma(weight, value[i], acc[r][i]);
        }
        if (next)
            for (int i = 0; i < VECTORS; i += 64 / sizeof(T) / LANES)
                fetch(next->v[key / LANES] + offset + i * LANES);
    }
    for (int r = 0; r < R; r++)
        for (int i = 0; i < VECTORS; i++) vec::store(out + r * out_row + column + i * LANES, acc[r][i]);
}

// Tile number j for R rows from `row` on.
template <typename T, int R>
void attend_rows(const AttentionCall& c, const Sizes<T>& z, const Scratch& s, int row, int64_t j, const Tile<T>& tile,
                 const Tile<T>* next) {
    int low[R], high[R], lowest = TILE, highest = 0;
    for (int r = 0; r < R; r++) {
        const int64_t end = s.position[row + r] + 1 - j * TILE;
        high[r] = std::clamp<int64_t>(end, 0, TILE);
        low[r] = c.sliding_window ? std::clamp<int64_t>(end - c.sliding_window, 0, TILE) : 0;
        if (low[r] >= high[r]) continue;
        lowest = std::min(lowest, low[r]), highest = std::max(highest, high[r]);
    }
    if (lowest >= highest) return;
    dot<T, R>(s.q + (int64_t)row * z.steps, z.steps, tile, next, s.weights);
    float rescale[R];
    for (int r = 0; r < R; r++)
        rescale[r] = weigh(s.weights + r * TILE, low[r], high[r], c.scale, c.softcap, s.top[row + r],
                           s.total + (int64_t)(row + r) * LANES);
    float* out = s.out + (int64_t)row * z.padded_dv;
    int column = 0;
    for (; column + 4 * LANES <= z.dv; column += 4 * LANES)
        mix<T, R, 4>(out, z.padded_dv, s.weights, rescale, tile, next, column, 0, z.dv, lowest, highest);
    for (; column < z.dv; column += LANES)
        mix<T, R, 1>(out, z.padded_dv, s.weights, rescale, tile, next, column, std::min(LANES, z.dv - column), z.dv,
                     lowest, highest);
}

// The next tile is fetched by the first rows that read this one.
template <typename T>
void attend_tile(const AttentionCall& c, const Sizes<T>& z, const Scratch& s, int row, int end, int64_t j,
                 const Tile<T>& tile, const Tile<T>* next) {
    for (; end - row >= ROWS; row += ROWS, next = nullptr) attend_rows<T, ROWS>(c, z, s, row, j, tile, next);
    if (end - row == 3) attend_rows<T, 3>(c, z, s, row, j, tile, next);
    if (end - row == 2) attend_rows<T, 2>(c, z, s, row, j, tile, next);
    if (end - row == 1) attend_rows<T, 1>(c, z, s, row, j, tile, next);
}

// --- one item ----------------------------------------------------------------------------------------------------------

template <typename T>
struct Pool {
    const AttentionCall& c;
    const Sizes<T>& z;
    int head;

    uint32_t* keys(int64_t block) const {
        return (uint32_t*)c.keys + (block * c.num_kv_heads + head) * z.steps * c.plan->block_size;
    }
    T* values(int64_t block) const { return (T*)c.values + (block * c.num_kv_heads + head) * c.plan->block_size * z.dv; }

    // Tile j of sequence s in place. Parts past its table repeat the last block: no row sees them.
    Tile<T> locate(int seq, int64_t j) const {
        const AttentionPlan& p = *c.plan;
        const int32_t* blocks = p.blocks + p.block_starts[seq];
        const int64_t last = table_length(p, seq) - 1;
        Tile<T> tile;
        tile.k_step = p.block_size;
        for (int i = 0; i < TILE_VECTORS; i++) {
            const int64_t position = j * TILE + i * LANES;
            const int64_t index = position / p.block_size, inside = position % p.block_size;
            const int64_t block = blocks[std::min(index, last)];
            tile.k[i] = keys(block) + inside;
            tile.v[i] = values(block) + inside * z.dv;
        }
        return tile;
    }

    // The same for blocks of fewer than sixteen positions: copied, in the layout of blocks of 64.
    Tile<T> gather(int seq, int64_t j, const Scratch& s) const {
        const AttentionPlan& p = *c.plan;
        const int size = p.block_size;
        const int32_t* blocks = p.blocks + p.block_starts[seq];
        const int64_t last = table_length(p, seq) - 1;
        for (int key = 0; key < TILE; key += size) {
            const int64_t block = blocks[std::min((j * TILE + key) / size, last)];
            for (int d = 0; d < z.steps; d++) memcpy(s.k_tile + d * TILE + key, keys(block) + d * size, size * 4);
            memcpy((T*)s.v_tile + (int64_t)key * z.dv, values(block), (int64_t)size * z.dv * sizeof(T));
        }
        Tile<T> tile;
        tile.k_step = TILE;
        for (int i = 0; i < TILE_VECTORS; i++) {
            tile.k[i] = s.k_tile + i * LANES;
            tile.v[i] = (T*)s.v_tile + (int64_t)i * LANES * z.dv;
        }
        return tile;
    }

    // Rows [row, end) through tiles [first, stop) of a sequence.
    void attend(const Scratch& s, int row, int end, int seq, int64_t first, int64_t stop) const {
        if (c.plan->block_size < LANES) {
            for (int64_t j = first; j < stop; j++) attend_tile<T>(c, z, s, row, end, j, gather(seq, j, s), nullptr);
            return;
        }
        Tile<T> tile = locate(seq, first);
        for (int64_t j = first; j < stop; j++) {
            const Tile<T> next = locate(seq, std::min(j + 1, stop - 1));
            attend_tile<T>(c, z, s, row, end, j, tile, j + 1 < stop ? &next : nullptr);
            tile = next;
        }
    }
};

template <typename T>
void start_row(const AttentionCall& c, const Sizes<T>& z, const Scratch& s, int row, int64_t token, int head,
               int64_t position) {
    T* q = (T*)(s.q + (int64_t)row * z.steps);
    memcpy(q, (const T*)c.q + token * c.q_token + head * c.q_head, z.dk * sizeof(T));
    if (z.dk % channels_per_step<T>) q[z.dk] = T{};
    memset(s.out + (int64_t)row * z.padded_dv, 0, z.padded_dv * sizeof(float));
    memset(s.total + (int64_t)row * LANES, 0, LANES * sizeof(float));
    s.position[row] = position;
    s.top[row] = LOWEST;
    if (c.sinks) {  // as if a first key had this score and a value of zeros
        s.top[row] = c.sinks[head];
        s.total[(int64_t)row * LANES] = 1.0f;
    }
}

template <typename T>
void finish_row(const AttentionCall& c, const Sizes<T>& z, const Scratch& s, int row, int64_t token, int head) {
    const float total = vec::sum(vec::load(s.total + (int64_t)row * LANES));
    const float* from = s.out + (int64_t)row * z.padded_dv;
    T* to = (T*)c.out + (token * c.num_heads + head) * z.dv;
    for (int column = 0; column < z.dv; column += LANES)
        vec::store(to + column, vec::load(from + column) / total + 0.0f, std::min(LANES, z.dv - column));
    if (c.lse) c.lse[token * c.num_heads + head] = s.top[row] + __builtin_logf(total);
}

// Calls visit(row, token in the flat batch, query head, position) for every row of an item.
template <typename Visit>
void each_row(const AttentionCall& c, const Item& item, int kv_head, int group, Visit visit) {
    const AttentionPlan& p = *c.plan;
    int row = 0;
    for (int m = item.first_member; m < item.first_member + item.num_members; m++) {
        const int seq = p.members[m];
        for (int t = item.first_token; t < item.first_token + item.num_tokens; t++)
            for (int g = 0; g < group; g++)
                visit(row++, p.token_starts[seq] + t, kv_head * group + g, p.first_position[seq] + t);
    }
}

template <typename T>
void attend_item(const AttentionCall& c, const Sizes<T>& z, const Scratch& s, const Item& item, int kv_head) {
    const AttentionPlan& p = *c.plan;
    const Pool<T> pool{c, z, kv_head};
    each_row(c, item, kv_head, z.group,
             [&](int row, int64_t token, int head, int64_t at) { start_row<T>(c, z, s, row, token, head, at); });
    const int rows = item.num_tokens * z.group;  // of one member
    auto first_tile = [&](int row) {
        return c.sliding_window ? std::max<int64_t>(0, s.position[row] + 1 - c.sliding_window) / TILE : 0;
    };
    if (item.shared_tiles) {
        int64_t first = first_tile(0);
        for (int m = 1; m < item.num_members; m++) first = std::min(first, first_tile(m * rows));
        if (first < item.shared_tiles)
            pool.attend(s, 0, rows * item.num_members, p.members[item.first_member], first, item.shared_tiles);
    }
    for (int m = 0; m < item.num_members; m++) {
        const int row = m * rows, end = row + rows;
        pool.attend(s, row, end, p.members[item.first_member + m], std::max<int64_t>(item.shared_tiles, first_tile(row)),
                    s.position[end - 1] / TILE + 1);
    }
    each_row(c, item, kv_head, z.group,
             [&](int row, int64_t token, int head, int64_t) { finish_row<T>(c, z, s, row, token, head); });
}

// --- the step ------------------------------------------------------------------------------------------------------------

// A chunk's keys and values go to their slots.
template <typename T>
void write_sequence(const AttentionCall& c, const Sizes<T>& z, int seq, int kv_head) {
    const AttentionPlan& p = *c.plan;
    const Pool<T> pool{c, z, kv_head};
    const int size = p.block_size;
    for (int64_t token = p.token_starts[seq], position = p.first_position[seq]; token < p.token_starts[seq + 1];
         token++, position++) {
        const int64_t block = p.blocks[p.block_starts[seq] + position / size], inside = position % size;
        const T* k = (const T*)c.k + token * c.k_token + kv_head * c.k_head;
        const T* v = (const T*)c.v + token * c.v_token + kv_head * c.v_head;
        T* to = (T*)(pool.keys(block) + inside);
        constexpr int per = channels_per_step<T>;
        for (int d = 0; d < z.dk; d++) to[(int64_t)(d / per) * size * per + d % per] = k[d];
        if (z.dk % per) to[(int64_t)(z.dk / per) * size * per + 1] = T{};
        memcpy(pool.values(block) + inside * z.dv, v, z.dv * sizeof(T));
    }
}

template <typename T>
void attend(const AttentionCall& c) {
    const Sizes<T> z(c);
    const AttentionPlan& p = *c.plan;
    const int64_t scratch_bytes = Scratch(nullptr, z).bytes();
    const int64_t num_writes = (int64_t)p.num_sequences * c.num_kv_heads;
    const int64_t num_reads = (int64_t)p.num_items * c.num_kv_heads;
    int next_scratch = 0;
#pragma omp parallel num_threads(c.num_threads) if (c.num_threads > 1)
    {
        int mine;
#pragma omp atomic capture
        mine = next_scratch++;
        const Scratch scratch(c.scratch + mine * scratch_bytes, z);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < num_writes; i++) write_sequence<T>(c, z, i / c.num_kv_heads, i % c.num_kv_heads);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < num_reads; i++)
            attend_item<T>(c, z, scratch, p.items[i / c.num_kv_heads], i % c.num_kv_heads);
    }
}

}  // namespace

extern "C" {

void attention_plan(AttentionPlan* plan) { make_plan(*plan); }

// Bytes of scratch a thread needs.
int64_t attention_scratch(const AttentionCall* c) {
    return c->half ? Scratch(nullptr, Sizes<bf16>(*c)).bytes() : Scratch(nullptr, Sizes<float>(*c)).bytes();
}

void attention(const AttentionCall* c) { c->half ? attend<bf16>(*c) : attend<float>(*c); }
}
