// Sums of a panel on their way into y, a row at a time between products that do not need them: done all at once the multipliers would
// stand still meanwhile, while to the processor, which looks some hundred operations ahead, few of them beside many products are nothing.

#pragma once

#include "output.h"

namespace {

// Where nothing is to be done beside products.
struct Nothing {
    void one() {}
};

// Rows of whole panels of what is ROUNDED, ADDED, or GATED by SILU. Values makes floats of a row's sums, which begin ROW further on
// than those of the row before.
template <Result RESULT, typename Values>
class Interleaved {
    const Values values_;
    const typename Values::Sum* sums_;
    bf16* to_;
    int64_t row_, left_ = 0;
    const int64_t apart_;

  public:
    // ``apart``: from row to row of y.
    Interleaved(const Values& values, int64_t apart) : values_(values), apart_(apart) {}

    // ``count`` rows from ``row`` on, whose first goes to ``to``; what was left of others is made now.
    void begin(int64_t row, int64_t count, const typename Values::Sum* sums, bf16* to) {
        all();
        row_ = row, left_ = count, sums_ = sums, to_ = to;
    }

    // The next row, if there is one.
    [[gnu::always_inline]] void one() {
        if (!left_) return;
        Floats low, high;
        values_.take(row_, sums_, low, high);
        put_row<RESULT>(to_, low, high);
        ++row_, --left_, sums_ += Values::ROW, to_ += apart_;
    }
    void all() {
        while (left_) one();
    }
};

}  // namespace
