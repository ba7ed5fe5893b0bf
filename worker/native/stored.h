// Keys and values as the pool has them: of the queries' own type, or rounded; to bfloat16, or to int8 with a scale for each token
// and KV head.

#pragma once

#include <algorithm>
#include <type_traits>

#include "vectors.h"

namespace {

// What a layer's pool holds. On the wire from Python: 0 what queries are, 1 bfloat16, 2 int8.
enum StoredType { AS_QUERIES, AS_BF16, AS_INT8 };

template <typename Stored>
struct Pool {
    Stored *keys, *values;             // [num_kv_heads, num_slots, head_dim]
    float *key_scales, *value_scales;  // [num_kv_heads, num_slots], of int8

    template <typename Other>
    Pool<Other> as() const { return {(Other*)keys, (Other*)values, key_scales, value_scales}; }
};

constexpr float LEAST_OF_ROW = 1e-12f;  // the largest number of a row of zeros, or of nearly nothing

// ``row`` [head_dim] into its slot. One that holds no number has a scale that is none.
template <typename T, typename Stored>
inline void keep_row(const T* row, int64_t head_dim, Stored* to, float* scale) {
    if constexpr (std::is_same_v<T, Stored>) {
        std::memcpy(to, row, head_dim * sizeof(T));
    } else if constexpr (std::is_same_v<Stored, int8_t>) {
        const Floats rounder = Floats{} + 12582912.0f;  // see exponential()
        Floats tops = Floats{} + LEAST_OF_ROW, wrong = {};
        for (int64_t d = 0; d < head_dim; d += WIDTH) {
            Floats values = load(row + d), sizes = values < 0.0f ? -values : values;
            tops = greater(sizes, tops);
            wrong += values - values;
        }
        float top = tops[0];
        for (int i = 1; i < WIDTH; ++i) top = top > tops[i] ? top : tops[i];
        const float by = top / 127.0f;
        for (int64_t d = 0; d < head_dim; d += WIDTH) {
            Floats nearest = load(row + d) / by + rounder - rounder;
            Codes codes = __builtin_convertvector(__builtin_convertvector(nearest, Lanes), Codes);
            std::memcpy(to + d, &codes, sizeof codes);
        }
        *scale = by + sum_of(wrong);
    } else {
        (void)scale;
        for (int64_t d = 0; d < head_dim; d += WIDTH) store(to + d, load(row + d));
    }
}

// Where sixteen keys and more lie: of one KV head, in the cache.
template <typename S>
struct Past {
    typedef S Stored;
    static constexpr bool IS_SCALED = std::is_same_v<S, int8_t>;

    const Stored* keys;           // [num_slots, head_dim]
    const Stored* values;
    const float* key_scales;      // [num_slots]
    const float* value_scales;
    const int32_t* table;
    int64_t head_dim, block_size;
    int64_t end;                  // positions that were written
    int64_t begin = 0;            // the first that anybody sees; before it lies what may be a stranger's by now

    // Past the end it is the last one: what is scored there does not count.
    int64_t slot(int64_t position) const {
        position = std::min(position, end - 1);
        return table[position / block_size] * block_size + position % block_size;
    }
    int64_t offset(int64_t position) const { return slot(position) * head_dim; }

    // Rows as numbers of another type.
    template <typename To>
    void take_key(int64_t position, To* to) const { take(keys, key_scales, slot(position), to); }
    template <typename To>
    void take_value(int64_t position, To* to) const { take(values, value_scales, value_slot(position), to); }
    // Of a position that nobody sees it is one that somebody does: no weight of nought makes a stranger's NaN a number.
    int64_t value_slot(int64_t position) const { return slot(std::max(position, begin)); }

  private:
    template <typename To>
    void take(const Stored* rows, const float* scales, int64_t slot, To* to) const {
        const Stored* row = rows + slot * head_dim;
        if constexpr (std::is_same_v<Stored, To>) {
            std::memcpy(to, row, head_dim * sizeof(To));
        } else {
            const float scale = IS_SCALED ? scales[slot] : 1.0f;
            for (int64_t d = 0; d < head_dim; d += WIDTH) {
                if constexpr (IS_SCALED) store(to + d, load(row + d) * scale);
                else store(to + d, load(row + d));
            }
        }
    }
};

#if defined(__AVX512BF16__)
// Thirty-two numbers as bfloat16; codes are such numbers exactly.
inline __m512i thirty_two(const bf16* from) { return _mm512_loadu_si512(from); }
inline __m512i thirty_two(const int8_t* from) {
    return (__m512i)_mm512_cvtne2ps_pbh((__m512)load(from + WIDTH), (__m512)load(from));
}
#endif

}  // namespace
