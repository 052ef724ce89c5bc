// Packing of weights into panels, from a source or in place.
#include "panels.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "openmp.h"
#include "vec.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace {

using namespace panels;

// Square blocks of units are transposed in registers.
#ifdef __AVX512F__
constexpr int SIDE = 16;
#define INTERLEAVED(first, h)                                                                                             \
    first, first + h, first + 1, first + 1 + h, first + 2, first + 2 + h, first + 3, first + 3 + h, first + 4, first + 4 + h, \
        first + 5, first + 5 + h, first + 6, first + 6 + h, first + 7, first + 7 + h
#else
constexpr int SIDE = 4;
#define INTERLEAVED(first, h) first, first + h, first + 1, first + 1 + h
#endif
typedef int32_t Row __attribute__((vector_size(4 * SIDE)));

// Halves of `a` and `b`, interleaved: the low ones, and the high ones.
#ifdef __clang__
VEC_INLINE Row low_halves(Row a, Row b) { return __builtin_shufflevector(a, b, INTERLEAVED(0, SIDE)); }
VEC_INLINE Row high_halves(Row a, Row b) { return __builtin_shufflevector(a, b, INTERLEAVED(SIDE / 2, SIDE)); }
#else
constexpr Row LOW = {INTERLEAVED(0, SIDE)}, HIGH = LOW + SIDE / 2;
VEC_INLINE Row low_halves(Row a, Row b) { return __builtin_shuffle(a, b, LOW); }
VEC_INLINE Row high_halves(Row a, Row b) { return __builtin_shuffle(a, b, HIGH); }
#endif

// SIDE units of SIDE rows -> SIDE rows, `stride` units apart, by interleaving halves.
VEC_INLINE void transpose(const int32_t* const* rows, int64_t unit, int32_t* out, int64_t stride) {
    Row block[SIDE], mixed[SIDE];
    for (int i = 0; i < SIDE; ++i) std::memcpy(&block[i], rows[i] + unit, sizeof(Row));
    for (int round = 1; round < SIDE; round *= 2) {
        for (int i = 0; i < SIDE / 2; ++i) {
            mixed[2 * i] = low_halves(block[i], block[i + SIDE / 2]);
            mixed[2 * i + 1] = high_halves(block[i], block[i + SIDE / 2]);
        }
        std::memcpy(block, mixed, sizeof block);
    }
    for (int i = 0; i < SIDE; ++i) std::memcpy(out + i * stride, &block[i], sizeof(Row));
}

// Sixteen units of sixteen rows of W -> sixteen columns of a panel.
void pack_block(const int32_t* const* rows, int64_t unit, int32_t* out) {
    for (int column = 0; column < 16; column += SIDE)
        for (int u = 0; u < 16; u += SIDE) transpose(rows + column, unit + u, out + u * PANEL + column, PANEL);
}

// Sixteen columns, of which `columns` exist: rows of `row_bytes`, `stride` bytes apart, from `weight` on.
void pack_half(const char* weight, int64_t stride, int64_t row_bytes, int64_t columns, int64_t units, int32_t* out) {
    columns = std::clamp<int64_t>(columns, 0, 16);
    const int32_t* rows[16];
    for (int64_t n = 0; n < columns; ++n) rows[n] = reinterpret_cast<const int32_t*>(weight + n * stride);
    int64_t unit = 0;
    if (columns == 16)
        for (; (unit + UNIT_BLOCK) * 4 <= row_bytes; unit += UNIT_BLOCK) pack_block(rows, unit, out + unit * PANEL);
    for (; unit < units; unit += UNIT_BLOCK) {  // where N or K ends: through a copy filled up with zeros
        int32_t copy[16][UNIT_BLOCK] = {};
        const int32_t* copies[16];
        const int64_t bytes = std::clamp<int64_t>(row_bytes - unit * 4, 0, 4 * UNIT_BLOCK);
        for (int64_t n = 0; n < columns; ++n)
            std::memcpy(copy[n], reinterpret_cast<const char*>(rows[n]) + unit * 4, bytes);
        for (int64_t n = 0; n < 16; ++n) copies[n] = copy[n];
        pack_block(copies, 0, out + unit * PANEL);
    }
}

// A panel -> 32 rows, `units` apart.
void unpack_panel(const int32_t* panel, int64_t units, int32_t* out) {
    const int32_t* rows[SIDE];
    for (int64_t unit = 0; unit < units; unit += SIDE) {
        for (int i = 0; i < SIDE; ++i) rows[i] = panel + (unit + i) * PANEL;
        for (int64_t column = 0; column < PANEL; column += SIDE)
            transpose(rows, column, out + column * units + unit, units);
    }
}

// Neighbouring panels of a weight [out_features, in_features], and where they are written.
struct Run {
    const int32_t* from;
    int32_t* to;
    int64_t out_features, in_features, is_bf16;

    int64_t units() const { return padded_units(in_features, is_bf16); }
    int64_t panels() const { return divided_up(out_features, PANEL); }
};

enum Move : int32_t { COPY, UNPACK, PACK };

void move_panel(const Run& run, int64_t panel, int32_t move, int32_t* rows) {
    const int64_t units = run.units(), size = PANEL * units, columns = run.out_features - panel * PANEL;
    const int32_t* from = run.from + panel * size;
    int32_t* to = run.to + panel * size;
    if (move == UNPACK) return unpack_panel(from, units, to);
    if (move == COPY) {
        std::memcpy(to, from, 4 * size);
        return;
    }
    std::memcpy(rows, from, 4 * size);  // perhaps the same memory
    const char* weight = reinterpret_cast<const char*>(rows);
    const int64_t row_bytes = run.in_features * (run.is_bf16 ? 2 : 4);
    pack_half(weight, 4 * units, row_bytes, columns, units, to);
    pack_half(weight + 16 * 4 * units, 4 * units, row_bytes, columns - 16, units, to + 16);
}

}  // namespace

extern "C" {

// Request huge pages: fewer page faults in packing, fewer TLB misses in every product.
void gemm_ask_for_large_pages(void* memory, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    constexpr uintptr_t LARGE = 2 << 20;
    const uintptr_t begin = (reinterpret_cast<uintptr_t>(memory) + LARGE - 1) / LARGE * LARGE;
    const uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + bytes) / LARGE * LARGE;
    if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

// weight [out_features, in_features] -> packed [panels, units, 32].
void gemm_pack(const char* weight, int64_t out_features, int64_t in_features, int32_t is_bf16, int32_t* packed,
               int32_t num_threads) {
    const int64_t units = padded_units(in_features, is_bf16), row_bytes = in_features * (is_bf16 ? 2 : 4);
    const int64_t panels = divided_up(out_features, PANEL);
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int64_t panel = 0; panel < panels; ++panel) {
        const int64_t first = panel * PANEL, columns = out_features - first;
        int32_t* out = packed + first * units;
        pack_half(weight + first * row_bytes, row_bytes, row_bytes, columns, units, out);
        pack_half(weight + (first + 16) * row_bytes, row_bytes, row_bytes, columns - 16, units, out + 16);
    }
}

// Copies, unpacks or packs panels. Rows that are packed, or were unpacked, are `units` apart: 32 of them take the bytes of
// one panel, and may be packed where they are.
void gemm_move_panels(const Run* runs, int64_t count, int32_t move, int32_t num_threads) {
    std::vector<int64_t> ends;  // counts panels
    int64_t largest = 0;
    for (int64_t i = 0; i < count; ++i) {
        ends.push_back((i ? ends.back() : 0) + runs[i].panels());
        largest = std::max(largest, PANEL * runs[i].units());
    }
#pragma omp parallel num_threads(num_threads)
    {
        std::vector<int32_t> rows(move == PACK ? largest : 0);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < (count ? ends.back() : 0); ++i) {
            const int64_t run = std::upper_bound(ends.begin(), ends.end(), i) - ends.begin();
            move_panel(runs[run], i - (ends[run] - runs[run].panels()), move, rows.data());
        }
    }
}
}
