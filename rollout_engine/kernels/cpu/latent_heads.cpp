// The products of `latent.cpp` by packed weights: for each head, x[T, K] @ W[N, K]^T as `gemm.cpp` computes it.
//
// A head's columns begin at a panel of their own, so a product has the bits of any other one with the same rows: they depend
// neither on the other heads and tokens, nor on threads. Work is divided into heads and, where there are few, parts of the
// tokens; each is a product of one thread.
#include <algorithm>
#include <cstring>

#include "gemm.h"
#include "openmp.h"
#include "panels.h"
#include "team.h"

// Strides are in elements; the last dimension is dense. Mirrored in latent.py.
struct HeadsCall {
    const char* x;       // [T, H, K + tail]
    const char* packed;  // the panels of [H, N up to whole panels, K]
    char* out;           // [T, H, N + tail], dense
    char* staging;       // latent_heads_staging() bytes
    int64_t x_token, x_head;
    int64_t num_tokens, in_features, out_features, tail;  // T, K, N; elements that are copied behind each product
    int32_t num_heads, half, num_threads;
};

namespace {

constexpr int64_t MOST_ROWS = 256;              // of a part: its copy stays in the second-level cache
constexpr int64_t PRODUCTS_A_THREAD = 1 << 17;  // fewer are done before another thread has woken up

int threads_of(const HeadsCall& c) {
    const int64_t products = c.num_tokens * c.num_heads * c.in_features * c.out_features;
    return (int)std::clamp<int64_t>(products / PRODUCTS_A_THREAD, 1, c.num_threads);
}

int64_t rows_a_part(const HeadsCall& c) {
    const int threads = threads_of(c);
    const int64_t for_threads = threads == 1 ? 1 : panels::divided_up(4 * threads, c.num_heads);
    const int64_t parts = std::max(for_threads, panels::divided_up(c.num_tokens, MOST_ROWS));
    return panels::divided_up(panels::divided_up(c.num_tokens, parts), panels::PANEL) * panels::PANEL;
}

int64_t staging_a_thread(const HeadsCall& c) {
    const int64_t rows = std::min(rows_a_part(c), c.num_tokens);
    return panels::divided_up(gemm_staging_bytes(rows, c.in_features, c.half, false, 1), 64) * 64;
}

void multiply(const HeadsCall& c, int64_t head, int64_t first, int64_t rows, char* staging) {
    const int64_t size = c.half ? 2 : 4, width = c.out_features + c.tail;
    const int64_t panels_a_head = panels::divided_up(c.out_features, panels::PANEL);
    const int64_t panel_bytes = panels::padded_units(c.in_features, c.half) * panels::PANEL * 4;
    GemmCall call = {};
    call.x = c.x + (first * c.x_token + head * c.x_head) * size;
    call.packed = c.packed + head * panels_a_head * panel_bytes;
    call.out = c.out + (first * c.num_heads + head) * width * size;
    call.staging = staging;
    call.rows = rows, call.in_features = c.in_features, call.out_features = c.out_features;
    call.is_bf16 = c.half, call.num_threads = 1;
    call.x_stride = c.x_token, call.out_stride = c.num_heads * width;
    Team::run(1, [&](Team& team) { gemm_in_team(call, team); });
    if (c.tail)
        for (int64_t row = 0; row < rows; ++row)
            std::memcpy(call.out + (row * call.out_stride + c.out_features) * size,
                        call.x + (row * c.x_token + c.in_features) * size, c.tail * size);
}

}  // namespace

extern "C" {

// Bytes of `HeadsCall::staging`.
int64_t latent_heads_staging(const HeadsCall* c) { return staging_a_thread(*c) * threads_of(*c); }

void latent_multiply_heads(const HeadsCall* c) {
    if (c->num_tokens == 0) return;
    const int64_t rows = rows_a_part(*c), parts = panels::divided_up(c->num_tokens, rows), bytes = staging_a_thread(*c);
    [[maybe_unused]] const int threads = threads_of(*c);  // without OpenMP
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < parts * c->num_heads; ++i) {
        const int64_t first = i % parts * rows;
        multiply(*c, i / parts, first, std::min(rows, c->num_tokens - first), c->staging + omp_get_thread_num() * bytes);
    }
}
}
