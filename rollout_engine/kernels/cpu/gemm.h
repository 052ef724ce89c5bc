// The product of `gemm.cpp`, for kernels that call it inside a parallel region of their own.
#pragma once

#include <cstdint>

#include "adapters.h"
#include "panels.h"
#include "team.h"

// One product; `Call` of gemm.py.
struct GemmCall {
    const char* x;          // [rows, in_features]; columns are dense, here and in `out`
    const void* packed;     // [panels, units, 32], or int8 codes of their elements
    const void* bias;       // [out_features] or null
    char* out;              // [rows, out_features]
    char* staging;          // gemm_staging_bytes(), aligned to a cache line
    int64_t rows, in_features, out_features;
    int32_t is_bf16, num_threads;
    int32_t float32_out;    // sums of bfloat16 products are written as they are, not rounded to bfloat16
    const AdapterCall* adapters;  // added to `out` as it is written; or null
    int64_t x_stride, out_stride;  // elements from one row to the next
    const float* scales;    // [panels * 32] of the codes; null: `packed` holds weights (`int8.h`)
};

// Bytes of the copy of x in `staging`.
inline int64_t gemm_copy_bytes(int64_t rows, int64_t in_features, bool is_bf16) {
#ifdef __AVX512F__
    constexpr int64_t BYTES = 2;  // of an element
#else
    constexpr int64_t BYTES = 4;
#endif
    return is_bf16 ? (rows + 15) / 16 * 16 * (((in_features + 31) / 32 + 1) * 32) * BYTES : 0;
}

// Bytes of `staging` that any product of this size needs. With int8 codes every thread has a panel of weights behind the copy.
inline int64_t gemm_staging_bytes(int64_t rows, int64_t in_features, bool is_bf16, bool is_int8, int64_t num_threads) {
    const int64_t panel = panels::padded_units(in_features, is_bf16) * panels::PANEL * 4;
    return gemm_copy_bytes(rows, in_features, is_bf16) + (is_int8 ? panel * num_threads : 0);
}

// Every thread of a team calls this with the same `call`; returns once the whole product is written. With adapters, all
// have called adapters_down_in_team() before, and need not have met since.
void gemm_in_team(const GemmCall& call, Team& team);
