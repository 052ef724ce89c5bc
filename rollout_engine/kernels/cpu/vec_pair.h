// Vectors for registers of fewer than sixteen floats: `Pair` of what AVX2 holds, or `Pair` of `Pair` for NEON and SSE.
//
// Compilers keep a generic vector that is wider than a register in memory; halves stay in registers. Operators are those
// of generic vectors, element by element; `select` stands for `? :`, and `converted` for `__builtin_convertvector`.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX__) || defined(__FMA__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define PAIR_INLINE inline __attribute__((always_inline))

namespace vec {

#ifdef __AVX__
constexpr int REGISTER_LANES = 8;
#else
constexpr int REGISTER_LANES = 4;
#endif

template <typename Scalar, typename Half>
struct Pair {
    Half low, high;

    Pair() = default;
    PAIR_INLINE Pair(Half low, Half high) : low(low), high(high) {}
    PAIR_INLINE Pair(Scalar x) : low(x - Half{}), high(low) {}  // in every lane; -0.0 stays

    // The same bits as another type.
    template <typename S, typename H>
    explicit PAIR_INLINE operator Pair<S, H>() const {
        return {(H)low, (H)high};
    }

    PAIR_INLINE Pair operator-() const { return {-low, -high}; }
    PAIR_INLINE Pair operator<<(int bits) const { return {low << bits, high << bits}; }
    PAIR_INLINE Pair operator>>(int bits) const { return {low >> bits, high >> bits}; }
    PAIR_INLINE Pair& operator+=(Pair b) { return *this = *this + b; }

#define PAIR_OPERATOR(op) \
    friend PAIR_INLINE Pair operator op(Pair a, Pair b) { return {a.low op b.low, a.high op b.high}; }
#define PAIR_COMPARISON(op)                                                               \
    friend PAIR_INLINE auto operator op(Pair a, Pair b) {                                 \
        return Pair<int32_t, decltype(a.low op b.low)>(a.low op b.low, a.high op b.high); \
    }
    PAIR_OPERATOR(+)
    PAIR_OPERATOR(-)
    PAIR_OPERATOR(*)
    PAIR_OPERATOR(/)
    PAIR_OPERATOR(&)
    PAIR_OPERATOR(|)
    PAIR_COMPARISON(<)
    PAIR_COMPARISON(<=)
    PAIR_COMPARISON(>)
    PAIR_COMPARISON(>=)
    PAIR_COMPARISON(==)
#undef PAIR_OPERATOR
#undef PAIR_COMPARISON
};

template <typename Scalar, int LANES>
struct Wide {
    typedef Pair<Scalar, typename Wide<Scalar, LANES / 2>::type> type;
};
template <typename Scalar>
struct Wide<Scalar, REGISTER_LANES> {
    typedef Scalar type __attribute__((vector_size(REGISTER_LANES * sizeof(Scalar))));
};
typedef Wide<float, REGISTER_LANES>::type Register;

// `a` where the mask is set, else `b`.
template <typename Mask, typename V>
PAIR_INLINE V select(Mask mask, V a, V b) {
    return mask ? a : b;
}
template <typename M, typename S, typename H>
PAIR_INLINE Pair<S, H> select(Pair<int32_t, M> mask, Pair<S, H> a, Pair<S, H> b) {
    return {select(mask.low, a.low, b.low), select(mask.high, a.high, b.high)};
}

// Copies between a vector and memory.
template <typename V>
PAIR_INLINE void read(const void* p, V& x) {
    memcpy(&x, p, sizeof x);
}
template <typename S, typename H>
PAIR_INLINE void read(const void* p, Pair<S, H>& x) {
    read(p, x.low);
    read((const char*)p + sizeof(H), x.high);
}
template <typename V>
PAIR_INLINE void write(void* p, V x) {
    memcpy(p, &x, sizeof x);
}
template <typename S, typename H>
PAIR_INLINE void write(void* p, Pair<S, H> x) {
    write(p, x.low);
    write((char*)p + sizeof(H), x.high);
}

template <typename To, typename V>
PAIR_INLINE To converted(V x) {
    return __builtin_convertvector(x, To);
}
#ifdef __AVX2__
template <>
PAIR_INLINE Wide<uint32_t, 8>::type converted(Wide<uint16_t, 8>::type x) {  // compilers take four instructions
    return (Wide<uint32_t, 8>::type)_mm256_cvtepu16_epi32((__m128i)x);
}
template <>
PAIR_INLINE Wide<int32_t, 8>::type converted(Wide<int8_t, 8>::type x) {
    return (Wide<int32_t, 8>::type)_mm256_cvtepi8_epi32(_mm_cvtsi64_si128((int64_t)x));
}
#endif
template <typename To, typename S, typename H>
PAIR_INLINE To converted(Pair<S, H> x) {
    return {converted<decltype(To::low)>(x.low), converted<decltype(To::low)>(x.high)};
}

// a * b + c, rounded once where the machine can: without the instruction a compiler fuses in one place and not in another.
PAIR_INLINE Register fma(Register a, Register b, Register c) {
#if defined(__FMA__)
    return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
    return vfmaq_f32(c, a, b);
#else
    return a * b + c;
#endif
}
template <typename S, typename H>
PAIR_INLINE Pair<S, H> fma(Pair<S, H> a, Pair<S, H> b, Pair<S, H> c) {
    return {fma(a.low, b.low, c.low), fma(a.high, b.high, c.high)};
}

// a * b, rounded even where it feeds a sum.
PAIR_INLINE Register product(Register a, Register b) {
    Register result = a * b;
#if defined(__x86_64__)
    __asm__("" : "+x"(result));
#elif defined(__aarch64__)
    __asm__("" : "+w"(result));
#else
    __asm__("" : "+m"(result));
#endif
    return result;
}
template <typename S, typename H>
PAIR_INLINE Pair<S, H> product(Pair<S, H> a, Pair<S, H> b) {
    return {product(a.low, b.low), product(a.high, b.high)};
}

}  // namespace vec
