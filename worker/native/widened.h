// Four-bit codes times many rows: a few panels at a time become int8, with one scale for each column, while they are in the
// cache, and are multiplied with x as int8's are, x rounded by token. So sums run over all inputs, and nothing has to be scaled
// group by group; but a row gets other bits than int4.h's sums give it among few.

#pragma once

#include "int4.h"

#if defined(HAVE_INT8)

namespace {

namespace int4 {

constexpr int64_t WIDENED = 64;      // rows beyond which it pays
constexpr int64_t AT_ONCE = 2;       // panels

inline bool is_widened(const Matrix& matrix, int64_t rows) { return matrix.may_widen && rows > WIDENED; }

// One half of a panel, on its way to int8::Matrix's codes.
class Widening {
    const Matrix& matrix_;
    const uint8_t* const packed_;
    __m512 inverse_;

  public:
    __m512 scales;  // of the columns, as multiples of the matrix's unit

    Widening(const Matrix& matrix, int64_t panel, int half)
        : matrix_(matrix), packed_(matrix.panel_at(panel) + half * matrix.unit_bytes()) {
        // No weight is larger than the ends of what its group can say.
        __m512 largest = _mm512_setzero_ps();
        for (int64_t index = 0; index < matrix.groups(); ++index) {
            const __m512 offset = Matrix::offsets_of(at(index));
            const __m512 end = _mm512_fmadd_ps(Matrix::scales_of(at(index)), _mm512_set1_ps(15.0f), offset);
            largest = _mm512_max_ps(largest, _mm512_max_ps(_mm512_abs_ps(offset), _mm512_abs_ps(end)));
        }
        scales = _mm512_mul_ps(largest, _mm512_set1_ps(1.0f / 127.0f));
        const __mmask16 is_any = _mm512_cmp_ps_mask(largest, _mm512_setzero_ps(), _CMP_GT_OQ);
        inverse_ = _mm512_maskz_div_ps(is_any, _mm512_set1_ps(256 * 127.0f), largest);
    }

    // Into every other tile of a panel, a line for four inputs.
    void put(uint8_t* to) const {
        int64_t input = 0;
        for (int64_t index = 0; index < matrix_.groups(); ++index) {
            // In 256ths, with what codes are stored above themselves, and half a step, so that cutting off rounds.
            const __m512i factor = in_pairs(Matrix::scales_of(at(index)), 0);
            const __m512i base = in_pairs(Matrix::offsets_of(at(index)), 128 * 256 + 128);
            const uint8_t* line = at(index) + UNIT_BYTES;
            for (const int64_t end = input + matrix_.group; input < end; input += 8, line += 64) {
                int8::fetch(line + AHEAD);
                const __m512i codes = _mm512_load_si512(line);
                uint8_t* quad = to + input / DEEP * 2 * TILE_BYTES + input % DEEP * SIDE;
                _mm512_store_si512(quad, widened(codes, factor, base));
                _mm512_store_si512(quad + 64, widened(_mm512_srli_epi16(codes, 4), factor, base));
            }
        }
    }

  private:
    const uint8_t* at(int64_t index) const { return packed_ + 2 * index * matrix_.unit_bytes(); }

    // Each twice, in 16 bits, of which the highest are lost.
    __m512i in_pairs(__m512 terms, int added) const {
        const __m512i whole = _mm512_add_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(terms, inverse_)), _mm512_set1_epi32(added));
        return _mm512_mask_blend_epi16(0xaaaaaaaa, whole, _mm512_slli_epi32(whole, 16));
    }

    // Of the low halves of bytes.
    static __m512i widened(__m512i codes, __m512i factor, __m512i base) {
        const __m512i low = _mm512_set1_epi16(15);
        const __m512i even = _mm512_and_si512(codes, low), odd = _mm512_and_si512(_mm512_srli_epi16(codes, 8), low);
        const __m512i first = _mm512_srli_epi16(_mm512_add_epi16(_mm512_mullo_epi16(even, factor), base), 8);
        return _mm512_mask_blend_epi8(0xaaaaaaaaaaaaaaaaull, first, _mm512_add_epi16(_mm512_mullo_epi16(odd, factor), base));
    }
};

struct WidenedProduct {
    const Matrix& matrix;
    const int8::Tokens x;
    int64_t rows;
    Output output;

    // Every thread of the team calls it, each with Tiles of its own.
    void run(Team& team) const {
        static thread_local std::vector<char> held;
        const int64_t panel_bytes = x.deep * COLUMNS, panels = matrix.num_panels(), turns = (panels + AT_ONCE - 1) / AT_ONCE;
        const int64_t row_tiles = (rows + SIDE - 1) / SIDE, block_tiles = int8::tiles_at_once(rows, x.deep);
        uint8_t* codes = (uint8_t*)int8::room(held, AT_ONCE * (panel_bytes + COLUMNS * 4) + block_tiles * 4 * TILE_BYTES);
        float* scales = (float*)(codes + AT_ONCE * panel_bytes);
        int32_t* sums = (int32_t*)(scales + AT_ONCE * COLUMNS);
        team.each((row_tiles + block_tiles - 1) / block_tiles * turns, 1, [&](int64_t task) {
            const int64_t first = task / turns * block_tiles, last = std::min(first + block_tiles, row_tiles);
            const int64_t left = task % turns * AT_ONCE, right = std::min(left + AT_ONCE, panels);
            for (int64_t panel = left; panel < right; ++panel) {
                for (int half = 0; half < 2; ++half) {
                    const Widening widening(matrix, panel, half);
                    widening.put(codes + (panel - left) * panel_bytes + half * TILE_BYTES);
                    const __m512 unit = _mm512_set1_ps(float(matrix.unit));
                    _mm512_store_ps(scales + (panel - left) * COLUMNS + half * SIDE, _mm512_mul_ps(widening.scales, unit));
                }
            }
            // As if all panels were there: none but these are read.
            const int8::Matrix wide = {codes - left * panel_bytes, scales - left * COLUMNS, matrix.bias,
                                       matrix.size, matrix.columns, matrix.apart};
#if defined(HAVE_TILES)
            const int8::TileProduct tiles = {wide, x, rows, output};
            if (may_use_tiles()) return tiles.block(first, last, left, right, tiles.slice_of(block_tiles), sums);
#else
            (void)sums;
#endif
            const int8::Product product = {wide, x, rows, output};
            for (int64_t panel = left; panel < right; ++panel) {
                Claim claim(nullptr, 0);
                product.each_some(first * SIDE, std::min(last * SIDE, rows), panel, claim, PrefetchSteps());
            }
        });
    }
};

template <typename T>
void linear(const Matrix& matrix, const T* x, int64_t rows, Output output, int threads) {
    static std::vector<char> held;
    const int64_t size = matrix.size, work = size * matrix.columns / 2, at_once = std::max<int64_t>(1, 16384 / size);
    if (is_widened(matrix, rows)) {
        const int8::Tokens tokens(rows, size, int8::room(held, int8::Tokens::bytes(rows, size)));
        return Team::run(threads, [&](Team& team) {
#if defined(HAVE_TILES)
            Tiles session(true);
#endif
            team.each(rows, at_once, [&](int64_t row) { tokens.take(row, x + row * size, size); });
            WidenedProduct{matrix, tokens, rows, output}.run(team);
        });
    }
    const Tokens tokens(rows, size, matrix.group, int8::room(held, Tokens::bytes(rows, size, matrix.group)));
    Team::run(work + work / 32 * rows < int8::ALONE ? 1 : threads, [&](Team& team) {
#if defined(HAVE_TILES)
        Tiles session(true);
#endif
        team.each(rows, at_once, [&](int64_t row) { tokens.take(row, x + row * size); });
        Product{matrix, tokens, rows, output}.run(team);
    });
}

}  // namespace int4

}  // namespace

#endif
