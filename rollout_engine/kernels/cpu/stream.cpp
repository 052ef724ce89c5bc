// Copies that bypass the caches, for bytes that are not read again soon: a cached write first fetches the line that it
// replaces, which adds half of the traffic. The copy also finds the largest value.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace {

constexpr size_t LINE = 64;

// Copy one line; only the destination is aligned.
inline void write_line(char* out, const char* in) {
#ifdef __SSE2__
    for (size_t i = 0; i < LINE; i += 16) _mm_stream_si128((__m128i*)(out + i), _mm_loadu_si128((const __m128i*)(in + i)));
#else
    memcpy(out, in, LINE);
#endif
}

// The largest of T's bits without the sign: of floats, those of the largest magnitude.
template <typename T>
struct Largest {
    typedef T Line __attribute__((vector_size(LINE)));
    static constexpr T MAGNITUDE = std::numeric_limits<T>::max();
    Line top = {};
    T rest = 0;

    void line(const char* in) {
        Line bits;
        memcpy(&bits, in, LINE);
        bits &= Line{} + MAGNITUDE;
        top = top > bits ? top : bits;
    }

    void some(const char* in, size_t bytes) {
        for (size_t i = 0; i + sizeof(T) <= bytes; i += sizeof(T)) {
            T bits;
            memcpy(&bits, in + i, sizeof(T));
            bits &= MAGNITUDE;
            rest = rest > bits ? rest : bits;
        }
    }

    int64_t result() const {
        T all = rest;
        for (size_t i = 0; i < LINE / sizeof(T); i++) all = all > top[i] ? all : top[i];
        return all;
    }
};

template <typename T>
int64_t stream(char* out, const char* in, size_t bytes) {
    Largest<T> largest;
    if (!bytes) return largest.result();  // a tensor without elements may have no address
    size_t done = -(uintptr_t)out % LINE;
    if (done > bytes) done = bytes;
    memcpy(out, in, done);
    largest.some(in, done);
    for (; done + LINE <= bytes; done += LINE) {
        largest.line(in + done);
        write_line(out + done, in + done);
    }
    memcpy(out + done, in + done, bytes - done);
    largest.some(in + done, bytes - done);
#ifdef __SSE2__
    _mm_sfence();  // whoever is told now sees it
#endif
    return largest.result();
}

}  // namespace

// Copies `bytes` bytes of elements `width` bytes wide, both pointers at whole elements.
extern "C" int64_t stream_copy(void* out, const void* in, int64_t bytes, int64_t width) {
    switch (width) {
        case 1: return stream<int8_t>((char*)out, (const char*)in, bytes);
        case 2: return stream<int16_t>((char*)out, (const char*)in, bytes);
        case 4: return stream<int32_t>((char*)out, (const char*)in, bytes);
        default: return stream<int64_t>((char*)out, (const char*)in, bytes);
    }
}
