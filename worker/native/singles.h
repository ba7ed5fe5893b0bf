// y = x times the transpose of a packed matrix where there are no tiles and pairs of bfloat16 are slow: by vectors of float32.
//
// A row has the same bits either way, and in any company. x is widened once for all columns, and where rows are many a panel is once
// for all rows.

#pragma once

#include "aligned.h"
#include "floats.h"
#include "pairs.h"

#if defined(__AVX512BF16__)

namespace {

struct SingleProduct {
    static constexpr int AT_ONCE = 14;             // rows that are multiplied at once: 28 sums, in registers
    static constexpr int64_t DECODED_MOST = 8;     // rows that are multiplied while what is coded is decoded
    static constexpr int64_t BLOCK = 256;          // rows that share a widened panel
    static constexpr int64_t HELD_BYTES = 1 << 20; // of widened x, that stay in the second cache
    static constexpr int64_t TASK_PANELS = 7;      // of many rows, that share slices of x or are taken one behind the other
    static constexpr int64_t FEW = 4;              // rows for which the matrix takes its time to arrive either way

    const bf16* x;  // [rows, size], or laid out
    int64_t rows;
    const Matrix& matrix;
    const Output& output;
    bool is_laid;
    const Expansion* expansion;  // what is added to the sums, or null

    // Whether it is faster than PairProduct here.
    static bool pays(int64_t rows) {
        return rows > FEW && pairs_are_slow();
    }

    // Every thread of the team calls it.
    void run(Team& team) const {
        if (rows > FEW_ROWS) return many(team);
        static thread_local AlignedBuffer<float> held;
        const Rows all(rows, matrix.coded.panels && rows <= 16 ? DECODED_MOST : AT_ONCE);
        held.grow(all.padded() * matrix.size);
        widen(all, 0, 0, matrix.size, held.begin());
        const int64_t panels = matrix.num_panels(), at_once = std::clamp<int64_t>(panels / (RUNS * team.size()), 1, MAX_RUN);
        team.each_apart(panels, at_once, [&](int64_t panel, Claim& claim) { few(all, panel, held.begin(), claim); });
    }

  private:
    static constexpr int64_t RUNS = PairProduct::RUNS, MAX_RUN = PairProduct::MAX_RUN;

    // Rows cut into groups: of as many each, and the last of what is left, an even number.
    struct Rows {
        int64_t count, groups, of_group;

        explicit Rows(int64_t all, int64_t most = AT_ONCE) : count(all), groups((all + most - 1) / most) {
            of_group = std::min<int64_t>(most, even((count + groups - 1) / groups));
            groups = (count + of_group - 1) / of_group;
        }
        static int64_t even(int64_t number) { return (number + 1) / 2 * 2; }
        int64_t in(int64_t group) const { return std::min(of_group, even(count - group * of_group)); }
        int64_t padded() const { return (groups - 1) * of_group + in(groups - 1); }
    };

    // The next panel on its way into the second cache, where there are several groups to fetch it, or it is to be decoded when it is
    // reached: some lines with each step.
    struct Ahead {
        const char* at;
        const int64_t lines;  // in a step of a group

        Ahead(const Matrix& matrix, const void* begin, int64_t groups)
            : at((const char*)begin),
              lines(matrix.coded.panels || groups > 1 ? (of_step(matrix) + groups - 1) / groups : 0) {}
        static int64_t of_step(const Matrix& matrix) {
            return matrix.coded.panels ? Coded::groups_of(DEPTH) * Coded::GROUP_BYTES / 64 : 2 * TILE;
        }
        void fetch(int pair) {
            for (int64_t line = pair; line < lines; line += TILE, at += 64) __builtin_prefetch(at, 0, 2);
        }
    };

    // A panel as it is packed. ARRIVES: it comes from memory, not from a cache.
    template <bool ARRIVES>
    struct Packed {
        const bf16* at;

        void arrive() {}
        void fetch(int pair) const {
            if (ARRIVES) PairProduct::fetch<true>(at, pair);
        }
        __m512 line(int pair, int half, bool is_second) const {
            const __m512i both = _mm512_load_si512(at + half * TILE_SIZE + pair * LANES);
            return is_second ? seconds_of(both) : firsts_of(both);
        }
        void step() { at += 2 * TILE_SIZE; }
    };

    // A panel that is coded, and is decoded step by step on its way.
    struct Arriving : Packed<false> {
        Decoding& decoding;

        void arrive() { decoding.some(Coded::groups_of(DEPTH)); }
    };

    // The same as floats, [inputs][2][16].
    struct Widened {
        const float* at;

        void arrive() {}
        void fetch(int) const {}
        __m512 line(int pair, int half, bool is_second) const {
            return _mm512_load_ps(at + (2 * pair + is_second) * PANEL + half * TILE);
        }
        void step() { at += DEPTH * PANEL; }
    };

    // Where the sums [row tiles][2][16][16] of a row are.
    static float* place(float* sums, int64_t row) { return sums + (row / TILE * 2 * TILE + row % TILE) * TILE; }

    // Some inputs of R rows, x [steps][R][32], added to the sums from a row on where there are some. Not inlined, so that nothing of
    // it is done before floats are Flushing.
    template <int R, typename Panel>
    [[gnu::noinline]] static void some(const float* x, Panel panel, int64_t steps, bool adds, Ahead& ahead, float* to, int64_t row) {
        __m512 sums[R][2];
#pragma GCC unroll 14
        for (int r = 0; r < R; ++r) {
            sums[r][0] = adds ? _mm512_load_ps(place(to, row + r)) : _mm512_setzero_ps();
            sums[r][1] = adds ? _mm512_load_ps(place(to, row + r) + TILE * TILE) : _mm512_setzero_ps();
        }
        for (int64_t step = 0; step < steps; ++step, x += R * DEPTH, panel.step()) {
            panel.arrive();
            // No more of them at once, as in pairs.h.
#pragma GCC unroll 2
            for (int pair = 0; pair < TILE; ++pair) {
                panel.fetch(pair);
                ahead.fetch(pair);
#pragma GCC unroll 2
                for (int second = 1; second >= 0; --second) {
                    const __m512 left = panel.line(pair, 0, second), right = panel.line(pair, 1, second);
#pragma GCC unroll 14
                    for (int r = 0; r < R; ++r) {
                        const __m512 input = _mm512_set1_ps(x[r * DEPTH + 2 * pair + second]);
                        sums[r][0] = _mm512_fmadd_ps(left, input, sums[r][0]);
                        sums[r][1] = _mm512_fmadd_ps(right, input, sums[r][1]);
                    }
                }
            }
        }
#pragma GCC unroll 14
        for (int r = 0; r < R; ++r) {
            _mm512_store_ps(place(to, row + r), sums[r][0]);
            _mm512_store_ps(place(to, row + r) + TILE * TILE, sums[r][1]);
        }
    }

    template <typename Panel>
    static void group(int64_t count, const float* x, Panel panel, int64_t steps, bool adds, Ahead& ahead, float* sums, int64_t row) {
        switch (count) {
            case 2: return some<2>(x, panel, steps, adds, ahead, sums, row);
            case 4: return some<4>(x, panel, steps, adds, ahead, sums, row);
            case 6: return some<6>(x, panel, steps, adds, ahead, sums, row);
            case 8: return some<8>(x, panel, steps, adds, ahead, sums, row);
            case 10: return some<10>(x, panel, steps, adds, ahead, sums, row);
            case 12: return some<12>(x, panel, steps, adds, ahead, sums, row);
            case 14: return some<14>(x, panel, steps, adds, ahead, sums, row);
        }
    }

    // Columns [from, to) of rows from ``first`` on, by groups: [steps][rows][32].
    void widen(const Rows& block, int64_t first, int64_t from, int64_t to, float* held) const {
        for (int64_t group = 0, row = first; group < block.groups; ++group, row += block.of_group) {
            for (int64_t column = from, count = block.in(group); column < to; column += DEPTH) {
                for (int64_t r = 0; r < count; ++r, held += DEPTH) {
                    // Of an odd number the last one twice.
                    const bf16* at = row_at(std::min(row + r, rows - 1), column);
                    store(held, load(at)), store(held + WIDTH, load(at + WIDTH));
                }
            }
        }
    }

    const bf16* row_at(int64_t row, int64_t column) const {
        return x + (is_laid ? Laid::place(row, column, matrix.size) : row * matrix.size + column);
    }

    void few(const Rows& all, int64_t panel, const float* held, Claim& claim) const {
        alignas(64) float sums[FEW_ROWS / TILE * 2 * TILE * TILE];
        const int64_t steps = matrix.size / DEPTH, of_group = all.of_group;
        // More rows leave no registers for it.
        const bool is_coded = matrix.coded.panels, arrives = is_coded && of_group <= DECODED_MOST;
        const bf16* packed = arrives ? Matrix::room_for(matrix.size) : matrix.panel_at(panel);
        Decoding decoding;
        if (arrives) decoding = {matrix.coded, panel, matrix.size, 0, matrix.size, Matrix::room_for(matrix.size)};
        Ahead ahead(matrix, matrix.address(panel + 1), all.groups);
        {
            Flushing session;
            for (int64_t index = 0; index < all.groups; ++index, held += of_group * matrix.size) {
                if (!index && arrives) group(of_group, held, Arriving{{packed}, decoding}, steps, false, ahead, sums, 0);
                else if (!index && !is_coded) group(of_group, held, Packed<true>{packed}, steps, false, ahead, sums, 0);
                else group(all.in(index), held, Packed<false>{packed}, steps, false, ahead, sums, index * of_group);
            }
        }
        if (claim.may_write()) put_out(0, rows, panel, sums);
    }

    void put_out(int64_t first, int64_t last, int64_t panel, float* sums) const {
        Finish finish(matrix, output, expansion, passes_caches());
        for (int64_t row = first; row < last; row += TILE, sums += 2 * TILE * TILE) {
            if (expansion && expansion->is_tile(row / TILE)) {
                expansion->add_tile(row / TILE, matrix.left(panel), matrix.left(panel) + matrix.apart, sums);
            }
            finish.begin(row, std::min<int64_t>(TILE, last - row), panel, sums);
            finish.some(finish.left());
        }
        if (passes_caches()) _mm_sfence();
    }

    bool passes_caches() const { return PairProduct::passes_caches(output, rows, matrix); }

    void many(Team& team) const {
        static thread_local AlignedBuffer<float> held_rows, held_panel, held_sums;
        const int64_t panels = matrix.num_panels(), blocks = (rows + BLOCK - 1) / BLOCK;
        const int64_t block_rows = ((rows + blocks - 1) / blocks + TILE - 1) / TILE * TILE;
        const int64_t num_slices = (block_rows * matrix.size * 4 + HELD_BYTES - 1) / HELD_BYTES;
        const int64_t slice = (matrix.size / DEPTH + num_slices - 1) / num_slices * DEPTH;
        const int64_t at_once = num_slices > 1 ? TASK_PANELS : 1, sums_size = block_rows * PANEL;
        const int64_t stretches = (panels + at_once - 1) / at_once;
        held_rows.grow(Rows(block_rows).padded() * slice);
        held_panel.grow(slice * PANEL);
        held_sums.grow(at_once * sums_size);
        int64_t lying = -1;
        team.each_claimed(blocks * stretches, TASK_PANELS / at_once, [&](int64_t task, Claim& claim) {
            const int64_t first = task / stretches * block_rows, last = std::min(first + block_rows, rows);
            const int64_t left = task % stretches * at_once, right = std::min(left + at_once, panels);
            const Rows block(last - first);
            for (int64_t from = 0; from < matrix.size; from += slice) {
                const int64_t to = std::min(from + slice, matrix.size);
                if (lying != first || num_slices > 1) widen(block, first, from, to, held_rows.begin());
                lying = first;
                for (int64_t panel = left; panel < right; ++panel) {
                    const bf16* packed = matrix.panel_at(panel, from, to);
                    const bool is_last = at_once > 1 && panel + 1 == right;
                    const void* next = is_last ? matrix.address(left, to) : matrix.address(panel + 1, from);
                    float* sums = held_sums.begin() + (panel - left) * sums_size;
                    widen_panel(packed, (to - from) / DEPTH, held_panel.begin());
                    multiply(block, held_rows.begin(), held_panel.begin(), (to - from) / DEPTH, from > 0, next, sums);
                    if (to == matrix.size && claim.may_write()) put_out(first, last, panel, sums);
                }
            }
        });
    }

    static void widen_panel(const bf16* packed, int64_t steps, float* to) {
        Packed<false> panel{packed};
        for (int64_t step = 0; step < steps; ++step, panel.step()) {
            for (int pair = 0; pair < TILE; ++pair, to += 2 * PANEL) {
                for (int half = 0; half < 2; ++half) {
                    _mm512_store_ps(to + half * TILE, panel.line(pair, half, false));
                    _mm512_store_ps(to + PANEL + half * TILE, panel.line(pair, half, true));
                }
            }
        }
    }

    void multiply(const Rows& block, const float* held, const float* panel, int64_t steps, bool adds, const void* next, float* sums) const {
        Flushing session;
        Ahead ahead(matrix, next, block.groups);
        for (int64_t index = 0, row = 0; index < block.groups; ++index, row += block.of_group) {
            const int64_t count = block.in(index);
            group(count, held, Widened{panel}, steps, adds, ahead, sums, row);
            held += count * steps * DEPTH;
        }
    }
};

}  // namespace

#endif
