// Tokens that may not come next: those of a few tiles that are looked at, or of all logits of a row.

#pragma once

#include "maxima.h"

namespace {

// Of one row: bit t % 32 of word t / 32 says whether token t may come. There is at least one word for each half tile that holds a
// logit.
struct Mask {
    const uint32_t* bits;  // null: whatever there is
    int64_t words;

    bool has(int64_t token) const { return bits == nullptr || (bits[token / HALF_TILE] >> token % HALF_TILE & 1); }

    // A tile's tokens.
    uint64_t kept(int64_t tile) const {
        if (bits == nullptr) return ~uint64_t(0);
        const int64_t first = 2 * tile;
        const uint32_t low = first < words ? bits[first] : 0, high = first + 1 < words ? bits[first + 1] : 0;
        return uint64_t(high) << 32 | low;
    }

    // How many of a vocabulary may come, and which, as far as they are no more than ``most``.
    int64_t tokens(int64_t vocab_size, int64_t most, int32_t* found) const {
        int64_t count = 0;
        for (int64_t word = 0; word < std::min(words, (vocab_size + HALF_TILE - 1) / HALF_TILE); ++word) {
            for (uint32_t left = bits[word]; left; left &= left - 1) {
                const int64_t token = word * HALF_TILE + __builtin_ctz(left);
                if (token >= vocab_size) break;
                if (count++ == most) return count;
                found[count - 1] = int32_t(token);
            }
        }
        return count;
    }

    // Whether it has any, of as many tiles as there are lanes.
    Lanes keeps_any(int64_t tile) const {
        Lanes any = {};
        if (2 * (tile + WIDTH) <= words) {
            const Lanes even = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
            const Lanes odd = {1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31};
            Words low, high;
            std::memcpy(&low, bits + 2 * tile, sizeof low), std::memcpy(&high, bits + 2 * tile + WIDTH, sizeof high);
            return (__builtin_shuffle(low, high, even) | __builtin_shuffle(low, high, odd)) != 0;
        }
        for (int i = 0; i < WIDTH; ++i) any[i] = -(kept(tile + i) != 0);
        return any;
    }

    // Of a tile's logits the largest that may come.
    float largest_of(const float* x, int64_t tile) const {
        const uint64_t both = kept(tile);
        const float low = largest(these(x, both), these(x + WIDTH, both >> WIDTH));
        const float high = largest(these(x + HALF_TILE, both >> HALF_TILE), these(x + HALF_TILE + WIDTH, both >> (HALF_TILE + WIDTH)));
        return std::max(low, high);
    }

    // Over a row of logits and its maxima, as ``Maxima`` has them. A tile that keeps nothing is left as it is behind maxima of minus
    // infinity, since nobody opens it.
    void lay(float* logits, float* maxima, int64_t vocab_size) const {
        for (int64_t tile = 0; tile < tiles_of(vocab_size); ++tile) lay_tile(logits + tile * LOGITS, maxima + 2 * tile, tile, vocab_size);
    }

  private:
    void lay_tile(float* x, float* tops, int64_t tile, int64_t vocab_size) const {
        const int64_t some = std::min<int64_t>(LOGITS, vocab_size - tile * LOGITS);
        const uint64_t both = kept(tile);
        if (!(tops[0] < INFINITY && tops[1] < INFINITY)) return;  // no distribution, whatever is taken from it
        if (both == ~uint64_t(0)) return;
        if (both == 0) {
            tops[0] = tops[1] = -INFINITY;
            return;
        }
        float held[LOGITS];
        float* all = x;
        if (some < LOGITS) {
            all = held;
            std::fill(std::copy(x, x + some, held), held + LOGITS, -INFINITY);
        }
        tops[0] = keep(all, uint32_t(both)), tops[1] = keep(all + HALF_TILE, uint32_t(both >> HALF_TILE));
        if (some < LOGITS) std::copy(held, held + some, x);
    }

    // Of half a tile; returns the largest that is left.
    static float keep(float* x, uint32_t kept) {
        const Floats low = these(x, kept), high = these(x + WIDTH, kept >> WIDTH);
        store(x, low), store(x + WIDTH, high);
        return largest(low, high);
    }

    static Floats these(const float* x, uint64_t kept) {
        const Words places = Words{1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
        return (places & uint32_t(kept)) != 0 ? load(x) : Floats{} - INFINITY;
    }
};

}  // namespace
