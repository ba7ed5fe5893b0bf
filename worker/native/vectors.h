// Sixteen float32 at a time, from float32 or bfloat16 in memory and back, by the compiler's own vectors (GCC and Clang), so
// that one source serves AVX-512, AVX2 and NEON.

#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

typedef float Floats __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef int32_t Lanes __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef int8_t Codes __attribute__((vector_size(16)));

constexpr int WIDTH = 16;  // floats in a vector

// What one register holds: where it is less than sixteen floats, compilers keep sums of these in memory.
#if defined(__AVX512F__)
constexpr int REGISTER_FLOATS = 16;
#elif defined(__AVX2__)
constexpr int REGISTER_FLOATS = 8;
#else
constexpr int REGISTER_FLOATS = 4;
#endif
typedef float Register __attribute__((vector_size(4 * REGISTER_FLOATS)));
typedef uint32_t Bits __attribute__((vector_size(4 * REGISTER_FLOATS)));
typedef int32_t Integers __attribute__((vector_size(4 * REGISTER_FLOATS)));
constexpr int MAX_HEAD_DIM = 1024;

struct bf16 {
    uint16_t bits;
};

inline float bits_to_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline uint32_t float_to_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

inline float get(float value) { return value; }
inline float get(bf16 value) { return bits_to_float(uint32_t(value.bits) << 16); }

inline void put(float* to, float value) { *to = value; }
inline void put(bf16* to, float value) {  // to the nearest, ties to even; a NaN stays one
    uint32_t bits = float_to_bits(value);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    to->bits = uint16_t(value != value ? 0x7fc0u : rounded);
}

inline Floats load(const float* from) {
    Floats values;
    std::memcpy(&values, from, 64);
    return values;
}
#if defined(__AVX512BF16__)
// Of bfloat16; some compilers, left to themselves, would widen each half apart.
inline Floats widened(__m256i halves) { return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16); }
#endif
inline Floats load(const bf16* from) {
#if defined(__AVX512BF16__)
    return widened(_mm256_loadu_si256((const __m256i*)from));
#else
    Halves halves;
    std::memcpy(&halves, from, 32);
    return (Floats)(__builtin_convertvector(halves, Words) << 16);
#endif
}
inline Floats load(const int8_t* from) {
#if defined(__AVX512BF16__)
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
#else
    Codes codes;
    std::memcpy(&codes, from, 16);
    return __builtin_convertvector(__builtin_convertvector(codes, Lanes), Floats);
#endif
}

// As many as a register holds.
inline Register load_part(const float* from) {
    Register values;
    std::memcpy(&values, from, sizeof values);
    return values;
}
inline Bits words(const void* from) {
    Bits values;
    std::memcpy(&values, from, sizeof values);
    return values;
}
inline Register load_part(const bf16* from) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    return (Register)((Bits)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from)) << 16);
#else
    typedef uint16_t Shorts __attribute__((vector_size(2 * REGISTER_FLOATS)));
    Shorts halves;
    std::memcpy(&halves, from, sizeof halves);
    return (Register)(__builtin_convertvector(halves, Bits) << 16);
#endif
}
inline Integers bytes(const int8_t* from) {
#if defined(__AVX512F__)
    return (Integers)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
    return (Integers)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
    typedef int8_t Bytes __attribute__((vector_size(REGISTER_FLOATS)));
    Bytes values;
    std::memcpy(&values, from, sizeof values);
    return __builtin_convertvector(values, Integers);
#endif
}
inline Register load_part(const int8_t* from) { return __builtin_convertvector(bytes(from), Register); }

// Where compilers, for all that there is room, would read them from memory for each product again.
inline void keep_in_registers(Register& left, Register& right) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    asm("" : "+x"(left), "+x"(right));
#else
    (void)left, (void)right;
#endif
}

inline void store_part(float* to, Register values) { std::memcpy(to, &values, sizeof values); }

// Of each of four what its floats add up to.
inline void sum_four(const Register* values, float* to) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    const __m256 left = _mm256_hadd_ps(values[0], values[1]), right = _mm256_hadd_ps(values[2], values[3]);
    const __m256 halves = _mm256_hadd_ps(left, right);
    const __m128 sums = _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
    std::memcpy(to, &sums, sizeof sums);
#else
    for (int i = 0; i < 4; ++i) {
        to[i] = 0.0f;
        for (int lane = 0; lane < REGISTER_FLOATS; ++lane) to[i] += values[i][lane];
    }
#endif
}

inline void store(float* to, Floats values) { std::memcpy(to, &values, 64); }
inline void store(bf16* to, Floats values) {
#if defined(__AVX512BF16__)
    __m256bh halves = _mm512_cvtneps_pbh((__m512)values);
    std::memcpy(to, &halves, 32);
#else
    Words bits = (Words)values;
    Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    Halves halves = __builtin_convertvector(values != values ? Words{} + 0x7fc0u : rounded, Halves);
    std::memcpy(to, &halves, 32);
#endif
}

// What is left of them in bfloat16.
inline Floats as_stored(Floats values) {
#if defined(__AVX512BF16__)
    return widened((__m256i)_mm512_cvtneps_pbh((__m512)values));
#else
    bf16 halves[WIDTH];
    store(halves, values);
    return load(halves);
#endif
}

// A vector at ``at``, or what is left of one: body(load, store) sees whole vectors, zeros after the end.
template <typename T>
struct Place {
    int64_t at;
    int count;

    Floats get_from(const T* from) const { return some(from + at); }
    Floats get_from_floats(const float* from) const { return some(from + at); }
    void put_into(T* to, Floats values) const {
        if (count == WIDTH) return store(to + at, values);
        for (int i = 0; i < count; ++i) put(to + at + i, values[i]);
    }

  private:
    template <typename U>
    Floats some(const U* from) const {
        if (count == WIDTH) return load(from);
        Floats values = {};
        for (int i = 0; i < count; ++i) values[i] = get(from[i]);
        return values;
    }
};

template <typename T, typename Body>
inline void sweep(int64_t size, Body body) {
    int64_t at = 0;
    for (; at + WIDTH <= size; at += WIDTH) body(Place<T>{at, WIDTH});
    if (at < size) body(Place<T>{at, int(size - at)});
}

// Sixteen rows of sixteen words become columns (Eklundh 1972): quarters of ever smaller squares change places.
template <int HALF = WIDTH / 2>
inline void transpose(Words* rows) {
    Lanes keep, move;
    for (int i = 0; i < WIDTH; ++i) {
        keep[i] = i & HALF ? i - HALF + WIDTH : i;
        move[i] = i & HALF ? i + WIDTH : i + HALF;
    }
    for (int i = 0; i < WIDTH; ++i) {
        if (i & HALF) continue;
        Words a = rows[i], b = rows[i + HALF];
        rows[i] = __builtin_shuffle(a, b, keep);
        rows[i + HALF] = __builtin_shuffle(a, b, move);
    }
    if constexpr (HALF > 1) transpose<HALF / 2>(rows);
}

inline float sum_of(Floats values) {
    float sum = 0.0f;
    for (int i = 0; i < WIDTH; ++i) sum += values[i];
    return sum;
}

// pick(a, b), a register at a time: what is compared as more than that compilers compare number by number.
template <typename Pick>
inline Floats picked(Floats a, Floats b, const Pick& pick) {
    if constexpr (REGISTER_FLOATS == WIDTH) return pick(a, b);
    Floats made;
    for (int at = 0; at < WIDTH; at += REGISTER_FLOATS) {
        store_part((float*)&made + at, pick(load_part((const float*)&a + at), load_part((const float*)&b + at)));
    }
    return made;
}

// Where one is no number it is the second.
inline Floats greater(Floats a, Floats b) {
#if defined(__AVX512BF16__)
    return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return picked(a, b, [](Register one, Register other) { return one > other ? one : other; });
#endif
}

inline Floats lesser(Floats a, Floats b) {
#if defined(__AVX512BF16__)
    return (Floats)_mm512_min_ps((__m512)a, (__m512)b);
#else
    return picked(a, b, [](Register one, Register other) { return one < other ? one : other; });
#endif
}

// e to the x within 2 ulp, as 2 to the whole part times a polynomial (Cephes' expf, Moshier, in base 2); 0 below -87.
[[gnu::always_inline]] inline Floats exponential(Floats x) {
    const Floats rounder = Floats{} + 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    x = lesser(Floats{} + 88.0f, greater(Floats{} - 87.0f, x));
    Floats shifted = x * 1.44269504088896341f + rounder;
    Floats whole = shifted - rounder;
    Floats r = x - whole * 0.693359375f;
    r = r + whole * 2.12194440e-4f;
    Floats p = Floats{} + 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * (Floats)(((Lanes)shifted << 23) + 0x3f800000);
}

#if defined(__AVX512BF16__)
// 2 to the x within 3e-7 of itself: of the fraction a polynomial (its minimax coefficients), of the rest an exponent.
inline Floats power_of_two(__m512 x) {
    Floats r = (Floats)_mm512_reduce_ps(x, 0);
    Floats p = Floats{} + 1.327647129e-3f;
    p = p * r + 9.675540961e-3f;
    p = p * r + 5.550713092e-2f;
    p = p * r + 2.402212024e-1f;
    p = p * r + 6.931469671e-1f;
    p = p * r + 1.0f;
    return (Floats)_mm512_scalef_ps((__m512)p, _mm512_sub_ps(x, (__m512)r));
}

// 2 to the x, within 8e-5 of itself, a fiftieth of what bfloat16 rounds by; 0 for minus infinity.
inline Floats rough_power_of_two(Floats x) {
    Floats r = (Floats)_mm512_reduce_ps((__m512)x, 0);
    Floats p = Floats{} + 5.517143557e-2f;
    p = p * r + 2.426108095e-1f;
    p = p * r + 6.932609914e-1f;
    p = p * r + 9.999280928e-1f;
    return (Floats)_mm512_scalef_ps((__m512)p, (__m512)(x - r));
}
#endif

inline Floats hyperbolic_tangent(Floats x) { return 1.0f - 2.0f / (exponential(2.0f * x) + 1.0f); }

}  // namespace
