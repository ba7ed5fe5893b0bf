// The noise of worker/sampling/race.py: words of a stream, and what is made of them, exactly or roughly.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "vectors.h"

namespace {

typedef uint64_t Longs __attribute__((vector_size(64)));
typedef int64_t SignedLongs __attribute__((vector_size(64)));
typedef float EightFloats __attribute__((vector_size(32)));

constexpr uint64_t TILE_WORDS = uint64_t(1) << 40;

constexpr uint64_t GAMMA = 0x9E3779B97F4A7C15;

// One, or a vector.
template <typename Word>
inline Word mixed(Word z) {
    z = (z ^ (z >> 30)) * uint64_t(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * uint64_t(0x94D049BB133111EB);
    return z ^ (z >> 31);
}

// Word ``at`` of a stream.
inline uint64_t word_of(uint64_t start, uint64_t at) { return mixed(start + at * GAMMA); }

inline float uniform_of(uint64_t word) {
    float upper = float(int64_t(word >> 11 | 1)) * 0x1p-53f;
    return std::min(upper, 1.0f - 0x1p-24f);
}

inline float exponential_of(uint64_t word) { return float(-std::log1p(-double(uniform_of(word)))); }

inline float logarithm(float x) { return float(std::log(double(x))); }

// e to the x within 3e-7 of itself, whichever way is the shortest; of minus infinity no more than the smallest numbers.
inline Floats rough_exponential(Floats x) {
#if defined(__AVX512BF16__)
    return power_of_two((__m512)(x * 1.44269504088896341f));
#else
    return exponential(x);
#endif
}

// Natural, of what is above zero, with a relative error of 1e-6 near one and as small an absolute one elsewhere: whole powers of
// two, and what is left by the series of the area tangent.
inline Floats rough_logarithm(Floats x) {
    Words bits = (Words)x;
    Words away = bits - 0x3f3504f3u;  // from the root of a half
    Floats exponents = __builtin_convertvector((Lanes)away >> 23, Floats);
    Floats rest = (Floats)((away & 0x007fffffu) + 0x3f3504f3u) - 1.0f;
    Floats s = rest / (rest + 2.0f), square = s * s;
    Floats series = 1.0f + square * (1.0f / 3.0f + square * (1.0f / 5.0f + square * (1.0f / 7.0f)));
    return exponents * 0.6931471805599453f + 2.0f * s * series;
}

inline EightFloats eight_uniforms(Longs words) {
    const EightFloats uniform = __builtin_convertvector((SignedLongs)(words >> 11 | 1), EightFloats) * 0x1p-53f;
    return uniform < 1.0f - 0x1p-24f ? uniform : EightFloats{} + (1.0f - 0x1p-24f);
}

// Of the words of both.
inline Floats uniforms_of(Longs low, Longs high) {
    const EightFloats halves[2] = {eight_uniforms(low), eight_uniforms(high)};
#if defined(__AVX512DQ__)
    // By way of memory it would wait until both are written.
    return (Floats)_mm512_insertf32x8(_mm512_castps256_ps512((__m256)halves[0]), (__m256)halves[1], 1);
#else
    Floats both;
    std::memcpy(&both, halves, sizeof both);
    return both;
#endif
}

// Of words [first, first + 16) of a stream.
inline Floats uniforms_of(uint64_t start, uint64_t first) {
    const Longs steps = {0, GAMMA, 2 * GAMMA, 3 * GAMMA, 4 * GAMMA, 5 * GAMMA, 6 * GAMMA, 7 * GAMMA};
    const uint64_t at = start + first * GAMMA;
    return uniforms_of(mixed(steps + at), mixed(steps + (at + 8 * GAMMA)));
}

inline Floats rough_exponentials(Floats uniform) {
    // Next to one the difference to it says too little.
    Floats series = uniform * (1.0f + uniform * (0.5f + uniform * (1.0f / 3.0f)));
    return uniform < 0.00390625f ? series : -rough_logarithm(1.0f - uniform);
}

}  // namespace
