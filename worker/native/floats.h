// Pairs of bfloat16 multiplied as floats, to the same bits, where that is faster.
//
// Intel's processors take two cycles for sixteen pairs, and half of one for sixteen floats. Of each pair the second product is
// added before the first, and what is too small for a float is zero: as the instruction for pairs does it.

#pragma once

#include "vectors.h"

#if defined(__AVX512BF16__)

#include <algorithm>

namespace {

// While it lives, this thread's floats are as the products of pairs are.
class Flushing {
    const unsigned before_ = _mm_getcsr();

  public:
    Flushing() { _mm_setcsr(before_ | 0x8040); }  // what is denormal counts as zero, and is not made
    ~Flushing() { _mm_setcsr(before_); }
    Flushing(const Flushing&) = delete;
};

// The first of each pair, and the second.
inline __m512 firsts_of(__m512i pairs) { return (__m512)_mm512_slli_epi32(pairs, 16); }
inline __m512 seconds_of(__m512i pairs) { return (__m512)_mm512_and_si512(pairs, _mm512_set1_epi32(0xffff0000)); }

template <typename Body>
uint64_t cycles_of(const Body& body) {
    __m512 sums[14] = {};
    const uint64_t began_at = __rdtsc();
    for (int turn = 0; turn < 100; ++turn) {
#pragma GCC unroll 14
        for (__m512& sum : sums) {
            sum = body(sum);
            asm volatile("" : "+v"(sum));
        }
    }
    return __rdtsc() - began_at;
}

// Timed on some thousands of both, the best of some tries; whatever disturbs all of them costs speed, not bits.
inline bool find_whether_pairs_are_slow() {
    uint64_t pairs = UINT64_MAX, singles = UINT64_MAX;
    for (int turn = 0; turn < 16; ++turn) {
        pairs = std::min(pairs, cycles_of([](__m512 sum) { return _mm512_dpbf16_ps(sum, (__m512bh)sum, (__m512bh)sum); }));
        singles = std::min(singles, cycles_of([](__m512 sum) { return _mm512_fmadd_ps(sum, sum, sum); }));
    }
    return 2 * pairs > 5 * singles;
}

inline bool pairs_are_slow() {
    static const bool found = find_whether_pairs_are_slow();
    return found;
}

}  // namespace

#endif
