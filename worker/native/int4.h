// y = x times the transpose of a matrix of four-bit codes with a scale and an offset for each group of inputs. Each group of a
// token is rounded to int8 by its own largest, so sums within a group are integers, and groups are added up in one order:
// however many rows come together, and by whichever instructions, each gets the same.

#pragma once

#include "int8.h"

#if defined(HAVE_INT8)

namespace {

namespace int4 {

using int8::DEEP;
using int8::SIDE;
using int8::TILE_BYTES;

constexpr int64_t NO_TILES = 4;     // rows for which VNNI is no slower than tiles
constexpr int UNIT_BYTES = 64;      // of a group and 16 columns: their scales and their offsets, in float16
constexpr int COLUMNS = 4 * SIDE;   // of y, that one task computes
constexpr int TASK_ROWS = 16 * SIDE;
constexpr int AHEAD = 4096;

// x by token and group: codes in tiles [rows / 16][tiles][16][64], a tile for 64 inputs, or, where a group has 32, for it and
// as many zeros; what to multiply by, and what the group's inputs sum to.
struct Tokens {
    int64_t group = 0, groups = 0, tiles = 0;
    std::vector<int8_t> held;
    std::vector<float> scales, sums;  // [rows / 16][groups][16]
    int8_t* codes = nullptr;

    void resize(int64_t rows, int64_t size, int64_t of_group) {
        group = of_group, groups = size / group;
        tiles = groups * tiles_of_group();
        int64_t all = (rows + SIDE - 1) / SIDE * SIDE;
        if (int64_t(held.size()) < all * tiles * DEEP + 64) held.resize(all * tiles * DEEP + 64);
        if (int64_t(scales.size()) < all * groups) scales.resize(all * groups), sums.resize(all * groups);
        codes = (int8_t*)((uintptr_t(held.data()) + 63) / 64 * 64);
    }

    int64_t tiles_of_group() const { return group < DEEP ? 1 : group / DEEP; }
    const int8_t* tile(int64_t row) const { return codes + row / SIDE * SIDE * tiles * DEEP; }
    int64_t place(int64_t row) const { return row / SIDE * SIDE * groups + row % SIDE; }

    template <typename T>
    void take(int64_t row, const T* x) {
        int8_t* to = codes + row / SIDE * SIDE * tiles * DEEP + row % SIDE * DEEP;
        for (int64_t index = 0; index < groups; ++index) {
            int8::Codes rounded(x + index * group, group);
            for (int64_t at = 0; at < group; at += DEEP, to += TILE_BYTES) {
                // The second group of a tile of the matrix meets it in the second half.
                __m512i code = rounded.next(x + index * group + at, group - at);
                if (group < DEEP && index % 2) code = _mm512_shuffle_i64x2(code, code, 0x4e);
                _mm512_store_si512(to, code);
            }
            scales[place(row) + index * SIDE] = rounded.scale;
            sums[place(row) + index * SIDE] = rounded.scale * float(rounded.sum());
        }
    }
};

struct Matrix {
    const uint8_t* packed;  // [columns / 16][size / group] of UNIT_BYTES and then lines for 8 inputs of 16 columns: their first
                            // four in the low halves of bytes; columns filled up to a whole tile
    const float* bias;      // [columns], filled up, or null
    float unit;             // that all scales and offsets are multiples of
    int64_t size, columns, group;

    int64_t groups() const { return size / group; }
    int64_t group_bytes() const { return UNIT_BYTES + group * SIDE / 2; }
    const uint8_t* tile(int64_t column) const { return packed + column / SIDE * groups() * group_bytes(); }

    static __m512 scales_of(const uint8_t* at) { return _mm512_cvtph_ps(_mm256_load_si256((const __m256i*)at)); }
    static __m512 offsets_of(const uint8_t* at) { return _mm512_cvtph_ps(_mm256_load_si256((const __m256i*)at + 1)); }
    static __m512i low(__m512i line) { return _mm512_and_si512(line, _mm512_set1_epi8(15)); }
    static __m512i high(__m512i line) { return low(_mm512_srli_epi16(line, 4)); }

    // What a group adds to sixteen columns of a row; one way to round, wherever it is called from.
    static __m512 add(__m512 total, __m512i sum, __m512 scale, __m512 offset, float row_scale, float row_sum) {
        total = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_mul_ps(scale, _mm512_set1_ps(row_scale)), total);
        return _mm512_fmadd_ps(offset, _mm512_set1_ps(row_sum), total);
    }

    template <typename Out>
    void put_out(__m512 total, int64_t row, int64_t column, Out* y) const {
        __m512 added = bias ? _mm512_loadu_ps(bias + column) : _mm512_setzero_ps();
        Floats value = (Floats)_mm512_fmadd_ps(total, _mm512_set1_ps(unit), added);
        Out* to = y + row * columns + column;
        if (column + SIDE <= columns) return store(to, value);
        for (int64_t i = 0; i < columns - column; ++i) put(to + i, value[i]);
    }

    // R rows from ``first`` of the columns [left, right), one tile of columns after the other, as they lie in memory.
    template <int R, typename Out>
    void few(const Tokens& x, int64_t first, int64_t left, int64_t right, Out* y) const {
        const int8_t* from[R];
        const float *scales[R], *sums[R];
        for (int row = 0; row < R; ++row) {
            from[row] = x.tile(first + row) + (first + row) % SIDE * DEEP;
            scales[row] = x.scales.data() + x.place(first + row), sums[row] = x.sums.data() + x.place(first + row);
        }
        const int64_t lines = group / 8;
        for (int64_t column = left; column < right; column += SIDE) {
            const uint8_t* at = tile(column);
            __m512 totals[R];
            for (auto& total : totals) total = _mm512_setzero_ps();
            int64_t step = 0;
            for (int64_t index = 0; index < groups(); ++index) {
                const __m512 scale = scales_of(at), offset = offsets_of(at);
                __builtin_prefetch(at + AHEAD);
                at += UNIT_BYTES;
                __m512i parts[R][2];
                for (auto& of_row : parts) of_row[0] = of_row[1] = _mm512_setzero_si512();
                int64_t inside = group < DEEP && index % 2 ? group : 0;
                for (int64_t line = 0; line < lines; ++line, at += 64, inside += 8) {
                    __builtin_prefetch(at + AHEAD);
                    const __m512i codes = _mm512_load_si512(at);
                    const __m512i even = low(codes), odd = high(codes);
                    const int64_t place = step * TILE_BYTES + inside / DEEP * TILE_BYTES + inside % DEEP;
                    for (int row = 0; row < R; ++row) {
                        int32_t four[2];
                        std::memcpy(four, from[row] + place, 8);
                        parts[row][0] = _mm512_dpbusd_epi32(parts[row][0], even, _mm512_set1_epi32(four[0]));
                        parts[row][1] = _mm512_dpbusd_epi32(parts[row][1], odd, _mm512_set1_epi32(four[1]));
                    }
                }
                step += x.tiles_of_group();
                for (int row = 0; row < R; ++row) {
                    totals[row] = add(totals[row], _mm512_add_epi32(parts[row][0], parts[row][1]), scale, offset,
                                      scales[row][index * SIDE], sums[row][index * SIDE]);
                }
            }
            for (int row = 0; row < R; ++row) put_out(totals[row], first + row, column, y);
        }
    }

    template <typename Out>
    void few(const Tokens& x, int64_t first, int64_t last, int64_t left, int64_t right, Out* y) const {
        for (; first + 4 <= last; first += 4) few<4>(x, first, left, right, y);
        switch (last - first) {
            case 3: return few<3>(x, first, left, right, y);
            case 2: return few<2>(x, first, left, right, y);
            case 1: return few<1>(x, first, left, right, y);
        }
    }

#if defined(HAVE_INT8_TILES)
    int64_t deep() const { return (size + DEEP - 1) / DEEP * DEEP; }

    // One tile of columns as bytes, [size / 64][16 quads][16][4], and its scales and offsets, [groups][2][16].
    void unpack(int64_t column, uint8_t* to, float* terms) const {
        const uint8_t* at = tile(column);
        for (int64_t index = 0; index < groups(); ++index, terms += 2 * SIDE) {
            _mm512_store_ps(terms, scales_of(at));
            _mm512_store_ps(terms + SIDE, offsets_of(at));
            __builtin_prefetch(at + AHEAD);
            at += UNIT_BYTES;
            for (int64_t input = 0; input < group; input += 8, at += 64, to += 128) {
                __builtin_prefetch(at + AHEAD);
                const __m512i codes = _mm512_load_si512(at);
                _mm512_store_si512(to, low(codes));
                _mm512_store_si512(to + 64, high(codes));
            }
        }
    }

    // A tile of rows, of which ROWS count at most, and one of columns.
    template <int ROWS, typename Out>
    void multiply(const Tokens& x, int64_t first, int64_t count, int64_t column, const uint8_t* b, const float* terms,
                  Out* y) const {
        alignas(64) int32_t sums[2][SIDE * SIDE];
        const int8_t* a = x.tile(first);
        const float *row_scales = x.scales.data() + x.place(first), *row_sums = x.sums.data() + x.place(first);
        __m512 totals[ROWS];
        for (auto& total : totals) total = _mm512_setzero_ps();
        auto sum_up = [&](int64_t index) {
            // Two after each other, so that the next is multiplied while the last is added up.
            asm volatile("" ::: "memory");
            if (index % 2) {
                _tile_zero(1);
            } else {
                _tile_zero(0);
            }
            for (int64_t step = 0; step < x.tiles_of_group(); ++step, a += TILE_BYTES) {
                const uint8_t* tile = b + (index * group + step * DEEP) / DEEP * TILE_BYTES;
                if (index % 2) {
                    _tile_loadd(4, a, 64);
                    _tile_loadd(6, tile, 64);
                    _tile_dpbsud(1, 4, 6);
                } else {
                    _tile_loadd(5, a, 64);
                    _tile_loadd(7, tile, 64);
                    _tile_dpbsud(0, 5, 7);
                }
            }
            if (index % 2) {
                _tile_stored(1, sums[1], 64);
            } else {
                _tile_stored(0, sums[0], 64);
            }
            asm volatile("" ::: "memory");
        };
        sum_up(0);
        for (int64_t index = 0; index < groups(); ++index) {
            if (index + 1 < groups()) sum_up(index + 1);
            const __m512 scale = _mm512_load_ps(terms + index * 2 * SIDE);
            const __m512 offset = _mm512_load_ps(terms + index * 2 * SIDE + SIDE);
#pragma GCC unroll 16
            for (int row = 0; row < ROWS; ++row) {
                totals[row] = add(totals[row], _mm512_load_si512(sums[index % 2] + row * SIDE), scale, offset,
                                  row_scales[index * SIDE + row], row_sums[index * SIDE + row]);
            }
        }
        for (int row = 0; row < ROWS; ++row) {
            if (row < count) put_out(totals[row], first + row, column, y);
        }
    }

    template <typename Out>
    void many(const Tokens& x, int64_t first, int64_t last, int64_t left, int64_t right, uint8_t* tiles, float* terms,
              Out* y) const {
        for (int64_t column = left; column < right; column += SIDE) {
            unpack(column, tiles, terms);
            for (int64_t row = first; row < last; row += SIDE) {
                int64_t count = std::min<int64_t>(SIDE, last - row);
                if (count > 8) multiply<16>(x, row, count, column, tiles, terms, y);
                else multiply<8>(x, row, count, column, tiles, terms, y);
            }
        }
    }
#endif
};

template <typename T, typename Out>
void linear(const Matrix& matrix, const T* x, Out* y, int64_t rows, int threads) {
    const int64_t size = matrix.size;
    static Tokens tokens;
    tokens.resize(rows, size, matrix.group);
#if defined(HAVE_INT8_TILES)
    const bool by_tiles = rows > NO_TILES && may_use_tiles();
#else
    const bool by_tiles = false;
#endif
    const int64_t work = size * matrix.columns / 2;
    if (work + work / 32 * rows < int8::ALONE) threads = 1;
    const int64_t row_blocks = by_tiles ? (rows + TASK_ROWS - 1) / TASK_ROWS : 1;
    const int64_t column_blocks = (matrix.columns + COLUMNS - 1) / COLUMNS;
    const int64_t tasks = row_blocks * column_blocks;
    // Of few rows each thread takes long runs of columns, so that it reads the matrix in one go.
    const int64_t at_once = std::max<int64_t>(1, tasks / (4 * threads));
    const bool is_small = rows * size < 16384;
    if (is_small) {
        for (int64_t row = 0; row < rows; ++row) tokens.take(row, x + row * size);
    }
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        if (!is_small) {
#pragma omp for schedule(static)
            for (int64_t row = 0; row < rows; ++row) tokens.take(row, x + row * size);
        }
#if defined(HAVE_INT8_TILES)
        Tiles session(by_tiles);
        const int64_t terms = matrix.groups() * 2 * SIDE;
        float* room = by_tiles ? (float*)int8::room(terms + SIDE * matrix.deep() / 4) : nullptr;
#endif
#pragma omp for schedule(dynamic, at_once) nowait
        for (int64_t task = 0; task < tasks; ++task) {
            int64_t first = task / column_blocks * TASK_ROWS, left = task % column_blocks * COLUMNS;
            int64_t right = std::min(left + COLUMNS, matrix.columns);
#if defined(HAVE_INT8_TILES)
            if (by_tiles) {
                matrix.many(tokens, first, std::min(first + TASK_ROWS, rows), left, right, (uint8_t*)(room + terms), room, y);
                continue;
            }
#endif
            matrix.few(tokens, first, rows, left, right, y);
        }
    }
}

}  // namespace int4

}  // namespace

#endif
