// The largest of each 32 neighbouring logits: half of a tile of the sampler's, and what one panel of a matrix makes.

#pragma once

#include "team.h"
#include "vectors.h"

namespace {

constexpr int LOGITS = 64;           // of a tile
constexpr int HALF_TILE = LOGITS / 2;

// Whichever is larger, or no number.
inline Floats larger(Floats a, Floats b) {
    return picked(a, b, [](Register one, Register other) { return (one > other) | (one != one) ? one : other; });
}

// Lane i of the result is the largest of all lanes of tops[i].
inline Floats largest_across(Floats* tops) {
    const Lanes even = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
    const Lanes odd = {1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31};
    for (int left = WIDTH / 2; left > 0; left /= 2) {
        for (int i = 0; i < left; ++i) {
            Floats a = tops[2 * i], b = tops[2 * i + 1];
            tops[i] = larger(__builtin_shuffle(a, b, even), __builtin_shuffle(a, b, odd));
        }
    }
    return tops[0];
}

// The first of them, minus infinity behind.
inline Floats first_of(Floats values, int64_t count) {
    for (int64_t i = std::max<int64_t>(count, 0); i < WIDTH; ++i) values[i] = -INFINITY;
    return values;
}

// Of both.
inline float largest(Floats a, Floats b) {
    a = larger(a, b);
    a = larger(a, __builtin_shuffle(a, Lanes{8, 9, 10, 11, 12, 13, 14, 15}));
    a = larger(a, __builtin_shuffle(a, Lanes{4, 5, 6, 7}));
    a = larger(a, __builtin_shuffle(a, Lanes{2, 3}));
    return larger(a, __builtin_shuffle(a, Lanes{1}))[0];
}

inline int64_t tiles_of(int64_t vocab_size) { return (vocab_size + LOGITS - 1) / LOGITS; }

// Logits [rows, vocab_size], and of each row the largest of every half tile: maxima [rows, 2 * tiles]. What does not exist
// counts as minus infinity.
struct Maxima {
    const float* logits;
    float* maxima;
    int64_t vocab_size;

    // Half tiles [first, first + some) of a row; some is at most WIDTH.
    void find(int64_t row, int64_t first, int64_t some) const {
        const float* from = logits + row * vocab_size;
        Floats tops[WIDTH];
        for (int64_t i = 0; i < WIDTH; ++i) {
            int64_t at = (first + i) * HALF_TILE;
            tops[i] = Floats{} - INFINITY;
            if (i >= some) continue;
            if (at + HALF_TILE <= vocab_size) {
                __builtin_prefetch(from + at + 1024);
                __builtin_prefetch(from + at + 1024 + WIDTH);
                tops[i] = larger(load(from + at), load(from + at + WIDTH));
            } else {
                for (int64_t j = at; j < vocab_size; ++j) tops[i] = larger(Floats{} + from[j], tops[i]);
            }
        }
        Floats found = largest_across(tops);
        std::memcpy(maxima + row * 2 * tiles_of(vocab_size) + first, &found, some * sizeof(float));
    }
};

// Of all rows. Every thread of the team calls it.
inline void find_maxima(Maxima of, int64_t rows, Team& team) {
    const int64_t halves = 2 * tiles_of(of.vocab_size), tasks = (halves + WIDTH - 1) / WIDTH;
    team.each(rows * tasks, std::max<int64_t>(1, rows * tasks / (16 * team.size())), [&](int64_t task) {
        const int64_t first = task % tasks * WIDTH;
        of.find(task / tasks, first, std::min<int64_t>(WIDTH, halves - first));
    });
}
inline void find_maxima(Maxima of, int64_t rows, int threads) {
    Team::run(rows * of.vocab_size < 65536 ? 1 : threads, [&](Team& team) { find_maxima(of, rows, team); });
}

// Again, where logits have changed: ``places`` [count] in [rows * vocab_size].
inline void refresh_maxima(Maxima of, const int64_t* places, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
        const int64_t row = places[i] / of.vocab_size;
        of.find(row, (places[i] - row * of.vocab_size) / HALF_TILE, 1);
    }
}

}  // namespace
