// One row of x and a matrix of four-bit codes, by VNNI.

#pragma once

#include "int4_matrix.h"
#include "int8_row.h"

#if defined(HAVE_INT8)

namespace {

namespace int4 {

constexpr int ROW_AHEAD = 4096;      // bytes by which panels side by side are fetched before they are multiplied, into the second cache
constexpr int NEAR = 1024;           // the same of few rows, into the first

struct Row {
    const Matrix& matrix;
    const Tokens& x;
    const Output& output;

    void run(Team& team) const {
        each_beside(team, matrix.num_panels(), [&](auto count, int64_t panel, Claim& claim) {
            beside<decltype(count)::value>(panel, claim);
        });
    }

  private:
    static void fetch(const uint8_t* at, int64_t far) {
        int8::fetch(at + far);
        __builtin_prefetch(at + NEAR);
    }

    // P panels, each as it lies in memory; what is fetched at a panel's end is as in int8_row.h.
    template <int P>
    void beside(int64_t panel, Claim& claim) const {
        const int64_t group = matrix.group, unit_bytes = matrix.unit_bytes(), apart = matrix.groups() * 2 * unit_bytes;
        const int64_t quiet = apart - ROW_AHEAD;
        const uint8_t *const begin = matrix.panel_at(panel), *at = begin;
        __m512 totals[2][P] = {};
        for (int64_t index = 0; index < x.groups; ++index) {
            const int8_t* codes = x.codes + x.begin_of(index);
            const int64_t far = ROW_AHEAD + (at - begin < quiet ? 0 : (P - 1) * apart);
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half, at += unit_bytes) {
                __m512i even[P] = {}, odd[P] = {};
                const uint8_t* line = at + UNIT_BYTES;
                for (int64_t input = 0; input < group; input += 8, line += 64) {
                    const int8_t* eight = codes + Tokens::place_in(input);
                    const __m512i first = int8::four_of(eight), second = int8::four_of(eight + 4);
#pragma GCC unroll 4
                    for (int one = 0; one < P; ++one) {
                        const uint8_t* own = line + one * apart;
                        fetch(own, far);
                        const __m512i both = _mm512_load_si512(own);
                        even[one] = _mm512_dpbusd_epi32(even[one], Matrix::low(both), first);
                        odd[one] = _mm512_dpbusd_epi32(odd[one], Matrix::high(both), second);
                    }
                }
#pragma GCC unroll 4
                for (int one = 0; one < P; ++one) {
                    const uint8_t* own = at + one * apart;
                    fetch(own, far);
                    totals[half][one] = Matrix::add(totals[half][one], _mm512_add_epi32(even[one], odd[one]), Matrix::scales_of(own),
                                                    Matrix::offsets_of(own), x.scales[index * SIDE], x.sums[index * SIDE]);
                }
            }
        }
        if (!claim.may_write()) return;
        for (int one = 0; one < P; ++one) matrix.put_out(output, 0, panel + one, totals[0][one], totals[1][one]);
    }
};

}  // namespace int4

}  // namespace

#endif
