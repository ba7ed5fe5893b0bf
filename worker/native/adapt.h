// What adapters make of one product's input: for the rows of each, up (down x), in bfloat16, or y += that.
//
// A row or two of each adapter, as where everybody decodes: it is the adapters that take their time to arrive, and they are
// read once, in order. Whole tiles of rows, as of a prompt, go through the narrow matrix by tiles.

#pragma once

#include "narrow.h"

#if defined(__AVX512BF16__)

namespace {

// Middles on to y [rows, columns], to what is there or, but for tiles, in its place.
template <bool ADDS>
class Widen {
    const Middles middles_;
    bf16* const y_;
    const int64_t columns_;

  public:
    Widen(Middles middles, bf16* y, int64_t columns) : middles_(middles), y_(y), columns_(columns) {}

    void take(const Owners& owners, const Owners::Task& task, const Factor* factors) const {
        if (!ADDS) clear(owners, task, factors);
        for (int64_t number = 0; number < MAX_FACTORS; ++number) {
            const Factor& factor = factors[number];
            if (!factor.width) continue;
            if (task.is_tiles) {
                for (int64_t tile = task.first; tile < task.first + task.count; ++tile) add_tile(tile, factor, number);
            } else {
                add_rows(owners.loose(task), task.count, factor, number);
            }
        }
    }

  private:
    // Rows whose columns are not all made.
    void clear(const Owners& owners, const Owners::Task& task, const Factor* factors) const {
        int64_t width = 0;
        for (int64_t number = 0; number < MAX_FACTORS; ++number) width += factors[number].width;
        if (width == columns_) return;
        const int32_t* rows = owners.loose(task);
        for (int64_t at = 0; at < task.count; ++at) std::memset(y_ + rows[at] * columns_, 0, columns_ * sizeof(bf16));
    }

    void add_tile(int64_t tile, const Factor& factor, int64_t number) const {
        alignas(64) float sums[2][TILE * TILE];
        const int64_t pairs = (factor.rank + 1) / 2, steps = Middles::held_of(factor.rank) / DEPTH;
        for (int64_t at = 0; at < factor.width; at += 2 * TILE) {
            // A tile of ``up`` reaches into what comes behind it, which the zeros of the middle meet.
            const bf16 *left = factor.up + at * 2 * pairs, *right = at + TILE < factor.width ? left + TILE * 2 * pairs : left;
            multiply<1, 2, false>({middles_.at(tile * TILE, number)}, middles_.stride() * sizeof(bf16), DEPTH, {left, right}, TILE_SIZE,
                                  steps, {{sums[0], sums[1]}});
            for (int row = 0; row < TILE; ++row) {
                bf16* to = y_ + (tile * TILE + row) * columns_ + factor.left + at;
                for (int side = 0; side < 2 && at + side * TILE < factor.width; ++side) {
                    const Place<bf16> place{side * TILE, int(std::min<int64_t>(TILE, factor.width - at - side * TILE))};
                    place.put_into(to, place.get_from(to) + load(sums[side] + row * TILE));
                }
            }
        }
    }

    void add_rows(const int32_t* rows, int64_t count, const Factor& factor, int64_t number) const {
        int64_t at = 0;
        for (; at + 8 <= count; at += 8) some<8>(rows + at, factor, number);
        for (; at + 4 <= count; at += 4) some<4>(rows + at, factor, number);
        for (; at + 2 <= count; at += 2) some<2>(rows + at, factor, number);
        if (at < count) some<1>(rows + at, factor, number);
    }

    template <int N>
    void some(const int32_t* rows, const Factor& factor, int64_t number) const {
        const bf16* inputs[N];
        for (int row = 0; row < N; ++row) inputs[row] = middles_.at(rows[row], number);
        const int64_t pairs = (factor.rank + 1) / 2;
        for (int64_t at = 0; at < factor.width; at += TILE) {
            const Place<bf16> place{factor.left + at, int(std::min<int64_t>(TILE, factor.width - at))};
            __m512 sums[N];
            for (int row = 0; row < N; ++row) {
                sums[row] = ADDS ? (__m512)place.get_from(y_ + rows[row] * columns_) : _mm512_setzero_ps();
            }
            products<N>(inputs, factor.up + at * 2 * pairs, pairs, sums);
            for (int row = 0; row < N; ++row) place.put_into(y_ + rows[row] * columns_, (Floats)sums[row]);
        }
    }
};

// y += all of it. Every thread of the team calls it, each with Tiles of its own. ``first``: of the product's factors, among all of
// an adapter.
inline void adapt(Team& team, const Owners& owners, int64_t first, Input input, Middles middles, bf16* y, int64_t columns) {
    const Narrow narrow(input, middles);
    const Widen<true> widen(middles, y, columns);
    owners.each(team, first, [&](const Owners::Task& task, const Factor* factors) {
        narrow.take(owners, task, factors);
        widen.take(owners, task, factors);
    });
}

// The middles of tiles, and of the other rows what is added to y, in ``added``.
inline void prepare(Team& team, const Owners& owners, int64_t first, Input input, Middles middles, bf16* added, int64_t columns) {
    const Narrow narrow(input, middles);
    const Widen<false> widen(middles, added, columns);
    owners.each(team, first, [&](const Owners::Task& task, const Factor* factors) {
        narrow.take(owners, task, factors);
        if (!task.is_tiles) widen.take(owners, task, factors);
    });
}

}  // namespace

#endif
