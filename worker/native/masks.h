// Tokens that may not come next: their logits go to minus infinity, and the maxima of half tiles are kept true.

#pragma once

#include "maxima.h"

namespace {

// Of some rows of logits and maxima, as ``Maxima`` has them: bit t % 32 of word t / 32 says whether token t may come. A row of
// words has at least one for each half tile that holds a logit.
struct Masks {
    float* logits;
    float* maxima;
    int64_t vocab_size;
    const int64_t* rows;
    const uint32_t* const* bits;  // [count][words]
    int64_t words;

    // A tile of a masked row. One that keeps nothing is left as it is behind maxima of minus infinity, since nobody opens it.
    void apply(int64_t place, int64_t tile) const {
        const int64_t tiles = tiles_of(vocab_size);
        float* tops = maxima + rows[place] * 2 * tiles + 2 * tile;
        float* x = logits + rows[place] * vocab_size + tile * LOGITS;
        const int64_t some = std::min<int64_t>(LOGITS, vocab_size - tile * LOGITS), first = 2 * tile;
        const uint32_t low = bits[place][first], high = first + 1 < words ? bits[place][first + 1] : 0;
        const uint64_t kept = uint64_t(high) << 32 | low;
        if (!(tops[0] < INFINITY && tops[1] < INFINITY)) return;  // no distribution, whatever is taken from it
        if (kept == ~uint64_t(0)) return;
        if (kept == 0) {
            tops[0] = tops[1] = -INFINITY;
            return;
        }
        float held[LOGITS];
        float* all = x;
        if (some < LOGITS) {
            all = held;
            std::fill(std::copy(x, x + some, held), held + LOGITS, -INFINITY);
        }
        tops[0] = keep(all, low), tops[1] = keep(all + HALF_TILE, high);
        if (some < LOGITS) std::copy(held, held + some, x);
    }

  private:
    // Of half a tile; returns the largest that is left.
    static float keep(float* x, uint32_t kept) {
        const Words places = Words{1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
        const Floats none = Floats{} - INFINITY;
        const Floats low = (places & kept) != 0 ? load(x) : none;
        const Floats high = (places & kept >> WIDTH) != 0 ? load(x + WIDTH) : none;
        store(x, low), store(x + WIDTH, high);
        return largest(low, high);
    }
};

constexpr int64_t FEW_MASKED = 1 << 19;  // logits that one thread has masked before another has woken, as most tiles keep none

inline void apply_masks(Masks masks, int64_t count, int threads) {
    const int64_t tiles = tiles_of(masks.vocab_size), at_once = 256, tasks = (tiles + at_once - 1) / at_once;
    Team::run(count * masks.vocab_size <= FEW_MASKED ? 1 : threads, [&](Team& team) {
        team.each(count * tasks, 1, [&](int64_t task) {
            const int64_t first = task % tasks * at_once;
            for (int64_t tile = first; tile < std::min(first + at_once, tiles); ++tile) masks.apply(task / tasks, tile);
        });
    });
}

}  // namespace
