// Tiles of few rows by a panel, step by step as it arrives from memory.

#pragma once

#include "finish.h"
#include "prefetch.h"

#if defined(HAVE_TILES)

namespace {

// A step of a panel is its two tiles, of bfloat16 each.
constexpr int STEP_BYTES = 2 * TILE_SIZE * int(sizeof(bf16));

// A panel as it is packed.
struct ArrivingPacked {
    const bf16* at;

    const bf16* step() {
        const bf16* own = at;
#pragma GCC unroll 4
        for (int line = 0; line < STEP_BYTES; line += 64) {
            __builtin_prefetch((const char*)own + Decoding::FAR + line, 0, 2);
            __builtin_prefetch((const char*)own + Decoding::NEAR + line);
        }
        at += 2 * TILE_SIZE;
        return own;
    }
};

// A panel that is coded: a step is decoded while the tiles' unit multiplies the one before. ``held``: room for the whole panel, which
// is left there, or for HELD steps where it is not ``is_kept``.
class ArrivingCoded {
    Decoding decoding_;
    bf16* const held_;
    const int64_t mask_;
    int64_t step_ = 0;

    bf16* place(int64_t step) const { return held_ + (step & mask_) * 2 * TILE_SIZE; }

  public:
    static constexpr int64_t HELD = 4;

    ArrivingCoded(const Matrix& matrix, int64_t panel, bf16* held, bool is_kept)
        : decoding_(matrix.coded, panel, matrix.size, 0, matrix.size, held), held_(held), mask_(is_kept ? -1 : HELD - 1) {
        decoding_.step(held);
    }

    [[gnu::always_inline]] const bf16* step() {
        if (decoding_.left()) decoding_.step(place(step_ + 1));
        return place(step_++);
    }
};

// A panel that is in a cache already, while the next one arrives.
struct Arrived {
    const bf16* at;
    PrefetchSteps next;
    int64_t number = 0;

    const bf16* step() {
        const bf16* own = at + number * 2 * TILE_SIZE;
#pragma GCC unroll 4
        for (int line = 0; line < STEP_BYTES; line += 64) __builtin_prefetch((const char*)own + Decoding::NEAR + line);
        next.fetch(number++);
        return own;
    }
};

// sums [M][2][16][16] of M tiles of rows, ``row_bytes`` from row to row.
template <int M, typename Panel>
void multiply_arriving(const bf16* const (&tiles)[M], int64_t row_bytes, int64_t steps, Panel panel, float* sums) {
    const bf16 *first = tiles[0], *second = tiles[M - 1];
    asm volatile("" ::: "memory");  // the compiler does not know that tiles are read from memory
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (M > 1) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t step = 0; step < steps; ++step, first += DEPTH, second += DEPTH) {
        const bf16* b = panel.step();
        asm volatile("" ::: "memory");
        _tile_loadd(4, first, row_bytes);
        _tile_loadd(6, b, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b + TILE_SIZE, 64);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (M > 1) {
            _tile_loadd(5, second, row_bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + TILE * TILE, 64);
    if constexpr (M > 1) {
        _tile_stored(2, sums + 2 * TILE * TILE, 64);
        _tile_stored(3, sums + 3 * TILE * TILE, 64);
    }
}

}  // namespace

#endif
