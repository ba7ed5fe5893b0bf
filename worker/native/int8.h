// y = x times the transpose of a matrix of int8 codes with a scale for each output, x rounded to int8 by token: dynamic
// W8A8. Codes are packed as code + 128, so that one layout serves VNNI, which wants one side unsigned, and AMX; what the
// 128 adds is taken off again by the sum of x's codes. Sums are integers: however many rows come together, and by
// whichever instructions, each gets the same.

#pragma once

#include "int8_matrix.h"
#include "int8_row.h"
#include "int8_tiles.h"
#include "interleaved.h"
#include "prefetch.h"
#include "team.h"

#if defined(HAVE_INT8)

namespace {

namespace int8 {

constexpr int MANY = 8;                // rows that VNNI multiplies at once: half a tile
constexpr int64_t NO_TILES = 1;        // rows for which VNNI is no slower than tiles
constexpr int SOME_AHEAD = 4096;       // bytes by which a panel is fetched before several rows are multiplied, by vectors

struct Product {
    const Matrix& matrix;
    const Tokens x;
    int64_t rows;
    Output output;

    int64_t steps() const { return x.deep / DEEP; }

    // Sums [R][2][16] of R rows of a tile of x: what is read of the matrix serves all of them, and what is read of x both halves of the
    // panel. ARRIVES: the panel comes from memory, not from a cache. ``next`` comes meanwhile, and ``others`` have a turn now and then.
    template <int R, bool ARRIVES, typename Others>
    [[gnu::always_inline]] void sum(int64_t first, int64_t panel, PrefetchSteps& next, int32_t* to, Others& others) const {
        const int8_t* from = x.row(first);
        const uint8_t* tile = matrix.panel_at(panel);
        const int64_t every = std::max<int64_t>(1, steps() / MANY);
        int64_t turn = every;
        __m512i sums[R][2];
        for (auto& of_row : sums) of_row[0] = of_row[1] = _mm512_setzero_si512();
        for (int64_t step = 0; step < steps(); ++step, from += TILE_BYTES, tile += 2 * TILE_BYTES) {
            if (!--turn) others.one(), turn = every;
            if (R == MANY) next.fetch(step);
            // No more of them at once, as in pairs.h.
#pragma GCC unroll 2
            for (int quad = 0; quad < SIDE; ++quad) {
                if (ARRIVES) {
                    __builtin_prefetch(tile + SOME_AHEAD + quad * 128);
                    __builtin_prefetch(tile + SOME_AHEAD + quad * 128 + 64);
                }
                const __m512i left = _mm512_load_si512(tile + quad * 64), right = _mm512_load_si512(tile + TILE_BYTES + quad * 64);
#pragma GCC unroll 8
                for (int row = 0; row < R; ++row) {
                    const __m512i four = four_of(from + row * DEEP + quad * 4);
                    sums[row][0] = _mm512_dpbusd_epi32(sums[row][0], left, four);
                    sums[row][1] = _mm512_dpbusd_epi32(sums[row][1], right, four);
                }
            }
        }
        // Sums that are asked for by number would never have been in registers.
#pragma GCC unroll 8
        for (int row = 0; row < R; ++row) {
            _mm512_store_si512(to + row * COLUMNS, sums[row][0]);
            _mm512_store_si512(to + row * COLUMNS + SIDE, sums[row][1]);
        }
    }

    // Everything but storing is done before the claim is asked, so that they are hardly ever being written while a thread is put aside.
    template <int R, bool ARRIVES>
    void some(int64_t first, int64_t panel, Claim& claim, PrefetchSteps& next) const {
        alignas(64) int32_t held[R * COLUMNS];
        Nothing none;
        sum<R, ARRIVES>(first, panel, next, held, none);
        const int64_t count = std::min<int64_t>(R, rows - first);
        const Scaled scaled(matrix, x, panel);
        Floats low[R], high[R];
        for (int64_t row = 0; row < count; ++row) scaled.take(first + row, held + row * COLUMNS, low[row], high[row]);
        output.gate_rows(count, low, high);
        if (claim.may_write()) output.put_rows(first, count, matrix.columns, matrix.left(panel), matrix.apart, low, high);
    }

    // All rows of a panel, by VNNI.
    void all(int64_t panel, Claim& claim) const {
        PrefetchSteps next;
        switch (rows) {
            case 1: return some<1, true>(0, panel, claim, next);
            case 2: return some<2, true>(0, panel, claim, next);
            case 3: return some<3, true>(0, panel, claim, next);
            case 4: return some<4, true>(0, panel, claim, next);
        }
        const int64_t goes = (rows + MANY - 1) / MANY;
        if (goes > 1) next = {matrix.panel_at(panel + 1), matrix.deep() * COLUMNS, goes * steps()};
        each_some(0, rows, panel, claim, next);
    }

    // Rows [first, last), of which the first begins a tile.
    void each_some(int64_t first, int64_t last, int64_t panel, Claim& claim, PrefetchSteps next) const {
        auto in_between = [&](auto result) { between<decltype(result)::value>(first, last, panel, claim, next); };
        if (last - first > MANY && output.if_simple(matrix.columns, matrix.apart, in_between)) return;
        some<MANY, true>(first, panel, claim, next);
        while ((first += MANY) < last && !claim.is_lost()) some<MANY, false>(first, panel, claim, next);
    }

    // The same of more than MANY, and what is summed is made into y while the next rows are.
    template <Result RESULT>
    void between(int64_t first, int64_t last, int64_t panel, Claim& claim, PrefetchSteps next) const {
        alignas(64) int32_t held[2][MANY * COLUMNS];
        const int64_t width = RESULT == GATED ? matrix.columns / 2 : matrix.columns;
        bf16* to = (bf16*)output.y + first * width + matrix.left(panel);
        Interleaved<RESULT, Scaled> others(Scaled(matrix, x, panel), width);
        for (int64_t row = first; row < last; row += MANY, to += MANY * width) {
            int32_t* sums = held[row / MANY % 2];
            if (row == first) eight<true>(row, panel, next, sums, others);
            else eight<false>(row, panel, next, sums, others);
            if (!claim.may_write()) return;
            others.begin(row, std::min<int64_t>(MANY, last - row), sums, to);
        }
        others.all();
    }

    template <bool ARRIVES, typename Others>
    [[gnu::noinline]] void eight(int64_t first, int64_t panel, PrefetchSteps& next, int32_t* to, Others& others) const {
        sum<MANY, ARRIVES>(first, panel, next, to, others);
    }

    // Every thread of the team calls it, each with Tiles of its own.
    void run(Team& team) const {
        #if defined(HAVE_TILES)
        if (rows > NO_TILES && may_use_tiles()) return TileProduct{matrix, x, rows, output}.run(team);
#endif
        if (rows == 1 && (!is_zen5() || row_is_kept(matrix, team.size()))) return Row{matrix, x, output}.run(team);
        const int64_t panels = matrix.num_panels();
        team.each_apart(panels, run_of(panels), [&](int64_t panel, Claim& claim) { all(panel, claim); });
    }
};

template <typename T>
void linear(const Matrix& matrix, const T* x, int64_t rows, Output output, int threads) {
    static std::vector<char> held;
    const int64_t size = matrix.size, work = matrix.deep() * matrix.columns;
    const Tokens tokens(rows, size, room(held, Tokens::bytes(rows, size)));
    Team::run(work + work / 64 * rows < ALONE ? 1 : threads, [&](Team& team) {
#if defined(HAVE_TILES)
        Tiles session(true);
#endif
        team.each(rows, std::max<int64_t>(1, 16384 / size), [&](int64_t row) { tokens.take(row, x + row * size, size); });
        Product{matrix, tokens, rows, output}.run(team);
    });
}

}  // namespace int8

}  // namespace

#endif
