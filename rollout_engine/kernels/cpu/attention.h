// The attention of `attention.cpp`, for kernels that call it inside a parallel region of their own.
#pragma once

#include <cstdint>

#include "team.h"

constexpr int ATTENTION_TILE = 64;         // positions, counted from 0
constexpr int ATTENTION_ITEM_TOKENS = 32;  // query tokens of one work item at most: their state stays in the L2 cache

// Rows computed together.
struct AttentionItem {
    int32_t first_member, num_members;  // in `members`
    int32_t first_token, num_tokens;    // of each member's chunk
    int32_t shared_tiles;               // read once for all members
};

// One step's sequences; the same for all layers. Mirrored in attention.py.
struct AttentionPlan {
    const int32_t* blocks;          // block tables
    const int64_t* block_starts;    // [N] in `blocks`
    const int64_t* token_starts;    // [N + 1] in the flat batch
    const int64_t* first_position;  // [N] of each chunk
    int32_t* members;               // [N], out
    AttentionItem* items;           // [N + num_tokens / 32], out
    int64_t num_entries;            // of `blocks`
    int32_t num_sequences, block_size, num_items, items_wanted;
    int32_t max_block;              // out: the largest block that is read or written

    int64_t chunk_length(int s) const { return token_starts[s + 1] - token_starts[s]; }
    int64_t table_length(int s) const { return (first_position[s] + chunk_length(s) - 1) / block_size + 1; }
};

// One layer. Strides are in elements; the last dimension is dense. Mirrored in attention.py.
struct AttentionCall {
    const AttentionPlan* plan;
    const void *q, *k, *v;             // [T, H, dk], [T, Hk, dk], [T, Hk, dv]; without k nothing is written
    void* out;                         // [T, H, dv]; heads are dense
    float* lse;                        // [T, H] log-sum-exp, or null
    void *keys, *values;               // the pool; without values, latents (see attention.cpp)
    const float* sinks;                // [H] one more logit for each head, or null
    char* scratch;                     // num_threads * attention_scratch()
    const void *q_weight, *k_weight;   // [dk] of an RMSNorm still to be done to each head, or null
    const void *cos, *sin;             // [T, rotary] of the rotation still to be done after that, or null
    const void* q_factors;             // [T] of the queries, to be multiplied after the rotation, or null
    const int32_t* reach;              // [T] positions behind its own that each query sees, or null: none
    int64_t q_token, q_head, k_token, k_head, v_token, v_head, out_token;
    int32_t num_tokens, num_heads, num_kv_heads, dk, dv;
    int32_t half;  // bfloat16, else float32
    int32_t num_threads, sliding_window;
    float scale, softcap, q_epsilon, k_epsilon;
    int32_t rotary;                 // the first channels of a head, which are rotated
    int32_t q_offset, k_offset;     // whether 1 is added to the weight of the RMSNorm
};

// Bytes of scratch a thread needs.
extern "C" int64_t attention_scratch(const AttentionCall* call);

// Every thread of a team calls this with the same `call`; returns once all of `out` is written.
void attention_in_team(const AttentionCall& call, Team& team);
