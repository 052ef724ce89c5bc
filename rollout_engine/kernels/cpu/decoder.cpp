// All decoder layers of one step over the flat batch, in one parallel region: per layer
//
//     x += attention(norm(x))        norm -> q, k, v in one product -> attention (norms q and k, rotates, writes KV) -> product
//     x += mlp(norm(x))              norm -> gate, up in one product -> silu(gate) * up -> product
//
// Each product gets the adapters of those rows that have one. Every value is rounded where the Hugging Face modules round it. There is a barrier after every step of a layer; bits do
// not depend on the number of threads.
#include <algorithm>

#include "adapters.h"
#include "attention.h"
#include "carved.h"
#include "gemm.h"
#include "rows.h"

namespace {

constexpr int64_t MLP_ROWS = 1024;  // computed at once: of gate and up, not more than caches hold

struct Norm {
    const void* weight;  // [hidden_size]
    float epsilon;
};

struct Product {
    const int32_t* packed;
    const void* bias;  // or null
};

}  // namespace

extern "C" {

// Mirrored in decoder.py.
struct DecoderLayer {
    AttentionCall attention;  // all but what a step brings
    Norm attention_norm, mlp_norm;
    Product qkv, out, gate_up, down;
};

// Of the products of a layer.
struct LayerAdapters {
    AdapterTable qkv, out, gate_up, down;
};

struct DecoderCall {
    const DecoderLayer* layers;
    const AttentionPlan* plan;
    const LayerAdapters* adapters;  // of each layer, or null
    AdapterRows adapter_rows;
    void* hidden;           // [T, hidden_size]: embeddings, then the last layer's output
    const void *cos, *sin;  // [T, dk]
    char* memory;           // decoder_bytes(), aligned to a cache line
    int64_t num_tokens, hidden_size, intermediate_size;
    int32_t num_layers, num_threads, is_bf16;
};
}

namespace {

// Activations of one layer, used again by the next.
template <typename T>
struct Buffers : Carved {
    T *normed;         // [T, hidden_size]
    T *delta;          // [T, hidden_size], to be added to the residual stream
    T *qkv, *attended; // [T, (H + Hk) dk + Hk dv], [T, H dv]
    T *gate_up, *activated;  // [MLP_ROWS, 2 intermediate_size], [MLP_ROWS, intermediate_size]
    char *staging, *scratch;
    float* low;  // x A of one product's adapters

    Buffers(char* memory, const DecoderCall& c) : Carved(memory) {
        int64_t qkv_size = 0, attended_size = 0, scratch_bytes = 0;
        for (int i = 0; i < c.num_layers; i++) {
            const AttentionCall& a = c.layers[i].attention;
            qkv_size = std::max<int64_t>(qkv_size, (a.num_heads + a.num_kv_heads) * a.dk + a.num_kv_heads * a.dv);
            attended_size = std::max<int64_t>(attended_size, a.num_heads * a.dv);
            scratch_bytes = std::max(scratch_bytes, attention_scratch(&a));
        }
        const int64_t mlp_rows = std::min(c.num_tokens, MLP_ROWS);
        take(normed, c.num_tokens * c.hidden_size), take(delta, c.num_tokens * c.hidden_size);
        take(qkv, c.num_tokens * qkv_size), take(attended, c.num_tokens * attended_size);
        take(gate_up, mlp_rows * 2 * c.intermediate_size), take(activated, mlp_rows * c.intermediate_size);
        take(staging, std::max(gemm_staging_bytes(c.num_tokens, std::max(c.hidden_size, attended_size), c.is_bf16),
                               gemm_staging_bytes(mlp_rows, c.intermediate_size, c.is_bf16)));
        take(scratch, scratch_bytes * c.num_threads);
        take(low, low_size(c));
    }

  private:
    static int64_t low_size(const DecoderCall& c) {
        int64_t size = 0;
        for (int i = 0; c.adapters && i < c.num_layers; i++) {
            const LayerAdapters& layer = c.adapters[i];
            for (const AdapterTable* table : {&layer.qkv, &layer.out, &layer.gate_up, &layer.down})
                size = std::max(size, table->num_parts * table->max_rank);
        }
        return size * c.adapter_rows.num_rows;
    }
};

// The work of one thread of the team.
template <typename T>
struct Worker {
    const DecoderCall& c;
    const Buffers<T> b;
    Team& team;

    void run() const {
        const T* delta = nullptr;
        for (int i = 0; i < c.num_layers; i++) {
            const LayerAdapters adapters = c.adapters ? c.adapters[i] : LayerAdapters{};
            add_and_norm(delta, &c.layers[i].attention_norm);
            attention(c.layers[i], adapters);
            add_and_norm(b.delta, &c.layers[i].mlp_norm);
            for (int64_t first = 0; first < c.num_tokens; first += MLP_ROWS)
                mlp(c.layers[i], adapters, first, std::min(MLP_ROWS, c.num_tokens - first));
            delta = b.delta;
        }
        add_and_norm(delta, nullptr);
    }

  private:
    // hidden += delta; normed = norm(hidden).
    void add_and_norm(const T* delta, const Norm* norm) const {
#pragma omp for schedule(static) nowait
        for (int64_t row = 0; row < c.num_tokens; row++) {
            T* x = (T*)c.hidden + row * c.hidden_size;
            if (delta) rows::add_row(x, delta + row * c.hidden_size, c.hidden_size);
            if (norm)
                rows::norm_row(x, (const T*)norm->weight, b.normed + row * c.hidden_size, c.hidden_size, norm->epsilon);
        }
        team.meet();
    }

    void attention(const DecoderLayer& layer, const LayerAdapters& adapters) const {
        AttentionCall a = layer.attention;
        const int64_t q_size = a.num_heads * a.dk, k_size = a.num_kv_heads * a.dk;
        const int64_t size = q_size + k_size + a.num_kv_heads * a.dv;
        multiply(layer.qkv, adapters.qkv, b.normed, b.qkv, 0, c.num_tokens, c.hidden_size, size);
        a.plan = c.plan;
        a.q = b.qkv, a.k = b.qkv + q_size, a.v = b.qkv + q_size + k_size, a.out = b.attended;
        a.q_token = a.k_token = a.v_token = size, a.q_head = a.k_head = a.dk, a.v_head = a.dv;
        a.cos = c.cos, a.sin = c.sin, a.scratch = b.scratch;
        a.num_tokens = c.num_tokens, a.num_threads = c.num_threads;
        attention_in_team(a, team);
        multiply(layer.out, adapters.out, b.attended, b.delta, 0, c.num_tokens, a.num_heads * a.dv, c.hidden_size);
    }

    // Rows [first, first + count).
    void mlp(const DecoderLayer& layer, const LayerAdapters& adapters, int64_t first, int64_t count) const {
        const int64_t size = c.intermediate_size, start = first * c.hidden_size;
        multiply(layer.gate_up, adapters.gate_up, b.normed + start, b.gate_up, first, count, c.hidden_size, 2 * size);
#pragma omp for schedule(static) nowait
        for (int64_t row = 0; row < count; row++) {
            const T* gate = b.gate_up + row * 2 * size;
            rows::activate_row(gate, gate + size, b.activated + row * size, size);
        }
        team.meet();
        multiply(layer.down, adapters.down, b.activated, b.delta + start, first, count, size, c.hidden_size);
    }

    // x [count, in_features] -> out [count, out_features]; these are rows [first, first + count) of the batch.
    void multiply(const Product& p, const AdapterTable& table, const T* x, T* out, int64_t first, int64_t count,
                  int64_t in_features, int64_t out_features) const {
        const AdapterCall adapted = {(const char*)x, (char*)out, &table, &c.adapter_rows, b.low, in_features,
                                     out_features, first, first + count, c.is_bf16, c.num_threads};
        if (table.parts) adapters_down_in_team(adapted);
        gemm_in_team({(const char*)x, p.packed, p.bias, (char*)out, b.staging, count, in_features, out_features,
                      c.is_bf16, c.num_threads, 0, table.parts ? &adapted : nullptr},
                     team);
    }
};

template <typename T>
void run(const DecoderCall& c) {
    const Buffers<T> buffers(c.memory, c);
    Team::run(c.num_threads, [&](Team& team) { Worker<T>{c, buffers, team}.run(); });
}

}  // namespace

extern "C" {

// Bytes of scratch memory for this many tokens, layers and threads.
int64_t decoder_bytes(const DecoderCall* c) {
    return c->is_bf16 ? Buffers<bf16>(nullptr, *c).bytes() : Buffers<float>(nullptr, *c).bytes();
}

void decoder_run(const DecoderCall* c) {
    if (c->num_tokens) c->is_bf16 ? run<bf16>(*c) : run<float>(*c);
}
}
