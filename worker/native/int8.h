// y = x times the transpose of a matrix of int8 codes with a scale for each output, x rounded to int8 by token: dynamic
// W8A8. Codes are packed as code + 128, so that one layout serves VNNI, which wants one side unsigned, and AMX; what the
// 128 adds is taken off again by the sum of x's codes. Sums are integers: however many rows come together, and by
// whichever instructions, each gets the same.

#pragma once

#include "behind.h"
#include "int8_matrix.h"
#include "int8_row.h"
#include "interleaved.h"
#include "team.h"

#if defined(HAVE_INT8)

namespace {

namespace int8 {

constexpr int MANY = 8;                // rows that VNNI multiplies at once: half a tile
constexpr int64_t NO_TILES = 1;        // rows for which VNNI is no slower than tiles
constexpr int64_t STREAMED = 64;       // rows for which the matrix is what takes its time to arrive
constexpr int TASK_PANELS = 8;         // of many rows
constexpr int64_t MAX_RUN = 8;         // panels of few rows that a thread takes at once
constexpr int STEPS = 7;               // of a panel, that stay in the first cache
constexpr int SOME_AHEAD = 4096;       // bytes by which a panel is fetched before several rows are multiplied, by vectors
constexpr int TILES_AHEAD = 1024;      // the same, by tiles

struct Product {
    const Matrix& matrix;
    const Tokens x;
    int64_t rows;
    Output output;

    int64_t steps() const { return x.deep / DEEP; }
    int64_t row_tiles() const { return (rows + SIDE - 1) / SIDE; }

    // Rows from ``first`` on of a panel: sums(row, half) are theirs. Of no more than MANY, everything but storing them is done before
    // the claim is asked, so that they are hardly ever being written while a thread is put aside.
    template <typename Sums>
    void put_claimed(int64_t first, int64_t count, int64_t panel, Claim& claim, const Sums& sums) const {
        Floats low[MANY], high[MANY];
        each_value(first, count, panel, sums, [&](int64_t row, Floats left, Floats right) { low[row] = left, high[row] = right; });
        output.gate_rows(count, low, high);
        if (claim.may_write()) output.put_rows(first, count, matrix.columns, matrix.left(panel), matrix.apart, low, high);
    }

    template <typename Sums>
    void put_out(int64_t first, int64_t count, int64_t panel, const Sums& sums) const {
        each_value(first, count, panel, sums, [&](int64_t row, Floats low, Floats high) {
            output.put_both(first + row, matrix.columns, matrix.left(panel), matrix.apart, low, high);
        });
    }

    // use(row, low, high)
    template <typename Sums, typename Use>
    [[gnu::always_inline]] void each_value(int64_t first, int64_t count, int64_t panel, const Sums& sums, const Use& use) const {
        const Scaled scaled(matrix, x, panel);
        for (int64_t row = 0; row < count; ++row) {
            Floats low, high;
            scaled.take(first + row, sums(row, 0), sums(row, 1), low, high);
            use(row, low, high);
        }
    }

    // Sums [R][2][16] of R rows of a tile of x: what is read of the matrix serves all of them, and what is read of x both halves of the
    // panel. ARRIVES: the panel comes from memory, not from a cache. ``next`` comes meanwhile, and ``others`` have a turn now and then.
    template <int R, bool ARRIVES, typename Others>
    [[gnu::always_inline]] void sum(int64_t first, int64_t panel, BehindSteps& next, int32_t* to, Others& others) const {
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

    template <int R, bool ARRIVES>
    void some(int64_t first, int64_t panel, Claim& claim, BehindSteps& next) const {
        alignas(64) int32_t held[R * COLUMNS];
        Nothing none;
        sum<R, ARRIVES>(first, panel, next, held, none);
        put_claimed(first, std::min<int64_t>(R, rows - first), panel, claim,
                    [&](int64_t row, int half) { return _mm512_load_si512(held + row * COLUMNS + half * SIDE); });
    }

    // All rows of a panel, by VNNI.
    void all(int64_t panel, Claim& claim) const {
        BehindSteps next;
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
    void each_some(int64_t first, int64_t last, int64_t panel, Claim& claim, BehindSteps next) const {
        auto in_between = [&](auto result) { between<decltype(result)::value>(first, last, panel, claim, next); };
        if (last - first > MANY && output.if_simple(matrix.columns, matrix.apart, in_between)) return;
        some<MANY, true>(first, panel, claim, next);
        while ((first += MANY) < last && !claim.is_lost()) some<MANY, false>(first, panel, claim, next);
    }

    // The same of more than MANY, and what is summed is made into y while the next rows are.
    template <Result RESULT>
    void between(int64_t first, int64_t last, int64_t panel, Claim& claim, BehindSteps next) const {
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
    [[gnu::noinline]] void eight(int64_t first, int64_t panel, BehindSteps& next, int32_t* to, Others& others) const {
        sum<MANY, ARRIVES>(first, panel, next, to, others);
    }

#if defined(HAVE_TILES)
    // Sums of tiles of rows and panels, [2][16][16] each, on their way into y: of one tile and two panels, or two and one.
    class Finish {
        struct Part {
            int64_t row, count, panel;
            const int32_t* sums;
        };
        const Product& product_;
        Part parts_[2];
        int num_ = 0;
        int64_t left_ = 0;

      public:
        explicit Finish(const Product& product) : product_(product) {}

        int64_t left() const { return left_; }

        void add(int64_t row_tile, int64_t panel, const int32_t* sums) {
            if (num_ == 2) some(left_);
            const int64_t row = row_tile * SIDE, count = std::min<int64_t>(SIDE, product_.rows - row);
            parts_[num_++] = {row, count, panel, sums};
            left_ += count;
        }

        void some(int64_t count) {
            count = std::min(count, left_);
            left_ -= count;
            while (count) {
                Part& part = parts_[0];
                const int64_t now = std::min(count, part.count);
                const int32_t* sums = part.sums;
                product_.put_out(part.row, now, part.panel,
                                 [&](int64_t row, int half) { return _mm512_load_si512(sums + half * 256 + row * SIDE); });
                count -= now;
                part = {part.row + now, part.count - now, part.panel, sums + now * SIDE};
                if (!part.count) parts_[0] = parts_[1], --num_;
            }
        }
    };

    // The same by tiles, of two row tiles and a panel, a row tile and two panels, or one of each: steps [begin, end), added to
    // ``sums`` [4][16][16] where there are sums already. In each step so many lines of each panel are fetched, from ``ahead`` on, and
    // while the tiles' unit multiplies, vectors finish what was summed before.
    template <int M, int P>
    void multiply(int64_t row_tile, int64_t panel, int64_t begin, int64_t end, const uint8_t* const (&ahead)[P], int64_t lines,
                  int32_t* sums, Finish& finish) const {
        static_assert(M * P <= 2);
        const int64_t at_once = (finish.left() + end - begin - 1) / (end - begin);
        const int8_t* a = x.codes + row_tile * SIDE * x.deep + begin * TILE_BYTES;
        const uint8_t *b = step_at(panel, begin), *c = step_at(panel + 1, begin);
        asm volatile("" ::: "memory");  // the compiler does not know that tiles are read from memory
        if (begin) {
            _tile_loadd(0, sums, 64);
            _tile_loadd(1, sums + 256, 64);
            if constexpr (M * P > 1) _tile_loadd(2, sums + 512, 64);
            if constexpr (M * P > 1) _tile_loadd(3, sums + 768, 64);
        } else {
            _tile_zero(0);
            _tile_zero(1);
            if constexpr (M * P > 1) _tile_zero(2);
            if constexpr (M * P > 1) _tile_zero(3);
        }
        for (int64_t step = 0; step < end - begin; ++step, a += TILE_BYTES, b += 2 * TILE_BYTES, c += 2 * TILE_BYTES) {
            for (int64_t line = step * lines; line < (step + 1) * lines; ++line) {
                for (const uint8_t* from : ahead) fetch(from + line * 64);
            }
            _tile_loadd(4, a, 64);
            _tile_loadd(6, b, 64);
            _tile_dpbsud(0, 4, 6);
            _tile_loadd(7, b + TILE_BYTES, 64);
            _tile_dpbsud(1, 4, 7);
            if constexpr (M > 1) {
                _tile_loadd(5, a + SIDE * x.deep, 64);
                _tile_dpbsud(2, 5, 6);
                _tile_dpbsud(3, 5, 7);
            }
            if constexpr (P > 1) {
                _tile_loadd(5, c, 64);
                _tile_dpbsud(2, 4, 5);
                _tile_loadd(6, c + TILE_BYTES, 64);
                _tile_dpbsud(3, 4, 6);
            }
            if (at_once) finish.some(at_once);
        }
        _tile_stored(0, sums, 64);
        _tile_stored(1, sums + 256, 64);
        if constexpr (M * P > 1) _tile_stored(2, sums + 512, 64);
        if constexpr (M * P > 1) _tile_stored(3, sums + 768, 64);
        asm volatile("" ::: "memory");
    }

    const uint8_t* step_at(int64_t panel, int64_t step) const { return matrix.panel_at(panel) + step * 2 * TILE_BYTES; }

    // All rows of a panel, as it arrives.
    void stream(int64_t panel, Claim& claim) const {
        alignas(64) int32_t sums[2][1024];
        const uint8_t* ahead[1] = {matrix.panel_at(panel) + TILES_AHEAD};
        Finish finish(*this);
        for (int64_t tile = 0, lines = 2 * SIDE; tile < row_tiles(); tile += 2, lines = 0) {
            const bool two = tile + 1 < row_tiles();
            int32_t* own = sums[tile / 2 % 2];
            if (two) multiply<2, 1>(tile, panel, 0, steps(), ahead, lines, own, finish);
            else multiply<1, 1>(tile, panel, 0, steps(), ahead, lines, own, finish);
            if (!claim.may_write()) return;
            finish.add(tile, panel, own);
            if (two) finish.add(tile + 1, panel, own + 512);
        }
        finish.some(finish.left());
    }

    // Row tiles [first, last) and panels [left, right), two at a time, of which so many steps that they stay in the first cache
    // while all rows pass; ``slice`` steps before the next two. ``held`` has room for 1024 sums of each row tile and, where
    // there are several slices, each two panels.
    void block(int64_t first, int64_t last, int64_t left, int64_t right, int64_t slice, int32_t* held) const {
        const int64_t tiles = last - first, lines = (2 * SIDE + tiles - 1) / tiles;
        const bool is_whole = slice >= steps();
        Finish finish(*this);
        for (int64_t from = 0; from < steps(); from += slice) {
            const int64_t to = std::min(from + slice, steps());
            for (int64_t panel = left; panel < right; panel += 2) {
                int32_t* sums = held + (is_whole ? 0 : panel - left) / 2 * tiles * 1024;
                for (int64_t at = from; at < to; at += STEPS) {
                    const int64_t end = std::min(at + STEPS, to);
                    // What comes next: of these two, or of the next.
                    const int64_t other = end < to ? panel : panel + 2 < right || is_whole ? panel + 2 : left;
                    const int64_t next = end < to ? end : is_whole ? 0 : panel + 2 < right ? from : to;
                    for (int64_t tile = 0; tile < tiles; ++tile) {
                        const int64_t part = tile * (end - at) * 2 * TILE_BYTES / tiles;
                        const uint8_t* ahead[2] = {step_at(other, next) + part, step_at(other + 1, next) + part};
                        int32_t* own = sums + tile * 1024;
                        if (panel + 1 < right) multiply<1, 2>(first + tile, panel, at, end, ahead, lines, own, finish);
                        else multiply<1, 1>(first + tile, panel, at, end, {ahead[0]}, lines, own, finish);
                        if (end < steps()) continue;
                        finish.add(first + tile, panel, own);
                        if (panel + 1 < right) finish.add(first + tile, panel + 1, own + 512);
                    }
                }
            }
        }
        finish.some(finish.left());
    }

    // Steps of so many row tiles that stay in the second cache.
    int64_t slice_of(int64_t block_tiles) const {
        const int64_t most = BLOCK_BYTES / (block_tiles * TILE_BYTES), num_slices = (steps() + most - 1) / most;
        return (steps() + num_slices - 1) / num_slices;
    }

    void many(Team& team) const {
        static thread_local std::vector<char> held;
        const int64_t panels = matrix.num_panels(), block_tiles = tiles_at_once(rows, x.deep);
        const int64_t slice = slice_of(block_tiles);
        const int64_t across = std::max<int64_t>((panels + TASK_PANELS - 1) / TASK_PANELS, std::min<int64_t>(panels, team.size()));
        const int64_t width = ((panels + across - 1) / across + 1) / 2 * 2;
        int32_t* sums = (int32_t*)room(held, block_tiles * (slice < steps() ? width / 2 : 1) * 4 * TILE_BYTES);
        team.each((row_tiles() + block_tiles - 1) / block_tiles * across, 1, [&](int64_t task) {
            const int64_t first = task / across * block_tiles, left = task % across * width;
            block(first, std::min(first + block_tiles, row_tiles()), left, std::min(left + width, panels), slice, sums);
        });
    }
#endif

    // Every thread of the team calls it, each with Tiles of its own.
    void run(Team& team) const {
        const int64_t panels = matrix.num_panels(), at_once = std::clamp<int64_t>(panels / RUNS, 1, MAX_RUN);
#if defined(HAVE_TILES)
        if (rows > NO_TILES && may_use_tiles()) {
            if (rows > STREAMED) return many(team);
            return team.each_apart(panels, at_once, [&](int64_t panel, Claim& claim) { stream(panel, claim); });
        }
#endif
        if (rows == 1 && (!is_amd() || row_is_kept(matrix, team.size()))) return Row{matrix, x, output}.run(team);
        team.each_apart(panels, at_once, [&](int64_t panel, Claim& claim) { all(panel, claim); });
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
