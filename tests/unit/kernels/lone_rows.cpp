// A program for processors that the tests do not run on: products of `gemm.cpp`, whose rows must be the same bits alone and
// in a batch, and close to sums in double. Ends with status 0 where they are.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "../../../rollout_engine/kernels/cpu/gemm.h"

extern "C" {
void gemm_pack(const char*, int64_t, int64_t, int32_t, int32_t*, int32_t);
void int8_pack(const char*, int64_t, int64_t, int32_t, int8_t*, float*, int32_t);
void gemm_run(const GemmCall*);
}

namespace {

constexpr int64_t ROWS = 37, IN = 70, OUT = 90, UNITS = 80, PANELS = 3;

float number(uint32_t i) { return (float)((i * 2654435761u) >> 8) / (1 << 24) - 0.5f; }

float rounded(float x) {  // to bfloat16, towards zero: exact in both dtypes
    uint32_t bits;
    memcpy(&bits, &x, 4);
    bits &= 0xffff0000;
    memcpy(&x, &bits, 4);
    return x;
}

std::vector<char> stored(const std::vector<float>& values, bool is_bf16) {
    std::vector<char> bytes(values.size() * (is_bf16 ? 2 : 4));
    for (size_t i = 0; i < values.size(); i++)
        memcpy(&bytes[i * (is_bf16 ? 2 : 4)], (const char*)&values[i] + (is_bf16 ? 2 : 0), is_bf16 ? 2 : 4);
    return bytes;
}

float value(const std::vector<char>& bytes, size_t i, bool is_bf16) {
    float x = 0;
    memcpy((char*)&x + (is_bf16 ? 2 : 0), &bytes[i * (is_bf16 ? 2 : 4)], is_bf16 ? 2 : 4);
    return x;
}

bool holds(bool is_bf16, bool is_int8) {
    const int64_t size = is_bf16 ? 2 : 4;
    std::vector<float> x(ROWS * IN), w(OUT * IN);
    for (size_t i = 0; i < x.size(); i++) x[i] = rounded(number(i));
    for (size_t i = 0; i < w.size(); i++) w[i] = rounded(number(i + 99999));
    const std::vector<char> rows = stored(x, is_bf16), weight = stored(w, is_bf16);
    std::vector<int32_t> packed(PANELS * UNITS * 32);
    std::vector<float> scales(PANELS * 32);
    if (is_int8)
        int8_pack(weight.data(), OUT, IN, is_bf16, (int8_t*)packed.data(), scales.data(), 1);
    else
        gemm_pack(weight.data(), OUT, IN, is_bf16, packed.data(), 1);
    alignas(64) static char staging[1 << 20];
    auto product = [&](int64_t first, int64_t count) {
        std::vector<char> out(count * OUT * size);
        GemmCall call = {rows.data() + first * IN * size, packed.data(), nullptr, out.data(), staging, count, IN, OUT, is_bf16, 1};
        call.x_stride = IN, call.out_stride = OUT;
        call.scales = is_int8 ? scales.data() : nullptr;
        gemm_run(&call);
        return out;
    };
    const std::vector<char> whole = product(0, ROWS);
    for (int64_t r = 0; r < ROWS; r++) {
        const std::vector<char> alone = product(r, 1);
        if (memcmp(alone.data(), &whole[r * OUT * size], alone.size())) return false;
        for (int64_t n = 0; n < OUT; n++) {
            double sum = 0;
            for (int64_t k = 0; k < IN; k++) {
                const float scale = is_int8 ? scales[n] : 1, weight = w[n * IN + k] / scale;
                sum += (double)x[r * IN + k] * (is_int8 ? std::nearbyint(weight) * scale : weight);
            }
            if (std::abs(value(alone, n, is_bf16) - sum) > (is_bf16 ? 2e-2 : is_int8 ? 1e-2 : 1e-5)) return false;
        }
    }
    return true;
}

}  // namespace

int main() {
    bool all = true;
    for (bool is_int8 : {false, true})
        for (bool is_bf16 : {false, true}) {
            const bool found = holds(is_bf16, is_int8);
            printf("%s%s %d\n", is_int8 ? "int8 codes of " : "", is_bf16 ? "bfloat16" : "float32", found);
            all &= found;
        }
    return !all;
}
