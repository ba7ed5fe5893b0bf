// Few rows of x and a matrix that is coded: its lines are made while they are multiplied.

#pragma once

#include "coded.h"
#include "narrow.h"

#if defined(__AVX512BF16__)

namespace {

// Of R rows of x and P panels from ``panel`` on, side by side: sums [P][2][16][16], of each tile's first R rows. The same products
// in the same order as pairs.h has them. A step of a row of x is ``stride`` elements behind the one before. fetch(group, its
// number): what follows a group in its panel. KEEP: the panel, which is one then, is also left decoded in ``kept``.
template <int R, int P, bool KEEP, typename Fetch>
[[gnu::always_inline]] inline void multiply_coded(const Coded& coded, int64_t size, int64_t panel, const bf16* const (&rows)[R],
                                                  int64_t stride, bf16* kept, float* to, const Fetch& fetch) {
    static_assert(P == 1 || !KEEP);
    const int64_t groups = Coded::groups_of(size), apart = Coded::panel_bytes(size);
    const uint8_t* at = coded.group_at(panel, size, 0);
    __m512i tables[P];
    Exceptions exceptions[P];
    __m512 sums[P][R][2];
    for (int one = 0; one < P; ++one) {
        tables[one] = Coded::table_of(coded.panel_at(panel + one, size));
        exceptions[one] = Exceptions(coded, panel + one);
        for (auto& of_row : sums[one]) of_row[0] = of_row[1] = _mm512_setzero_ps();
    }
    alignas(64) bf16 held[P][2 * Coded::HALF] = {};  // exceptions of a group; zeros elsewhere, and where there are none
    auto take = [&](int64_t group, auto has_exceptions) __attribute__((always_inline)) {
        const int64_t input = group / Coded::groups_of(DEPTH) * stride + group % Coded::groups_of(DEPTH) * Coded::INPUTS;
        bf16* to_kept = KEEP ? kept + Coded::place_of(group) : nullptr;
#pragma GCC unroll 4
        for (int one = 0; one < P; ++one) {
            const uint8_t* own = at + one * apart;
            if (R > 1) fetch(own, group);
            const CodedLines left(own), right(own + Coded::HALF_BYTES);
#pragma GCC unroll 4
            for (int line = 0; line < Coded::PAIRS; ++line) {
                __m512i low = left.line(line, tables[one]), high = right.line(line, tables[one]);
                if (has_exceptions) {
                    low = _mm512_or_si512(low, _mm512_load_si512(held[one] + line * Coded::LINE));
                    high = _mm512_or_si512(high, _mm512_load_si512(held[one] + Coded::HALF + line * Coded::LINE));
                }
                if (KEEP) {
                    _mm512_store_si512(to_kept + line * Coded::LINE, low);
                    _mm512_store_si512(to_kept + TILE_SIZE + line * Coded::LINE, high);
                }
#pragma GCC unroll 8
                for (int row = 0; row < R; ++row) {
                    const __m512bh both = pair_of(rows[row] + input + 2 * line);
                    sums[one][row][0] = _mm512_dpbf16_ps(sums[one][row][0], (__m512bh)low, both);
                    sums[one][row][1] = _mm512_dpbf16_ps(sums[one][row][1], (__m512bh)high, both);
                }
            }
            // One row waits for lines: its own go before those that are to come.
            if (R == 1) fetch(own, group);
        }
        at += Coded::GROUP_BYTES;
    };
    for (int64_t group = 0; group < groups; ++group) {
        int64_t stop = groups;
        for (const Exceptions& each : exceptions) stop = std::min(stop, each.group(groups));
        for (; group < stop; ++group) take(group, std::false_type());
        if (group == groups) break;
        for (int one = 0; one < P; ++one) {
            exceptions[one].each(group + 1, [&](const Exception& each) {
                held[one][Coded::place_in_group(each.place)].bits = each.bits;
            });
        }
        take(group, std::true_type());
        std::memset(held, 0, sizeof held);
    }
#pragma GCC unroll 4
    for (int one = 0; one < P; ++one, to += 2 * TILE * TILE) {
#pragma GCC unroll 8
        for (int row = 0; row < R; ++row) {
            _mm512_store_ps(to + row * TILE, sums[one][row][0]);
            _mm512_store_ps(to + (TILE + row) * TILE, sums[one][row][1]);
        }
    }
}

}  // namespace

#endif
