// One row of x and a matrix of int8, by VNNI.

#pragma once

#include "beside.h"
#include "int8_matrix.h"

#if defined(HAVE_INT8)

namespace {

namespace int8 {

constexpr int AHEAD = 4096;        // bytes by which a panel is fetched before it is multiplied, into the second cache
constexpr int NEAR = 1024;         // the same, into the first
constexpr int64_t KEPT = 1 << 20;  // bytes of a matrix that one thread finds in its second cache again

inline __m512i four_of(const int8_t* codes) {
    int32_t four;
    std::memcpy(&four, codes, 4);
    return _mm512_set1_epi32(four);
}

inline bool row_is_kept(const Matrix& matrix, int64_t threads) { return threads == 1 && matrix.deep() * matrix.columns <= KEPT; }

struct Row {
    const Matrix& matrix;
    const Tokens& x;
    const Output& output;

    void run(Team& team) const {
        const int64_t panels = matrix.num_panels();
        const bool is_kept = row_is_kept(matrix, team.size());
        each_beside(team, panels, is_kept ? 1 : num_beside(panels, team.size()), [&](auto count, int64_t panel, Claim& claim) {
            if (is_kept) beside<1, false>(panel, claim);
            else beside<decltype(count)::value, true>(panel, claim);
        });
    }

  private:
    // P panels, each as it lies in memory. ARRIVES: from there, not from a cache. Behind a panel's end comes not its neighbour, which
    // is read already, but what is read next.
    template <int P, bool ARRIVES>
    void beside(int64_t panel, Claim& claim) const {
        constexpr int SUMS = P < 4 ? 2 : 1;  // of each half so many side by side, since each takes some cycles to be added to
        const int8_t* from = x.row(0);
        const uint8_t* tile = matrix.panel_at(panel);
        const int64_t steps = x.deep / DEEP, apart = matrix.deep() * COLUMNS, quiet = steps - AHEAD / (2 * TILE_BYTES);
        __m512i sums[P][2][SUMS] = {};
        for (int64_t step = 0; step < steps; ++step, from += TILE_BYTES) {
            const int64_t far = AHEAD + (step < quiet ? 0 : (P - 1) * apart);
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half, tile += TILE_BYTES) {
#pragma GCC unroll 16
                for (int quad = 0; quad < SIDE; ++quad) {
                    const __m512i four = four_of(from + quad * 4);
#pragma GCC unroll 4
                    for (int one = 0; one < P; ++one) {
                        const uint8_t* at = tile + one * apart + quad * 64;
                        if (ARRIVES) fetch(at + far), __builtin_prefetch(at + NEAR);
                        __m512i& sum = sums[one][half][quad % SUMS];
                        sum = _mm512_dpbusd_epi32(sum, _mm512_load_si512(at), four);
                    }
                }
            }
        }
        Floats low[P], high[P];
        for (int one = 0; one < P; ++one) {
            for (auto& of_half : sums[one]) of_half[0] = SUMS > 1 ? _mm512_add_epi32(of_half[0], of_half[SUMS - 1]) : of_half[0];
            Scaled(matrix, x, panel + one).take(0, sums[one][0][0], sums[one][1][0], low[one], high[one]);
        }
        output.gate_rows(P, low, high);
        if (!claim.may_write()) return;
        for (int one = 0; one < P; ++one) {
            output.put_rows(0, 1, matrix.columns, matrix.left(panel + one), matrix.apart, low + one, high + one);
        }
    }
};

}  // namespace int8

}  // namespace

#endif
