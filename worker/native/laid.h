// Rows in the order in which tiles are multiplied.

#pragma once

#include "output.h"
#include "tiles.h"

#if defined(__AVX512BF16__)

namespace {

constexpr int FEW_ROWS = 64;  // for which it does not pay

// Rows that are laid out: [pairs of row tiles][steps][2][16 rows][32].
struct Laid {
    static constexpr int64_t ROWS = 2 * TILE;

    static int64_t pair_size(int64_t size) { return size * ROWS; }
    static int64_t size_of(int64_t rows, int64_t size) { return (rows + ROWS - 1) / ROWS * pair_size(size); }
    static int64_t place(int64_t row, int64_t column, int64_t size) {
        return row / ROWS * pair_size(size) + column / DEPTH * 2 * TILE_SIZE + row % ROWS * DEPTH + column % DEPTH;
    }
    // Columns [from, to) of a row of x.
    static void take(const bf16* x, int64_t from, int64_t to, bf16* laid) {
        for (int64_t column = from; column < to; column += DEPTH, laid += 2 * TILE_SIZE) {
            std::memcpy(laid, x + column, DEPTH * sizeof(bf16));
        }
    }
};

// Where a row's gated numbers go from a column on, of ``size``, and how far it is to the next row's.
inline bf16* gated_at(const Output& output, int64_t row, int64_t column, int64_t size) {
    return (bf16*)output.y + (output.is_laid ? Laid::place(row, column, size) : row * size + column);
}
inline int64_t gated_apart(const Output& output, int64_t size) { return output.is_laid ? DEPTH : size; }

}  // namespace

#endif
