// Attention over paged KV, read in place: decode, prefill and both in one flat batch.
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
// Latents (multi-head latent attention, DeepSeek-V2): one key for all heads, whose first dv channels are the value too. Their
// pool is rows [num_blocks, block_size, dk], and a tile of it is turned into the layouts above before rows read it. The
// heads may be cut into any number of parts, as if these were KV heads: bits do not depend on it.
//
// Three ways to multiply, chosen by shape and CPU alone (never by the number of rows, since they round differently): AMX
// tiles of 16 rows, else vectors of sixteen: VDPBF16PS, or fused multiply-adds.
#include "attention.h"

#include <algorithm>

#include "attention_amx.h"
#include "attention_tile.h"
#include "attention_turn.h"
#include "openmp.h"
#include "rows.h"
#include "vec.h"

namespace {

using vec::LANES;
using namespace tiles;

// Rows [row, end) over tile number j; together they prefetch the next one.
template <typename T>
void attend_tile(const AttentionCall& c, const Sizes<T>& z, const Scratch& s, int row, int end, int64_t j,
                 const Tile& tile, const Tile* next) {
    if (attend_tile_amx(c, z, s, row, end, j, tile, next)) return;
    Fetch ahead = {next, 0, (end - row + ROWS - 1) / ROWS};
    for (; row < end; row += BATCH, ahead.first += BATCH / ROWS)
        attend_batch<T>(c, z, s, row, std::min(BATCH, end - row), j, tile, ahead);
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

    bool has_latents() const { return !c.values; }
    T* latents(int64_t block) const { return (T*)c.keys + block * c.plan->block_size * z.dk; }

    // Channel 0 of a position in `values`, and how far its channels lie apart.
    int64_t channel_stride() const { return std::min(per_unit<T>, c.plan->block_size); }
    int64_t value_offset(int64_t inside) const {
        const int64_t stride = channel_stride();
        return inside / stride * stride * z.dv + inside % stride;
    }

    // Tile j of sequence s, read in place. Parts past its table repeat the last block, which no row sees.
    Tile locate(int seq, int64_t j) const {
        const AttentionPlan& p = *c.plan;
        const int32_t* blocks = p.blocks + p.block_starts[seq];
        const int64_t last = p.table_length(seq) - 1;
        Tile tile;
        if (has_latents()) return tile;  // nothing is read in place
        tile.k_step = p.block_size;
        tile.num_parts = std::clamp<int64_t>((last + 1) * p.block_size - j * TILE, LANES, TILE) / LANES;
        for (int i = 0; i < TILE_VECTORS; i++) {
            const int64_t position = j * TILE + i * LANES;
            const int64_t index = position / p.block_size, inside = position % p.block_size;
            const int64_t block = blocks[std::min(index, last)];
            tile.k[i] = keys(block) + inside;
            tile.v[i] = (const uint32_t*)(values(block) + inside * z.dv);
        }
        return tile;
    }

    // The same for latents, and for blocks of fewer than sixteen positions: copied, in the layout of blocks of 64.
    Tile gather(int seq, int64_t j, const Scratch& s) const {
        const AttentionPlan& p = *c.plan;
        const int size = p.block_size;
        const int32_t* blocks = p.blocks + p.block_starts[seq];
        const int64_t last = p.table_length(seq) - 1;
        const T* rows[TILE];
        for (int key = 0; key < TILE; key += size) {
            const int64_t block = blocks[std::min((j * TILE + key) / size, last)];
            if (has_latents()) {
                for (int i = 0; i < size; i++) rows[key + i] = latents(block) + i * z.dk;
                continue;
            }
            for (int d = 0; d < z.steps; d++) memcpy(s.k_tile + d * TILE + key, keys(block) + d * size, size * 4);
            if (size >= per_unit<T>) {
                memcpy((T*)s.v_tile + (int64_t)key * z.dv, values(block), (int64_t)size * z.dv * sizeof(T));
                continue;
            }
            T* pairs = (T*)(s.v_tile + (int64_t)(key / 2) * z.dv) + key % 2;
            for (int i = 0; i < z.dv; i++) pairs[2 * i] = values(block)[i];
        }
        if (has_latents()) {
            turn_keys(rows, z, s.k_tile);
            turn_values(rows, z.dv, s.v_tile);
        }
        Tile tile;
        tile.k_step = TILE;
        tile.num_parts = TILE_VECTORS;
        for (int i = 0; i < TILE_VECTORS; i++) {
            tile.k[i] = s.k_tile + i * LANES;
            tile.v[i] = s.v_tile + (int64_t)i * (LANES / per_unit<T>)*z.dv;
        }
        return tile;
    }

    // Rows [row, end) through tiles [first, stop) of a sequence; `after` is read next.
    void attend(const Scratch& s, int row, int end, int seq, int64_t first, int64_t stop, const Tile* after) const {
        if (has_latents() || c.plan->block_size < LANES) {
            for (int64_t j = first; j < stop; j++) attend_tile<T>(c, z, s, row, end, j, gather(seq, j, s), nullptr);
            return;
        }
        Tile tile = locate(seq, first);
        for (int64_t j = first; j < stop; j++) {
            const Tile next = locate(seq, std::min(j + 1, stop - 1));
            attend_tile<T>(c, z, s, row, end, j, tile, j + 1 < stop ? &next : after);
            tile = next;
        }
    }
};

struct HeadNorm {
    const void* weight;  // or null: there is none
    float epsilon;
    int32_t has_offset;
};

// Copy a row of q or k from `from`, normalised and rotated where the call says so.
template <typename T>
void make_ready(const AttentionCall& c, const T* from, HeadNorm norm, int64_t token, T* to) {
    if (!norm.weight)
        memcpy(to, from, c.dk * sizeof(T));
    else if (norm.has_offset)
        rows::offset_norm_row(from, (const T*)norm.weight, to, c.dk, norm.epsilon);
    else
        rows::norm_row(from, (const T*)norm.weight, to, c.dk, norm.epsilon);
    if (c.cos) rows::rotate_row(to, (const T*)c.cos + token * c.rotary, (const T*)c.sin + token * c.rotary, c.rotary);
}

template <typename T>
void start_row(const AttentionCall& c, const Sizes<T>& z, const Scratch& s, int row, int64_t token, int head,
               int64_t position) {
    T* q = (T*)(s.q + (int64_t)row * z.steps);
    make_ready(c, (const T*)c.q + token * c.q_token + head * c.q_head, {c.q_weight, c.q_epsilon, c.q_offset}, token, q);
    if (c.q_factors) rows::scale_row(q, ((const T*)c.q_factors)[token], c.dk);
    if (z.dk % per_unit<T>) q[z.dk] = T{};
    memset(s.out + (int64_t)row * z.padded_dv, 0, z.padded_dv * sizeof(float));
    memset(s.total + (int64_t)row * LANES, 0, LANES * sizeof(float));
    s.position[row] = position;
    s.last[row] = position + (c.reach ? c.reach[token] : 0);
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
    T* to = (T*)c.out + token * c.out_token + head * z.dv;
    int column = 0;
    for (; column + LANES <= z.dv; column += LANES) vec::store(to + column, vec::load(from + column) / total + 0.0f);
    if (column < z.dv) vec::store(to + column, vec::load(from + column) / total + 0.0f, z.dv - column);
    if (c.lse) c.lse[token * c.num_heads + head] = s.top[row] + __builtin_logf(total);
}

// Calls visit(row, token in the flat batch, query head, position) for every row of an item.
template <typename Visit>
void each_row(const AttentionCall& c, const AttentionItem& item, int kv_head, int group, Visit visit) {
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
void attend_item(const AttentionCall& c, const Sizes<T>& z, const Scratch& s, const AttentionItem& item, int kv_head) {
    const AttentionPlan& p = *c.plan;
    const Pool<T> pool{c, z, kv_head};
    each_row(c, item, kv_head, z.group,
             [&](int row, int64_t token, int head, int64_t at) { start_row<T>(c, z, s, row, token, head, at); });
    const int rows = item.num_tokens * z.group;  // of one member
    const int32_t* members = p.members + item.first_member;
    auto first_tile = [&](int m) {
        return c.sliding_window ? std::max<int64_t>(0, s.position[m * rows] + 1 - c.sliding_window) / TILE : 0;
    };
    auto first_own = [&](int m) { return std::max<int64_t>(item.shared_tiles, first_tile(m)); };
    if (item.shared_tiles) {
        int64_t first = first_tile(0);
        for (int m = 1; m < item.num_members; m++) first = std::min(first, first_tile(m));
        const Tile after = pool.locate(members[0], first_own(0));
        if (first < item.shared_tiles)
            pool.attend(s, 0, rows * item.num_members, members[0], first, item.shared_tiles, &after);
    }
    for (int m = 0; m < item.num_members; m++) {
        const int row = m * rows, end = row + rows;
        const bool is_last = m + 1 == item.num_members;
        const Tile after = is_last ? Tile() : pool.locate(members[m + 1], first_own(m + 1));
        pool.attend(s, row, end, members[m], first_own(m), s.last[end - 1] / TILE + 1, is_last ? nullptr : &after);
    }
    each_row(c, item, kv_head, z.group,
             [&](int row, int64_t token, int head, int64_t) { finish_row<T>(c, z, s, row, token, head); });
}

// --- the step ------------------------------------------------------------------------------------------------------------

// Write the first or second half of each unit; the other is unchanged.
void write_half(uint32_t* units, const uint16_t* halves, int count, int second) {
    const uint32_t stays = second ? 0xffff : 0xffff0000;
    for (int i = 0; i < count; i++) units[i] = (units[i] & stays) | (uint32_t)halves[i] << 16 * second;
}

// Write a chunk's keys and values to their slots. The first in a block clears its values: positions not written yet get
// zero weights, and zero times an earlier owner's NaN or inf is NaN.
template <typename T>
void write_sequence(const AttentionCall& c, const Sizes<T>& z, const Scratch& s, int seq, int kv_head) {
    const AttentionPlan& p = *c.plan;
    const Pool<T> pool{c, z, kv_head};
    const int size = p.block_size;
    const int64_t begin = p.token_starts[seq];
    for (int64_t token = begin, position = p.first_position[seq]; token < p.token_starts[seq + 1]; token++, position++) {
        const int64_t block = p.blocks[p.block_starts[seq] + position / size], inside = position % size;
        if (pool.has_latents()) {
            if (inside == 0) memset(pool.latents(block), 0, (int64_t)size * z.dk * sizeof(T));
            memcpy(pool.latents(block) + inside * z.dk, (const T*)c.k + token * c.k_token, z.dk * sizeof(T));
            continue;
        }
        uint32_t* keys = pool.keys(block) + inside;
        T* values = pool.values(block) + pool.value_offset(inside);
        if (token == begin || inside == 0) {  // ask for the lines that this block's tokens go to
            for (int d = 0; d < z.steps; d++) __builtin_prefetch(keys + (int64_t)d * size, 1);
            for (int i = 0; i < z.dv; i += LANES) __builtin_prefetch((uint32_t*)values + i, 1);
        }
        T* k = (T*)s.k;
        make_ready(c, (const T*)c.k + token * c.k_token + kv_head * c.k_head, {c.k_weight, c.k_epsilon, c.k_offset}, token, k);
        if (z.dk % per_unit<T>) k[z.dk] = T{};
        for (int d = 0; d < z.steps; d++) keys[(int64_t)d * size] = s.k[d];
        if (inside == 0) memset(pool.values(block), 0, (int64_t)size * z.dv * sizeof(T));
        const T* v = (const T*)c.v + token * c.v_token + kv_head * c.v_head;
        if (pool.channel_stride() == 1)
            memcpy(values, v, z.dv * sizeof(T));
        else
            write_half((uint32_t*)(values - inside % 2), (const uint16_t*)v, z.dv, inside % 2);
    }
}

template <typename T>
void attend(const AttentionCall& c, Team& team) {
    const Sizes<T> z(c);
    const AttentionPlan& p = *c.plan;
    const int num_written = !c.k ? 0 : c.values ? c.num_kv_heads : 1;  // heads
    const int64_t num_writes = (int64_t)p.num_sequences * num_written;
    const int64_t num_reads = (int64_t)p.num_items * c.num_kv_heads;
    const Scratch scratch(c.scratch + omp_get_thread_num() * Scratch(nullptr, z).bytes(), z);
    const TileScope tiles(uses_amx(z));
#pragma omp for schedule(static) nowait
    for (int64_t i = 0; i < num_writes; i++) write_sequence<T>(c, z, scratch, i / num_written, i % num_written);
    if (num_writes) team.meet();
#pragma omp for schedule(dynamic) nowait
    for (int64_t i = 0; i < num_reads; i++)
        attend_item<T>(c, z, scratch, p.items[i / c.num_kv_heads], i % c.num_kv_heads);
    team.meet();
}

}  // namespace

extern "C" {

int64_t attention_scratch(const AttentionCall* c) {
    return c->half ? Scratch(nullptr, Sizes<bf16>(*c)).bytes() : Scratch(nullptr, Sizes<float>(*c)).bytes();
}

void attention(const AttentionCall* c) {
    Team::run(c->num_threads, [&](Team& team) { attention_in_team(*c, team); });
}
}

void attention_in_team(const AttentionCall& c, Team& team) { c.half ? attend<bf16>(c, team) : attend<float>(c, team); }
