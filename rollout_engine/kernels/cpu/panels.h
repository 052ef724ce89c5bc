// The weights of a product, packed into panels of 32 columns; a *unit* is 32 bits of one column: one float32, or two bfloat16 that
// follow one another along K.
//
//     packed[panel][unit][32]      a panel is read front to back, and so is the next: one stream from memory
//
// Sixteen units of sixteen columns are an AMX tile (stride 128 bytes); one unit of sixteen columns is a vector.
// Units are padded with zeros to a multiple of 16, columns to a multiple of 32.
#pragma once

#include <cstdint>

namespace panels {

constexpr int64_t PANEL = 32;       // columns
constexpr int64_t UNIT_BLOCK = 16;  // units are padded to a multiple of this

inline int64_t divided_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int64_t whole_units(int64_t in_features, bool is_bf16) { return is_bf16 ? (in_features + 1) / 2 : in_features; }

inline int64_t padded_units(int64_t in_features, bool is_bf16) {
    return divided_up(whole_units(in_features, is_bf16), UNIT_BLOCK) * UNIT_BLOCK;
}

}  // namespace panels
