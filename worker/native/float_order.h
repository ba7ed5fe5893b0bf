// Floats in their order: what the largest of many reach.

#pragma once

#include "vectors.h"

namespace {

// The place of a float in the order of all, and back.
inline int64_t key_of(float x) {
    const int32_t bits = int32_t(float_to_bits(x));
    return bits < 0 ? bits ^ 0x7fffffff : bits;
}
inline float number_of(int64_t key) {
    const int32_t bits = int32_t(key);
    return bits_to_float(uint32_t(bits < 0 ? bits ^ 0x7fffffff : bits));
}

// What the k largest of a whole number of vectors reach, by halving what it may be.
inline float last_among(const float* from, int64_t count, int64_t k) {
    auto at_least = [&](float least) {
        Lanes found = {};
        for (int64_t i = 0; i < count; i += WIDTH) found -= load(from + i) >= least;
        int64_t sum = 0;
        for (int i = 0; i < WIDTH; ++i) sum += found[i];
        return sum;
    };
    int64_t low = key_of(-INFINITY), high = int64_t(key_of(INFINITY));
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2, num = at_least(number_of(middle));
        (num >= k ? low : high) = middle;
        if (num == k) break;  // whatever is between the k-th and the next will do
    }
    return number_of(low);
}

}  // namespace
