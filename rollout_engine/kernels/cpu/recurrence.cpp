// The forward of `kernels.recurrence`: outputs of every token, and states from slot to slot.
//
// A work item is a chunk, a head and a block of columns of its state. The block is read from its slot by the first token and
// written to its slot by the last one; between them it stays in the cache, packed, and each token passes over it once. A
// chunk of one token reads and writes memory in place.
#include "recurrence.h"

#include "openmp.h"

namespace {

using namespace recurrence;

struct Scratch : Carved {
    float* tile;  // [K][WIDTH]
    Token tokens[2];

    Scratch(const Inputs& in, char* memory) : Carved(memory) {
        take(tile, (int64_t)in.key_size * WIDTH);
        for (Token& token : tokens)
            for (float** vector : {&token.key, &token.query, &token.decay, &token.decayed_key}) take(*vector, in.padded_key());
    }
};

struct Item {
    const RecurrenceCall& c;
    const Inputs& in;
    int64_t chunk;
    int head, column, width;

    // The block in a slot, rows as far apart as the state's.
    Place slot(int64_t number) const {
        return {c.states + (number * in.num_heads + head) * in.key_size * in.value_size + column, in.value_size};
    }

    // The block of the chunk's source: in place if its rows are whole vectors, else a copy in the tile.
    Place load(Place tile) const {
        const int64_t source = in.chunks.sources()[chunk];
        if (source >= 0 && width == WIDTH) return slot(source);
        std::fill_n(tile.data, (int64_t)in.key_size * WIDTH, 0.0f);
        if (source >= 0) copy_columns(slot(source).data, in.value_size, tile.data, WIDTH, in.key_size, width);
        return tile;
    }

    void write_out(int64_t t, const F (&v)[VECTORS], const F (&out)[VECTORS]) const {
        const int64_t place = t * c.out_token + (int64_t)head * in.value_size + column;
        for (int i = 0; i < VECTORS; i++) {
            const int n = lanes_of(width, i);
            if (!n) break;
            const F x = in.skip ? vec::fma(vec::set1(in.skip[head]), v[i], out[i]) : out[i];
            if (in.v.half)
                rows::store_first((bf16*)c.out + place + i * LANES, x, n);
            else
                rows::store_first((float*)c.out + place + i * LANES, x, n);
        }
    }

    // The block that the item reads in place; null if it reads none.
    Place source() const {
        const int64_t source = in.chunks.sources()[chunk];
        return source >= 0 ? slot(source) : Place{};
    }

    // `ahead`: the block that this thread reads next, or null.
    template <bool DELTA>
    void run(Scratch& scratch, Place ahead) const {
        const int64_t first = in.chunks.starts()[chunk], end = in.chunks.starts()[chunk + 1];
        if (first == end) return;
        const Place tile{scratch.tile, WIDTH};
        Token now = scratch.tokens[0], next = scratch.tokens[1];
        int64_t write = in.chunks.write_starts()[chunk];
        const int64_t last_write = in.chunks.write_starts()[chunk + 1];
        Place state = load(tile);
        now.prepare(in, first, head);
        F recalled[VECTORS] = {};
        if (DELTA) recall(state, in.key_size, now, recalled);
        for (int64_t t = first; t < end; t++) {
            F v[VECTORS], u[VECTORS], out[VECTORS] = {}, next_recalled[VECTORS] = {};
            load_values(in, t, head, column, width, v);
            const F beta = vec::set1(in.beta_of(t, head));
            for (int i = 0; i < VECTORS; i++) u[i] = vec::product(beta, DELTA ? v[i] - recalled[i] : v[i]);
            const bool is_written = write < last_write && in.chunks.write_ends()[write] == t + 1;
            const Place to = is_written && width == WIDTH ? slot(in.chunks.write_slots()[write]) : tile;
            if (t + 1 < end) next.prepare(in, t + 1, head);
            if (DELTA && t + 1 < end)
                advance<true, true>(state, to, in.key_size, now, next, u, out, next_recalled);
            else if (ahead.data)
                advance<true, false, true>(state, to, in.key_size, now, now, u, out, next_recalled, ahead);
            else
                advance<true, false>(state, to, in.key_size, now, now, u, out, next_recalled);
            write_out(t, v, out);
            if (is_written && width < WIDTH)
                copy_columns(tile.data, WIDTH, slot(in.chunks.write_slots()[write]).data, in.value_size, in.key_size, width);
            write += is_written;
            state = to;
            std::swap(now, next);
            for (int i = 0; i < VECTORS; i++) recalled[i] = next_recalled[i];
        }
    }
};

}  // namespace

void recurrence_in_team(const RecurrenceCall& c, Team& team) {
    const Inputs& in = c.in;
    const int64_t blocks = (in.value_size + WIDTH - 1) / WIDTH, num_heads = in.chunks.num_chunks * in.num_heads;
    // Blocks of a state are neighbours in memory: an item is all of them, if there are enough heads for the threads.
    const int64_t total = num_heads * blocks, share = num_heads < 4 * in.num_threads ? 1 : std::max<int64_t>(blocks, 1);
    const int64_t bundle =
        in.num_threads == 1 ? std::max<int64_t>(total, 1) : std::clamp<int64_t>(total / share / (8 * in.num_threads), 1, 8) * share;
    Scratch scratch(in, c.scratch + omp_get_thread_num() * Scratch(in, nullptr).bytes());
    const auto item_at = [&](int64_t i) {
        const int column = i % blocks * WIDTH;
        return Item{c, in, i / blocks / in.num_heads, (int)(i / blocks % in.num_heads), column,
                    std::min(WIDTH, in.value_size - column)};
    };
#pragma omp for schedule(dynamic) nowait
    for (int64_t first = 0; first < total; first += bundle) {
        const int64_t end = std::min(first + bundle, total);
        for (int64_t i = first; i < end; i++) {
            const Place ahead = blocks == 1 && i + 1 < end ? item_at(i + 1).source() : Place{};
            in.delta ? item_at(i).run<true>(scratch, ahead) : item_at(i).run<false>(scratch, ahead);
        }
    }
    team.meet();
}

extern "C" {

int64_t recurrence_scratch(const RecurrenceCall* c) { return Scratch(c->in, nullptr).bytes(); }

void recurrence_run(const RecurrenceCall* c) {
    Team::run(c->in.num_threads, [&](Team& team) { recurrence_in_team(*c, team); });
}
}
