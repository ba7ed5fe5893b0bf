// x and matrices of four-bit codes, and what a group of inputs adds to a row.

#pragma once

#include "int8_matrix.h"

#if defined(HAVE_INT8)

namespace {

namespace int4 {

using int8::COLUMNS;
using int8::DEEP;
using int8::SIDE;
using int8::TILE_BYTES;

constexpr int UNIT_BYTES = 64;       // of a group and 16 columns: their scales and their offsets, in float16

// x by token and group: codes in tiles [rows / 16][tiles][16][64], a tile for 64 inputs, or, where a group has 32, for it and
// as many zeros; what to multiply by, and what the group's inputs sum to.
struct Tokens {
    int64_t group, groups, tiles;
    float *scales, *sums;  // [rows / 16][groups][16]
    int8_t* codes;

    static int64_t bytes(int64_t rows, int64_t size, int64_t group) {
        return (rows + SIDE - 1) / SIDE * SIDE * (size / group) * (8 + std::max<int64_t>(group, DEEP));
    }

    // In memory that starts a cache line.
    Tokens(int64_t rows, int64_t size, int64_t of_group, void* memory) : group(of_group), groups(size / of_group) {
        const int64_t all = (rows + SIDE - 1) / SIDE * SIDE;
        tiles = groups * tiles_of_group();
        scales = (float*)memory;
        sums = scales + all * groups;
        codes = (int8_t*)(sums + all * groups);
    }

    int64_t tiles_of_group() const { return group < DEEP ? 1 : group / DEEP; }
    const int8_t* tile(int64_t row) const { return codes + row / SIDE * SIDE * tiles * DEEP; }
    int64_t place(int64_t row) const { return row / SIDE * SIDE * groups + row % SIDE; }
    // Of a row's codes, from its first on: where those of a group begin, and where in it an input's is.
    int64_t begin_of(int64_t index) const {
        return index * tiles_of_group() * TILE_BYTES + (group < DEEP && index % 2 ? group : 0);
    }
    static int64_t place_in(uint64_t input) { return input / DEEP * TILE_BYTES + input % DEEP; }

    template <typename T>
    void take(int64_t row, const T* x) const {
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
    const uint8_t* packed;  // [panels][size / group][2] of UNIT_BYTES and then lines for 8 inputs of 16 columns: their first
                            // four in the low halves of bytes
    const float* bias;      // [panels][2][16], or null
    double unit;            // that all scales and offsets are multiples of
    int64_t size, columns, apart;  // as int8's
    int64_t group;
    int64_t may_widen;      // whether many rows may get other bits than few (see widened.h)

    int64_t num_panels() const { return (columns + COLUMNS - 1) / COLUMNS; }
    int64_t left(int64_t panel) const { return panel * (apart == SIDE ? COLUMNS : SIDE); }
    int64_t groups() const { return size / group; }
    int64_t unit_bytes() const { return UNIT_BYTES + group * SIDE / 2; }
    const uint8_t* panel_at(int64_t panel) const { return packed + panel * groups() * 2 * unit_bytes(); }

    static __m512 scales_of(const uint8_t* at) { return _mm512_cvtph_ps(_mm256_load_si256((const __m256i*)at)); }
    static __m512 offsets_of(const uint8_t* at) { return _mm512_cvtph_ps(_mm256_load_si256((const __m256i*)at + 1)); }
    static __m512i low(__m512i line) { return _mm512_and_si512(line, _mm512_set1_epi8(15)); }
    static __m512i high(__m512i line) { return low(_mm512_srli_epi16(line, 4)); }

    // What a group adds to sixteen columns of a row; one way to round, wherever it is called from.
    static __m512 add(__m512 total, __m512i sum, __m512 scale, __m512 offset, float row_scale, float row_sum) {
        total = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_mul_ps(scale, _mm512_set1_ps(row_scale)), total);
        return _mm512_fmadd_ps(offset, _mm512_set1_ps(row_sum), total);
    }

    // What all groups of a panel came to in a row, into y.
    void put_out(const Output& output, int64_t row, int64_t panel, __m512 low_total, __m512 high_total) const {
        const __m512 scale = _mm512_set1_ps(float(unit)), zero = _mm512_setzero_ps();
        const float* added = bias + panel * COLUMNS;
        low_total = _mm512_fmadd_ps(low_total, scale, bias ? _mm512_loadu_ps(added) : zero);
        high_total = _mm512_fmadd_ps(high_total, scale, bias ? _mm512_loadu_ps(added + SIDE) : zero);
        output.put_both(row, columns, left(panel), apart, (Floats)low_total, (Floats)high_total);
    }
};

}  // namespace int4

}  // namespace

#endif
