// The plan of a step's attention: which rows are computed together. Sequences with a common start of their block tables
// are, so that shared KV is read once.
#include <algorithm>

#include "attention.h"

namespace {

// Whole tiles that two decoding sequences both read and both hold in the same blocks.
int common_tiles(const AttentionPlan& p, int a, int b) {
    const int32_t *x = p.blocks + p.block_starts[a], *y = p.blocks + p.block_starts[b];
    const int64_t longest = std::min(p.first_position[a], p.first_position[b]) + 1;
    const int64_t limit = longest / ATTENTION_TILE * (ATTENTION_TILE / p.block_size);
    return (std::mismatch(x, x + limit, y).first - x) / (ATTENTION_TILE / p.block_size);
}

// Limit of sequences without shared KV in one item, which reads them in turn: each prefetches the next one's first tile.
constexpr int IN_TURN = 8;

// End of the group of decoding sequences from `first` on: one joins while that does not reduce the number of saved tiles.
int group_end(const AttentionPlan& p, int first, int num_decoding, int limit, int* shared) {
    int end = first + 1;
    *shared = 0;
    for (int64_t tiles = 1 << 30; end < num_decoding && end - first < limit; end++) {
        const int64_t with = std::min<int64_t>(tiles, common_tiles(p, p.members[end - 1], p.members[end]));
        const int64_t members = end - first;
        if (!with || (members > 1 && with * members < tiles * (members - 1))) break;
        *shared = tiles = with;
    }
    if (*shared) return end;
    const int last = std::min(num_decoding, first + std::min(limit, IN_TURN));
    while (end < last && (end + 1 == num_decoding || !common_tiles(p, p.members[end], p.members[end + 1]))) end++;
    return end;
}

void make_plan(AttentionPlan& p) {
    int num_decoding = 0, num_others = p.num_sequences;
    for (int s = 0; s < p.num_sequences; s++) p.members[p.chunk_length(s) == 1 ? num_decoding++ : --num_others] = s;
    std::sort(p.members, p.members + num_decoding, [&p](int a, int b) {
        const int32_t *x = p.blocks + p.block_starts[a], *y = p.blocks + p.block_starts[b];
        const int64_t n = std::min(p.table_length(a), p.table_length(b));
        const int64_t same = std::mismatch(x, x + n, y).first - x;
        return same < n ? x[same] < y[same] : a < b;
    });
    // Large groups are split so that every thread has work.
    const int limit = std::clamp(num_decoding / std::max(1, p.items_wanted), 1, ATTENTION_ITEM_TOKENS);
    p.num_items = 0;
    for (int m = 0, end, shared; m < num_decoding; m = end) {
        end = group_end(p, m, num_decoding, limit, &shared);
        p.items[p.num_items++] = {m, end - m, 0, 1, shared};
    }
    for (int m = num_decoding; m < p.num_sequences; m++) {
        const int length = p.chunk_length(p.members[m]);
        for (int t = 0; t < length; t += ATTENTION_ITEM_TOKENS)
            p.items[p.num_items++] = {m, 1, t, std::min(ATTENTION_ITEM_TOKENS, length - t), 0};
    }
}

// The first sequence whose table does not cover its chunk, or names a block below 0; -1: none. Chunks lie end to end.
int first_wrong(AttentionPlan& p) {
    constexpr int64_t FARTHEST = 1ll << 40;
    p.max_block = -1;
    for (int s = 0; s < p.num_sequences; s++) {
        if (p.chunk_length(s) < 0 || p.first_position[s] < 0 || p.first_position[s] > FARTHEST) return s;
        const int64_t start = p.block_starts[s], length = p.chunk_length(s) ? p.table_length(s) : 0;
        if (start < 0 || start > p.num_entries || length > p.num_entries - start) return s;
        for (const int32_t* block = p.blocks + start; block < p.blocks + start + length; block++) {
            if (*block < 0) return s;
            p.max_block = std::max(p.max_block, *block);
        }
    }
    return -1;
}

}  // namespace

// Returns -1, or the first sequence whose columns are invalid; the plan must not be used then.
extern "C" int32_t attention_plan(AttentionPlan* plan) {
    const int wrong = first_wrong(*plan);
    if (wrong < 0) make_plan(*plan);
    return wrong;
}
