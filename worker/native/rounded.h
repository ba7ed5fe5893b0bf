// Numbers rounded to int8 by the largest of them, in tiles for VNNI and AMX.

#pragma once

#include "tiles.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#include <cpuid.h>
#include <immintrin.h>

#include <algorithm>
#include <vector>

#define HAVE_INT8 1

namespace {

namespace int8 {

// AMD's fifth: its first cache waits for more lines at once than others', so that one row need not go by way of the second, and is
// faster where what is read of x serves both halves of a panel. (The fourth is as Intel's are.)
inline bool is_zen5() {
    static const bool found = [] {
        unsigned model = 0, unused;
        if (!__builtin_cpu_is("amd") || !__get_cpuid(1, &model, &unused, &unused, &unused)) return false;
        return (model >> 8 & 0xf) + (model >> 20 & 0xff) == 0x1a;
    }();
    return found;
}

constexpr int SIDE = 16;               // rows of a tile of x, columns of a tile of the matrix
constexpr int DEEP = 64;               // inputs of a tile
constexpr int TILE_BYTES = SIDE * DEEP;
constexpr int COLUMNS = 2 * SIDE;      // of a panel: two tiles side by side
constexpr int64_t ALONE = 200000;      // bytes of the matrix, and a 64th of the products, for which no other thread is woken

constexpr int64_t RUNS = 64;           // that a matrix is read in where rows are few

constexpr int BLOCK_BYTES = 5 << 18;   // of x, that stay in the second cache

// Row tiles that are multiplied together, an even number: 512 rows where that many stay in the second cache, else about 256.
inline int64_t tiles_at_once(int64_t rows, int64_t row_bytes) {
    const int64_t all = (rows + SIDE - 1) / SIDE, most = row_bytes * 512 <= BLOCK_BYTES ? 32 : 16;
    const int64_t blocks = (all + most - 1) / most;
    return ((all + blocks - 1) / blocks + 1) / 2 * 2;
}

// Into the second cache, which waits for three times as many lines at once as the first.
inline void fetch(const void* at) { __builtin_prefetch(at, 0, 2); }

// Some inputs of a token as int8: the largest magnitude becomes 127. Where one is a NaN or an infinity, the scale is a NaN.
class Codes {
    Floats inverse_;
    bool is_empty_;
    __m512i sum_ = _mm512_setzero_si512();

  public:
    float scale;

    template <typename T>
    Codes(const T* x, int64_t size) : Codes(largest_of(x, size)) {}

    // Of numbers of which none is larger than this.
    explicit Codes(float magnitude) {
        const bool is_finite = magnitude < INFINITY;
        // The reciprocal of what is smaller than this is no longer a number.
        const bool is_zero = magnitude < 1e-36f;
        is_empty_ = is_zero || !is_finite;
        scale = !is_finite ? NAN : is_zero ? 0.0f : magnitude / 127.0f;
        inverse_ = Floats{} + 127.0f / magnitude;
    }

    // The next 64, or what is left of them and zeros.
    template <typename T>
    __m512i next(const T* x, int64_t size) {
        if (is_empty_) return _mm512_setzero_si512();
        __m512i codes;
        if (size >= DEEP) {
            codes = codes_of(x);
        } else {
            T padded[DEEP] = {};
            std::memcpy(padded, x, size * sizeof(T));
            codes = codes_of(padded);
        }
        return counted(codes);
    }

    // The next 64 of bfloat16, 32 and 32.
    __m512i next(__m512i first, __m512i second) {
        return is_empty_ ? _mm512_setzero_si512() : counted(codes_of(first, second));
    }

    // Of all codes so far.
    int32_t sum() const { return _mm512_reduce_add_epi32(sum_); }

    // Of many numbers the largest so far, ``largest``, for ``magnitude_of``: of bfloat16 as bits, so that a NaN is larger than anything.
    static __m512i larger(__m512i largest, __m512i numbers) {
        return _mm512_max_epu16(largest, _mm512_and_si512(numbers, _mm512_set1_epi16(0x7fff)));
    }
    static float magnitude_of(__m512i largest) {
        const __m512i low = _mm512_slli_epi32(largest, 16);
        return bits_to_float(_mm512_reduce_max_epu32(_mm512_max_epu32(low, largest)) & 0xffff0000u);
    }

  private:
    __m512i counted(__m512i codes) {
        sum_ = _mm512_dpbusd_epi32(sum_, _mm512_set1_epi8(1), codes);
        return codes;
    }

    // As bits, so that a NaN is larger than anything.
    static float largest_of(const float* x, int64_t size) {
        Words largest = {};
        sweep<float>(size, [&](auto place) {
            Words bits = (Words)place.get_from(x) & 0x7fffffffu;
            largest = bits > largest ? bits : largest;
        });
        return bits_to_float(_mm512_reduce_max_epu32((__m512i)largest));
    }
    static float largest_of(const bf16* x, int64_t size) {
        __m512i largest = _mm512_setzero_si512();
        for (int64_t at = 0; at < size; at += 2 * WIDTH) {
            __mmask32 inside = size - at < 2 * WIDTH ? (1u << (size - at)) - 1 : ~0u;
            largest = larger(largest, _mm512_maskz_loadu_epi16(inside, x + at));
        }
        return magnitude_of(largest);
    }

    __m512i rounded(__m512 x) const { return _mm512_cvtps_epi32(_mm512_mul_ps(x, (__m512)inverse_)); }

    __m512i codes_of(const float* x) const {
        __m128i parts[4];
        for (int part = 0; part < 4; ++part) parts[part] = _mm512_cvtsepi32_epi8(rounded(_mm512_loadu_ps(x + part * WIDTH)));
        __m512i codes;
        std::memcpy(&codes, parts, 64);
        return codes;
    }
    __m512i codes_of(const bf16* x) const { return codes_of(_mm512_loadu_si512(x), _mm512_loadu_si512(x + 2 * WIDTH)); }
    __m512i codes_of(__m512i first, __m512i second) const {
        const __m512i halves[2] = {in_pairs(first), in_pairs(second)};
        // Quarters of both take turns after packing.
        const __m512i in_order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
        return _mm512_permutexvar_epi64(in_order, _mm512_packs_epi16(halves[0], halves[1]));
    }
    // Of bfloat16, in 16 bits.
    __m512i in_pairs(__m512i both) const {
        const __m512i even = rounded((__m512)_mm512_slli_epi32(both, 16));
        const __m512i odd = rounded((__m512)_mm512_and_si512(both, _mm512_set1_epi32(0xffff0000)));
        return _mm512_mask_blend_epi16(0xaaaaaaaa, even, _mm512_slli_epi32(odd, 16));
    }
};

// From the start of a cache line on, so many bytes, of memory that grows when it must.
inline char* room(std::vector<char>& held, int64_t bytes) {
    if (int64_t(held.size()) < bytes + 64) held.resize(bytes + 64);
    return (char*)((uintptr_t(held.data()) + 63) / 64 * 64);
}

}  // namespace int8

}  // namespace

#endif
