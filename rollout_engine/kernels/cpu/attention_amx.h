// `attention_tile.h` for bfloat16 on AMX tile registers, sixteen rows at a time.
#pragma once

#include "amx.h"
#include "attention_tile.h"

namespace tiles {

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

inline bool uses_amx(const Sizes<bf16>& z) { return z.dk % 32 == 0 && z.dv % TILE == 0 && amx::granted(); }

// Sets this thread's tile shapes for `attend_rows_amx` while it lives; oneDNN may have set others.
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

// Tile number j for up to 16 rows from `row` on; results of the rows past them are discarded.
inline void attend_rows_amx(const AttentionCall& c, const Sizes<bf16>& z, const Scratch& s, int row, int count, int64_t j,
                     const Tile& tile, const Tile* next) {
    Span seen[AMX_ROWS];
    look(c, s, row, count, j, seen);
    const Span around = Span::around(seen, count);
    if (around.empty()) return;
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
    weigh_rows<bf16>(c, s, seen, row, count, rescale);
    for (int column = 0; column < z.dv; column += TILE) {
        clear_sums();
        for (int part = around.low / LANES; part * LANES < around.high; part++) {
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

inline bool attend_tile_amx(const AttentionCall& c, const Sizes<bf16>& z, const Scratch& s, int row, int end, int64_t j,
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
inline bool uses_amx(const Sizes<bf16>&) { return false; }
inline bool attend_tile_amx(const AttentionCall&, const Sizes<bf16>&, const Scratch&, int, int, int64_t, const Tile&,
                     const Tile*) {
    return false;
}
#endif
inline bool uses_amx(const Sizes<float>&) { return false; }
inline bool attend_tile_amx(const AttentionCall&, const Sizes<float>&, const Scratch&, int, int, int64_t, const Tile&,
                     const Tile*) {
    return false;
}

}  // namespace tiles
