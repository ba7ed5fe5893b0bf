// y = x times the transpose of a matrix of int8 codes with a scale for each output, x rounded to int8 by token: dynamic
// W8A8. Codes are packed as code + 128, so that one layout serves VNNI, which wants one side unsigned, and AMX; what the
// 128 adds is taken off again by the sum of x's codes. Sums are integers: however many rows come together, and by
// whichever instructions, each gets the same.

#pragma once

#include "tiles.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#include <immintrin.h>

#include <algorithm>
#include <vector>

#define HAVE_INT8 1
#if defined(HAVE_TILES) && defined(__AMX_INT8__)
#define HAVE_INT8_TILES 1
#endif

namespace {

namespace int8 {

constexpr int SIDE = 16;               // rows of a tile of x, columns of a tile of the matrix
constexpr int DEEP = 64;               // inputs of a tile
constexpr int TILE_BYTES = SIDE * DEEP;
constexpr int FEW = 4;                 // rows that VNNI multiplies at once
constexpr int64_t NO_TILES = 1;        // rows for which VNNI is no slower than tiles
constexpr int TASK_COLUMNS = 4 * SIDE;
constexpr int WIDE_COLUMNS = 32 * SIDE;  // of a task of many rows, so that y is written in long stretches
constexpr int TASK_ROWS = 8 * SIDE;
constexpr int STEPS = 7;              // tiles deep that are multiplied before the next columns, so that x stays in L1
constexpr int AHEAD = 4096;
constexpr int64_t ALONE = 200000;      // bytes of the matrix, and a 64th of the products, for which no other thread is woken

// Some inputs of a token as int8: the largest magnitude becomes 127. Where one is a NaN or an infinity, the scale is a NaN.
class Codes {
    Floats inverse_;
    bool is_empty_;
    __m512i sum_ = _mm512_setzero_si512();

  public:
    float scale;

    template <typename T>
    Codes(const T* x, int64_t size) {
        const float magnitude = largest_of(x, size);
        const bool is_finite = magnitude < INFINITY;
        // The reciprocal of what is smaller than this is no longer a number.
        const bool is_zero = magnitude < 1e-36f;
        is_empty_ = is_zero || !is_finite;
        scale = !is_finite ? NAN : is_zero ? 0.0f : magnitude / 127.0f;
        inverse_ = Floats{} + 127.0f / magnitude;
    }

    // The next 64, or what is left of them and zeros.
    template <typename T>
    __m512i next(const T* x, int64_t size) {
        if (is_empty_) return _mm512_setzero_si512();
        __m512i codes;
        if (size >= DEEP) {
            codes = codes_of(x);
        } else {
            T padded[DEEP] = {};
            std::memcpy(padded, x, size * sizeof(T));
            codes = codes_of(padded);
        }
        sum_ = _mm512_dpbusd_epi32(sum_, _mm512_set1_epi8(1), codes);
        return codes;
    }

    // Of all codes so far.
    int32_t sum() const { return _mm512_reduce_add_epi32(sum_); }

  private:
    // As bits, so that a NaN is larger than anything.
    static float largest_of(const float* x, int64_t size) {
        Words largest = {};
        sweep<float>(size, [&](auto place) {
            Words bits = (Words)place.get_from(x) & 0x7fffffffu;
            largest = bits > largest ? bits : largest;
        });
        return bits_to_float(_mm512_reduce_max_epu32((__m512i)largest));
    }
    static float largest_of(const bf16* x, int64_t size) {
        const __m512i no_sign = _mm512_set1_epi16(0x7fff);
        __m512i largest = _mm512_setzero_si512();
        for (int64_t at = 0; at < size; at += 2 * WIDTH) {
            __mmask32 inside = size - at < 2 * WIDTH ? (1u << (size - at)) - 1 : ~0u;
            largest = _mm512_max_epu16(largest, _mm512_and_si512(_mm512_maskz_loadu_epi16(inside, x + at), no_sign));
        }
        __m512i low = _mm512_slli_epi32(largest, 16);
        return bits_to_float(_mm512_reduce_max_epu32(_mm512_max_epu32(low, largest)) & 0xffff0000u);
    }

    __m512i rounded(__m512 x) const { return _mm512_cvtps_epi32(_mm512_mul_ps(x, (__m512)inverse_)); }

    __m512i codes_of(const float* x) const {
        __m128i parts[4];
        for (int part = 0; part < 4; ++part) parts[part] = _mm512_cvtsepi32_epi8(rounded(_mm512_loadu_ps(x + part * WIDTH)));
        __m512i codes;
        std::memcpy(&codes, parts, 64);
        return codes;
    }
    __m512i codes_of(const bf16* x) const {
        __m512i halves[2];
        for (int half = 0; half < 2; ++half) {
            __m512i both = _mm512_loadu_si512(x + half * 2 * WIDTH);
            __m512i even = rounded((__m512)_mm512_slli_epi32(both, 16));
            __m512i odd = rounded((__m512)_mm512_and_si512(both, _mm512_set1_epi32(0xffff0000)));
            halves[half] = _mm512_mask_blend_epi16(0xaaaaaaaa, even, _mm512_slli_epi32(odd, 16));
        }
        // Quarters of both take turns after packing.
        const __m512i in_order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
        return _mm512_permutexvar_epi64(in_order, _mm512_packs_epi16(halves[0], halves[1]));
    }
};

// x by token: codes in tiles [rows / 16][size / 64][16][64], what to multiply by, and 128 times the sum of the codes.
struct Tokens {
    std::vector<int8_t> held;
    std::vector<float> scales;
    std::vector<int32_t> shifts;
    int8_t* codes = nullptr;
    int64_t deep = 0;  // bytes of a row: the size rounded up to whole tiles

    void resize(int64_t rows, int64_t size) {
        deep = (size + DEEP - 1) / DEEP * DEEP;
        int64_t all = (rows + SIDE - 1) / SIDE * SIDE;
        if (int64_t(held.size()) < all * deep + 64) held.resize(all * deep + 64);
        if (int64_t(scales.size()) < all) scales.resize(all), shifts.resize(all);
        codes = (int8_t*)((uintptr_t(held.data()) + 63) / 64 * 64);
    }

    int8_t* row(int64_t row) const { return codes + row / SIDE * SIDE * deep + row % SIDE * DEEP; }

    template <typename T>
    void take(int64_t index, const T* x, int64_t size) {
        Codes rounded(x, size);
        int8_t* to = row(index);
        for (int64_t at = 0; at < size; at += DEEP, to += TILE_BYTES) _mm512_store_si512(to, rounded.next(x + at, size - at));
        scales[index] = rounded.scale;
        shifts[index] = 128 * rounded.sum();
    }
};

struct Matrix {
    const uint8_t* codes;  // [columns / 16][size / 64][16 quads][16][4], filled up to whole pairs of tiles
    const float* scales;   // [columns], filled up likewise
    const float* bias;     // the same, or null
    int64_t size, columns;
};

struct Product : Matrix {
    const Tokens& x;
    int64_t rows;

    Product(const Matrix& matrix, const Tokens& x, int64_t rows) : Matrix(matrix), x(x), rows(rows) {}

    int64_t steps() const { return x.deep / DEEP; }
    int64_t row_tiles() const { return (rows + SIDE - 1) / SIDE; }

    // Of sixteen columns of one row; one way to round, wherever it is called from.
    static Floats value_of(__m512i sum, __m512i shift, Floats scale, Floats scales, Floats bias) {
        __m512 exact = _mm512_cvtepi32_ps(_mm512_sub_epi32(sum, shift));
        return (Floats)_mm512_fmadd_ps(_mm512_mul_ps(exact, (__m512)scale), (__m512)scales, (__m512)bias);
    }

    template <typename Out>
    void put_out(int64_t row, int64_t column, __m512i sum, Out* y) const {
        Floats value = value_of(sum, _mm512_set1_epi32(x.shifts[row]), Floats{} + x.scales[row], load(scales + column),
                                bias ? load(bias + column) : Floats{});
        Out* to = y + row * columns + column;
        if (column + SIDE <= columns) return store(to, value);
        for (int64_t i = 0; i < columns - column; ++i) put(to + i, value[i]);
    }

    static void store_both(float* to, Floats low, Floats high) { store(to, low), store(to + WIDTH, high); }
    static void store_both(bf16* to, Floats low, Floats high) {
#if defined(__AVX512BF16__)
        __m512bh both = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
        std::memcpy(to, &both, 64);
#else
        store(to, low), store(to + WIDTH, high);
#endif
    }

    // R rows from ``first`` of the columns [left, right), one tile of columns after the other, as they lie in memory.
    template <int R, typename Out>
    void few(int64_t first, int64_t left, int64_t right, Out* y) const {
        constexpr int LANES = R == 1 ? 4 : 2;  // sums side by side, since each takes some cycles to be added to
        const int8_t* from[R];
        for (int row = 0; row < R; ++row) from[row] = x.row(first + row);
        for (int64_t column = left; column < right; column += SIDE) {
            const uint8_t* tile = codes + column * x.deep;
            __m512i sums[R][LANES];
            for (auto& of_row : sums) for (auto& sum : of_row) sum = _mm512_setzero_si512();
            for (int64_t step = 0; step < steps(); ++step, tile += TILE_BYTES) {
#pragma GCC unroll 16
                for (int quad = 0; quad < SIDE; ++quad) {
                    __builtin_prefetch(tile + AHEAD + quad * 64);
                    __m512i line = _mm512_load_si512(tile + quad * 64);
                    for (int row = 0; row < R; ++row) {
                        int32_t four;
                        std::memcpy(&four, from[row] + step * TILE_BYTES + quad * 4, 4);
                        __m512i& sum = sums[row][quad % LANES];
                        sum = _mm512_dpbusd_epi32(sum, line, _mm512_set1_epi32(four));
                    }
                }
            }
            for (int row = 0; row < R; ++row) {
                __m512i sum = sums[row][0];
                for (int lane = 1; lane < LANES; ++lane) sum = _mm512_add_epi32(sum, sums[row][lane]);
                put_out(first + row, column, sum, y);
            }
        }
    }

    template <typename Out>
    void few(int64_t first, int64_t last, int64_t left, int64_t right, Out* y) const {
        for (; first + FEW <= last; first += FEW) few<FEW>(first, left, right, y);
        switch (last - first) {
            case 3: return few<3>(first, left, right, y);
            case 2: return few<2>(first, left, right, y);
            case 1: return few<1>(first, left, right, y);
        }
    }

#if defined(HAVE_INT8_TILES)
    // The same by tiles: M by 2 of them, added to ``sums`` where there are sums already.
    template <int M, int FETCH>
    void multiply(int64_t row_tile, int64_t column, int64_t begin, int64_t end, bool add, int32_t* sums) const {
        const int8_t* a = x.codes + row_tile * SIDE * x.deep;
        const uint8_t* b = codes + column * x.deep;
        asm volatile("" ::: "memory");  // the compiler does not know that tiles are read from memory
        if (add) {
            _tile_loadd(0, sums, 64);
            _tile_loadd(1, sums + 256, 64);
            if constexpr (M > 1) _tile_loadd(2, sums + 512, 64);
            if constexpr (M > 1) _tile_loadd(3, sums + 768, 64);
        } else {
            _tile_zero(0);
            _tile_zero(1);
            if constexpr (M > 1) _tile_zero(2);
            if constexpr (M > 1) _tile_zero(3);
        }
        for (int64_t step = begin; step < end; ++step) {
            const uint8_t *left = b + step * TILE_BYTES, *right = left + SIDE * x.deep;
            if constexpr (FETCH != 0) {
                for (int line = 0; line < SIDE; ++line) {
                    __builtin_prefetch(left + FETCH + line * 64);
                    __builtin_prefetch(right + FETCH + line * 64);
                }
            }
            _tile_loadd(4, a + step * TILE_BYTES, 64);
            _tile_loadd(6, left, 64);
            _tile_dpbsud(0, 4, 6);
            _tile_loadd(7, right, 64);
            _tile_dpbsud(1, 4, 7);
            if constexpr (M > 1) {
                _tile_loadd(5, a + SIDE * x.deep + step * TILE_BYTES, 64);
                _tile_dpbsud(2, 5, 6);
                _tile_dpbsud(3, 5, 7);
            }
        }
        _tile_stored(0, sums, 64);
        _tile_stored(1, sums + 256, 64);
        if constexpr (M > 1) _tile_stored(2, sums + 512, 64);
        if constexpr (M > 1) _tile_stored(3, sums + 768, 64);
        asm volatile("" ::: "memory");
    }

    template <typename Out>
    void put_tiles(int64_t row_tile, int64_t column, const int32_t* sums, Out* y) const {
        int64_t from = row_tile * SIDE, count = std::min<int64_t>(SIDE, rows - from);
        if (column + 2 * SIDE <= columns) {
            const Floats left = load(scales + column), right = load(scales + column + SIDE);
            const Floats left_bias = bias ? load(bias + column) : Floats{};
            const Floats right_bias = bias ? load(bias + column + SIDE) : Floats{};
            for (int64_t row = 0; row < count; ++row, sums += SIDE) {
                const __m512i shift = _mm512_set1_epi32(x.shifts[from + row]);
                const Floats scale = Floats{} + x.scales[from + row];
                Floats low = value_of(_mm512_load_si512(sums), shift, scale, left, left_bias);
                Floats high = value_of(_mm512_load_si512(sums + 256), shift, scale, right, right_bias);
                store_both(y + (from + row) * columns + column, low, high);
            }
            return;
        }
        for (int64_t row = 0; row < count; ++row) {
            put_out(from + row, column, _mm512_loadu_si512(sums + row * SIDE), y);
            if (column + SIDE < columns) put_out(from + row, column + SIDE, _mm512_loadu_si512(sums + 256 + row * SIDE), y);
        }
    }

    // Row tiles [first, last) of the columns [left, right), ``blocks`` times a part of the inputs; ``held`` has room for the
    // sums of all of them.
    template <int FETCH, typename Out>
    void many(int64_t first, int64_t last, int64_t left, int64_t right, int64_t blocks, int32_t* held, Out* y) const {
        const int64_t pairs = (right - left + 2 * SIDE - 1) / (2 * SIDE);
        for (int64_t block = 0; block < blocks; ++block) {
            const int64_t begin = steps() * block / blocks, end = steps() * (block + 1) / blocks;
            // Two pairs of rows meet each pair of columns while it is in L1.
            for (int64_t rows_from = first; rows_from < last; rows_from += 4) {
                for (int64_t pair = 0; pair < pairs; ++pair) {
                    const int64_t column = left + pair * 2 * SIDE;
                    for (int64_t tile = rows_from; tile < std::min(rows_from + 4, last); tile += 2) {
                        const bool two = tile + 1 < last;
                        int32_t* sums = blocks > 1 ? held + ((tile - first) / 2 * pairs + pair) * 1024 : held;
                        if (two) multiply<2, FETCH>(tile, column, begin, end, block > 0, sums);
                        else multiply<1, FETCH>(tile, column, begin, end, block > 0, sums);
                        if (block + 1 == blocks) {
                            put_tiles(tile, column, sums, y);
                            if (two) put_tiles(tile + 1, column, sums + 512, y);
                        }
                    }
                }
            }
        }
    }
#endif
};

#if defined(HAVE_INT8_TILES)
// This thread's own, from the start of a cache line on.
inline int32_t* room(int64_t size) {
    static thread_local std::vector<int32_t> held;
    if (int64_t(held.size()) < size + 16) held.resize(size + 16);
    return (int32_t*)((uintptr_t(held.data()) + 63) / 64 * 64);
}
#endif

template <typename T, typename Out>
void linear(const Matrix& matrix, const T* x, Out* y, int64_t rows, int threads) {
    const int64_t size = matrix.size, columns = matrix.columns;
    static Tokens tokens;
    tokens.resize(rows, size);
    Product product(matrix, tokens, rows);
    const int64_t work = tokens.deep * columns;
    if (work + work / 64 * rows < ALONE) threads = 1;
#if defined(HAVE_INT8_TILES)
    const bool by_tiles = rows > NO_TILES && may_use_tiles();
#else
    const bool by_tiles = false;
#endif
    const bool is_long = by_tiles && rows > 4 * SIDE;
    const int64_t width = is_long ? WIDE_COLUMNS : TASK_COLUMNS;
    const int64_t row_blocks = by_tiles ? (rows + TASK_ROWS - 1) / TASK_ROWS : 1;
    const int64_t column_blocks = (columns + width - 1) / width;
    const int64_t tasks = row_blocks * column_blocks;
    // Of few rows each thread takes long runs of columns, so that it reads the matrix in one go.
    const int64_t at_once = is_long ? 1 : std::max<int64_t>(1, tasks / (4 * threads));
    const bool is_small = rows * size < 16384;
    if (is_small) {
        for (int64_t row = 0; row < rows; ++row) tokens.take(row, x + row * size, size);
    }
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        if (!is_small) {
#pragma omp for schedule(static)
            for (int64_t row = 0; row < rows; ++row) tokens.take(row, x + row * size, size);
        }
#if defined(HAVE_INT8_TILES)
        Tiles session(by_tiles);
        int32_t* sums = by_tiles ? room(TASK_ROWS / SIDE * width / SIDE * 256) : nullptr;
#endif
#pragma omp for schedule(dynamic, at_once) nowait
        for (int64_t task = 0; task < tasks; ++task) {
            int64_t left = task % column_blocks * width, right = std::min(left + width, columns);
#if defined(HAVE_INT8_TILES)
            if (by_tiles) {
                int64_t first = task / column_blocks * (TASK_ROWS / SIDE);
                int64_t last = std::min(first + TASK_ROWS / SIDE, product.row_tiles());
                if (is_long) product.many<0>(first, last, left, right, (product.steps() + STEPS - 1) / STEPS, sums, y);
                else product.many<AHEAD>(first, last, left, right, 1, sums, y);
                continue;
            }
#endif
            product.few(0, rows, left, right, y);
        }
    }
}

}  // namespace int8

}  // namespace

#endif
