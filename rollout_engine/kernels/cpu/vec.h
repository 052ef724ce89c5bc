// Vectors of sixteen floats: AVX-512 where the CPU has it, else pairs of registers (`vec_pair.h`).
//
// Every function is element-wise or reduces in one fixed order, so bits never depend on a value's place in a row, block
// or thread. Therefore write a product that feeds a sum as `fma` or `product`: otherwise the compiler may fuse the two in
// one place and not in another.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __AVX512F__
#pragma GCC diagnostic push  // GCC 12 warns of its own undefined values in this header
#pragma GCC diagnostic ignored "-Wuninitialized"
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#pragma GCC diagnostic pop
#else
#include "vec_pair.h"
#endif

#pragma GCC diagnostic ignored "-Wpsabi"  // 64-byte vectors are only passed to inlined functions
#define VEC_INLINE static inline __attribute__((always_inline))

struct bf16 {
    uint16_t bits;
};

namespace vec {

constexpr int LANES = 16;
#ifdef __AVX512F__
typedef float F __attribute__((vector_size(64)));
typedef int32_t I __attribute__((vector_size(64)));
typedef uint32_t U __attribute__((vector_size(64)));
typedef uint16_t Half __attribute__((vector_size(32)));  // sixteen bfloat16

// `a` where the mask is set, else `b`.
template <typename V>
VEC_INLINE V select(I mask, V a, V b) {
    return mask ? a : b;
}

template <typename To, typename V>
VEC_INLINE To converted(V x) {
    return __builtin_convertvector(x, To);
}

VEC_INLINE I lane_numbers() { return I{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

template <typename V>
VEC_INLINE void read(const void* p, V& x) {
    memcpy(&x, p, sizeof x);
}

template <typename V>
VEC_INLINE void write(void* p, V x) {
    memcpy(p, &x, sizeof x);
}

VEC_INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }

// a * b, rounded even where it feeds a sum.
VEC_INLINE F product(F a, F b) {
    F result = a * b;
    __asm__("" : "+v"(result));
    return result;
}
#else
typedef Wide<float, LANES>::type F;
typedef Wide<int32_t, LANES>::type I;
typedef Wide<uint32_t, LANES>::type U;
typedef Wide<uint16_t, LANES>::type Half;
typedef Wide<int8_t, LANES>::type Byte;

VEC_INLINE I lane_numbers() {
    constexpr int32_t numbers[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    I x;
    read(numbers, x);
    return x;
}
#endif

// A register of doubles.
#ifdef __AVX512F__
typedef double Doubles __attribute__((vector_size(64)));
VEC_INLINE Doubles fma(Doubles a, Doubles b, Doubles c) { return _mm512_fmadd_pd(a, b, c); }
#elif defined(__FMA__)
typedef double Doubles __attribute__((vector_size(32)));
VEC_INLINE Doubles fma(Doubles a, Doubles b, Doubles c) { return _mm256_fmadd_pd(a, b, c); }
#else
typedef double Doubles __attribute__((vector_size(16)));
#ifdef __aarch64__
VEC_INLINE Doubles fma(Doubles a, Doubles b, Doubles c) { return vfmaq_f64(c, a, b); }
#else
VEC_INLINE Doubles fma(Doubles a, Doubles b, Doubles c) { return a * b + c; }
#endif
#endif

// a * b + c of a vector of doubles, rounded once where the machine can.
template <typename V>
VEC_INLINE V fma_doubles(V a, V b, V c) {
    Doubles x[sizeof(V) / sizeof(Doubles)], y[sizeof(V) / sizeof(Doubles)], z[sizeof(V) / sizeof(Doubles)];
    read(&a, x), read(&b, y), read(&c, z);
    for (unsigned i = 0; i < sizeof(V) / sizeof(Doubles); i++) z[i] = fma(x[i], y[i], z[i]);
    read(z, c);
    return c;
}

VEC_INLINE F set1(float x) { return F{} + x; }  // -0.0 becomes 0.0

// The second operand where either is NaN.
VEC_INLINE F max(F a, F b) {
#ifdef __AVX512F__
    return _mm512_max_ps(a, b);
#else
    return select(a > b, a, b);
#endif
}

VEC_INLINE F min(F a, F b) {
#ifdef __AVX512F__
    return _mm512_min_ps(a, b);
#else
    return select(a < b, a, b);
#endif
}

// --- memory; the forms with `n` touch the first n < 16 elements only and read zeros past them ----------------------

VEC_INLINE F from_bf16(Half x) { return (F)(converted<U>(x) << 16); }

// To nearest, ties to even, as torch rounds; NaN stays NaN.
VEC_INLINE Half to_bf16(F x) {
    U bits = (U)x;
    U rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    rounded = select(x == x, rounded, U{} + 0x7fc0);
    return converted<Half>(rounded);
}

VEC_INLINE F load(const float* p) {
    F x;
    read(p, x);
    return x;
}

VEC_INLINE F load(const bf16* p) {
    Half x;
    read(p, x);
    return from_bf16(x);
}

VEC_INLINE void store(float* p, F x) { write(p, x); }

VEC_INLINE void store(bf16* p, F x) {
    write(p, to_bf16(x));
}

// The same, for values that are 0, normal or NaN only.
VEC_INLINE void store_normal(float* p, F x) { store(p, x); }
VEC_INLINE void store_normal(bf16* p, F x) {
#ifdef __AVX512BF16__
    const __m256bh rounded = _mm512_cvtneps_pbh(x);
    memcpy(p, &rounded, sizeof rounded);
#else
    store(p, x);
#endif
}

template <typename T>
VEC_INLINE F load(const T* p, int n) {
    T padded[LANES] = {};
    memcpy(padded, p, n * sizeof(T));
    return load(padded);
}

template <typename T>
VEC_INLINE void store(T* p, F x, int n) {
    T padded[LANES];
    store(padded, x);
    memcpy(p, padded, n * sizeof(T));
}

#ifdef __AVX512F__
VEC_INLINE F load(const float* p, int n) { return _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p); }
VEC_INLINE void store(float* p, F x, int n) { _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), x); }
#elif defined(__AVX2__)
VEC_INLINE F load(const float* p, int n) {
    const I mask = lane_numbers() < n;
    return {_mm256_maskload_ps(p, (__m256i)mask.low), _mm256_maskload_ps(p + REGISTER_LANES, (__m256i)mask.high)};
}
#endif

VEC_INLINE float to_float(float x) { return x; }

VEC_INLINE float to_float(bf16 x) {
    uint32_t bits = (uint32_t)x.bits << 16;
    float result;
    memcpy(&result, &bits, sizeof result);
    return result;
}

// --- across lanes ----------------------------------------------------------------------------------------------------

// All lanes combined by f, by a fixed tree: halves first.
template <typename Function>
VEC_INLINE float folded(F x, Function f) {
#ifdef __AVX__  // compilers would go through memory
#ifdef __AVX512F__
    const __m256 eight = f(_mm512_castps512_ps256(x), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1)));
#else
    const __m256 eight = f(x.low, x.high);
#endif
    const __m128 four = f(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = f(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(f(two, _mm_movehdup_ps(two)));
#else
    float lane[LANES];
    store(lane, x);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) lane[i] = f(lane[i], lane[i + width]);
    return lane[0];
#endif
}

VEC_INLINE float sum(F x) {
    return folded(x, [](auto a, auto b) { return a + b; });
}

VEC_INLINE float max(F x) {
#ifdef __AVX512F__
    return _mm512_reduce_max_ps(x);
#else
    return folded(x, [](auto a, auto b) { return a > b ? a : b; });
#endif
}

// --- functions -------------------------------------------------------------------------------------------------------

// e^x to about 1 ulp: x = n ln2 + r, |r| <= ln2 / 2, e^r by the polynomial of Cephes (Moshier), ln2 in two parts (Cody
// and Waite). exp(0) is 1, exp(inf) is inf, NaN stays NaN. Results that would be subnormal are 0: CPUs take a hundred times
// longer over those.
VEC_INLINE F exp(F x) {
    const float round = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    const float lowest = -87.33654f;  // e^lowest is the least normal number
    const I is_low = x < lowest;
    x = min(set1(89.0f), max(set1(lowest), x));
    F shifted = fma(x, set1(1.44269504f), set1(round));
    F n = shifted - round;
    F r = fma(n, set1(-0.693359375f), x);
    r = fma(n, set1(2.12194440e-4f), r);
    F p = fma(set1(1.9875691500e-4f), r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    p = fma(p, r * r, r) + 1.0f;
#ifdef __AVX512F__
    F result = _mm512_scalef_ps(p, n);
#else
    // 2^n by two factors: 2^n alone is no normal number at either end.
    I exponent = (I)shifted - (I)set1(round);
    I half = exponent >> 1;
    F result = p * (F)((half + 127) << 23) * (F)((exponent - half + 127) << 23);
#endif
    return select(is_low, F{}, result);
}

// acc + a0 b0 + a1 b1 in each lane, where a lane of `a` and `b` holds two bfloat16.
VEC_INLINE F dot_pairs(F acc, I a, I b) {
#ifdef __AVX512BF16__
    return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
#else
    acc = fma((F)((U)a << 16), (F)((U)b << 16), acc);
    return fma((F)(a & (int32_t)0xffff0000), (F)(b & (int32_t)0xffff0000), acc);
#endif
}

}  // namespace vec
