// A packed matrix of bfloat16, and how sums of a panel of it become what is wanted.

#pragma once

#include "aligned.h"
#include "coded.h"
#include "expansion.h"
#include "laid.h"
#include "output.h"

#if defined(__AVX512BF16__)

#include <algorithm>

namespace {

constexpr int PANEL = 2 * TILE;  // columns of y that one panel of the matrix makes: two tiles side by side

// A matrix [columns, size] as Python packs it: panels [size / 32][2][16 pairs][16][2]. The second tile of a
// panel holds the columns ``apart`` further on: 16, or, where gates and what they open lie below each other, half of all.
struct Matrix {
    const bf16* packed;  // null where it is coded
    const bf16* bias;    // [columns] or null
    int64_t size, columns, apart;
    Coded coded;

    int64_t num_panels() const { return (apart == TILE ? columns + PANEL - 1 : columns) / PANEL; }
    int64_t left(int64_t panel) const { return panel * (apart == TILE ? PANEL : TILE); }
    // Where a panel lies, from an input on, and how much of it; also of what is coded.
    const void* address(int64_t panel, int64_t input = 0) const {
        return coded.panels ? (const void*)coded.group_at(panel, size, input) : packed + (panel * size + input) * PANEL;
    }
    int64_t panel_bytes() const { return coded.panels ? Coded::panel_bytes(size) : size * PANEL * int64_t(sizeof(bf16)); }

    // Inputs [from, to) of a panel; of what is coded in memory of this thread's own, until it asks for others.
    const bf16* panel_at(int64_t panel, int64_t from, int64_t to) const {
        if (!coded.panels) return packed + (panel * size + from) * PANEL;
        bf16* decoded = room_for(to - from);
        Decoding all(coded, panel, size, from, to, decoded);
        all.some(all.left());
        return decoded;
    }
    static bf16* room_for(int64_t inputs) {
        static thread_local AlignedBuffer<bf16> decoded;
        decoded.grow(inputs * PANEL);
        return decoded.begin();
    }
    const bf16* panel_at(int64_t panel) const { return panel_at(panel, 0, size); }
};

// The columns of y that a panel makes, and what is added to a row's sums there.
struct PanelColumns {
    typedef float Sum;
    static constexpr int ROW = TILE;  // from row to row of the sums of a tile [2][16][16]

    int64_t first = 0, width = 0;
    Floats low_bias, high_bias;

    void set(const Matrix& matrix, int64_t panel) {
        first = matrix.left(panel);
        width = matrix.apart == TILE ? std::min<int64_t>(PANEL, matrix.columns - first) : PANEL;
        bf16 added[PANEL] = {};
        if (matrix.bias && matrix.apart == TILE) {
            std::memcpy(added, matrix.bias + first, width * sizeof(bf16));
        } else if (matrix.bias) {
            std::memcpy(added, matrix.bias + first, TILE * sizeof(bf16));
            std::memcpy(added + TILE, matrix.bias + first + matrix.apart, TILE * sizeof(bf16));
        }
        low_bias = load(added), high_bias = load(added + TILE);
    }

    // See interleaved.h.
    void take(int64_t, const float* sums, Floats& low, Floats& high) const {
        low = load(sums) + low_bias, high = load(sums + TILE * TILE) + high_bias;
    }
};

// Sums of one panel, for one or two tiles of rows, on their way into y.
class Finish {
    const Matrix& matrix_;
    const Output& output_;
    const Expansion* const expansion_;
    const bool passes_caches_;
    const float* sums_ = nullptr;  // [row tiles, 2, 16, 16]
    PanelColumns columns_;
    Floats tops_[TILE];
    int64_t panel_ = -1, row_ = 0, next_ = 0, count_ = 0;

  public:
    // ``passes_caches``: whole lines of y do, which is WIDE; they are there for others behind a fence.
    Finish(const Matrix& matrix, const Output& output, const Expansion* expansion, bool passes_caches = false)
        : matrix_(matrix), output_(output), expansion_(expansion), passes_caches_(passes_caches) {}

    int64_t left() const { return count_ - next_; }

    // ``count`` rows from ``row`` on; what was left of others is made now.
    void begin(int64_t row, int64_t count, int64_t panel, const float* sums) {
        some(left());
        sums_ = sums, row_ = row, next_ = 0, count_ = count;
        if (panel != panel_) columns_.set(matrix_, panel), panel_ = panel;
    }

    void some(int64_t count) {
        switch (output_.result) {
            case ROUNDED: return each<ROUNDED>(count);
            case WIDE: return widen(count);
            case GATED: return gate(count);
            case ADDED: return each<ADDED>(count);
        }
    }

  private:
    // body(index, low, high) of the sums of each row. What does not change from row to row is copied before: the compiler does
    // not know that it is not y.
    template <typename Body>
    [[gnu::always_inline]] void each_row(int64_t count, const Body& body) {
        const Floats low_bias = columns_.low_bias, high_bias = columns_.high_bias;
        const float* const of_all = sums_;
        const uint64_t begin = next_, end = std::min(next_ + count, count_);
        auto row = [&](uint64_t index, auto expand) {
            const float* sums = of_all + (index / TILE * 2 * TILE + index % TILE) * TILE;
            Floats low = load(sums) + low_bias, high = load(sums + TILE * TILE) + high_bias;
            expand(row_ + index, low, high);
            body(index, low, high);
        };
        next_ = std::max(begin, end);
        if (!expansion_) {
#pragma GCC unroll 2
            for (uint64_t index = begin; index < end; ++index) row(index, [](int64_t, Floats&, Floats&) {});
            return;
        }
        for (uint64_t index = begin; index < end; ++index) {
            row(index, [&](int64_t number, Floats& low, Floats& high) {
                if (expansion_->is_tile(number / TILE)) return;
                expansion_->add_row(number, columns_.first, columns_.first + matrix_.apart, low, high);
            });
        }
    }

    // What is added to y, or is it, row by row.
    template <Result RESULT>
    void each(int64_t count) {
        const int64_t columns = matrix_.columns, apart = matrix_.apart, width = columns_.width;
        bf16* const y = (bf16*)output_.y + row_ * columns + columns_.first;
        each_row(count, [&](uint64_t index, Floats low, Floats high) {
            bf16* to = y + index * columns;
            __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
            if (RESULT == ADDED) both = sum_with(to, width, both);
            if (apart != TILE) {
                _mm256_storeu_si256((__m256i*)to, _mm512_castsi512_si256(both));
                _mm256_storeu_si256((__m256i*)(to + apart), _mm512_extracti64x4_epi64(both, 1));
            } else if (width == PANEL) {
                _mm512_storeu_si512(to, both);
            } else {
                std::memcpy(to, &both, width * sizeof(bf16));
            }
        });
    }

    // To ``width`` numbers of y, whose tiles are neighbours.
    static __m512i sum_with(const bf16* y, int64_t width, __m512i both) {
        bf16 held[PANEL] = {};
        if (width != PANEL) std::memcpy(held, y, width * sizeof(bf16)), y = held;
        const __m512 low = (__m512)(load(y) + low_of(both)), high = (__m512)(load(y + TILE) + high_of(both));
        return (__m512i)_mm512_cvtne2ps_pbh(high, low);
    }

    static Floats low_of(__m512i both) { return widened(_mm512_castsi512_si256(both)); }
    static Floats high_of(__m512i both) { return widened(_mm512_extracti64x4_epi64(both, 1)); }

    // Rounded all the same: what is wanted are the floats of a bfloat16 result.
    void widen(int64_t count) {
        const int64_t columns = matrix_.columns, apart = matrix_.apart, width = columns_.width;
        const bool passes_caches = passes_caches_, finds = output_.maxima;
        float* const y = (float*)output_.y + row_ * columns + columns_.first;
        each_row(count, [&](uint64_t index, Floats low, Floats high) {
            float* to = y + index * columns;
            const Floats values[] = {as_stored(low), as_stored(high)};
            if (apart != TILE) store(to, values[0]), store(to + apart, values[1]);
            else if (width != PANEL) std::memcpy(to, values, width * sizeof(float));
            else if (passes_caches) _mm512_stream_ps(to, (__m512)values[0]), _mm512_stream_ps(to + TILE, (__m512)values[1]);
            else store(to, values[0]), store(to + TILE, values[1]);
            if (!finds) return;
            tops_[index % TILE] = larger(first_of(values[0], width), first_of(values[1], width - TILE));
            if (index % TILE == TILE - 1 || int64_t(index) + 1 == count_) put_maxima(index);
        });
    }

    // Of the rows of a tile up to this one.
    void put_maxima(uint64_t last) {
        const Floats found = largest_across(tops_);
        const uint64_t first = last / TILE * TILE;
        for (uint64_t row = first; row <= last; ++row) {
            output_.put_maximum(row_ + row, matrix_.columns, columns_.first, found[row - first]);
        }
    }

    void gate(int64_t count) {
        bf16* const y = gated_at(output_, row_, columns_.first, matrix_.columns / 2);
        const int64_t apart = gated_apart(output_, matrix_.columns / 2);
        with_activation(output_.activation, [&](auto activation) {
            each_row(count, [&](uint64_t index, Floats low, Floats high) {
                store(y + index * apart, Output::gate_both(low, high, activation));
            });
        });
    }
};

}  // namespace

#endif
