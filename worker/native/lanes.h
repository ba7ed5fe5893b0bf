// The lanes of a vector by a bit for each.

#pragma once

#include "vectors.h"

namespace {

// Each lane's number.
inline Lanes numbered() { return Lanes{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

// A bit for each lane that is not zero.
inline uint32_t bits_of(Lanes lanes) {
#if defined(__AVX512BF16__)
    return _mm512_test_epi32_mask((__m512i)lanes, (__m512i)lanes);
#else
    uint32_t bits = 0;
    for (int i = 0; i < WIDTH; ++i) bits |= uint32_t(lanes[i] != 0) << i;
    return bits;
#endif
}

// body(i) for each bit i, the lowest first.
template <typename Body>
inline void each_bit(uint32_t bits, Body body) {
    for (; bits; bits &= bits - 1) body(__builtin_ctz(bits));
}

// The lanes that have a bit, side by side; returns where they end. ``to`` has room for all.
template <typename Values, typename T>
inline T* put_those(uint32_t bits, Values values, T* to) {
#if defined(__AVX512BF16__)
    const __m512i packed = _mm512_maskz_compress_epi32(__mmask16(bits), (__m512i)values);
    std::memcpy(to, &packed, sizeof packed);
    return to + __builtin_popcount(bits);
#else
    each_bit(bits, [&](int i) { *to++ = values[i]; });
    return to;
#endif
}

}  // namespace
