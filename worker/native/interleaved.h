// Sums of a panel on their way into y, a row at a time between products that do not need them: done all at once the multipliers would
// stand still meanwhile, while to the processor, which looks some hundred operations ahead, few of them beside many products are nothing.

#pragma once

#include "finish.h"

#if defined(__AVX512BF16__)

namespace {

// Whole panels of what is ROUNDED, ADDED, or GATED by SILU, to which nobody else adds.
template <Result RESULT>
class Interleaved {
    const Matrix& matrix_;
    const Output& output_;
    const PanelColumns columns_;
    const float* sums_;
    bf16* to_;
    int64_t left_ = 0;

  public:
    Interleaved(const Matrix& matrix, const Output& output, int64_t panel) : matrix_(matrix), output_(output), columns_(matrix, panel) {}

    static bool serves(const Matrix& matrix, const Output& output) {
        if (output.result != RESULT) return false;
        return RESULT == GATED ? output.activation == SILU : matrix.apart == TILE && matrix.columns % PANEL == 0;
    }

    // ``count`` rows of a tile from ``row`` on; what was left of others is made now.
    void begin(int64_t row, int64_t count, const float* sums) {
        all();
        left_ = count, sums_ = sums;
        to_ = RESULT == GATED ? gated_at(matrix_, output_, row, columns_.first)
                              : (bf16*)output_.y + row * matrix_.columns + columns_.first;
    }

    // Of the next row, if there is one.
    [[gnu::always_inline]] void one() {
        if (!left_) return;
        const Floats low = load(sums_) + columns_.low_bias, high = load(sums_ + TILE * TILE) + columns_.high_bias;
        if constexpr (RESULT == GATED) put_gated(to_, low, high, SILU);
        else _mm512_storeu_si512(to_, put_together<RESULT>(to_, PANEL, low, high));
        to_ += RESULT == GATED ? gated_apart(matrix_, output_) : matrix_.columns;
        sums_ += TILE, --left_;
    }
    void all() {
        while (left_) one();
    }
};

}  // namespace

#endif
