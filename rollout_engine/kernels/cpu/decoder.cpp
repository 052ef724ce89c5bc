// All decoder layers of one step over the flat batch, in one parallel region: per layer
//
//     x += attention(norm(x))        norm -> q, k, v in one product -> attention (norms q and k, rotates, writes KV) -> product
//     x += mlp(norm(x))              norm -> gate, up in one product -> silu(gate) * up -> product
//
// or one of the two alone (Nemotron-H), or max(up, 0)^2 in place of silu(gate) * up, or norms of what is added instead (OLMo);
// or, of a layer with a state, norm -> products -> the gated delta rule (`delta_net.h`), Mamba 2's recurrence (`mamba.h`) or a
// short convolution (`short_convolution.h`) -> product in place of attention;
// or, of a mixture of experts, norm -> router -> the same for each expert and the rows that are sent to it -> weighted sum,
// to which the output of a shared expert may be added, times the sigmoid of a product of its own. What is added to x may be
// multiplied by a number first.
//
// Before them it may look up embeddings and rotary rows, and behind them it may norm the rows that are wanted. Behind the
// attention of the last layer only those are computed: of a prompt, one. Each product gets the adapters of those rows that
// have one. Every value is rounded where the Hugging Face modules round it. There is a barrier after every step of a layer;
// bits do not depend on the number of threads.
//
// A model may be cut over ranks, processes that share memory. Each computes its heads and its columns of every product into
// the memory that all share, and meets the others four times a layer before it reads what they wrote:
//
//     norm -> own q, k, v -> own heads │ own columns of the product │ norm -> own gate, up │ own columns │
//                                                                     norm -> own experts  │ own columns of the sum │
//
// `attended`, `activated` and `outputs` are written after a meeting that follows their last reader's, and so is `delta`.
#include <algorithm>
#include <cstring>

#include "adapters.h"
#include "attention.h"
#include "carved.h"
#include "delta_net.h"
#include "experts.h"
#include "gemm.h"
#include "mamba.h"
#include "rows.h"
#include "short_convolution.h"
#include "turns.h"

namespace {

constexpr int64_t MLP_ROWS = 1024;  // computed at once: of gate and up, not more than caches hold
constexpr int64_t ENTRIES = 4096;   // of a mixture, computed at once: weights are read for each such part
constexpr int INPUTS = 4;           // products of a layer's input at most, by the side of one another

struct Product {
    const void* packed;
    const void* bias;     // or null
    const float* scales;  // of int8 codes, or null
};

}  // namespace

extern "C" {

struct Norm {
    const void* weight;  // [hidden_size]; null: there is none
    float epsilon;
    int32_t has_offset;   // 1 is added to the weight
    int32_t rounds_once;  // behind the weight alone, as with an offset
};

// Columns [first, first + size) of `whole`: those that this rank computes.
struct Columns {
    int64_t first, size, whole;
};

// Mirrored in decoder.py, as the next.
struct Mixture {
    Product router;
    const Product *gate_up, *down;     // [num_own]
    int64_t first_expert, num_own;     // those that this rank computes
    int64_t intermediate_size;
    experts::Routing routing;
    int64_t place;  // of the layer, among those that have experts
    Product shared_gate_up, shared_down, shared_gate;  // of the expert of all rows; `packed` null: none
    Columns shared, shared_out;                        // columns of this rank: of half the first, and of the second
    int32_t is_plain;                                  // experts, and the shared one, have no gates, as `DecoderLayer`
    Product latent_in, latent_out;  // before all experts but the shared one, and behind their sum; `packed` null: none
    int64_t expert_size;            // of the inputs and outputs of experts: hidden_size without latents
};

struct DecoderLayer {
    AttentionCall attention;  // all but the parts that a step brings; nothing of a layer with a mixer
    Columns attended;         // of the heads of all ranks
    Norm attention_norm, mlp_norm;
    Product inputs[INPUTS];   // of attention one: q, k and v; `packed` null: no more
    int64_t sizes[INPUTS];    // columns of each
    Product out, gate_up, down;  // the last two are of no layer with a mixture; `out.packed` null: it has an MLP alone
    const Mixture* mixture;      // or null
    const DeltaNet* delta;       // its mixer, or null, as the next two; with none it has attention
    const Mamba* mamba;
    const ShortConvolution* convolution;
    int32_t is_gated;            // behind each head of q is one of a gate, whose sigmoid multiplies its output
    float factor;                // multiplies both results that are added to the residual stream
    int32_t is_plain;            // its MLP has no gates: `gate_up` is up alone
    int32_t norms_behind;        // both norms are of what is added, instead of the inputs
    Norm q_norm, k_norm;         // of all heads together, or none

    bool mixes() const { return out.packed; }
    bool feeds() const { return mlp_norm.weight; }

    int64_t num_projected() const {
        int64_t sum = 0;
        for (int64_t size : sizes) sum += size;
        return sum;
    }
};

// Of the products of a layer.
struct LayerAdapters {
    AdapterTable inputs[INPUTS], out, gate_up, down, shared_gate;  // of a mixture the last three are of its shared expert
    AdapterTable latent_in, latent_out;                            // of a mixture

    int64_t low_size() const {
        int64_t size = 0;
        for (const AdapterTable& table : inputs) size = std::max(size, table.num_parts * table.max_rank);
        for (const AdapterTable* table : {&out, &gate_up, &down, &shared_gate, &latent_in, &latent_out})
            size = std::max(size, table->num_parts * table->max_rank);
        return size;
    }
};

// Inputs before the layers, and the norm behind them.
struct DecoderEnds {
    const int64_t *token_ids, *positions;  // [T], rows of the tables
    const void* embedding;                 // [vocab_size, hidden_size]
    const void *cos, *sin;                 // [num_positions, rotary]
    void* states;                          // [num_rows, hidden_size], out: the rows that are wanted, behind the norm
    int64_t vocab_size, num_positions;
    Norm norm;
    float factor;  // multiplies embeddings
};

struct DecoderCall {
    const DecoderLayer* layers;
    const AttentionPlan* plan;
    const LayerAdapters* adapters;  // of each layer, or null
    AdapterRows adapter_rows, kept_adapter_rows;  // of the batch, and of `rows`
    void* hidden;             // [T, hidden_size]: embeddings, then the last layer's output; null, as the next two, with ends
    const void *cos, *sin;    // [T, rotary]
    const void* q_factors;    // [T] of the queries after the rotation, or null
    const DecoderEnds* ends;  // or null: the caller has looked up, and norms
    char* memory;             // decoder_bytes(), aligned to a cache line
    char* exchanged;          // decoder_exchanged_bytes(), aligned to a cache line; the same for all ranks
    Turns* turns;             // of the ranks, or null: there is one
    int32_t* routed;          // [T, num_mixtures, top_k], out: experts, the most probable first; or null
    const int64_t* rows;      // [num_rows], those of T whose outputs are wanted: in `hidden` others may be left as they are
    int64_t num_tokens, num_rows, num_mixtures;
    const StateChunks* chunks;  // of layers with a state; null without any
    Columns hidden_columns, intermediate;
    int64_t rotary;             // channels of a head that are rotated; 0: none
    int32_t num_layers, num_threads, is_bf16, num_ranks;

    // Whether rows that are not wanted end with the last layer's attention. Routes are of all rows.
    bool drops_rows() const { return num_rows < num_tokens && !routed; }
};
}

namespace {

// Rows of a batch that a mixture computes at once.
int64_t rows_at_once(const Mixture& m, int64_t num_tokens) {
    return std::min(num_tokens, std::max<int64_t>(1, ENTRIES / m.routing.top_k));
}

// Elements from one row of a product's inputs to the next: an odd number of cache lines. Rows an even number apart, as in
// most models, would map to few sets of the L1 cache.
template <typename T>
int64_t row_stride(int64_t size) {
    constexpr int64_t LINE = 64 / sizeof(T);
    return ((size + LINE - 1) / LINE | 1) * LINE;
}

// The largest sizes of all mixtures.
struct MixtureSizes {
    int64_t rows = 0, entries = 0, experts = 0, top_k = 0, intermediate = 0, shared = 0, own_shared = 0, latents = 0;

    explicit MixtureSizes(const DecoderCall& c) {
        for (int i = 0; i < c.num_layers; i++) {
            const Mixture* m = c.layers[i].mixture;
            if (!m) continue;
            const int64_t at_once = rows_at_once(*m, c.num_tokens);
            rows = std::max(rows, at_once), entries = std::max(entries, at_once * m->routing.top_k);
            experts = std::max(experts, m->routing.num_experts), top_k = std::max(top_k, m->routing.top_k);
            intermediate = std::max(intermediate, m->intermediate_size);
            shared = std::max(shared, m->shared.whole), own_shared = std::max(own_shared, m->shared.size);
            if (m->latent_in.packed) latents = std::max(latents, m->expert_size);
        }
    }
};

// The largest sizes of all mixers.
template <typename T>
struct MixerSizes {
    int64_t channels = 0, heads = 0, values = 0, scratch_bytes = 0;

    // Whether the layer has one.
    bool add(const DecoderLayer& layer) {
        if (const DeltaNet* d = layer.delta) return add(d->num_channels, d->num_heads, 0, DeltaCall<T>{*d}.scratch_bytes());
        if (const Mamba* m = layer.mamba) {
            const int64_t size = (int64_t)m->num_heads * m->value_size;
            return add(m->num_channels, m->num_heads, size, MambaCall<T>{*m}.scratch_bytes());
        }
        if (const ShortConvolution* s = layer.convolution)
            return add(s->run.count, 0, 0, ShortConvolutionCall<T>{*s}.scratch_bytes());
        return false;
    }

  private:
    bool add(int64_t num_channels, int64_t num_heads, int64_t num_values, int64_t num_bytes) {
        channels = std::max(channels, num_channels), heads = std::max(heads, num_heads);
        values = std::max(values, num_values), scratch_bytes = std::max(scratch_bytes, num_bytes);
        return true;
    }
};

// Activations of one layer that all ranks read, used again by the next.
template <typename T>
struct Exchanged : Carved {
    T *attended;   // [T, H dv], with row_stride()
    T *delta;      // [T, hidden_size], to be added to the residual stream
    T *activated;  // [MLP_ROWS, intermediate_size], with row_stride()
    T *outputs;    // [entries of mixtures at once, hidden_size]

    explicit Exchanged(const DecoderCall& c) : Carved(c.exchanged) {
        int64_t attended_size = 0;
        for (int i = 0; i < c.num_layers; i++) attended_size = std::max(attended_size, c.layers[i].attended.whole);
        take(attended, c.num_tokens * row_stride<T>(attended_size)), take(delta, c.num_tokens * c.hidden_columns.whole);
        const MixtureSizes sizes(c);
        take(activated, std::max(std::min(c.num_tokens, MLP_ROWS) * row_stride<T>(c.intermediate.whole),
                                 sizes.rows * row_stride<T>(sizes.shared)));
        take(outputs, sizes.entries * std::max(c.hidden_columns.whole, sizes.latents));
    }
};

// Activations of one layer that this rank alone reads, used again by the next.
template <typename T>
struct Buffers : Carved {
    T *hidden, *cos, *sin;    // as in the call, of a step with ends
    T *normed;                // [T, hidden_size], with row_stride()
    T *inputs;                // [T, columns of the products of the layer's input]
    T *mixed;                 // [T, C]: of layers with a state, as the next three
    float *decays, *betas;    // [T, H]
    float *values;            // [T, H V], of Mamba 2
    T *gate_up;               // [MLP_ROWS, 2 intermediate_size]
    T *kept, *kept_attended;  // `hidden` and `attended` of the rows that are wanted, where others are dropped
    char *staging, *scratch;
    float* low;  // x A of one product's adapters
    // Of mixtures, N entries at once:
    float* logits;                // [rows, E], in the type of the model unless they are precise
    T *sent, *projected, *inner;  // [N, hidden_size], [N, 2 I], [N, I]; two with row_stride()
    T *shared, *shared_gates;     // [rows, hidden_size], [rows]
    T *latents, *latent_sums;     // [rows, L], the second with row_stride()
    float *scores, *choices, *weights;                   // [threads, E], [threads, E], [N]
    int32_t *left, *chosen, *experts, *places, *starts;  // [threads, E], [threads, k], [N], [N], [E + 1]

    explicit Buffers(const DecoderCall& c) : Carved(c.memory) {
        int64_t inputs_size = 0, attended_size = 0, scratch_bytes = 0;
        MixerSizes<T> mixers;
        bool is_int8 = false;
        for (int i = 0; i < c.num_layers; i++) {
            const DecoderLayer& layer = c.layers[i];
            inputs_size = std::max(inputs_size, layer.num_projected());
            attended_size = std::max(attended_size, layer.attended.whole);
            if (layer.mixes() && !mixers.add(layer)) scratch_bytes = std::max(scratch_bytes, attention_scratch(&layer.attention));
            is_int8 |= layer.inputs[0].scales != nullptr;
        }
        const int64_t mlp_rows = std::min(c.num_tokens, MLP_ROWS);
        const int64_t hidden_size = c.hidden_columns.whole;
        const int64_t looked_up = c.ends ? c.num_tokens : 0, rotated = looked_up * c.rotary;
        take(hidden, looked_up * hidden_size), take(cos, rotated), take(sin, rotated);
        take(normed, c.num_tokens * row_stride<T>(hidden_size)), take(inputs, c.num_tokens * inputs_size);
        take(mixed, c.num_tokens * mixers.channels), take(values, c.num_tokens * mixers.values);
        take(decays, c.num_tokens * mixers.heads), take(betas, c.num_tokens * mixers.heads);
        const MixtureSizes sizes(c);
        take(gate_up, 2 * std::max(mlp_rows * c.intermediate.size, sizes.rows * sizes.own_shared));
        const int64_t num_kept = c.drops_rows() ? c.num_rows : 0;
        take(kept, num_kept * hidden_size), take(kept_attended, num_kept * row_stride<T>(attended_size));
        auto staged = [&](int64_t rows, int64_t size) {
            return gemm_staging_bytes(rows, size, c.is_bf16, is_int8, c.num_threads);
        };
        const int64_t before_mlp = staged(c.num_tokens, std::max(hidden_size, attended_size));
        take(staging, std::max({before_mlp, staged(mlp_rows, c.intermediate.whole), staged(sizes.rows, sizes.shared),
                                staged(sizes.entries, std::max({hidden_size, sizes.intermediate, sizes.latents}))}));
        take(scratch, std::max(scratch_bytes, mixers.scratch_bytes) * c.num_threads);
        take(low, low_size(c));
        const int64_t threads = sizes.entries ? c.num_threads : 0;
        take(logits, sizes.rows * sizes.experts), take(sent, sizes.entries * row_stride<T>(std::max(hidden_size, sizes.latents)));
        take(projected, sizes.entries * 2 * sizes.intermediate);
        take(inner, sizes.entries * row_stride<T>(sizes.intermediate));
        const int64_t shared_rows = sizes.shared ? sizes.rows : 0;
        take(shared, shared_rows * hidden_size), take(shared_gates, shared_rows);
        take(latents, sizes.rows * sizes.latents), take(latent_sums, sizes.latents ? sizes.rows * row_stride<T>(sizes.latents) : 0);
        take(scores, threads * sizes.experts), take(choices, threads * sizes.experts), take(weights, sizes.entries);
        take(left, threads * sizes.experts), take(chosen, threads * sizes.top_k);
        take(experts, sizes.entries), take(places, sizes.entries), take(starts, sizes.experts + 1);
    }

  private:
    static int64_t low_size(const DecoderCall& c) {
        int64_t size = 0;
        for (int i = 0; c.adapters && i < c.num_layers; i++) size = std::max(size, c.adapters[i].low_size());
        return size * std::max(c.adapter_rows.num_rows, c.kept_adapter_rows.num_rows);
    }
};

// The work of one thread of the team.
template <typename T>
struct Worker {
    const DecoderCall& c;
    const Buffers<T> b;
    const Exchanged<T> e;
    Team& team;

    void run() const {
        if (c.ends) look_up(*c.ends);
        const int last = c.num_layers - 1;
        for (int i = 0; i < last; i++) finish(i, attend(i));
        const Rows left = c.drops_rows() ? kept(attend(last)) : attend(last);
        finish(last, left);
        add_and_norm(left, pending(last), {});
        if (c.ends)
            leave(*c.ends, left);
        else if (c.drops_rows())
            put_back(left);
    }

  private:
    // The rows that are computed: their residual stream, and what attention gave them in this layer.
    struct Rows {
        T *hidden, *attended;
        int64_t count;
        const AdapterRows* adapted;  // those of them that have an adapter
    };

    // Adapters of a product of some rows.
    struct Adapters {
        const AdapterTable* table;  // or null: none
        const AdapterRows* rows;
    };

    // A layer up to its attention, or its mixer, of all rows of the batch.
    Rows attend(int i) const {
        const DecoderLayer& layer = c.layers[i];
        const Rows all = {c.ends ? b.hidden : (T*)c.hidden, e.attended, c.num_tokens, &c.adapter_rows};
        add_and_norm(all, i ? pending(i - 1) : Added{}, layer.mixes() ? ahead(layer, layer.attention_norm) : Input{});
        if (!layer.mixes()) return all;
        project(i, all);
        mix(layer);
        return all;
    }

    // The rest of the layer; the output of its MLP waits in `delta`.
    void finish(int i, Rows r) const {
        const DecoderLayer& layer = c.layers[i];
        if (layer.mixes()) {
            multiply(layer.out, adapters_of(i, &LayerAdapters::out, r), r.attended, row_stride<T>(layer.attended.whole),
                     e.delta, 0, r.count, layer.attended.whole, c.hidden_columns);
            meet_ranks();
        }
        add_and_norm(r, layer.mixes() ? added(layer, layer.attention_norm) : Added{},
                     layer.feeds() ? ahead(layer, layer.mlp_norm) : Input{});
        if (!layer.feeds()) return;
        if (const Mixture* m = layer.mixture) {
            const int64_t rows = rows_at_once(*m, c.num_tokens);
            for (int64_t first = 0; first < r.count; first += rows)
                mixture(i, *m, r, first, std::min(rows, r.count - first));
        } else {
            for (int64_t first = 0; first < r.count; first += MLP_ROWS)
                mlp(i, r, first, std::min(MLP_ROWS, r.count - first));
        }
    }

    Adapters adapters_of(int layer, AdapterTable LayerAdapters::*product, Rows r) const {
        if (!c.adapters || !(c.adapters[layer].*product).parts) return {};
        return {&(c.adapters[layer].*product), r.adapted};
    }

    // Copies of the rows that are wanted.
    Rows kept(Rows all) const {
        const int64_t size = c.hidden_columns.whole, whole = c.layers[c.num_layers - 1].attended.whole;
        const int64_t stride = row_stride<T>(whole);
#pragma omp for schedule(static) nowait
        for (int64_t i = 0; i < c.num_rows; i++) {
            memcpy(b.kept + i * size, all.hidden + c.rows[i] * size, size * sizeof(T));
            memcpy(b.kept_attended + i * stride, all.attended + c.rows[i] * stride, whole * sizeof(T));
        }
        team.meet();
        return {b.kept, b.kept_attended, c.num_rows, &c.kept_adapter_rows};
    }

    void put_back(Rows r) const {
        const int64_t size = c.hidden_columns.whole;
#pragma omp for schedule(static) nowait
        for (int64_t i = 0; i < r.count; i++) memcpy((T*)c.hidden + c.rows[i] * size, r.hidden + i * size, size * sizeof(T));
    }

    // Threads have the same rows as in `add_and_norm`, behind which they meet.
    void look_up(const DecoderEnds& ends) const {
        const int64_t size = c.hidden_columns.whole, rotary = c.rotary;
#pragma omp for schedule(static) nowait
        for (int64_t row = 0; row < c.num_tokens; row++) {
            const int64_t token = ends.token_ids[row], position = ends.positions[row];
            memcpy(b.hidden + row * size, (const T*)ends.embedding + token * size, size * sizeof(T));
            if (ends.factor != 1.0f) rows::multiply_row(b.hidden + row * size, ends.factor, size);
            if (!rotary) continue;
            memcpy(b.cos + row * rotary, (const T*)ends.cos + position * rotary, rotary * sizeof(T));
            memcpy(b.sin + row * rotary, (const T*)ends.sin + position * rotary, rotary * sizeof(T));
        }
    }

    void leave(const DecoderEnds& ends, Rows r) const {
        const int64_t size = c.hidden_columns.whole;
#pragma omp for schedule(static) nowait
        for (int64_t i = 0; i < c.num_rows; i++) {
            const int64_t row = c.drops_rows() ? i : c.rows[i];
            norm_row(r.hidden + row * size, ends.norm, (T*)ends.states + i * size, size);
        }
    }

    // Returns once all ranks have written what is exchanged; the threads of each have met before.
    void meet_ranks() const {
        if (!c.turns) return;
        if (omp_get_thread_num() == 0) c.turns->meet(c.num_ranks);  // where they are broken, the rest is garbage
        team.meet();
    }

    // What is added to the residual stream: factor * delta, or factor * norm(delta).
    struct Added {
        T* delta;  // or null: nothing; the norm of it is written over it
        float factor;
        const Norm* norm;  // or null
    };

    // The next input, `normed`: norm(hidden), or a copy of it.
    struct Input {
        const Norm* norm;  // or null
        bool is_copied;
    };

    Added added(const DecoderLayer& layer, const Norm& norm) const {
        return {e.delta, layer.factor, layer.norms_behind ? &norm : nullptr};
    }

    // The output of a layer's MLP.
    Added pending(int i) const { return c.layers[i].feeds() ? added(c.layers[i], c.layers[i].mlp_norm) : Added{}; }

    static Input ahead(const DecoderLayer& layer, const Norm& norm) {
        return {layer.norms_behind ? nullptr : &norm, layer.norms_behind != 0};
    }

    void add_and_norm(Rows r, Added a, Input input) const {
        const int64_t size = c.hidden_columns.whole, stride = row_stride<T>(size);
#pragma omp for schedule(static) nowait
        for (int64_t row = 0; row < r.count; row++) {
            T* x = r.hidden + row * size;
            T* delta = a.delta ? a.delta + row * size : nullptr;
            if (delta && a.norm) norm_row(delta, *a.norm, delta, size);
            if (delta && a.factor == 1.0f) rows::add_row(x, delta, size);
            if (delta && a.factor != 1.0f) rows::add_multiple_row(x, delta, a.factor, size);
            if (input.norm) norm_row(x, *input.norm, b.normed + row * stride, size);
            if (input.is_copied) memcpy(b.normed + row * stride, x, size * sizeof(T));
        }
        team.meet();
    }

    static void norm_row(const T* x, const Norm& norm, T* out, int64_t size) {
        const auto row = norm.has_offset    ? rows::offset_norm_row<T>
                         : norm.rounds_once ? rows::single_norm_row<T>
                                            : rows::norm_row<T>;
        row(x, (const T*)norm.weight, out, size, norm.epsilon);
    }

    // The products of a layer's input, side by side.
    void project(int i, Rows all) const {
        const DecoderLayer& layer = c.layers[i];
        const int64_t hidden_size = c.hidden_columns.whole, whole = layer.num_projected();
        int64_t first = 0;
        for (int k = 0; k < INPUTS && layer.inputs[k].packed; first += layer.sizes[k++]) {
            Adapters adapters = {};
            if (c.adapters && c.adapters[i].inputs[k].parts) adapters = {&c.adapters[i].inputs[k], all.adapted};
            multiply(layer.inputs[k], adapters, b.normed, row_stride<T>(hidden_size), b.inputs, 0, c.num_tokens,
                     hidden_size, {first, layer.sizes[k], whole});
        }
    }

    void attention(const DecoderLayer& layer) const {
        AttentionCall a = layer.attention;
        const int64_t head = layer.is_gated ? 2 * a.dk : a.dk;
        const int64_t q_size = a.num_heads * head, k_size = a.num_kv_heads * a.dk, size = layer.num_projected();
        if (layer.q_norm.weight) norm_heads(layer, q_size, k_size, size);
        a.plan = c.plan;
        a.q = b.inputs, a.k = b.inputs + q_size, a.v = b.inputs + q_size + k_size;
        a.out = e.attended + layer.attended.first;
        a.q_token = a.k_token = a.v_token = size, a.q_head = head, a.k_head = a.dk, a.v_head = a.dv;
        a.out_token = row_stride<T>(layer.attended.whole);
        if (c.rotary) a.cos = c.ends ? b.cos : c.cos, a.sin = c.ends ? b.sin : c.sin;
        a.q_factors = c.q_factors, a.scratch = b.scratch;
        a.num_tokens = c.num_tokens, a.num_threads = c.num_threads, a.rotary = c.rotary;
        attention_in_team(a, team);
        if (layer.is_gated) gate(a, size);
        meet_ranks();
    }

    // Norms the queries of each row, and its keys.
    void norm_heads(const DecoderLayer& layer, int64_t q_size, int64_t k_size, int64_t stride) const {
#pragma omp for schedule(static) nowait
        for (int64_t row = 0; row < c.num_tokens; row++) {
            T *q = b.inputs + row * stride, *k = q + q_size;
            norm_row(q, layer.q_norm, q, q_size);
            norm_row(k, layer.k_norm, k, k_size);
        }
        team.meet();
    }

    // The outputs of attention times the sigmoids of their gates, which lie behind the queries.
    void gate(const AttentionCall& a, int64_t size) const {
#pragma omp for schedule(static) nowait
        for (int64_t row = 0; row < c.num_tokens; row++)
            for (int h = 0; h < a.num_heads; h++)
                rows::gate_row((T*)a.out + row * a.out_token + h * a.dv, (const T*)a.q + row * size + h * a.q_head + a.dk, a.dv);
        team.meet();
    }

    // The layer's mixer, or attention.
    void mix(const DecoderLayer& layer) const {
        const int64_t size = layer.num_projected(), stride = row_stride<T>(layer.attended.whole);
        if (layer.delta)
            DeltaCall<T>{*layer.delta, *c.chunks, b.inputs, b.mixed, b.decays, b.betas, e.attended, b.scratch, size, stride,
                         c.num_tokens, c.num_threads}
                .run_in_team(team);
        else if (layer.mamba)
            MambaCall<T>{*layer.mamba, *c.chunks, b.inputs, b.mixed, b.decays, b.betas, b.values, b.scratch, e.attended, size,
                         stride, c.num_tokens, c.num_threads}
                .run_in_team(team);
        else if (layer.convolution)
            ShortConvolutionCall<T>{*layer.convolution, *c.chunks, b.inputs, b.mixed, b.scratch, e.attended, size, stride,
                                    c.num_tokens, c.num_threads}
                .run_in_team(team);
        else
            attention(layer);
    }

    // Rows [first, first + count).
    void mlp(int i, Rows r, int64_t first, int64_t count) const {
        const DecoderLayer& layer = c.layers[i];
        dense_products(i, layer.gate_up, layer.down, layer.is_plain, c.intermediate, r, first, count,
                       e.delta + first * c.hidden_columns.whole, c.hidden_columns);
        meet_ranks();
    }

    // down(silu(gate(x)) * up(x)), or down(max(up(x), 0)^2), of rows [first, first + count), these columns of it.
    void dense_products(int i, const Product& gate_up, const Product& down, bool is_plain, Columns inner, Rows r,
                        int64_t first, int64_t count, T* out, Columns columns) const {
        const int64_t size = inner.size, projected = is_plain ? size : 2 * size, hidden_size = c.hidden_columns.whole;
        const int64_t x_stride = row_stride<T>(hidden_size), inner_stride = row_stride<T>(inner.whole);
        multiply(gate_up, adapters_of(i, &LayerAdapters::gate_up, r), b.normed + first * x_stride, x_stride,
                 b.gate_up, first, count, hidden_size, {0, projected, projected});
#pragma omp for schedule(static) nowait
        for (int64_t row = 0; row < count; row++)
            activate(b.gate_up + row * projected, e.activated + row * inner_stride + inner.first, size, is_plain);
        team.meet();
        meet_ranks();
        multiply(down, adapters_of(i, &LayerAdapters::down, r), e.activated, inner_stride, out, first, count,
                 inner.whole, columns);
    }

    // silu(gate) * up of [gate, up], or of up alone max(up, 0)^2.
    void activate(const T* projected, T* out, int64_t size, bool is_plain) const {
        if (is_plain)
            rows::squared_relu_row(projected, out, size);
        else
            rows::activate_row(projected, projected + size, out, size);
    }

    // The output of the expert of all rows, of rows [first, first + count), in `shared`; threads have met behind it.
    void shared_expert(int layer, const Mixture& m, Rows r, int64_t first, int64_t count) const {
        const int64_t size = c.hidden_columns.whole, x_stride = row_stride<T>(size);
        dense_products(layer, m.shared_gate_up, m.shared_down, m.is_plain, m.shared, r, first, count, b.shared, m.shared_out);
        if (!m.shared_gate.packed) return;
        multiply(m.shared_gate, adapters_of(layer, &LayerAdapters::shared_gate, r), b.normed + first * x_stride, x_stride,
                 b.shared_gates, first, count, size, {0, 1, 1});
        if (omp_get_thread_num() == 0) rows::sigmoid_row(b.shared_gates, b.shared_gates, count);
        team.meet();
#pragma omp for schedule(static) nowait
        for (int64_t row = 0; row < count; row++)
            rows::scale_row(b.shared + row * size + c.hidden_columns.first, b.shared_gates[row], c.hidden_columns.size);
        team.meet();
    }

    // Rows [first, first + count).
    void mixture(int layer, const Mixture& m, Rows r, int64_t first, int64_t count) const {
        const int64_t size = c.hidden_columns.whole, inner_size = m.intermediate_size;
        const int64_t k = m.routing.top_k, num_experts = m.routing.num_experts, num_entries = count * k;
        const int64_t x_stride = row_stride<T>(size), inner_stride = row_stride<T>(inner_size);
        const Columns own = c.hidden_columns;
        const T* x = b.normed + first * x_stride;
        T* out = e.delta + first * size + own.first;
        if (m.shared_gate_up.packed) shared_expert(layer, m, r, first, count);
        multiply(m.router, {}, x, x_stride, (T*)b.logits, 0, count, size, {0, num_experts, num_experts},
                 m.routing.is_precise);
        choose(m, first, count);
        team.meet();
        if (omp_get_thread_num() == 0) experts::sort(b.experts, num_entries, num_experts, b.places, b.starts);
        team.meet();
        const int32_t start = b.starts[m.first_expert], stop = b.starts[m.first_expert + m.num_own];
        const int64_t expert_size = m.expert_size, sent_stride = row_stride<T>(expert_size);
        const T* input = x;
        int64_t input_stride = x_stride;
        if (m.latent_in.packed) {
            multiply(m.latent_in, adapters_of(layer, &LayerAdapters::latent_in, r), x, x_stride, b.latents, first, count, size,
                     {0, expert_size, expert_size});
            input = b.latents, input_stride = expert_size;
        }
#pragma omp for schedule(static) nowait
        for (int64_t i = 0; i < num_entries; i++) {
            const int32_t place = b.places[i];
            if (start <= place && place < stop)
                memcpy(b.sent + place * sent_stride, input + i / k * input_stride, expert_size * sizeof(T));
        }
        team.meet();
        const int64_t projected = m.is_plain ? inner_size : 2 * inner_size;
        products(m, m.gate_up, b.sent, b.projected, expert_size, projected);
#pragma omp for schedule(static) nowait
        for (int64_t i = start; i < stop; i++)
            activate(b.projected + i * projected, b.inner + i * inner_stride, inner_size, m.is_plain);
        team.meet();
        products(m, m.down, b.inner, e.outputs, inner_size, expert_size);
        meet_ranks();
        if (m.latent_in.packed) return leave_latents(layer, m, r, first, count);
#pragma omp for schedule(static) nowait
        for (int64_t row = 0; row < count; row++)
            add_experts(m, row, out + row * size);
        team.meet();
        meet_ranks();
    }

    // The product of the weighted sums of experts over latents, and the shared expert, of a model that is not cut.
    void leave_latents(int layer, const Mixture& m, Rows r, int64_t first, int64_t count) const {
        const int64_t size = c.hidden_columns.whole, k = m.routing.top_k, stride = row_stride<T>(m.expert_size);
        T* out = e.delta + first * size;
#pragma omp for schedule(static) nowait
        for (int64_t row = 0; row < count; row++)
            experts::add_row(e.outputs, b.places + row * k, b.weights + row * k, k, b.latent_sums + row * stride, m.expert_size,
                             m.expert_size);
        team.meet();
        multiply(m.latent_out, adapters_of(layer, &LayerAdapters::latent_out, r), b.latent_sums, stride, out, first, count,
                 m.expert_size, c.hidden_columns);
        if (!m.shared_gate_up.packed) return;
#pragma omp for schedule(static) nowait
        for (int64_t row = 0; row < count; row++) rows::add_row(out + row * size, b.shared + row * size, size);
        team.meet();
    }

    // The weighted sum of the experts of a row, and of the shared one, in this rank's columns.
    void add_experts(const Mixture& m, int64_t row, T* out) const {
        const Columns own = c.hidden_columns;
        const int64_t k = m.routing.top_k;
        experts::add_row(e.outputs + own.first, b.places + row * k, b.weights + row * k, k, out, own.size, own.whole);
        if (m.shared_gate_up.packed) rows::add_row(out, b.shared + row * own.whole + own.first, own.size);
    }

    // The experts of rows [first, first + count), whose logits are known.
    void choose(const Mixture& m, int64_t first, int64_t count) const {
        const int64_t k = m.routing.top_k, num_experts = m.routing.num_experts, thread = omp_get_thread_num();
        float *scores = b.scores + thread * num_experts, *choices = b.choices + thread * num_experts;
        const bool is_sigmoid = m.routing.is_sigmoid;
#pragma omp for schedule(static) nowait
        for (int64_t row = 0; row < count; row++) {
            int32_t* chosen = c.routed ? c.routed + ((first + row) * c.num_mixtures + m.place) * k : b.chosen + thread * k;
            if (m.routing.is_precise)
                experts::scores_row(b.logits + row * num_experts, scores, num_experts, is_sigmoid);
            else
                experts::scores_row((const T*)b.logits + row * num_experts, scores, num_experts, is_sigmoid);
            experts::choose_row<T>(m.routing, scores, choices, b.left + thread * num_experts, chosen, b.experts + row * k,
                                   b.weights + row * k);
        }
    }

    // The product of each own expert with the rows at its places.
    void products(const Mixture& m, const Product* of, const T* x, T* out, int64_t in_features,
                  int64_t out_features) const {
        for (int64_t i = 0; i < m.num_own; i++) {
            const int64_t start = b.starts[m.first_expert + i], count = b.starts[m.first_expert + i + 1] - start;
            const T* sent = x + start * row_stride<T>(in_features);
            if (count) product(of[i], sent, out + start * out_features, count, in_features, out_features);
        }
    }

    // x [count, in_features], with row_stride(), -> out [count, out_features], without adapters.
    void product(const Product& p, const T* x, T* out, int64_t count, int64_t in_features, int64_t out_features) const {
        multiply(p, {}, x, row_stride<T>(in_features), out, 0, count, in_features, {0, out_features, out_features});
    }

    // x [count, in_features] -> these columns of out [count, whole]; these are rows [first, first + count) of those that
    // are computed.
    void multiply(const Product& p, Adapters adapters, const T* x, int64_t x_stride, T* out, int64_t first,
                  int64_t count, int64_t in_features, Columns columns, bool float32_out = false) const {
        char* own = (char*)(out + columns.first);
        const AdapterCall adapted = {(const char*)x, own, adapters.table, adapters.rows, b.low, x_stride,
                                     columns.whole, first, first + count, c.is_bf16, c.num_threads};
        if (adapters.table) adapters_down_in_team(adapted);
        gemm_in_team({(const char*)x, p.packed, p.bias, own, b.staging, count, in_features, columns.size, c.is_bf16,
                      c.num_threads, float32_out, adapters.table ? &adapted : nullptr, x_stride, columns.whole, p.scales},
                     team);
    }
};

template <typename T>
void run(const DecoderCall& c) {
    const Buffers<T> buffers(c);
    const Exchanged<T> exchanged(c);
    Team::run(c.num_threads, [&](Team& team) { Worker<T>{c, buffers, exchanged, team}.run(); });
}

}  // namespace

extern "C" {

// Bytes of scratch memory for this many tokens, layers and threads.
int64_t decoder_bytes(const DecoderCall* c) {
    return c->is_bf16 ? Buffers<bf16>(*c).bytes() : Buffers<float>(*c).bytes();
}

// Bytes of memory that the ranks share, or, for one, that it has beside the scratch.
int64_t decoder_exchanged_bytes(const DecoderCall* c) {
    return c->is_bf16 ? Exchanged<bf16>(*c).bytes() : Exchanged<float>(*c).bytes();
}

// Returns -1. Where an id, a position or a wanted row is out of bounds, it returns its place, and has done nothing.
int64_t decoder_run(const DecoderCall* c) {
    auto is_in = [](int64_t x, int64_t size) { return 0 <= x && x < size; };
    if (const DecoderEnds* e = c->ends) {
        for (int64_t i = 0; i < c->num_tokens; i++)
            if (!is_in(e->token_ids[i], e->vocab_size) || !is_in(e->positions[i], e->num_positions)) return i;
    }
    for (int64_t i = 0; i < c->num_rows; i++)
        if (!is_in(c->rows[i], c->num_tokens)) return i;
    if (c->num_tokens) c->is_bf16 ? run<bf16>(*c) : run<float>(*c);
    return -1;
}
}
