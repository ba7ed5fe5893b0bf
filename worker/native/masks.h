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
    const uint32_t* bits;  // [count, words]
    int64_t words;

    // A tile of a masked row. One that keeps nothing is left as it is behind maxima of minus infinity, since nobody opens it.
    void apply(int64_t place, int64_t tile) const {
        const int64_t tiles = tiles_of(vocab_size);
        float* tops = maxima + rows[place] * 2 * tiles + 2 * tile;
        float* x = logits + rows[place] * vocab_size + tile * LOGITS;
        const int64_t some = std::min<int64_t>(LOGITS, vocab_size - tile * LOGITS), first = 2 * tile;
        const uint32_t low = bits[place * words + first], high = first + 1 < words ? bits[place * words + first + 1] : 0;
        const uint64_t kept = uint64_t(high) << 32 | low;
        if (!(tops[0] < INFINITY && tops[1] < INFINITY)) return;  // no distribution, whatever is taken from it
        if (kept == ~uint64_t(0)) return;
        if (kept != 0) {
            for (int64_t i = 0; i < some; ++i) x[i] = kept >> i & 1 ? x[i] : -INFINITY;
        }
        for (int half = 0; half < 2; ++half) {
            float top = -INFINITY;
            if (kept != 0) {
                for (int64_t i = half * HALF_TILE; i < std::min<int64_t>(some, (half + 1) * HALF_TILE); ++i) top = std::max(top, x[i]);
            }
            tops[half] = top;
        }
    }
};

inline void apply_masks(Masks masks, int64_t count, int threads) {
    const int64_t tiles = tiles_of(masks.vocab_size), at_once = 256, tasks = (tiles + at_once - 1) / at_once;
    Team::run(count * masks.vocab_size < 65536 ? 1 : threads, [&](Team& team) {
        team.each(count * tasks, 1, [&](int64_t task) {
            const int64_t first = task % tasks * at_once;
            for (int64_t tile = first; tile < std::min(first + at_once, tiles); ++tile) masks.apply(task / tasks, tile);
        });
    });
}

}  // namespace
