// x and matrices in int8, and how sums of their codes become numbers.

#pragma once

#include "laid.h"
#include "output.h"
#include "rounded.h"

#if defined(HAVE_INT8)

#include <optional>

namespace {

namespace int8 {

// Panels of a matrix times few rows that a thread takes at once.
inline int64_t run_of(int64_t panels) { return std::clamp<int64_t>(panels / RUNS, 1, 8); }

// x by token: codes in tiles [rows / 16][size / 64][16][64], what to multiply by, and 128 times the sum of the codes.
struct Tokens {
    int64_t deep;  // bytes of a row: the size rounded up to whole tiles
    float* scales;
    int32_t* shifts;
    int8_t* codes;

    static int64_t whole(int64_t size, int64_t of) { return (size + of - 1) / of * of; }
    static int64_t bytes(int64_t rows, int64_t size) { return whole(rows, SIDE) * (whole(size, DEEP) + 8); }

    // In memory that starts a cache line.
    Tokens(int64_t rows, int64_t size, void* memory) : deep(whole(size, DEEP)) {
        scales = (float*)memory;
        shifts = (int32_t*)(scales + whole(rows, SIDE));
        codes = (int8_t*)(shifts + whole(rows, SIDE));
    }

    int8_t* row(int64_t row) const { return codes + row / SIDE * SIDE * deep + row % SIDE * DEEP; }

    template <typename T>
    void take(int64_t index, const T* x, int64_t size) const {
        Codes rounded(x, size);
        int8_t* to = row(index);
        for (int64_t at = 0; at < size; at += DEEP, to += TILE_BYTES) _mm512_store_si512(to, rounded.next(x + at, size - at));
        scales[index] = rounded.scale;
        shifts[index] = 128 * rounded.sum();
    }

#if defined(HAVE_TILES)
    // A tile of rows that lie as Laid has them, of whole tiles of inputs.
    void take_laid(int64_t tile, const bf16* laid, int64_t size) const {
        const bf16* const from = laid + Laid::place(tile * SIDE, 0, size);
        __m512i largest[SIDE] = {};
        for (int64_t at = 0; at < size; at += DEPTH) {
#pragma GCC unroll 16
            for (int row = 0; row < SIDE; ++row) largest[row] = Codes::larger(largest[row], line_of(from, at, row));
        }
        std::optional<Codes> rounded[SIDE];
        for (int row = 0; row < SIDE; ++row) rounded[row].emplace(Codes::magnitude_of(largest[row]));
        int8_t* to = codes + tile * SIDE * deep;
        for (int64_t at = 0; at < size; at += DEEP) {
            for (int row = 0; row < SIDE; ++row, to += DEEP) {
                _mm512_store_si512(to, rounded[row]->next(line_of(from, at, row), line_of(from, at + DEPTH, row)));
            }
        }
        for (int row = 0; row < SIDE; ++row) {
            scales[tile * SIDE + row] = rounded[row]->scale;
            shifts[tile * SIDE + row] = 128 * rounded[row]->sum();
        }
    }
    static __m512i line_of(const bf16* tile, int64_t column, int64_t row) {
        return _mm512_load_si512(tile + column / DEPTH * 2 * TILE_SIZE + row * DEPTH);
    }
#endif
};

// Panels of two tiles. The second one holds the columns ``apart`` further on: 16, or, where gates and what they open lie
// below each other, half of all.
struct Matrix {
    const uint8_t* codes;  // [panels][size / 64][2][16 quads][16][4]
    const float* scales;   // [panels][2][16]
    const float* bias;     // the same, or null
    int64_t size, columns, apart;

    int64_t deep() const { return Tokens::whole(size, DEEP); }
    int64_t num_panels() const { return (columns + COLUMNS - 1) / COLUMNS; }
    int64_t left(int64_t panel) const { return panel * (apart == SIDE ? COLUMNS : SIDE); }
    const uint8_t* panel_at(int64_t panel) const { return codes + panel * deep() * COLUMNS; }
};

// Sums of a panel, as the numbers that they are; one way to round, wherever it is asked for.
struct Scaled {
    typedef int32_t Sum;
    static constexpr int ROW = COLUMNS;  // from row to row of sums [rows][2][16], see interleaved.h

    const Tokens& x;
    Floats left, right, left_bias = {}, right_bias = {};

    Scaled(const Matrix& matrix, const Tokens& x, int64_t panel) : x(x) { set(matrix, panel); }

    void set(const Matrix& matrix, int64_t panel) {
        const float *scales = matrix.scales + panel * COLUMNS, *bias = matrix.bias + panel * COLUMNS;
        left = load(scales), right = load(scales + SIDE);
        if (matrix.bias) left_bias = load(bias), right_bias = load(bias + SIDE);
    }

    void take(int64_t row, __m512i left_sum, __m512i right_sum, Floats& low, Floats& high) const {
        const __m512i shift = _mm512_set1_epi32(x.shifts[row]);
        const __m512 scale = _mm512_set1_ps(x.scales[row]);
        low = value_of(left_sum, shift, scale, left, left_bias), high = value_of(right_sum, shift, scale, right, right_bias);
    }
    void take(int64_t row, const int32_t* sums, Floats& low, Floats& high) const {
        take(row, _mm512_load_si512(sums), _mm512_load_si512(sums + SIDE), low, high);
    }

  private:
    static Floats value_of(__m512i sum, __m512i shift, __m512 scale, Floats scales, Floats bias) {
        const __m512 exact = _mm512_cvtepi32_ps(_mm512_sub_epi32(sum, shift));
        return (Floats)_mm512_fmadd_ps(_mm512_mul_ps(exact, scale), (__m512)scales, (__m512)bias);
    }
};

}  // namespace int8

}  // namespace

#endif
