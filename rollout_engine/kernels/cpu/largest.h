// The largest logit of a row.
#pragma once

#include <algorithm>
#include <cmath>

#include "vec.h"

// NaN is ignored here; it shows in sums over the row.
template <typename T>
float largest(const T* logits, int64_t size) {
    const vec::F lowest = vec::set1(-INFINITY);
    vec::F top[4] = {lowest, lowest, lowest, lowest};
    int64_t t = 0;
    for (; t + 4 * vec::LANES <= size; t += 4 * vec::LANES)
        for (int i = 0; i < 4; i++) top[i] = vec::max(vec::load(logits + t + i * vec::LANES), top[i]);
    float result = vec::max(vec::max(vec::max(top[0], top[1]), vec::max(top[2], top[3])));
    for (; t < size; t++) result = std::max(result, vec::to_float(logits[t]));
    return result;
}
