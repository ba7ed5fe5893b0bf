// y = x times the transpose of a matrix of four-bit codes with a scale and an offset for each group of inputs, x in
// bfloat16: weights alone are rounded. For few rows the codes themselves are multiplied, and each group's sum is scaled; for
// more, a stretch of columns becomes bfloat16 tiles first.

#pragma once

#include "linear.h"

#if defined(HAVE_TILES)

#define HAVE_INT4 1

namespace {

namespace int4 {

constexpr int FEW = 4;                    // rows that are multiplied without tiles
constexpr int CODES_BYTES = TILE_SIZE / 2;  // of 32 inputs and 16 columns: 4 lines, of each 16-bit lane 4 inputs
constexpr int UNIT_BYTES = 64;            // of a group and 16 columns: their scales and their offsets, in float16
constexpr int COLUMNS = 4 * TILE;         // of y, that one task computes
constexpr int FETCH = 4096;

struct Matrix {
    const uint8_t* packed;  // [columns / 16][size / group] of UNIT_BYTES and then codes, 256 bytes for each 32 inputs;
                            // columns filled up to a whole tile
    const bf16* bias;       // [columns] or null
    float unit;             // that all scales and offsets are multiples of
    int64_t size, columns, group;

    int64_t groups() const { return size / group; }
    int64_t group_bytes() const { return UNIT_BYTES + group / DEPTH * CODES_BYTES; }
    const uint8_t* tile(int64_t column) const { return packed + column / TILE * groups() * group_bytes(); }

    static __m512 scales_of(const uint8_t* at) { return _mm512_cvtph_ps(_mm256_load_si256((const __m256i*)at)); }
    static __m512 offsets_of(const uint8_t* at) { return _mm512_cvtph_ps(_mm256_load_si256((const __m256i*)at + 1)); }

    // R rows of x, [rows, size], and the sums of their groups, [rows, groups], of the columns [left, right).
    template <int R, typename Out>
    void few(const bf16* x, const float* sums, int64_t left, int64_t right, Out* y) const {
        // Twice, since a lane's fifth bit belongs to its next code.
        alignas(64) uint16_t values[2 * TILE];
        for (int code = 0; code < 2 * TILE; ++code) values[code] = uint16_t(float_to_bits(float(code % TILE)) >> 16);
        const __m512i table = _mm512_load_si512(values);
        constexpr int LANES = R < 3 ? 2 : 1;  // sums side by side, since each takes some cycles to be added to
        for (int64_t column = left; column < right; column += TILE) {
            const uint8_t* at = tile(column);
            __m512 totals[R];
            for (auto& total : totals) total = _mm512_setzero_ps();
            const bf16* inputs = x;
            for (int64_t index = 0; index < groups(); ++index) {
                const __m512 scale = scales_of(at), offset = offsets_of(at);
                __builtin_prefetch(at + FETCH);
                at += UNIT_BYTES;
                __m512 parts[R][LANES];
                for (auto& of_row : parts) for (auto& part : of_row) part = _mm512_setzero_ps();
                for (int64_t input = 0; input < group; input += 2 * DEPTH / 8, at += 64, inputs += 2 * DEPTH / 8) {
                    __builtin_prefetch(at + FETCH);
                    const __m512i line = _mm512_load_si512(at);
#pragma GCC unroll 4
                    for (int pair = 0; pair < 4; ++pair) {
                        __m512bh codes = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(line, 4 * pair), table);
                        for (int row = 0; row < R; ++row) {
                            int32_t both;
                            std::memcpy(&both, inputs + row * size + 2 * pair, 4);
                            __m512& part = parts[row][pair % LANES];
                            part = _mm512_dpbf16_ps(part, codes, (__m512bh)_mm512_set1_epi32(both));
                        }
                    }
                }
                for (int row = 0; row < R; ++row) {
                    __m512 part = parts[row][0];
                    for (int lane = 1; lane < LANES; ++lane) part = _mm512_add_ps(part, parts[row][lane]);
                    totals[row] = _mm512_fmadd_ps(part, scale, totals[row]);
                    totals[row] = _mm512_fmadd_ps(offset, _mm512_set1_ps(sums[row * groups() + index]), totals[row]);
                }
            }
            int64_t width = std::min<int64_t>(TILE, columns - column);
            bf16 added[TILE] = {};
            if (bias) std::memcpy(added, bias + column, width * sizeof(bf16));
            for (int row = 0; row < R; ++row) {
                Floats value = (Floats)totals[row] * unit + load(added);
                Out* to = y + row * columns + column;
                if (width == TILE) store(to, value);
                else for (int64_t i = 0; i < width; ++i) put(to + i, value[i]);
            }
        }
    }

    // One tile of columns as bfloat16, [size / 32][16 pairs][16][2].
    void unpack(int64_t column, bf16* to) const {
        const uint8_t* at = tile(column);
        const __m512 codes = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        const __m512 times = _mm512_set1_ps(unit);
        for (int64_t index = 0; index < groups(); ++index) {
            const __m512 scale = _mm512_mul_ps(scales_of(at), times), offset = _mm512_mul_ps(offsets_of(at), times);
            __builtin_prefetch(at + FETCH);
            at += UNIT_BYTES;
            for (int64_t input = 0; input < group; input += 8, at += 64) {
                __builtin_prefetch(at + FETCH);
                const __m512i line = _mm512_load_si512(at);
#pragma GCC unroll 4
                for (int pair = 0; pair < 4; ++pair, to += 2 * TILE) {
                    __m512 even = _mm512_permutexvar_ps(_mm512_srli_epi32(line, 4 * pair), codes);
                    __m512 odd = _mm512_permutexvar_ps(_mm512_srli_epi32(line, 16 + 4 * pair), codes);
                    even = _mm512_fmadd_ps(even, scale, offset);
                    odd = _mm512_fmadd_ps(odd, scale, offset);
                    _mm512_store_si512(to, side_by_side(even, odd));
                }
            }
        }
    }

    // The nearest bfloat16 of each, ``even`` in the low halves.
    static __m512i side_by_side(__m512 even, __m512 odd) {
        const __m512i half = _mm512_set1_epi32(0x8000);
        __m512i low = _mm512_srli_epi32(_mm512_add_epi32((__m512i)even, half), 16);
        return _mm512_mask_blend_epi16(0xaaaaaaaa, low, _mm512_add_epi32((__m512i)odd, half));
    }
};

inline void add_groups(const bf16* x, int64_t rows, int64_t size, int64_t group, float* sums) {
    for (int64_t at = 0; at < rows * size; at += group) {
        Floats sum = {};
        for (int64_t i = at; i < at + group; i += WIDTH) sum += load(x + i);
        *sums++ = _mm512_reduce_add_ps((__m512)sum);
    }
}

// This thread's own, from the start of a cache line on.
inline bf16* room(int64_t size) {
    static thread_local std::vector<bf16> held;
    if (int64_t(held.size()) < size + 32) held.resize(size + 32);
    return (bf16*)((uintptr_t(held.data()) + 63) / 64 * 64);
}

template <typename Out>
void linear(const Matrix& matrix, const bf16* x, Out* y, int64_t rows, int threads) {
    const int64_t size = matrix.size, tasks = (matrix.columns + COLUMNS - 1) / COLUMNS;
    const int64_t work = size * matrix.columns / 2;
    static std::vector<float> sums;
    static std::vector<bf16> tail;
    const bool is_few = rows <= FEW;
    if (is_few) {
        if (int64_t(sums.size()) < rows * matrix.groups()) sums.resize(rows * matrix.groups());
        add_groups(x, rows, size, matrix.group, sums.data());
    } else if (rows % TILE) {
        if (int64_t(tail.size()) < TILE * size) tail.resize(TILE * size);
        std::memcpy(tail.data(), x + rows / TILE * TILE * size, rows % TILE * size * sizeof(bf16));
    }
    if (work + work / 32 * rows < ALONE) threads = 1;
    const int64_t at_once = std::max<int64_t>(1, tasks / (4 * threads));
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        Tiles session(!is_few);
#pragma omp for schedule(dynamic, at_once) nowait
        for (int64_t task = 0; task < tasks; ++task) {
            int64_t left = task * COLUMNS, right = std::min(left + COLUMNS, matrix.columns);
            switch (is_few ? rows : 0) {
                case 1: matrix.few<1>(x, sums.data(), left, right, y); continue;
                case 2: matrix.few<2>(x, sums.data(), left, right, y); continue;
                case 3: matrix.few<3>(x, sums.data(), left, right, y); continue;
                case 4: matrix.few<4>(x, sums.data(), left, right, y); continue;
            }
            bf16* tiles = room(COLUMNS * size);
            for (int64_t column = left; column < right; column += TILE) matrix.unpack(column, tiles + (column - left) * size);
            Product product{x, tiles - left * size, matrix.bias, rows, size, matrix.columns, tail.data()};
            product.run<Out, 0>(0, product.row_tiles(), left, right, y);
        }
    }
}

}  // namespace int4

}  // namespace

#endif
