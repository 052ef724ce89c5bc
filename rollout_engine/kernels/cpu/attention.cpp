// Attention over paged KV, read in place: decode, prefill and both in one flat batch; and the plan of a step's work.
//
// A row is one (query token, query head). Each row runs an online softmax (Milakov and Gimelshein 2018; FlashAttention,
// Dao et al. 2022) over tiles of 64 positions counted from 0, in float32. Rows that share a KV head are computed
// together, and so are sequences whose tables begin alike, so that KV is read once; but no row's arithmetic looks at
// another row, at the block size or at the thread count, so neither do its bits. A tile in which a row sees nothing
// leaves that row as it was: only the sign of a zero may change, and results end with `+ 0.0`.
//
// Sums run over *steps* of 4-byte units, one float32 or two bfloat16 (VDPBF16PS), and never across lanes. Pool of one
// layer: keys [num_blocks, Hk, steps, block_size] units, two neighbouring channels in one; values [num_blocks, Hk,
// block_size / 2, dv] units, two neighbouring positions in one (blocks of one position hold single elements). Weights
// are rounded to bfloat16 with such values, as on GPUs; their sum is not.
//
// Three ways to multiply, chosen by shape and CPU alone (never by the number of rows, since they round differently): AMX
// tiles of 16 rows, else vectors of sixteen: VDPBF16PS, or fused multiply-adds.
#include "attention.h"

#include <omp.h>

#include <algorithm>

#include "amx.h"
#include "rows.h"
#include "vec.h"

namespace {

using vec::F;
using vec::I;
using vec::LANES;

constexpr int TILE = 64;
constexpr int TILE_VECTORS = TILE / LANES;
constexpr int ITEM_TOKENS = 32;  // query tokens of one work item at most: their state stays in the L2 cache
constexpr int ROWS = 4;          // rows that share each load of K or V: 16 accumulators of 32 registers
constexpr int AMX_ROWS = 16;
constexpr float LOWEST = -3.40282347e38f;

using Item = AttentionItem;

// --- the plan ----------------------------------------------------------------------------------------------------------

int64_t chunk_length(const AttentionPlan& p, int s) { return p.token_starts[s + 1] - p.token_starts[s]; }
int64_t table_length(const AttentionPlan& p, int s) {
    return (p.first_position[s] + chunk_length(p, s) - 1) / p.block_size + 1;
}

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
constexpr int per_unit = 4 / sizeof(T);

template <typename T>
struct Sizes {
    int dk, dv, steps, padded_dv, group;
    explicit Sizes(const AttentionCall& c)
        : dk(c.dk), dv(c.dv), steps((c.dk + per_unit<T> - 1) / per_unit<T>),
          padded_dv((c.dv + LANES - 1) / LANES * LANES), group(c.num_heads / c.num_kv_heads) {}
};

// Where the four sixteen-key parts of a tile lie.
struct Tile {
    const uint32_t *k[TILE_VECTORS], *v[TILE_VECTORS];
    int64_t k_step;  // units from one step to the next
};

// A thread's memory: the state of one item's rows.
struct Scratch {
    uint32_t* q;     // [rows, steps] units
    uint32_t* k;     // [steps] units
    float* out;      // [rows, padded_dv]
    float* total;    // [rows, 16]: sum of weights, by lane
    float* top;      // [rows]: largest score so far
    int32_t* position;
    float* scores;      // [AMX_ROWS, TILE]
    uint32_t* weights;  // [AMX_ROWS, TILE / per_unit] units
    float* mixed;       // [AMX_ROWS, TILE]
    uint32_t *k_tile, *v_tile;  // a tile gathered from blocks of fewer than sixteen, as if from one of 64

    template <typename T>
    Scratch(char* memory, const Sizes<T>& z) : base_(memory) {
        const int64_t rows = (int64_t)ITEM_TOKENS * z.group + AMX_ROWS;  // AMX reads past the last ones
        take(q, rows * z.steps), take(k, z.steps), take(out, rows * z.padded_dv), take(total, rows * LANES), take(top, rows);
        take(position, rows), take(scores, AMX_ROWS * TILE), take(weights, AMX_ROWS * TILE);
        take(mixed, AMX_ROWS * TILE);
        take(k_tile, (int64_t)z.steps * TILE), take(v_tile, (int64_t)z.dv * TILE);
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

VEC_INLINE I load_units(const uint32_t* p) {
    I x;
    memcpy(&x, p, sizeof x);
    return x;
}

VEC_INLINE F step(F acc, I vector, uint32_t unit, float) { return vec::fma((F)vector, (F)(I{} + (int32_t)unit), acc); }
VEC_INLINE F step(F acc, I vector, uint32_t unit, bf16) { return vec::dot_pairs(acc, vector, I{} + (int32_t)unit); }

VEC_INLINE void fetch(const void* p) { __builtin_prefetch(p, 0, 2); }

// Scores [R, TILE] before scaling: sums over channels in their order.
template <typename T, int R>
VEC_INLINE void dot(const uint32_t* q, int steps, const Tile& tile, const Tile* next, float* scores) {
    F acc[R][TILE_VECTORS] = {};
    for (int d = 0; d < steps; d++) {
        for (int i = 0; i < TILE_VECTORS; i++) {
            const I k = load_units(tile.k[i] + d * tile.k_step);
            for (int r = 0; r < R; r++) acc[r][i] = step(acc[r][i], k, q[r * steps + d], T{});
        }
        if (next)
            for (int i = 0; i < TILE_VECTORS; i++) fetch(next->k[i] + d * next->k_step);
    }
    for (int r = 0; r < R; r++)
        for (int i = 0; i < TILE_VECTORS; i++) vec::store(scores + r * TILE + i * LANES, acc[r][i]);
}

// Weights of one row from its scores, for the keys [low, high) it may see; returns the factor for what came before.
// Compiled once, so that it rounds alike for every caller.
template <typename T>
__attribute__((noinline)) float weigh(const float* scores, T* weights, int low, int high, float scale, float softcap,
                                      float& top, float* total) {
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
        vec::store(weights + i * LANES, weight);
        sum = sum + weight;
    }
    vec::store(total, vec::fma(vec::load(total), vec::set1(rescale), sum));
    top = new_top;
    return rescale;
}

// out[r] = out[r] * rescale[r] + weights[r] @ V over the key steps [low, high), in their order; `width` columns of V
// where VECTORS is 1.
template <typename T, int R, int VECTORS>
VEC_INLINE void mix(float* out, int out_row, const uint32_t* weights, const float* rescale, const Tile& tile,
                    const Tile* next, int column, int width, int dv, int low, int high) {
    constexpr int steps = LANES / per_unit<T>;  // of each part of the tile
    F acc[R][VECTORS];
    for (int r = 0; r < R; r++)
        for (int i = 0; i < VECTORS; i++)
            acc[r][i] = vec::load(out + r * out_row + column + i * LANES) * rescale[r];
    for (int key = low; key < high; key++) {
        const int64_t offset = (int64_t)(key % steps) * dv + column;
        const uint32_t* v = tile.v[key / steps] + offset;
        for (int i = 0; i < VECTORS; i++) {
            const I value = VECTORS > 1 ? load_units(v + i * LANES) : (I)vec::load((const float*)v, width);
            for (int r = 0; r < R; r++) acc[r][i] = step(acc[r][i], value, weights[r * (TILE / per_unit<T>)+key], T{});
        }
        if (next)
            for (int i = 0; i < VECTORS; i++) fetch(next->v[key / steps] + offset + i * LANES);
    }
    for (int r = 0; r < R; r++)
        for (int i = 0; i < VECTORS; i++) vec::store(out + r * out_row + column + i * LANES, acc[r][i]);
}

// The keys [low, high) of tile number j that each of `count` rows may see, and their span.
struct Sight {
    int low[AMX_ROWS], high[AMX_ROWS], lowest = TILE, highest = 0;

    Sight(const AttentionCall& c, const int32_t* position, int count, int64_t j) {
        for (int r = 0; r < count; r++) {
            const int64_t end = position[r] + 1 - j * TILE;
            high[r] = std::clamp<int64_t>(end, 0, TILE);
            low[r] = c.sliding_window ? std::clamp<int64_t>(end - c.sliding_window, 0, TILE) : 0;
            if (low[r] >= high[r]) continue;
            lowest = std::min(lowest, low[r]), highest = std::max(highest, high[r]);
        }
    }
    bool nothing() const { return lowest >= highest; }
};

// `weigh` for the scores of `count` rows from `row` on.
template <typename T>
VEC_INLINE void weigh_rows(const AttentionCall& c, const Scratch& s, const Sight& sight, int row, int count,
                           float* rescale) {
    for (int r = 0; r < count; r++)
        rescale[r] = weigh(s.scores + r * TILE, (T*)s.weights + r * TILE, sight.low[r], sight.high[r], c.scale,
                           c.softcap, s.top[row + r], s.total + (int64_t)(row + r) * LANES);
}

// Tile number j for R rows from `row` on.
template <typename T, int R>
void attend_rows(const AttentionCall& c, const Sizes<T>& z, const Scratch& s, int row, int64_t j, const Tile& tile,
                 const Tile* next) {
    const Sight sight(c, s.position + row, R, j);
    if (sight.nothing()) return;
    dot<T, R>(s.q + (int64_t)row * z.steps, z.steps, tile, next, s.scores);
    float rescale[R];
    weigh_rows<T>(c, s, sight, row, R, rescale);
    const int lowest = sight.lowest / per_unit<T>, highest = (sight.highest + per_unit<T> - 1) / per_unit<T>;
    float* out = s.out + (int64_t)row * z.padded_dv;
    int column = 0;
    for (; column + 4 * LANES <= z.dv; column += 4 * LANES)
        mix<T, R, 4>(out, z.padded_dv, s.weights, rescale, tile, next, column, 0, z.dv, lowest, highest);
    for (; column < z.dv; column += LANES)
        mix<T, R, 1>(out, z.padded_dv, s.weights, rescale, tile, next, column, std::min(LANES, z.dv - column), z.dv,
                     lowest, highest);
}

#if HAS_AMX
// Numbers of tile registers, and their shapes: four sums of 16 x 16; queries [16, 32 channels] and keys [16 steps, 16];
// weights [16, 16 keys] and values [8 steps, 16 columns]. Macros: the intrinsics paste them into assembly.
#define SUM0 0
#define SUM1 1
#define SUM2 2
#define SUM3 3
#define QUERY 4
#define KEY 5
#define WEIGHT 6
#define VALUE 7

struct TileConfig : amx::Config {
    TileConfig() { row_bytes[WEIGHT] = 32, rows[VALUE] = 8; }
};

bool uses_amx(const Sizes<bf16>& z) { return z.dk % 32 == 0 && z.dv % TILE == 0 && amx::granted(); }

// While it lives, this thread's tiles are shaped for `attend_rows_amx`; oneDNN may have left a shape of its own.
struct TileScope {
    explicit TileScope(bool needed) : needed_(needed) {
        if (!needed_) return;
        static const TileConfig ours;
        _tile_storeconfig(before_);
        _tile_loadconfig(&ours);
    }
    ~TileScope() {
        if (needed_) _tile_loadconfig(before_);
    }
    TileScope(const TileScope&) = delete;

  private:
    bool needed_;
    alignas(64) uint8_t before_[64];
};

VEC_INLINE void fetch_rows(const uint32_t* p, int64_t stride, int count) {
    for (int i = 0; i < count; i++) fetch(p + i * stride);
}

VEC_INLINE void store_sums(float* to) {
    _tile_stored(SUM0, to, TILE * 4);
    _tile_stored(SUM1, to + LANES, TILE * 4);
    _tile_stored(SUM2, to + 2 * LANES, TILE * 4);
    _tile_stored(SUM3, to + 3 * LANES, TILE * 4);
}

VEC_INLINE void clear_sums() {
    __asm__ volatile("" ::: "memory");  // tile loads do not tell the compiler that they read what was stored before
    _tile_zero(SUM0);
    _tile_zero(SUM1);
    _tile_zero(SUM2);
    _tile_zero(SUM3);
}

// Tile number j for up to 16 rows from `row` on; what the rows past them hold is computed and dropped.
void attend_rows_amx(const AttentionCall& c, const Sizes<bf16>& z, const Scratch& s, int row, int count, int64_t j,
                     const Tile& tile, const Tile* next) {
    const Sight sight(c, s.position + row, count, j);
    if (sight.nothing()) return;
    clear_sums();
    for (int d = 0; d < z.steps; d += LANES) {
        _tile_loadd(QUERY, s.q + (int64_t)row * z.steps + d, z.steps * 4);
#define ADD_KEYS(i)                                                        \
    _tile_loadd(KEY, tile.k[i] + d * tile.k_step, tile.k_step * 4);        \
    _tile_dpbf16ps(i, QUERY, KEY);                                    \
    if (next) fetch_rows(next->k[i] + d * next->k_step, next->k_step, LANES);
        ADD_KEYS(SUM0) ADD_KEYS(SUM1) ADD_KEYS(SUM2) ADD_KEYS(SUM3)
    }
    store_sums(s.scores);
    float rescale[AMX_ROWS];
    weigh_rows<bf16>(c, s, sight, row, count, rescale);
    for (int column = 0; column < z.dv; column += TILE) {
        clear_sums();
        for (int part = sight.lowest / LANES; part * LANES < sight.highest; part++) {
            const uint32_t* v = tile.v[part] + column;
            _tile_loadd(WEIGHT, s.weights + part * LANES / 2, TILE / 2 * 4);
#define ADD_VALUES(i)                              \
    _tile_loadd(VALUE, v + i * LANES, z.dv * 4);   \
    _tile_dpbf16ps(i, WEIGHT, VALUE);         \
    if (next) fetch_rows(next->v[part] + column + i * LANES, z.dv, LANES / 2);
            ADD_VALUES(SUM0) ADD_VALUES(SUM1) ADD_VALUES(SUM2) ADD_VALUES(SUM3)
        }
        store_sums(s.mixed);
        for (int r = 0; r < count; r++) {
            float* out = s.out + (int64_t)(row + r) * z.padded_dv + column;
            for (int i = 0; i < TILE; i += LANES)
                vec::store(out + i, vec::fma(vec::load(out + i), vec::set1(rescale[r]), vec::load(s.mixed + r * TILE + i)));
        }
    }
}

bool attend_tile_amx(const AttentionCall& c, const Sizes<bf16>& z, const Scratch& s, int row, int end, int64_t j,
                     const Tile& tile, const Tile* next) {
    if (!uses_amx(z)) return false;
    for (; row < end; row += AMX_ROWS, next = nullptr)
        attend_rows_amx(c, z, s, row, std::min(AMX_ROWS, end - row), j, tile, next);
    return true;
}
#else
struct TileScope {
    explicit TileScope(bool) {}
};
bool uses_amx(const Sizes<bf16>&) { return false; }
bool attend_tile_amx(const AttentionCall&, const Sizes<bf16>&, const Scratch&, int, int, int64_t, const Tile&,
                     const Tile*) {
    return false;
}
#endif
bool uses_amx(const Sizes<float>&) { return false; }
bool attend_tile_amx(const AttentionCall&, const Sizes<float>&, const Scratch&, int, int, int64_t, const Tile&,
                     const Tile*) {
    return false;
}

// The next tile is fetched by the first rows that read this one.
template <typename T>
void attend_tile(const AttentionCall& c, const Sizes<T>& z, const Scratch& s, int row, int end, int64_t j,
                 const Tile& tile, const Tile* next) {
    if (attend_tile_amx(c, z, s, row, end, j, tile, next)) return;
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

    // Channel 0 of a position in `values`, and how far its channels lie apart.
    int64_t channel_stride() const { return std::min(per_unit<T>, c.plan->block_size); }
    int64_t value_offset(int64_t inside) const {
        const int64_t stride = channel_stride();
        return inside / stride * stride * z.dv + inside % stride;
    }

    // Tile j of sequence s in place. Parts past its table repeat the last block: no row sees them.
    Tile locate(int seq, int64_t j) const {
        const AttentionPlan& p = *c.plan;
        const int32_t* blocks = p.blocks + p.block_starts[seq];
        const int64_t last = table_length(p, seq) - 1;
        Tile tile;
        tile.k_step = p.block_size;
        for (int i = 0; i < TILE_VECTORS; i++) {
            const int64_t position = j * TILE + i * LANES;
            const int64_t index = position / p.block_size, inside = position % p.block_size;
            const int64_t block = blocks[std::min(index, last)];
            tile.k[i] = keys(block) + inside;
            tile.v[i] = (const uint32_t*)(values(block) + inside * z.dv);
        }
        return tile;
    }

    // The same for blocks of fewer than sixteen positions: copied, in the layout of blocks of 64.
    Tile gather(int seq, int64_t j, const Scratch& s) const {
        const AttentionPlan& p = *c.plan;
        const int size = p.block_size;
        const int32_t* blocks = p.blocks + p.block_starts[seq];
        const int64_t last = table_length(p, seq) - 1;
        for (int key = 0; key < TILE; key += size) {
            const int64_t block = blocks[std::min((j * TILE + key) / size, last)];
            for (int d = 0; d < z.steps; d++) memcpy(s.k_tile + d * TILE + key, keys(block) + d * size, size * 4);
            if (size >= per_unit<T>) {
                memcpy((T*)s.v_tile + (int64_t)key * z.dv, values(block), (int64_t)size * z.dv * sizeof(T));
                continue;
            }
            T* pairs = (T*)(s.v_tile + (int64_t)(key / 2) * z.dv) + key % 2;
            for (int i = 0; i < z.dv; i++) pairs[2 * i] = values(block)[i];
        }
        Tile tile;
        tile.k_step = TILE;
        for (int i = 0; i < TILE_VECTORS; i++) {
            tile.k[i] = s.k_tile + i * LANES;
            tile.v[i] = s.v_tile + (int64_t)i * (LANES / per_unit<T>)*z.dv;
        }
        return tile;
    }

    // Rows [row, end) through tiles [first, stop) of a sequence.
    void attend(const Scratch& s, int row, int end, int seq, int64_t first, int64_t stop) const {
        if (c.plan->block_size < LANES) {
            for (int64_t j = first; j < stop; j++) attend_tile<T>(c, z, s, row, end, j, gather(seq, j, s), nullptr);
            return;
        }
        Tile tile = locate(seq, first);
        for (int64_t j = first; j < stop; j++) {
            const Tile next = locate(seq, std::min(j + 1, stop - 1));
            attend_tile<T>(c, z, s, row, end, j, tile, j + 1 < stop ? &next : nullptr);
            tile = next;
        }
    }
};

// A row of q or k as attention takes it: a copy of `from`, normalised and rotated where the call says so.
template <typename T>
void make_ready(const AttentionCall& c, const T* from, const void* weight, float epsilon, int64_t token, T* to) {
    if (weight)
        rows::norm_row(from, (const T*)weight, to, c.dk, epsilon);
    else
        memcpy(to, from, c.dk * sizeof(T));
    if (c.cos) rows::rotate_row(to, (const T*)c.cos + token * c.dk, (const T*)c.sin + token * c.dk, c.dk);
}

template <typename T>
void start_row(const AttentionCall& c, const Sizes<T>& z, const Scratch& s, int row, int64_t token, int head,
               int64_t position) {
    T* q = (T*)(s.q + (int64_t)row * z.steps);
    make_ready(c, (const T*)c.q + token * c.q_token + head * c.q_head, c.q_weight, c.q_epsilon, token, q);
    if (z.dk % per_unit<T>) q[z.dk] = T{};
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

// A chunk's keys and values go to their slots. The first in a block clears its values: those not written yet meet
// weights of zero, which must not be multiplied with what an earlier owner left.
template <typename T>
void write_sequence(const AttentionCall& c, const Sizes<T>& z, const Scratch& s, int seq, int kv_head) {
    const AttentionPlan& p = *c.plan;
    const Pool<T> pool{c, z, kv_head};
    T* k = (T*)s.k;
    const int size = p.block_size;
    for (int64_t token = p.token_starts[seq], position = p.first_position[seq]; token < p.token_starts[seq + 1];
         token++, position++) {
        const int64_t block = p.blocks[p.block_starts[seq] + position / size], inside = position % size;
        make_ready(c, (const T*)c.k + token * c.k_token + kv_head * c.k_head, c.k_weight, c.k_epsilon, token, k);
        const T* v = (const T*)c.v + token * c.v_token + kv_head * c.v_head;
        T* to = (T*)(pool.keys(block) + inside);
        constexpr int per = per_unit<T>;
        for (int d = 0; d < z.dk; d++) to[(int64_t)(d / per) * size * per + d % per] = k[d];
        if (z.dk % per) to[(int64_t)(z.dk / per) * size * per + 1] = T{};
        T* values = pool.values(block);
        if (inside == 0) memset(values, 0, (int64_t)size * z.dv * sizeof(T));
        values += pool.value_offset(inside);
        for (int64_t i = 0, stride = pool.channel_stride(); i < z.dv; i++) values[i * stride] = v[i];
    }
}

template <typename T>
void attend(const AttentionCall& c, Team& team) {
    const Sizes<T> z(c);
    const AttentionPlan& p = *c.plan;
    const int64_t num_writes = (int64_t)p.num_sequences * c.num_kv_heads;
    const int64_t num_reads = (int64_t)p.num_items * c.num_kv_heads;
    const Scratch scratch(c.scratch + omp_get_thread_num() * Scratch(nullptr, z).bytes(), z);
    const TileScope tiles(uses_amx(z));
#pragma omp for schedule(static) nowait
    for (int64_t i = 0; i < num_writes; i++) write_sequence<T>(c, z, scratch, i / c.num_kv_heads, i % c.num_kv_heads);
    team.meet();
#pragma omp for schedule(dynamic) nowait
    for (int64_t i = 0; i < num_reads; i++)
        attend_item<T>(c, z, scratch, p.items[i / c.num_kv_heads], i % c.num_kv_heads);
    team.meet();
}

}  // namespace

extern "C" {

void attention_plan(AttentionPlan* plan) { make_plan(*plan); }

int64_t attention_scratch(const AttentionCall* c) {
    return c->half ? Scratch(nullptr, Sizes<bf16>(*c)).bytes() : Scratch(nullptr, Sizes<float>(*c)).bytes();
}

void attention(const AttentionCall* c) {
    Team::run(c->num_threads, [&](Team& team) { attention_in_team(*c, team); });
}
}

void attention_in_team(const AttentionCall& c, Team& team) { c.half ? attend<bf16>(c, team) : attend<float>(c, team); }
