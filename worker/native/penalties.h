// Penalties of tokens that sequences have seen, with the roundings of worker/sampling/adjust.py.

#pragma once

#include "maxima.h"

namespace {

// What one sequence has seen.
struct Seen {
    int64_t row, count;
    const int64_t* tokens;    // [count], each once
    const float* num_output;  // [count]: how often each is in the output
    float repetition, presence, frequency;
};

constexpr int64_t FEW_SEEN = 1 << 14;  // tokens that one thread has gone through before another has woken

inline void penalise_row(const Seen& seen, float* logits) {
    if (seen.repetition != 1.0f) {
        for (int64_t i = 0; i < seen.count; ++i) {
            const float x = logits[seen.tokens[i]], more = x * seen.repetition, less = x / seen.repetition;
            logits[seen.tokens[i]] = x < 0.0f ? more : less;
        }
    }
    if (seen.presence == 0.0f && seen.frequency == 0.0f) return;
    for (int64_t i = 0; i < seen.count; ++i) {
        if (seen.num_output[i] == 0.0f) continue;
        volatile float often = seen.frequency * seen.num_output[i];  // rounded before it is taken away
        logits[seen.tokens[i]] = logits[seen.tokens[i]] - often - seen.presence;
    }
}

// Of logits [.., vocab_size], and their maxima with them, if they are known.
inline void penalise(const Seen* every, int64_t num, float* logits, int64_t vocab_size, float* maxima, int threads) {
    const Maxima of{logits, maxima, vocab_size};
    const int64_t halves = 2 * tiles_of(vocab_size);
    int64_t all = 0;
    for (int64_t nth = 0; nth < num; ++nth) all += every[nth].count;
    Team::run(num == 1 || all < FEW_SEEN ? 1 : threads, [&](Team& team) {
        team.each(num, 1, [&](int64_t nth) {
            const Seen& seen = every[nth];
            penalise_row(seen, logits + seen.row * vocab_size);
            if (!maxima) return;
            if (seen.count < halves / 8) {  // all at once are found so much faster than one by one
                for (int64_t i = 0; i < seen.count; ++i) of.find(seen.row, seen.tokens[i] / HALF_TILE, 1);
            } else {
                for (int64_t at = 0; at < halves; at += WIDTH) of.find(seen.row, at, std::min<int64_t>(WIDTH, halves - at));
            }
        });
    });
}

}  // namespace
