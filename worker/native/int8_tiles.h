// Several rows of x and a matrix of int8, by AMX.

#pragma once

#include "int8_matrix.h"
#include "prefetch.h"
#include "team.h"

#if defined(HAVE_INT8) && defined(HAVE_TILES)

namespace {

namespace int8 {

constexpr int64_t STREAMED = 64;       // rows for which the matrix is what takes its time to arrive
constexpr int TASK_PANELS = 8;         // of many rows
constexpr int64_t HELD = 16;           // steps of a panel, that stay in the first cache
constexpr int TILES_AHEAD = 1024;      // bytes by which a panel is fetched before few rows are multiplied
constexpr int64_t PAIR = 2 * SIDE;     // rows of two tiles, as two are multiplied side by side
constexpr int64_t PAIR_SUMS = PAIR * COLUMNS;

// What a panel's sums of two row tiles, [2][32][16], become in y, a row at a time between products that do not need them: done all at
// once the multipliers would stand still meanwhile. RESULT: as Output::if_simple has it, or WIDE for whatever it is.
template <Result RESULT>
class Finish {
    const Matrix& matrix_;
    const Output& output_;
    const int64_t apart_;  // from row to row of y
    Scaled values_;
    const int32_t* sums_;
    bf16* to_;
    int64_t row_, column_, left_ = 0;

  public:
    // ``panel``: the first one.
    Finish(const Matrix& matrix, const Tokens& x, const Output& output, int64_t panel)
        : matrix_(matrix), output_(output), apart_(output.result == GATED ? gated_apart(output, matrix.columns / 2) : matrix.columns),
          values_(matrix, x, panel) {}

    int64_t left() const { return left_; }

    // Rows from ``row`` on; what was left of others is made now.
    void begin(int64_t row, int64_t count, int64_t panel, const int32_t* sums) {
        all();
        values_.set(matrix_, panel);
        row_ = row, column_ = matrix_.left(panel), left_ = count, sums_ = sums;
        to_ = output_.result == GATED ? gated_at(output_, row, column_, matrix_.columns / 2) : (bf16*)output_.y + row * apart_ + column_;
    }

    [[gnu::always_inline]] void one() {
        Floats low, high;
        values_.take(row_, _mm512_load_si512(sums_), _mm512_load_si512(sums_ + PAIR * SIDE), low, high);
        if constexpr (RESULT != WIDE) put_row<RESULT>(to_, low, high);
        else if (output_.result == GATED) store(to_, Output::gate_both(low, high, output_.activation));
        else output_.put_both(row_, matrix_.columns, column_, matrix_.apart, low, high);
        ++row_, --left_, sums_ += SIDE, to_ += apart_;
    }

    [[gnu::always_inline]] void some(int64_t count) {
        for (count = std::min(count, left_); count; --count) one();
    }
    void all() { some(left_); }
};

struct TileProduct {
    const Matrix& matrix;
    const Tokens& x;
    int64_t rows;
    const Output& output;

    // Every thread of the team calls it, each with Tiles of its own.
    void run(Team& team) const {
        if (rows > STREAMED) return many(team);
        const int64_t panels = matrix.num_panels();
        team.each_apart(panels, run_of(panels), [&](int64_t panel, Claim& claim) {
            with_result([&](auto result) { stream<decltype(result)::value>(panel, claim); });
        });
    }

    // Row tiles [first, last), of which the first is an even one, and panels [left, right), of which so many steps that they stay in the
    // first cache while all rows pass, and ``slice`` steps of each before the next. ``held`` has room for PAIR_SUMS of each two row tiles
    // and, where there are several slices, each panel.
    void block(int64_t first, int64_t last, int64_t left, int64_t right, int64_t slice, int32_t* held) const {
        with_result([&](auto result) { block<decltype(result)::value>(first, last, left, right, slice, held); });
    }

    // Steps of so many row tiles that stay in the second cache.
    int64_t slice_of(int64_t block_tiles) const {
        const int64_t most = BLOCK_BYTES / (block_tiles * TILE_BYTES), num_slices = (steps() + most - 1) / most;
        return (steps() + num_slices - 1) / num_slices;
    }

  private:
    // Steps of a panel and two row tiles.
    struct Piece {
        const int8_t* rows;
        const uint8_t* panel;
        int64_t steps;
    };

    // What comes next in memory, of which so many lines are fetched with each step, into the second cache.
    struct Next {
        const uint8_t* at;
        int64_t lines;
    };

    int64_t steps() const { return x.deep / DEEP; }
    int64_t row_tiles() const { return (rows + SIDE - 1) / SIDE; }
    const uint8_t* step_at(int64_t panel, int64_t step) const { return matrix.panel_at(panel) + step * 2 * TILE_BYTES; }

    template <typename Use>
    void with_result(const Use& use) const {
        if (!output.if_simple(matrix.columns, matrix.apart, use)) use(std::integral_constant<Result, WIDE>());
    }

    // Sums [2][32][16] of a pair of row tiles, or of the last alone, added to what is there where the piece ``continues``. Meanwhile
    // vectors finish what was summed before.
    template <int M, bool STREAMS, Result RESULT>
    void multiply(const Piece& piece, bool continues, Next& next, int32_t* sums, Finish<RESULT>& finish) const {
        const int64_t at_once = (finish.left() + piece.steps - 1) / piece.steps;
        const int8_t *a = piece.rows, *c = a + SIDE * x.deep;
        const uint8_t* b = piece.panel;
        asm volatile("" ::: "memory");  // the compiler does not know that tiles are read from memory
        if (continues) {
            _tile_loadd(0, sums, 64);
            _tile_loadd(1, sums + PAIR * SIDE, 64);
            if constexpr (M > 1) _tile_loadd(2, sums + SIDE * SIDE, 64);
            if constexpr (M > 1) _tile_loadd(3, sums + (PAIR + SIDE) * SIDE, 64);
        } else {
            _tile_zero(0);
            _tile_zero(1);
            if constexpr (M > 1) _tile_zero(2);
            if constexpr (M > 1) _tile_zero(3);
        }
        for (int64_t step = 0; step < piece.steps; ++step, a += TILE_BYTES, c += TILE_BYTES, b += 2 * TILE_BYTES) {
            for (int64_t line = 0; line < next.lines; ++line, next.at += 64) fetch(next.at);
            if constexpr (STREAMS) _tile_stream_loadd(4, a, 64);
            else _tile_loadd(4, a, 64);
            _tile_loadd(6, b, 64);
            _tile_dpbsud(0, 4, 6);
            _tile_loadd(7, b + TILE_BYTES, 64);
            _tile_dpbsud(1, 4, 7);
            if constexpr (M > 1) {
                if constexpr (STREAMS) _tile_stream_loadd(5, c, 64);
                else _tile_loadd(5, c, 64);
                _tile_dpbsud(2, 5, 6);
                _tile_dpbsud(3, 5, 7);
            }
            finish.some(at_once);
        }
        _tile_stored(0, sums, 64);
        _tile_stored(1, sums + PAIR * SIDE, 64);
        if constexpr (M > 1) _tile_stored(2, sums + SIDE * SIDE, 64);
        if constexpr (M > 1) _tile_stored(3, sums + (PAIR + SIDE) * SIDE, 64);
        asm volatile("" ::: "memory");
    }

    // All rows of a panel, as it arrives.
    template <Result RESULT>
    void stream(int64_t panel, Claim& claim) const {
        alignas(64) int32_t sums[2][PAIR_SUMS];
        Next next{matrix.panel_at(panel) + TILES_AHEAD, 2 * SIDE};
        Finish<RESULT> finish(matrix, x, output, panel);
        for (int64_t row = 0; row < rows; row += PAIR, next.lines = 0) {
            const Piece piece{x.row(row), matrix.panel_at(panel), steps()};
            int32_t* own = sums[row / PAIR % 2];
            if (row + SIDE < rows) multiply<2, false>(piece, false, next, own, finish);
            else multiply<1, false>(piece, false, next, own, finish);
            if (!claim.may_write()) return;
            finish.begin(row, std::min(PAIR, rows - row), panel, own);
        }
        finish.all();
    }

    template <Result RESULT>
    void block(int64_t first, int64_t last, int64_t left, int64_t right, int64_t slice, int32_t* held) const {
        const int64_t pairs = (last - first + 1) / 2, stop = std::min(last * SIDE, rows);
        const bool is_whole = slice >= steps();
        Finish<RESULT> finish(matrix, x, output, left);
        for (int64_t from = 0; from < steps(); from += slice) {
            const int64_t to = std::min(from + slice, steps()), pieces = (to - from + HELD - 1) / HELD;
            const int64_t most = (to - from + pieces - 1) / pieces;
            for (int64_t panel = left; panel < right; ++panel) {
                int32_t* sums = held + (is_whole ? 0 : panel - left) * pairs * PAIR_SUMS;
                for (int64_t at = from; at < to; at += most) {
                    const int64_t count = std::min(most, to - at);
                    const bool is_end = at + count == steps();
                    // Of this panel, of the next, or what the next slice begins with.
                    Next next{at + count < to || is_whole ? step_at(panel, at + count)
                              : panel + 1 < right         ? step_at(panel + 1, from)
                                                          : step_at(left, to),
                              (most * 2 * SIDE + pairs * count - 1) / (pairs * count)};
                    for (int64_t pair = 0, row = first * SIDE; pair < pairs; ++pair, row += PAIR) {
                        const Piece piece{x.row(row) + at * TILE_BYTES, step_at(panel, at), count};
                        int32_t* own = sums + (is_whole && count == steps() ? pair % 2 : pair) * PAIR_SUMS;
                        if (row + SIDE < stop) multiply<2, true>(piece, at, next, own, finish);
                        else multiply<1, true>(piece, at, next, own, finish);
                        if (is_end) finish.begin(row, std::min(PAIR, stop - row), panel, own);
                    }
                }
            }
        }
        finish.all();
    }

    void many(Team& team) const {
        static thread_local std::vector<char> held;
        const int64_t panels = matrix.num_panels(), block_tiles = tiles_at_once(rows, x.deep);
        const int64_t slice = slice_of(block_tiles);
        const int64_t across = std::max<int64_t>((panels + TASK_PANELS - 1) / TASK_PANELS, std::min<int64_t>(panels, team.size()));
        const int64_t width = (panels + across - 1) / across;
        int32_t* sums = (int32_t*)room(held, block_tiles / 2 * (slice < steps() ? width : 1) * PAIR_SUMS * sizeof(int32_t));
        team.each((row_tiles() + block_tiles - 1) / block_tiles * across, 1, [&](int64_t task) {
            const int64_t first = task / across * block_tiles, left = task % across * width;
            block(first, std::min(first + block_tiles, row_tiles()), left, std::min(left + width, panels), slice, sums);
        });
    }
};

}  // namespace int8

}  // namespace

#endif
