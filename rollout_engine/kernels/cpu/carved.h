// Arrays that lie one after the other in one piece of memory.
#pragma once

#include <cstdint>

// Its heir names the arrays and takes each; over null memory it only counts.
class Carved {
  public:
    int64_t bytes() const { return bytes_; }

  protected:
    explicit Carved(char* memory) : memory_(memory) {}

    // The next array, of `count`, from a cache line on.
    template <typename T>
    void take(T*& array, int64_t count) {
        array = reinterpret_cast<T*>(memory_ + bytes_);
        bytes_ += (count * sizeof(T) + 63) / 64 * 64;
    }

  private:
    char* memory_;
    int64_t bytes_ = 0;
};
