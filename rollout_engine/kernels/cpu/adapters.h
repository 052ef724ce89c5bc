// The products of `adapters.cpp`, for kernels that call them inside a parallel region of their own.
#pragma once

#include <cstdint>

#include "team.h"

// One adapter's matrices for one linear layer. Mirrored in adapters.py, as the others are.
struct AdapterPart {
    const void* a;  // [rank / 16][in_features][16]; null where the adapter leaves this layer alone
    const void* b;  // [size / 32 rounded up][rank][32]
    int64_t rank;   // padded with zeros to a multiple of 16
    int64_t column, size;  // of the layer's outputs within a row of all parts' outputs
    float scale;
};

// The adapters of layers that share an input and write side by side.
struct AdapterTable {
    const AdapterPart* parts;  // [slots, num_parts]; null where no adapter changes these layers
    int64_t num_parts, max_rank, in_features, out_features;
};

// Entries [first, first + count) of `AdapterRows::rows`, all of one adapter.
struct AdapterBlock {
    int32_t first, count, slot;
};

// The rows of a batch that have an adapter.
struct AdapterRows {
    const AdapterBlock* blocks;
    const int32_t* rows;  // [num_rows], row numbers in the batch; ascending in a block
    int64_t num_blocks, num_rows;
};

// One addition. Rows [begin, end) of the batch are those of x and out.
struct AdapterCall {
    const char* x;
    char* out;
    const AdapterTable* table;
    const AdapterRows* rows;
    float* low;                    // [num_rows, num_parts, max_rank]: x A
    int64_t x_stride, out_stride;  // elements
    int64_t begin, end;
    int32_t is_bf16, num_threads;
};

// low = x A. Every thread of a team calls this with the same `call`; it does not wait for the others.
void adapters_down_in_team(const AdapterCall& call);

// A rectangle of a row-major matrix: rows [begin, end), columns [from, to).
struct Rectangle {
    int64_t begin, end, from, to;
};

// out += scale * low B, in these rows and columns of `out`, by the thread that calls it.
void adapters_up(const AdapterCall& call, Rectangle in);
