// Rounds weights to int8 codes with a scale for each output, in panels.
#include "int8.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "openmp.h"

namespace {

using namespace panels;

constexpr int32_t INFINITE = 0x7f800000;         // bits of a float; those of NaN are above
constexpr float LARGEST = 127;                   // code
constexpr float LEAST = 127 * 1.17549435e-38f;   // value: below it, a row's scale would be subnormal

// Bits of the largest absolute value: they are in the order of the values.
template <typename T>
int32_t largest_bits(const T* row, int64_t size) {
    vec::I largest = {};
    for (int64_t k = 0; k < size; k += vec::LANES) {
        const vec::F x = k + vec::LANES <= size ? vec::load(row + k) : vec::load(row + k, static_cast<int>(size - k));
        const vec::I bits = (vec::I)x & 0x7fffffff;
        largest = vec::select(bits > largest, bits, largest);
    }
    int32_t lanes[vec::LANES];
    vec::write(lanes, largest);
    return *std::max_element(lanes, lanes + vec::LANES);
}

// Sixteen values times `inverse`, to the nearest whole number, ties to even.
VEC_INLINE void round_to(int8_t* codes, vec::F x, vec::F inverse) {
    constexpr float SHIFT = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    const vec::F bounded = vec::max(vec::set1(-LARGEST), vec::min(vec::set1(LARGEST), vec::product(x, inverse)));
    const vec::I whole = (vec::I)(bounded + SHIFT) - (vec::I)vec::set1(SHIFT);
#ifdef __AVX512F__
    _mm_storeu_si128((__m128i*)codes, _mm512_cvtepi32_epi8((__m512i)whole));
#else
    int32_t lanes[vec::LANES];
    vec::write(lanes, whole);
    for (int i = 0; i < vec::LANES; ++i) codes[i] = static_cast<int8_t>(lanes[i]);
#endif
}

// The codes of a row, and its scale: NaN, and zeros for codes, where a value is not finite.
template <typename T>
void round_row(const T* row, int64_t size, int8_t* codes, float* scale) {
    const int32_t bits = largest_bits(row, size);
    float largest;
    std::memcpy(&largest, &bits, sizeof largest);
    const bool is_finite = bits < INFINITE, is_zero = largest < LEAST;
    *scale = !is_finite ? std::numeric_limits<float>::quiet_NaN() : is_zero ? 0 : largest / LARGEST;
    if (!is_finite || is_zero) {
        std::memset(codes, 0, size);
        return;
    }
    const vec::F inverse = vec::set1(LARGEST / largest);
    int64_t k = 0;
    for (; k + vec::LANES <= size; k += vec::LANES) round_to(codes + k, vec::load(row + k), inverse);
    if (k < size) round_to(codes + k, vec::load(row + k, static_cast<int>(size - k)), inverse);
}

// Outputs [first, end) of a weight [out_features, in_features]: a panel of codes, and their scales. `rows`: memory of
// int8::panel_bytes() for the codes row by row, zeros behind the end of each.
template <typename T>
void round_panel(const T* weight, int64_t in_features, int64_t first, int64_t end, int8_t* rows, int8_t* out, float* scales) {
    constexpr int64_t SIZE = 4 / sizeof(T);  // elements of a unit
    const int64_t units = padded_units(in_features, SIZE == 2), stride = units * SIZE;
    for (int64_t n = first; n < end; ++n)
        round_row(weight + n * in_features, in_features, rows + (n - first) * stride, scales + n);
    for (int64_t unit = 0; unit < units; ++unit, out += PANEL * SIZE)
        for (int64_t n = 0; n < end - first; ++n) std::memcpy(out + n * SIZE, rows + n * stride + unit * SIZE, SIZE);
}

}  // namespace

// Rounds a weight [out_features, in_features] to zeroed panels of codes and zeroed `scales` [panels * 32].
extern "C" void int8_pack(const char* weight, int64_t out_features, int64_t in_features, int32_t is_bf16, int8_t* codes,
                          float* scales, int32_t num_threads) {
    const int64_t bytes = int8::panel_bytes(in_features, is_bf16);
#pragma omp parallel num_threads(num_threads)
    {
        std::vector<int8_t> rows(bytes);
#pragma omp for schedule(static)
        for (int64_t panel = 0; panel < divided_up(out_features, PANEL); ++panel) {
            const int64_t first = panel * PANEL, end = std::min(first + PANEL, out_features);
            int8_t* out = codes + panel * bytes;
            is_bf16 ? round_panel((const bf16*)weight, in_features, first, end, rows.data(), out, scales)
                    : round_panel((const float*)weight, in_features, first, end, rows.data(), out, scales);
        }
    }
}
