// What adapters add to a product's sums before they are rounded.
//
// Where a tile's rows have the same adapter, it is one more step of the tile's product: the rows' narrow middles by the adapter's
// second matrix. What other rows are given was made before, row by row, since it is in one go that their adapters are read fastest.

#pragma once

#include "narrow.h"

#if defined(__AVX512BF16__)

namespace {

class Expansion {
    // Of sixteen columns of a product: where they lie among a factor's lines, and the middles that meet them.
    struct Columns {
        const bf16* up;  // null: nothing is added to them
        int64_t place, rank;
    };

    const Owners& owners_;
    const Middles middles_;
    const int64_t first_;
    const bf16* const added_;  // [rows, columns], of rows that are in no such tile and have adapters
    const int64_t columns_;

  public:
    Expansion(const Owners& owners, Middles middles, int64_t first, const bf16* added, int64_t columns)
        : owners_(owners), middles_(middles), first_(first), added_(added), columns_(columns) {}

    bool is_tile(int64_t tile) const { return owners_.is_tile(tile); }

    // To the sums of sixteen columns of a row that is in no such tile, from ``left`` on, and of as many from ``right`` on.
    void add_row(int64_t row, int64_t left, int64_t right, Floats& low, Floats& high) const {
        if (!owners_.factors(row)) return;
        low += load(added_ + row * columns_ + left), high += load(added_ + row * columns_ + right);
    }

    // To the sums [2][16][16] of a tile of rows that ``is_tile``.
    void add_tile(int64_t tile, int64_t left, int64_t right, float* sums) const {
        const Factor* factors = owners_.factors(tile * TILE);
        for (int side = 0; side < 2; ++side, sums += TILE * TILE) {
            const Columns columns = find(factors, side ? right : left);
            if (!columns.up) continue;
            multiply<1, 1, true>({middles_.at(tile * TILE, columns.place)}, middles_.stride() * sizeof(bf16), DEPTH, {columns.up},
                                 TILE_SIZE, Middles::held_of(columns.rank) / DEPTH, {{sums}});
        }
    }

#if defined(HAVE_TILES)
    // The same to the sums of two tiles that still are in the tiles' registers 0 to 3; 4 and 6 are used.
    void add_held(int64_t tile, bool is_first, bool is_second, int64_t left, int64_t right) const {
        if (is_first) add_at<0>(tile, left), add_at<1>(tile, right);
        if (is_second) add_at<2>(tile + 1, left), add_at<3>(tile + 1, right);
    }
#endif

  private:
    Columns find(const Factor* factors, int64_t column) const {
        for (int64_t place = 0; place < MAX_FACTORS; ++place) {
            const Factor& factor = factors[first_ + place];
            const int64_t at = column - factor.left;
            if (at >= 0 && at < factor.width) return {factor.up + at / TILE * ((factor.rank + 1) / 2) * LANES, place, factor.rank};
        }
        return {nullptr, 0, 0};
    }

#if defined(HAVE_TILES)
    template <int SUMS>
    void add_at(int64_t tile, int64_t column) const {
        const Columns columns = find(owners_.factors(tile * TILE), column);
        if (!columns.up) return;
        const bf16 *middle = middles_.at(tile * TILE, columns.place), *up = columns.up;
        asm volatile("" ::: "memory");  // the compiler does not know that tiles are read from memory
        for (int64_t at = 0; at < columns.rank; at += DEPTH, middle += DEPTH, up += TILE_SIZE) {
            _tile_loadd(4, middle, middles_.stride() * sizeof(bf16));
            _tile_loadd(6, up, 64);
            if constexpr (SUMS == 0) _tile_dpbf16ps(0, 4, 6);
            if constexpr (SUMS == 1) _tile_dpbf16ps(1, 4, 6);
            if constexpr (SUMS == 2) _tile_dpbf16ps(2, 4, 6);
            if constexpr (SUMS == 3) _tile_dpbf16ps(3, 4, 6);
        }
    }
#endif
};

}  // namespace

#endif
