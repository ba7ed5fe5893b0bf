// What becomes of a product's sums.

#pragma once

#include "small.h"

namespace {

enum Result { ROUNDED, WIDE, GATED };

// bfloat16, float32, or (first tile through the activation) * second tile, in bfloat16.
struct Output {
    void* y;
    Result result;
    int activation;

    // Of a row of y with so many columns: those from ``left`` on, and those ``apart`` further on. What lies behind the last
    // column is nowhere.
    void put_both(int64_t row, int64_t columns, int64_t left, int64_t apart, Floats low, Floats high) const {
        if (result == WIDE) {
            float* to = (float*)y + row * columns + left;
            put_some(to, low, columns - left);
            return put_some(to + apart, high, columns - left - apart);
        }
        bf16 both[2 * WIDTH];
        store(both, low), store(both + WIDTH, high);
        if (result == GATED) {
            // Of the rounded numbers, as when the two were columns of y.
            return store((bf16*)y + row * (columns / 2) + left, activate(load(both), activation) * load(both + WIDTH));
        }
        bf16* to = (bf16*)y + row * columns + left;
        std::memcpy(to, both, std::min<int64_t>(WIDTH, columns - left) * sizeof(bf16));
        if (left + apart < columns) {
            std::memcpy(to + apart, both + WIDTH, std::min<int64_t>(WIDTH, columns - left - apart) * sizeof(bf16));
        }
    }

  private:
    static void put_some(float* to, Floats values, int64_t count) {
        if (count >= WIDTH) return store(to, values);
        for (int64_t i = 0; i < count; ++i) to[i] = values[i];
    }
};

}  // namespace
