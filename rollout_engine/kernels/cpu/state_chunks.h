// `kernels.state_chunks.StateChunks` as C++ reads it: five arrays of int64, end to end. Python has checked them.
#pragma once

#include <cstdint>

// N chunks with W writes; mirrored in state_chunks.py.
struct StateChunks {
    const int64_t* table;
    int64_t num_chunks, num_writes;  // N, W

    // Chunk n is tokens [starts()[n], starts()[n + 1]).
    const int64_t* starts() const { return table; }
    // Slot of the state before its first token; -1: zeros.
    const int64_t* sources() const { return starts() + num_chunks + 1; }
    // Its writes are [write_starts()[n], write_starts()[n + 1]): the state behind the first `write_ends()[w]` tokens of all.
    const int64_t* write_starts() const { return sources() + num_chunks; }
    const int64_t* write_ends() const { return write_starts() + num_chunks + 1; }
    const int64_t* write_slots() const { return write_ends() + num_writes; }
};
