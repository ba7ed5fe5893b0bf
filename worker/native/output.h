// What becomes of a product's sums.

#pragma once

#include "maxima.h"
#include "small.h"

namespace {

enum Result { ROUNDED, WIDE, GATED, ADDED };

// bfloat16; float32; (first tile through the activation) * second tile, in bfloat16; or bfloat16 that is added to what is there,
// as if it had been rounded before.
struct Output {
    void* y;
    Result result;
    int activation;
    float* maxima = nullptr;  // of what is WIDE, too (see Maxima)
    bool is_laid = false;  // of what is gated: as linear.h's Laid

    // Of a row of y with so many columns: those from ``left`` on, and those ``apart`` further on. What lies behind the last
    // column is nowhere. It stands where it is called: a call takes as long as what it does.
    [[gnu::always_inline]] void put_both(int64_t row, int64_t columns, int64_t left, int64_t apart, Floats low,
                                         Floats high) const {
        if (result == GATED) {
            return store((bf16*)y + row * (columns / 2) + left, gate_both(low, high, activation));
        }
        if (left + apart + WIDTH > columns) return put_some(row, columns, left, apart, low, high);
        if (result == WIDE) {
            float* to = (float*)y + row * columns + left;
            store(to, low), store(to + apart, high);
            if (maxima) put_maximum(row, columns, left, largest(low, high));
            return;
        }
        bf16* to = (bf16*)y + row * columns + left;
        if (result == ADDED) return add_to(to, low), add_to(to + apart, high);
        store(to, low), store(to + apart, high);
    }

    // What some rows need before they are put, ``low`` and ``high`` [count]: what is gated, in place of the low ones.
    void gate_rows(int64_t count, Floats* low, const Floats* high) const {
        if (result != GATED) return;
        with_activation(activation, [&](auto which) {
            for (int64_t row = 0; row < count; ++row) low[row] = gate_both(low[row], high[row], which);
        });
    }
    // ``put_both`` of some rows from ``first`` on, once they are gated.
    void put_rows(int64_t first, int64_t count, int64_t columns, int64_t left, int64_t apart, const Floats* low,
                  const Floats* high) const {
        const int64_t width = result == GATED ? columns / 2 : columns;
        bf16* const to = (bf16*)y + first * width + left;
        if (result == GATED) {
            for (int64_t row = 0; row < count; ++row) store(to + row * width, low[row]);
        } else if (result == WIDE || left + apart + WIDTH > columns) {
            for (int64_t row = 0; row < count; ++row) put_both(first + row, columns, left, apart, low[row], high[row]);
        } else if (result == ADDED) {
            for (int64_t row = 0; row < count; ++row) add_to(to + row * width, low[row]), add_to(to + row * width + apart, high[row]);
        } else {
            for (int64_t row = 0; row < count; ++row) store(to + row * width, low[row]), store(to + row * width + apart, high[row]);
        }
    }

    // Of the columns from ``left`` on, a half tile.
    void put_maximum(int64_t row, int64_t columns, int64_t left, float maximum) const {
        float* to = maxima + 2 * row * tiles_of(columns) + left / HALF_TILE;
        to[0] = maximum;
        // The last tile may have no other half.
        if (left % LOGITS == 0 && left + HALF_TILE >= columns) to[1] = -INFINITY;
    }

    // Of the rounded numbers, as when the two were columns of y.
    [[gnu::always_inline]] static Floats gate_both(Floats low, Floats high, int activation) {
        return gated<bf16>(as_stored(low), as_stored(high), activation);
    }

    // use(a constant) of the result, where it is of whole panels whose tiles lie side by side, or gated by SILU, see interleaved.h;
    // whether that is so.
    template <typename Use>
    bool if_simple(int64_t columns, int64_t apart, const Use& use) const {
        const bool is_whole = apart == WIDTH && columns % (2 * WIDTH) == 0;
        if (result == ROUNDED && is_whole) return use(std::integral_constant<Result, ROUNDED>()), true;
        if (result == ADDED && is_whole) return use(std::integral_constant<Result, ADDED>()), true;
        if (result == GATED && activation == SILU) return use(std::integral_constant<Result, GATED>()), true;
        return false;
    }

    [[gnu::always_inline]] static void add_to(bf16* to, Floats values) { store(to, load(to) + as_stored(values)); }

  private:
    [[gnu::noinline]] void put_some(int64_t row, int64_t columns, int64_t left, int64_t apart, Floats low, Floats high) const {
        const int64_t at = row * columns + left;
        if (result != WIDE) {
            put_some((bf16*)y + at, low, columns - left);
            return put_some((bf16*)y + at + apart, high, columns - left - apart);
        }
        put_some((float*)y + at, low, columns - left);
        put_some((float*)y + at + apart, high, columns - left - apart);
        if (!maxima) return;
        Floats first = first_of(low, columns - left), second = first_of(high, columns - left - WIDTH);
        put_maximum(row, columns, left, largest(first, second));
    }

    template <typename T>
    void put_some(T* to, Floats values, int64_t count) const {
        count = std::min<int64_t>(count, WIDTH);
        if (result == ADDED) values = as_stored(values);
        for (int64_t i = 0; i < count; ++i) put(to + i, result == ADDED ? get(to[i]) + values[i] : values[i]);
    }
};

// A row of two neighbouring tiles of bfloat16, or of one that SILU gates.
template <Result RESULT>
[[gnu::always_inline]] inline void put_row(bf16* to, Floats low, Floats high) {
    static_assert(RESULT != WIDE);
    if constexpr (RESULT == GATED) {
        store(to, Output::gate_both(low, high, SILU));
    } else if constexpr (RESULT == ADDED) {
        Output::add_to(to, low), Output::add_to(to + WIDTH, high);
    } else {
#if defined(__AVX512BF16__)
        _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
#else
        store(to, low), store(to + WIDTH, high);
#endif
    }
}

}  // namespace
