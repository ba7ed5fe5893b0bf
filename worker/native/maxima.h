// The largest of each 64 neighbouring logits.

#pragma once

#include "team.h"
#include "vectors.h"

namespace {

constexpr int LOGITS = 64;  // of a tile

// Whichever is larger, or no number.
inline Floats larger(Floats a, Floats b) { return (a > b) | (a != a) ? a : b; }

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

// maxima [count] of logits [count, 64]
inline void find_maxima(const float* logits, int64_t count, float* maxima, int threads) {
    const int64_t tasks = (count + WIDTH - 1) / WIDTH;
    Team::run(count * LOGITS < 65536 ? 1 : threads, [&](Team& team) {
        team.each(tasks, std::max<int64_t>(1, tasks / (16 * team.size())), [&](int64_t task) {
            const int64_t first = task * WIDTH, some = std::min<int64_t>(WIDTH, count - first);
            Floats tops[WIDTH] = {};
            for (int64_t i = 0; i < some; ++i) {
                const float* tile = logits + (first + i) * LOGITS;
                for (int line = 0; line < LOGITS / WIDTH; ++line) __builtin_prefetch(tile + 1024 + line * WIDTH);
                tops[i] = larger(larger(load(tile), load(tile + 16)), larger(load(tile + 32), load(tile + 48)));
            }
            Floats found = largest_across(tops);
            std::memcpy(maxima + first, &found, some * sizeof(float));
        });
    });
}

}  // namespace
