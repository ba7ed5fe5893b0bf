// A packed matrix of bfloat16, and how sums of a panel of it become what is wanted.

#pragma once

#include "expansion.h"
#include "laid.h"
#include "output.h"

#if defined(__AVX512BF16__)

#include <algorithm>

namespace {

constexpr int PANEL = 2 * TILE;  // columns of y that one panel of the matrix makes: two tiles side by side

// A matrix [columns, size] as ``packed_tiles`` leaves it: panels [size / 32][2][16 pairs][16][2]. The second tile of a
// panel holds the columns ``apart`` further on: 16, or, where gates and what they open lie below each other, half of all.
struct Matrix {
    const bf16* packed;
    const bf16* bias;  // [columns] or null
    int64_t size, columns, apart;

    int64_t num_panels() const { return (apart == TILE ? columns + PANEL - 1 : columns) / PANEL; }
    int64_t left(int64_t panel) const { return panel * (apart == TILE ? PANEL : TILE); }
    const bf16* panel_at(int64_t panel) const { return packed + panel * size * PANEL; }
};

// Sums of one panel, for one or two tiles of rows, on their way into y.
class Finish {
    const Matrix& matrix_;
    const Output& output_;
    const Expansion* const expansion_;
    const bool passes_caches_;
    const float* sums_ = nullptr;  // [row tiles, 2, 16, 16]
    Floats low_bias_, high_bias_, tops_[TILE];
    int64_t row_ = 0, column_ = 0, width_ = 0, next_ = 0, count_ = 0;

  public:
    // ``passes_caches``: whole lines of y do, which is WIDE; they are there for others behind a fence.
    Finish(const Matrix& matrix, const Output& output, const Expansion* expansion, bool passes_caches = false)
        : matrix_(matrix), output_(output), expansion_(expansion), passes_caches_(passes_caches) {}

    int64_t left() const { return count_ - next_; }

    // ``count`` rows from ``row`` on; what was left of others is made now.
    void begin(int64_t row, int64_t count, int64_t panel, const float* sums) {
        some(left());
        sums_ = sums, row_ = row, next_ = 0, count_ = count, column_ = matrix_.left(panel);
        width_ = matrix_.apart == TILE ? std::min<int64_t>(PANEL, matrix_.columns - column_) : PANEL;
        bf16 added[PANEL] = {};
        if (matrix_.bias && matrix_.apart == TILE) {
            std::memcpy(added, matrix_.bias + column_, width_ * sizeof(bf16));
        } else if (matrix_.bias) {
            std::memcpy(added, matrix_.bias + column_, TILE * sizeof(bf16));
            std::memcpy(added + TILE, matrix_.bias + column_ + matrix_.apart, TILE * sizeof(bf16));
        }
        low_bias_ = load(added), high_bias_ = load(added + TILE);
    }

    void some(int64_t count) {
        switch (output_.result) {
            case ROUNDED: return each<ROUNDED>(count);
            case WIDE: return each<WIDE>(count);
            case GATED: return each<GATED>(count);
            case ADDED: return each<ADDED>(count);
        }
    }

  private:
    template <Result RESULT>
    void each(int64_t count) {
        for (const int64_t stop = std::min(next_ + count, count_); next_ < stop; ++next_) {
            const float* sums = sums_ + (next_ / TILE * 2 * TILE + next_ % TILE) * TILE;
            Floats low = load(sums) + low_bias_, high = load(sums + TILE * TILE) + high_bias_;
            if (expansion_ && !expansion_->is_tile((row_ + next_) / TILE)) {
                expansion_->add_row(row_ + next_, column_, column_ + matrix_.apart, low, high);
            }
            put<RESULT>(row_ + next_, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
            if (RESULT == WIDE && output_.maxima && (next_ % TILE == TILE - 1 || next_ + 1 == count_)) put_maxima();
        }
    }

    // Of the rows of a tile, which were the last ones.
    void put_maxima() {
        const Floats found = largest_across(tops_);
        const int64_t first = next_ / TILE * TILE;
        for (int64_t row = first; row <= next_; ++row) {
            output_.put_maximum(row_ + row, matrix_.columns, column_, found[row - first]);
        }
    }

    // To what is in y, whose tiles are neighbours.
    __m512i added_to(const bf16* y, __m256i low, __m256i high) const {
        bf16 before[PANEL] = {};
        std::memcpy(before, y, width_ == PANEL ? sizeof before : width_ * sizeof(bf16));
        return (__m512i)_mm512_cvtne2ps_pbh((__m512)(load(before + TILE) + widened(high)), (__m512)(load(before) + widened(low)));
    }

    static Floats widened(__m256i halves) { return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16); }

    template <Result RESULT>
    void put(int64_t row, __m512i both) {
        const int64_t apart = matrix_.apart, at = row * matrix_.columns + column_;
        const __m256i low = _mm512_castsi512_si256(both), high = _mm512_extracti64x4_epi64(both, 1);
        if (RESULT == GATED) {
            // Of the rounded numbers, as when the two were columns of y.
            const int64_t size = matrix_.columns / 2;
            store((bf16*)output_.y + (output_.is_laid ? Laid::place(row, column_, size) : row * size + column_),
                  gated<bf16>(widened(low), widened(high), output_.activation));
        } else if (RESULT != WIDE) {
            bf16* y = (bf16*)output_.y + at;
            if (RESULT == ADDED) both = added_to(y, low, high);
            if (apart != TILE) _mm256_storeu_si256((__m256i*)y, low), _mm256_storeu_si256((__m256i*)(y + apart), high);
            else if (width_ == PANEL) _mm512_storeu_si512(y, both);
            else std::memcpy(y, &both, width_ * sizeof(bf16));
        } else {
            // Rounded all the same: what is wanted are the floats of a bfloat16 result.
            float* y = (float*)output_.y + at;
            const Floats values[] = {widened(low), widened(high)};
            if (apart != TILE) store(y, values[0]), store(y + apart, values[1]);
            else if (width_ != PANEL) std::memcpy(y, values, width_ * sizeof(float));
            else if (passes_caches_) _mm512_stream_ps(y, (__m512)values[0]), _mm512_stream_ps(y + TILE, (__m512)values[1]);
            else store(y, values[0]), store(y + TILE, values[1]);
            if (!output_.maxima) return;
            tops_[next_ % TILE] = larger(first_of(values[0], width_), first_of(values[1], width_ - TILE));
        }
    }
};

}  // namespace

#endif
