// Arrays laid out one after the other in one allocation.
#pragma once

#include <cstdint>

// A subclass takes each of its arrays; with null memory only the size is counted.
class Carved {
  public:
    int64_t bytes() const { return bytes_; }

  protected:
    explicit Carved(char* memory) : memory_(memory) {}

    // The next array, of `count` elements, at the start of a cache line.
    template <typename T>
    void take(T*& array, int64_t count) {
        array = reinterpret_cast<T*>(memory_ + bytes_);
        bytes_ += (count * sizeof(T) + 63) / 64 * 64;
    }

  private:
    char* memory_;
    int64_t bytes_ = 0;
};
