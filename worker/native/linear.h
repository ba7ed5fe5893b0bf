// y = x times the transpose of a packed matrix, in bfloat16 tiles.
//
// For few rows it is the matrix that takes its time to arrive: it is read once, in order, and ahead. For many it is the tiles
// of x: a block of them stays in the second cache while panels of the matrix pass by, the next one fetched meanwhile.

#pragma once

#include "output.h"
#include "team.h"
#include "tiles.h"

#if defined(HAVE_TILES)

#include <algorithm>
#include <vector>

namespace {

constexpr int FEW_ROWS = 64;
constexpr int PANEL = 2 * TILE;          // columns of y that one panel of the matrix makes: two tiles side by side
constexpr int AHEAD_BYTES = 512;
constexpr int BLOCK_BYTES = 1 << 20;     // of x, that stay in the second cache
constexpr int HELD = 7 * DEPTH;          // of a panel, that stays in the first cache
constexpr int GROUP_PANELS = 14;         // that one task takes of many rows
constexpr int64_t ALONE = 400000;        // bytes of the matrix, and a 64th of the products, that one thread is done with
                                         // before another has woken

// A matrix [columns, size] as ``packed_tiles`` leaves it: panels [size / 32][2][16 pairs][16][2]. The second tile of a
// panel holds the columns ``apart`` further on: 16, or, where gates and what they open lie below each other, half of all.
struct Matrix {
    const bf16* packed;
    const bf16* bias;  // [columns] or null
    int64_t size, columns, apart;

    int64_t num_panels() const { return (apart == TILE ? columns + PANEL - 1 : columns) / PANEL; }
    int64_t left(int64_t panel) const { return panel * (apart == TILE ? PANEL : TILE); }
    const bf16* panel_at(int64_t panel) const { return packed + panel * size * PANEL; }
};

struct Product {
    const bf16* x;     // [rows, size]
    const bf16* tail;  // the last rows of x that are no whole tile, with more after them; null: so has x
    int64_t rows;
    Matrix matrix;
    Output output;

    int64_t row_tiles() const { return (rows + TILE - 1) / TILE; }
    const bf16* tile_of(int64_t row_tile) const {
        return tail && row_tile == rows / TILE ? tail : x + row_tile * TILE * matrix.size;
    }

    // Whole rows for what is no whole tile, in ``held`` [TILE * size].
    void hold_tail(bf16* held) {
        if (rows % TILE) {
            std::memcpy(held, x + rows / TILE * TILE * matrix.size, rows % TILE * matrix.size * sizeof(bf16));
            tail = held;
        }
    }

    // Few rows, one panel.
    void stream(int64_t panel) const {
        alignas(64) float sums[4][TILE * TILE];
        const int64_t steps = matrix.size / DEPTH, last = row_tiles(), row_bytes = matrix.size * 2;
        const bf16* b = matrix.panel_at(panel);
        for (int64_t tile = 0; tile < last; tile += 2) {
            if (tile + 1 < last) {
                multiply<2, 2, false, AHEAD_BYTES>({tile_of(tile), tile_of(tile + 1)}, row_bytes, DEPTH, {b, b + TILE_SIZE},
                                                   2 * TILE_SIZE, steps, {{sums[0], sums[1]}, {sums[2], sums[3]}});
                put_out(tile + 1, panel, sums[2], sums[3]);
            } else {
                multiply<1, 2, false, AHEAD_BYTES>({tile_of(tile)}, row_bytes, DEPTH, {b, b + TILE_SIZE}, 2 * TILE_SIZE,
                                                   steps, {{sums[0], sums[1]}});
            }
            put_out(tile, panel, sums[0], sums[1]);
        }
    }

    // Row tiles [first, last) and panels [left, right), ``slice`` of the size at a time, and of it so much of a panel that it
    // stays in the first cache while all rows pass; ``sums`` holds 1024 floats for each pair of row tiles and, where there are
    // several slices, each panel.
    void block(int64_t first, int64_t last, int64_t left, int64_t right, int64_t slice, float* sums) const {
        const int64_t pairs = (last - first + 1) / 2;
        const int64_t ahead_lines = (PANEL * DEPTH * 2 / std::max<int64_t>(pairs, 1) + 63) / 64;
        const bool is_whole = slice >= matrix.size;
        for (int64_t from = 0; from < matrix.size; from += slice) {
            const int64_t to = std::min(from + slice, matrix.size);
            for (int64_t panel = left; panel < right; ++panel) {
                float* own = sums + (is_whole ? 0 : panel - left) * pairs * 4 * TILE * TILE;
                for (int64_t at = from; at < to; at += HELD) {
                    const int64_t steps = std::min<int64_t>(HELD, to - at) / DEPTH;
                    const bf16* b = matrix.panel_at(panel) + at * PANEL;
                    // What comes next in memory, or what the next slice begins with.
                    const bf16* next = at + HELD < to || is_whole ? b + steps * DEPTH * PANEL
                                       : panel + 1 < right        ? matrix.panel_at(panel + 1) + from * PANEL
                                                                  : matrix.panel_at(left) + to * PANEL;
                    for (int64_t pair = 0; pair < pairs; ++pair) {
                        const char* ahead = (const char*)(next + pair * steps * DEPTH * PANEL / pairs);
                        pass(first + 2 * pair, last, at, steps, b, ahead, ahead_lines, own + pair * 4 * TILE * TILE);
                        if (at + HELD < matrix.size) continue;
                        put_out(first + 2 * pair, panel, own + pair * 4 * TILE * TILE, own + (pair * 4 + 1) * TILE * TILE);
                        if (first + 2 * pair + 1 == last) continue;
                        put_out(first + 2 * pair + 1, panel, own + (pair * 4 + 2) * TILE * TILE,
                                own + (pair * 4 + 3) * TILE * TILE);
                    }
                }
            }
        }
    }

    // Some steps of two row tiles, or of the last one alone.
    void pass(int64_t tile, int64_t last, int64_t at, int64_t steps, const bf16* b, const char* ahead, int64_t ahead_lines,
              float* sums) const {
        const int64_t row_bytes = matrix.size * 2;
        const bf16* a = tile_of(tile) + at;
        if (tile + 1 < last) {
            if (at) both<true>(a, tile_of(tile + 1) + at, row_bytes, b, steps, sums, ahead, ahead_lines);
            else both<false>(a, tile_of(tile + 1) + at, row_bytes, b, steps, sums, ahead, ahead_lines);
        } else if (at) {
            multiply<1, 2, true>({a}, row_bytes, DEPTH, {b, b + TILE_SIZE}, 2 * TILE_SIZE, steps, {{sums, sums + TILE * TILE}});
        } else {
            multiply<1, 2, false>({a}, row_bytes, DEPTH, {b, b + TILE_SIZE}, 2 * TILE_SIZE, steps, {{sums, sums + TILE * TILE}});
        }
    }

    template <bool ADD>
    static void both(const bf16* a0, const bf16* a1, int64_t row_bytes, const bf16* b, int64_t steps, float* sums,
                     const char* ahead, int64_t ahead_lines) {
        asm volatile("" ::: "memory");  // the compiler does not know that tiles are read from memory
        if (ADD) {
            _tile_loadd(0, sums, 64);
            _tile_loadd(1, sums + TILE * TILE, 64);
            _tile_loadd(2, sums + 2 * TILE * TILE, 64);
            _tile_loadd(3, sums + 3 * TILE * TILE, 64);
        } else {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
        }
        for (int64_t step = 0; step < steps; ++step) {
            for (int64_t line = 0; line < ahead_lines; ++line, ahead += 64) __builtin_prefetch(ahead, 0, 2);
            _tile_loadd(4, a0 + step * DEPTH, row_bytes);
            _tile_loadd(6, b + step * 2 * TILE_SIZE, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, b + step * 2 * TILE_SIZE + TILE_SIZE, 64);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(5, a1 + step * DEPTH, row_bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, sums, 64);
        _tile_stored(1, sums + TILE * TILE, 64);
        _tile_stored(2, sums + 2 * TILE * TILE, 64);
        _tile_stored(3, sums + 3 * TILE * TILE, 64);
    }

    void put_out(int64_t row_tile, int64_t panel, const float* left, const float* right) const {
        int64_t from = row_tile * TILE, count = std::min<int64_t>(TILE, rows - from), column = matrix.left(panel);
        int64_t apart = matrix.apart, width = apart == TILE ? std::min<int64_t>(PANEL, matrix.columns - column) : PANEL;
        bf16 added[PANEL] = {};
        if (matrix.bias && apart == TILE) {
            std::memcpy(added, matrix.bias + column, width * sizeof(bf16));
        } else if (matrix.bias) {
            std::memcpy(added, matrix.bias + column, TILE * sizeof(bf16));
            std::memcpy(added + TILE, matrix.bias + column + apart, TILE * sizeof(bf16));
        }
        Floats low_bias = load(added), high_bias = load(added + TILE), tops[TILE] = {};
        for (int64_t row = 0; row < count; ++row) {
            alignas(64) bf16 both[PANEL];
            __m512 low = (__m512)(load(left + row * TILE) + low_bias), high = (__m512)(load(right + row * TILE) + high_bias);
            _mm512_store_si512(both, (__m512i)_mm512_cvtne2ps_pbh(high, low));
            int64_t at = (from + row) * matrix.columns + column;
            if (output.result == GATED) {
                // Of the rounded numbers, as when the two were columns of y.
                store((bf16*)output.y + (from + row) * (matrix.columns / 2) + column,
                      activate(load(both), output.activation) * load(both + TILE));
            } else if (output.result == ROUNDED) {
                bf16* y = (bf16*)output.y + at;
                if (apart != TILE) std::memcpy(y, both, 32), std::memcpy(y + apart, both + TILE, 32);
                else if (width == PANEL) std::memcpy(y, both, 64);
                else std::memcpy(y, both, width * sizeof(bf16));
            } else {
                // Rounded all the same: what is wanted are the floats of a bfloat16 result.
                float* y = (float*)output.y + at;
                if (apart != TILE) store(y, load(both)), store(y + apart, load(both + TILE));
                else if (width == PANEL) store(y, load(both)), store(y + TILE, load(both + TILE));
                else for (int64_t i = 0; i < width; ++i) y[i] = get(both[i]);
                if (!output.maxima) continue;
                for (int64_t i = width; i < PANEL; ++i) put(both + i, -INFINITY);
                tops[row] = larger(load(both), load(both + TILE));
            }
        }
        if (!output.maxima) return;
        Floats found = largest_across(tops);
        for (int64_t row = 0; row < count; ++row) output.put_maximum(from + row, matrix.columns, column, found[row]);
    }

    // Every thread of the team calls it, each with Tiles of its own.
    void run(Team& team) const {
        const int64_t panels = matrix.num_panels();
        if (rows <= FEW_ROWS) {
            // Each thread takes long runs of panels, so that it reads the matrix in one go.
            int64_t at_once = std::max<int64_t>(1, panels / (16 * team.size()));
            return team.each(panels, at_once, [&](int64_t panel) { stream(panel); });
        }
        const int64_t at_once = matrix.size * 1024 <= BLOCK_BYTES ? 512 : 256;
        const int64_t row_blocks = (rows + at_once - 1) / at_once;
        const int64_t block_tiles = ((row_tiles() + row_blocks - 1) / row_blocks + 1) / 2 * 2;
        const int64_t most = BLOCK_BYTES / (block_tiles * TILE * 2), num_slices = (matrix.size + most - 1) / most;
        const int64_t slice = (matrix.size / DEPTH + num_slices - 1) / num_slices * DEPTH;
        const int64_t groups = std::max<int64_t>((panels + GROUP_PANELS - 1) / GROUP_PANELS, std::min<int64_t>(panels, team.size()));
        const int64_t group = (panels + groups - 1) / groups;
        static thread_local std::vector<float> held;
        const size_t needed = block_tiles / 2 * (num_slices > 1 ? group : 1) * 4 * TILE * TILE + 16;
        if (held.size() < needed) held.resize(needed);
        float* sums = (float*)(((uintptr_t)held.data() + 63) & ~uintptr_t(63));
        team.each(row_blocks * groups, 1, [&](int64_t task) {
            int64_t first = task / groups * block_tiles, left = task % groups * group;
            block(first, std::min(first + block_tiles, row_tiles()), left, std::min(left + group, panels), slice, sums);
        });
    }
};

inline void linear(Product product, int threads) {
    static std::vector<bf16> tail;
    if (int64_t(tail.size()) < TILE * product.matrix.size) tail.resize(TILE * product.matrix.size);
    product.hold_tail(tail.data());
    const int64_t work = product.matrix.size * product.matrix.columns * 2;
    if (work + work / 128 * product.rows < ALONE) threads = 1;
    Team::run(threads, [&](Team& team) {
        Tiles session(true);
        product.run(team);
    });
}

}  // namespace

#endif
