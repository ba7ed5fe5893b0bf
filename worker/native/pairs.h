// y = x times the transpose of a packed matrix where there are no tiles, or they are not asked: by vectors, which multiply pairs of
// bfloat16.
//
// Each sum is of all inputs in their order, so a row has the same bits in any company. Where rows are multiplied in several goes,
// each of them fetches its part of the next panel: memory is as busy then as the multipliers are.

#pragma once

#include "beside.h"
#include "coded_rows.h"
#include "finish.h"
#include "interleaved.h"
#include "prefetch.h"

#if defined(__AVX512BF16__)

namespace {

struct PairProduct {
    static constexpr int MANY = 8;        // rows that are multiplied at once: sixteen sums, so that none waits for another
    static constexpr int NEAR = 4096;     // bytes by which a panel is fetched before it is multiplied, in the order of memory
    static constexpr int NEARER = 2048;   // the same, and FAR into the second cache, where pairs are slow: Intel's first cache waits
    static constexpr int FAR = 8192;      // for fewer lines than its second one
    static constexpr int64_t DECODED_ONCE = 24;  // rows beyond which a panel that is coded is decoded once for all, not for each go
    static constexpr int64_t RUNS = 16;   // that each thread reads the matrix in
    static constexpr int64_t MAX_RUN = 8;
    static constexpr int64_t SHORT_RUN = 2;  // the same, where pairs are slow
    static constexpr int ONE_NEAR = 1024;  // for one row where pairs are slow: bytes by which each of the panels that are
    static constexpr int ONE_FAR = 4096;   // multiplied side by side is fetched, into the first cache and into the second
    static constexpr int64_t STEP_BYTES = DEPTH * PANEL * sizeof(bf16);  // of a panel
    static constexpr int64_t BLOCK_ROWS = 256;  // of many, that go through all panels before the next do
    static constexpr int64_t LAST_STEPS = 2;    // of their go, in which the first of the next one are fetched

    const bf16* x;  // [rows, size], or laid out
    int64_t rows;
    const Matrix& matrix;
    const Output& output;
    bool is_laid;
    const Expansion* expansion;  // what is added to the sums, or null

    // Every thread of the team calls it.
    void run(Team& team) const {
        if (rows == 1 && pairs_are_slow()) return one(team);
        const int64_t panels = matrix.num_panels(), most = pairs_are_slow() ? SHORT_RUN : MAX_RUN;
        const int64_t at_once = std::clamp<int64_t>(panels / (RUNS * team.size()), 1, most);
        if (is_laid) return by_blocks(team, at_once);
        const bool ahead = rows > MANY && rows <= FEW_ROWS;
        team.each_apart(panels, at_once, [&](int64_t panel, Claim& claim) {
            if (pairs_are_slow()) all<false, true>(panel, claim);
            else ahead ? all<true, false>(panel, claim) : all<false, false>(panel, claim);
        });
    }

    // Two lines of a panel that is read pair by pair. TWICE: into both caches.
    template <bool TWICE>
    static void fetch(const bf16* tile, int pair) {
        const char* at = (const char*)tile + pair * 128;
        if (TWICE) __builtin_prefetch(at + FAR, 0, 2), __builtin_prefetch(at + FAR + 64, 0, 2);
        __builtin_prefetch(at + (TWICE ? NEARER : NEAR)), __builtin_prefetch(at + (TWICE ? NEARER : NEAR) + 64);
    }

    // Whether y is written past the caches, in whole lines: more logits than they hold would be read only to be overwritten.
    static bool passes_caches(const Output& output, int64_t rows, const Matrix& matrix) {
        return output.result == WIDE && rows > MANY && matrix.columns % TILE == 0 && (uintptr_t)output.y % 64 == 0;
    }

  private:
    // Steps of so many rows, eight at a time.
    int64_t steps_of(int64_t count) const { return (count + MANY - 1) / MANY * matrix.size / DEPTH; }

    // All rows of a panel, a tile at a time; AHEAD: while the next one is fetched.
    template <bool AHEAD, bool TWICE>
    void all(int64_t panel, Claim& claim) const {
        alignas(64) float sums[2 * TILE * TILE];
        Prefetch next(matrix.address(panel + 1), matrix.panel_bytes(), steps_of(rows) * TILE);
        Finish finish(matrix, output, expansion, passes_caches());
        for (int64_t first = 0; first < rows; first += TILE) {
            const int64_t count = std::min<int64_t>(TILE, rows - first);
            if (first) up_to<false, AHEAD, false>(first, count, panel, next, sums);
            else up_to<true, AHEAD, TWICE>(first, count, panel, next, sums);
            if (count > MANY) up_to<false, AHEAD, false>(first + MANY, count - MANY, panel, next, sums + MANY * TILE);
            if (!put_out(first, count, panel, sums, finish, claim)) return;
        }
        if (passes_caches()) _mm_sfence();
    }

    // A tile's rows; false: they are not this thread's any more.
    bool put_out(int64_t first, int64_t count, int64_t panel, float* sums, Finish& finish, Claim& claim) const {
        if (expansion && expansion->is_tile(first / TILE)) {
            expansion->add_tile(first / TILE, matrix.left(panel), matrix.left(panel) + matrix.apart, sums);
        }
        if (!claim.may_write()) return false;
        finish.begin(first, count, panel, sums);
        finish.some(count);
        return true;
    }

    bool passes_caches() const { return passes_caches(output, rows, matrix); }

    // What eight rows that are laid out and a panel are read from.
    struct Go {
        const bf16 *tile, *rows;

        void fetch(int pair) const {
            __builtin_prefetch(tile + pair * LANES), __builtin_prefetch(tile + TILE_SIZE + pair * LANES);
            if (pair % 2 == 0) __builtin_prefetch(rows + pair / 2 * DEPTH);
        }
        void step() { tile += 2 * TILE_SIZE, rows += 2 * TILE_SIZE; }
    };

    // Rows that are laid out, a block of them with all panels, then the next.
    void by_blocks(Team& team, int64_t at_once) const {
        const int64_t panels = matrix.num_panels(), blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
        const int64_t of_block = ((rows + blocks - 1) / blocks + Laid::ROWS - 1) / Laid::ROWS * Laid::ROWS;
        team.each_apart(blocks * panels, at_once, [&](int64_t task, Claim& claim) {
            const int64_t first = task / panels * of_block, last = std::min(first + of_block, rows), panel = task % panels;
            auto in_between = [&](auto result) { between<decltype(result)::value>(first, last, panel, claim); };
            if (!expansion && output.if_simple(matrix.columns, matrix.apart, in_between)) return;
            each_tile(first, last, panel, claim);
        });
    }

    // Rows [first, last) of a panel, whose sums are made into y while the next ones are summed.
    template <Result RESULT>
    void between(int64_t first, int64_t last, int64_t panel, Claim& claim) const {
        PanelColumns columns;
        columns.set(matrix, panel);
        Interleaved<RESULT, PanelColumns> others(columns, RESULT == GATED ? gated_apart(output, matrix.columns / 2) : matrix.columns);
        alignas(64) float sums[2 * TILE * TILE];  // until the last ones are made into y
        const bool is_own = block(first, last, panel, sums, others, [&](int64_t row, int64_t count, const float* own) {
            if (!claim.may_write()) return false;
            bf16* const to = RESULT == GATED ? gated_at(output, row, columns.first, matrix.columns / 2)
                                             : (bf16*)output.y + row * matrix.columns + columns.first;
            others.begin(row, count, own, to);
            return true;
        });
        if (is_own) others.all();
    }

    // The same, each tile's before the next.
    void each_tile(int64_t first, int64_t last, int64_t panel, Claim& claim) const {
        Finish finish(matrix, output, expansion, passes_caches());
        Nothing none;
        alignas(64) float sums[2 * TILE * TILE];
        block(first, last, panel, sums, none, [&](int64_t row, int64_t count, const float*) {
            const int64_t place = row % TILE, tile = row - place;
            const bool is_whole = place || row + count == last;
            return !is_whole || put_out(tile, place + count, panel, sums, finish, claim);
        });
        if (passes_caches()) _mm_sfence();
    }

    // Eight rows of [first, last) at a time, into their part of ``sums`` [2, TILE, TILE]; summed(row, count, own) tells whether to go
    // on, and ``others`` have a turn now and then.
    template <typename Others, typename Summed>
    bool block(int64_t first, int64_t last, int64_t panel, float* sums, Others& others, const Summed& summed) const {
        PrefetchSteps after(matrix.address(panel + 1), matrix.panel_bytes(), steps_of(last - first));
        const bool is_coded = matrix.coded.panels;
        const bf16* tile = is_coded ? Matrix::room_for(matrix.size) : (const bf16*)matrix.address(panel);
        // Of what is coded the next panel is not there yet.
        const bf16* next_tile = is_coded ? tile : (const bf16*)matrix.address(panel + 1);
        auto go = [&](int64_t row, const bf16* of) { return Go{of, x + Laid::place(row, 0, matrix.size)}; };
        for (int64_t row = first; row < last; row += MANY) {
            float* to = sums + row % TILE * TILE;
            if (is_coded && row == first) first_eight(go(row, tile), panel, to);
            else eight(go(row, tile), row + MANY < last ? go(row + MANY, tile) : go(first, next_tile), after, to, others);
            if (!summed(row, std::min<int64_t>(MANY, last - row), to)) return false;
        }
        return true;
    }

    // The first eight, while a panel that is coded is decoded for all.
    [[gnu::noinline]] void first_eight(Go own, int64_t panel, float* to) const {
        const bf16* from[MANY];
        for (int row = 0; row < MANY; ++row) from[row] = own.rows + row * DEPTH;
        bf16* kept = Matrix::room_for(matrix.size);
        multiply_coded<MANY, 1, true>(matrix.coded, matrix.size, panel, from, 2 * TILE_SIZE, kept, to, [](const uint8_t* group, int64_t) {
#pragma GCC unroll 6
            for (int line = 0; line < Coded::GROUP_BYTES; line += 64) __builtin_prefetch(group + NEAR + line);
        });
    }

    // Eight rows, of which some may lie behind the last, into their part of the sums of a tile. That they lie at fixed distances
    // leaves the compiler registers enough. While the last steps are summed the first of ``next`` arrive in the first cache.
    template <typename Others>
    [[gnu::noinline]] void eight(Go own, Go next, PrefetchSteps& after, float* to, Others& others) const {
        const int64_t steps = matrix.size / DEPTH, quiet = std::max<int64_t>(0, steps - LAST_STEPS);
        const int64_t every = std::max<int64_t>(1, steps / MANY);
        int64_t turn = every;
        __m512 sums[MANY][2];
        for (auto& of_row : sums) of_row[0] = of_row[1] = _mm512_setzero_ps();
        auto take = [&](int64_t step, auto&& fetch) {
            if (!--turn) others.one(), turn = every;
            after.fetch(step);
#pragma GCC unroll 2
            for (int pair = 0; pair < TILE; ++pair) {
                fetch(pair);
                const __m512bh left = line_at(own.tile + pair * LANES), right = line_at(own.tile + TILE_SIZE + pair * LANES);
#pragma GCC unroll 8
                for (int row = 0; row < MANY; ++row) {
                    const __m512bh both = pair_of(own.rows + row * DEPTH + 2 * pair);
                    sums[row][0] = _mm512_dpbf16_ps(sums[row][0], left, both);
                    sums[row][1] = _mm512_dpbf16_ps(sums[row][1], right, both);
                }
            }
            own.step();
        };
        for (int64_t step = 0; step < quiet; ++step) take(step, [](int) {});
        for (int64_t step = quiet; step < steps; ++step, next.step()) take(step, [&](int pair) { next.fetch(pair); });
#pragma GCC unroll 8
        for (int row = 0; row < MANY; ++row) {
            _mm512_store_ps(to + row * TILE, sums[row][0]);
            _mm512_store_ps(to + (TILE + row) * TILE, sums[row][1]);
        }
    }

    void one(Team& team) const {
        each_beside(team, matrix.num_panels(), [&](auto count, int64_t panel, Claim& claim) {
            beside<decltype(count)::value>(panel, claim);
        });
    }

    // One row of P panels, each as it lies in memory: one tile behind the other.
    template <int P>
    void beside(int64_t panel, Claim& claim) const {
        alignas(64) float to[P][2 * TILE * TILE];
        if (matrix.coded.panels) coded_beside<P>(panel, to[0]);
        else plain_beside<P>(panel, to[0]);
        if (!claim.may_write()) return;
        Finish finish(matrix, output, expansion, passes_caches());
        for (int one = 0; one < P; ++one) finish.begin(0, 1, panel + one, to[one]), finish.some(1);
    }

    // Behind a panel's end comes not its neighbour, which is read already, but what this thread reads next.
    template <int P>
    void coded_beside(int64_t panel, float* to) const {
        const int64_t quiet = Coded::groups_of(matrix.size) - ONE_FAR / Coded::GROUP_BYTES, rest = (P - 1) * matrix.panel_bytes();
        multiply_coded<1, P, false>(matrix.coded, matrix.size, panel, {x}, DEPTH, nullptr, to, [&](const uint8_t* group, int64_t number) {
            const int64_t far = ONE_FAR + (number < quiet ? 0 : rest);
#pragma GCC unroll 6
            for (int line = 0; line < Coded::GROUP_BYTES; line += 64) {
                __builtin_prefetch(group + far + line, 0, 2), __builtin_prefetch(group + ONE_NEAR + line);
            }
        });
    }

    template <int P>
    void plain_beside(int64_t panel, float* to) const {
        const bf16* from = x;
        const char* line = (const char*)matrix.address(panel);
        const int64_t steps = matrix.size / DEPTH, apart = matrix.panel_bytes();
        __m512 sums[P][2];
        for (auto& of_panel : sums) of_panel[0] = of_panel[1] = _mm512_setzero_ps();
        for (int64_t step = 0; step < steps; ++step, from += DEPTH) {
            const int64_t far = ONE_FAR + (step + ONE_FAR / STEP_BYTES < steps ? 0 : (P - 1) * apart);
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
                // No more of them at once, as in ``some``.
#pragma GCC unroll 4
                for (int pair = 0; pair < TILE; ++pair, line += 64) {
                    const __m512bh both = pair_of(from + 2 * pair);
#pragma GCC unroll 4
                    for (int one = 0; one < P; ++one) {
                        const char* at = line + one * apart;
                        __builtin_prefetch(at + far, 0, 2), __builtin_prefetch(at + ONE_NEAR);
                        sums[one][half] = _mm512_dpbf16_ps(sums[one][half], line_at((const bf16*)at), both);
                    }
                }
            }
        }
        for (int one = 0; one < P; ++one, to += 2 * TILE * TILE) {
            _mm512_store_ps(to, sums[one][0]), _mm512_store_ps(to + TILE * TILE, sums[one][1]);
        }
    }

    // As many as there are, or one more, and at most MANY.
    template <bool ARRIVES, bool AHEAD, bool TWICE>
    void up_to(int64_t first, int64_t count, int64_t panel, Prefetch& next, float* sums) const {
        if (count == 1) some<1, ARRIVES, AHEAD, TWICE>(first, panel, next, sums);
        else if (count == 2) some<2, ARRIVES, AHEAD, TWICE>(first, panel, next, sums);
        else if (count <= 4) some<4, ARRIVES, AHEAD, TWICE>(first, panel, next, sums);
        else if (count <= 6) some<6, ARRIVES, AHEAD, TWICE>(first, panel, next, sums);
        else some<MANY, ARRIVES, AHEAD, TWICE>(first, panel, next, sums);
    }

    // R rows, into their part of the sums [2][16][16] of a tile; the last one as often as there are too few. ARRIVES: the panel
    // comes from memory, not from a cache.
    template <int R, bool ARRIVES, bool AHEAD, bool TWICE>
    void some(int64_t first, int64_t panel, Prefetch& next, float* to) const {
        const bf16* from[R];
        for (int row = 0; row < R; ++row) from[row] = x + std::min(first + row, rows - 1) * matrix.size;
        if (!matrix.coded.panels) return some_plain<R, ARRIVES, AHEAD, TWICE>(from, (const bf16*)matrix.address(panel), next, to);
        if (rows <= DECODED_ONCE) return some_coded<R, ARRIVES, AHEAD, TWICE, false>(from, first / MANY, panel, to);
        if (!ARRIVES) return some_plain<R, false, AHEAD, false>(from, Matrix::room_for(matrix.size), next, to);
        if constexpr (R == MANY) some_coded<R, ARRIVES, AHEAD, TWICE, true>(from, 0, panel, to);
    }

    // ``go``: which rows these are of those that are multiplied one behind the other. Each fetches its part of the next panel, so many
    // lines with every group; but what is decoded for all leaves that to the others.
    template <int R, bool ARRIVES, bool AHEAD, bool TWICE, bool KEEP>
    void some_coded(const bf16* const (&from)[R], int64_t go, int64_t panel, float* to) const {
        constexpr int lines = AHEAD && !KEEP ? 3 : 0;
        const char* ahead = (const char*)matrix.address(panel + 1) + go * Coded::groups_of(matrix.size) * lines * 64;
        bf16* kept = KEEP ? Matrix::room_for(matrix.size) : nullptr;
        multiply_coded<R, 1, KEEP>(matrix.coded, matrix.size, panel, from, DEPTH, kept, to, [&](const uint8_t* group, int64_t) {
            if (ARRIVES) {
#pragma GCC unroll 6
                for (int line = 0; line < Coded::GROUP_BYTES; line += 64) {
                    if (TWICE) __builtin_prefetch(group + FAR + line, 0, 2);
                    __builtin_prefetch(group + (TWICE ? NEARER : NEAR) + line);
                }
            }
#pragma GCC unroll 3
            for (int line = 0; line < lines; ++line, ahead += 64) __builtin_prefetch(ahead, 0, 2);
        });
    }

    template <int R, bool ARRIVES, bool AHEAD, bool TWICE>
    void some_plain(const bf16* (&from)[R], const bf16* tile, Prefetch& next, float* to) const {
        const int64_t steps = matrix.size / DEPTH;
        __m512 sums[R][2];
        for (auto& of_row : sums) of_row[0] = of_row[1] = _mm512_setzero_ps();
        for (int64_t step = 0; step < steps; ++step, tile += 2 * TILE_SIZE) {
            // No more of them at once: the compiler would ask for the lines of all in one go, and wait for them.
#pragma GCC unroll 2
            for (int pair = 0; pair < TILE; ++pair) {
                if (ARRIVES) fetch<TWICE>(tile, pair);
                if (AHEAD) next.fetch(step * TILE + pair);
                const __m512bh left = line_at(tile + pair * LANES), right = line_at(tile + TILE_SIZE + pair * LANES);
#pragma GCC unroll 8
                for (int row = 0; row < R; ++row) {
                    const __m512bh both = pair_of(from[row] + 2 * pair);
                    sums[row][0] = _mm512_dpbf16_ps(sums[row][0], left, both);
                    sums[row][1] = _mm512_dpbf16_ps(sums[row][1], right, both);
                }
            }
            for (const bf16*& at : from) at += DEPTH;
        }
#pragma GCC unroll 8
        for (int row = 0; row < R; ++row) {
            _mm512_store_ps(to + row * TILE, sums[row][0]);
            _mm512_store_ps(to + (TILE + row) * TILE, sums[row][1]);
        }
    }
};

}  // namespace

#endif
