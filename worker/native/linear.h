// y = x times the transpose of a packed matrix, in bfloat16 tiles.
//
// For few rows it is the matrix that takes its time to arrive: each part of it is read once, in order, and ahead.

#pragma once

#include "tiles.h"

#if defined(HAVE_TILES)

#include <algorithm>
#include <vector>

namespace {

constexpr int FEW_ROWS = 64;
constexpr int FEW_COLUMNS = 4 * TILE;    // of y, that one task computes
constexpr int MANY_COLUMNS = 32 * TILE;  // the same of more rows, so that y is written in long stretches
constexpr int BLOCK_ROWS = 128;
constexpr int AHEAD_BYTES = 4096;
constexpr int64_t ALONE = 400000;  // bytes of the matrix, and a 64th of the products, that one thread is done with before
                                   // another has woken

struct Product {
    const bf16* x;       // [rows, size]
    const bf16* packed;  // [columns / 16][size / 32][16 pairs][16][2], columns a multiple of 32, of which ``columns`` count
    const bf16* bias;    // [columns] or null
    int64_t rows, size, columns;
    const bf16* tail;    // the last rows of x that are no whole tile, with more rows after them

    int64_t row_tiles() const { return (rows + TILE - 1) / TILE; }
    const bf16* tile_of(int64_t row_tile) const { return row_tile < rows / TILE ? x + row_tile * TILE * size : tail; }

    // Row tiles [first, last) of the columns [left, right), row by row: y is written in the order in which it lies.
    template <typename Out, int AHEAD>
    void run(int64_t first, int64_t last, int64_t left, int64_t right, Out* y) const {
        alignas(64) float sums[4][TILE * TILE];
        for (int64_t tile = first; tile < last; tile += 2) {
            for (int64_t column = left; column < right; column += 2 * TILE) {
                const bf16* b0 = packed + column * size;
                const bf16* b1 = b0 + TILE * size;
                if (tile + 1 < last) {
                    multiply<2, 2, false, AHEAD>({tile_of(tile), tile_of(tile + 1)}, size * 2, DEPTH, {b0, b1}, TILE_SIZE,
                                                 size / DEPTH, {{sums[0], sums[1]}, {sums[2], sums[3]}});
                    put_out(tile + 1, column, sums[2], sums[3], y);
                } else {
                    multiply<1, 2, false, AHEAD>({tile_of(tile)}, size * 2, DEPTH, {b0, b1}, TILE_SIZE, size / DEPTH,
                                                 {{sums[0], sums[1]}});
                }
                put_out(tile, column, sums[0], sums[1], y);
            }
        }
    }

    // Two tiles side by side: a row of both is a cache line of y, which is written at once.
    template <typename Out>
    void put_out(int64_t row_tile, int64_t column, const float* left, const float* right, Out* y) const {
        int64_t from = row_tile * TILE, count = std::min<int64_t>(TILE, rows - from);
        int64_t width = std::min<int64_t>(2 * TILE, columns - column);
        bf16 added[2 * TILE] = {};
        if (bias) std::memcpy(added, bias + column, width * sizeof(bf16));
        Floats low_bias = load(added), high_bias = load(added + TILE);
        for (int64_t row = 0; row < count; ++row) {
            alignas(64) bf16 both[2 * TILE];
            __m512 low = (__m512)(load(left + row * TILE) + low_bias), high = (__m512)(load(right + row * TILE) + high_bias);
            _mm512_store_si512(both, (__m512i)_mm512_cvtne2ps_pbh(high, low));
            Out* to = y + (from + row) * columns + column;
            if constexpr (sizeof(Out) == 2) {
                if (width == 2 * TILE) std::memcpy(to, both, 64);
                else std::memcpy(to, both, width * sizeof(bf16));
            } else {
                // Rounded all the same: what is wanted are the floats of a bfloat16 result.
                if (width == 2 * TILE) store(to, load(both)), store(to + TILE, load(both + TILE));
                else for (int64_t i = 0; i < width; ++i) to[i] = get(both[i]);
            }
        }
    }
};

template <typename Out>
void linear(Product product, Out* y, int threads) {
    const int64_t rows = product.rows, size = product.size;
    static std::vector<bf16> tail;
    if (rows % TILE) {
        if (int64_t(tail.size()) < TILE * size) tail.resize(TILE * size);
        std::memcpy(tail.data(), product.x + rows / TILE * TILE * size, rows % TILE * size * sizeof(bf16));
        product.tail = tail.data();
    }
    const bool many = rows > FEW_ROWS;
    const int64_t width = many ? MANY_COLUMNS : FEW_COLUMNS;
    const int64_t row_blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    const int64_t column_blocks = (product.columns + width - 1) / width;
    const int64_t tasks = row_blocks * column_blocks;
    const int64_t work = size * product.columns * 2;
    if (work + work / 128 * rows < ALONE) threads = 1;
    // Of few rows each thread takes long runs of columns, so that it reads the matrix in one go.
    const int64_t at_once = many ? 1 : std::max<int64_t>(1, tasks / (4 * threads));
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        Tiles session(true);
#pragma omp for schedule(dynamic, at_once) nowait
        for (int64_t task = 0; task < tasks; ++task) {
            int64_t first = task / column_blocks * (BLOCK_ROWS / TILE), left = task % column_blocks * width;
            int64_t last = std::min(first + BLOCK_ROWS / TILE, product.row_tiles());
            int64_t right = std::min(left + width, product.columns);
            if (many) product.run<Out, 0>(first, last, left, right, y);
            else product.run<Out, AHEAD_BYTES>(first, last, left, right, y);
        }
    }
}

}  // namespace

#endif
