// The likeliest tokens of rows of logits, and what their probabilities are divided by: a thread for each row.

#pragma once

#include "tops.h"

namespace {

struct Rankings {
    int64_t rows, vocab_size, places;
    const float* logits;  // [.., vocab_size]
    const float* maxima;  // of them, see Maxima
    const int64_t* at;    // [rows]: which of these they are; null: the first
    float* totals;        // [rows]: the logarithm of the sum of all exponentials, NaN where the logits are no distribution
    float* values;        // [rows, places]: the largest logits, at most MAX_TRIES
    int64_t* tokens;      // [rows, places]: theirs, of equals the lowest first
};

// One row of them.
class Ranking : Tops {
    static constexpr float NOTHING_SEEN = 40.0f;  // what weighs e to its negative adds nothing that could be seen

  public:
    using Tops::padded;

    Ranking(const Rankings& all, int64_t row, float* memory)
        : Tops(all.logits + row * all.vocab_size, all.maxima + row * 2 * tiles_of(all.vocab_size), all.vocab_size, {nullptr, 0},
               memory) {
        join();
    }

    float total() const {
        if (!(std::abs(largest_) < INFINITY)) return NAN;
        double lanes[WIDTH] = {};
        each_open([&](Floats x) { return x > largest_ - NOTHING_SEEN; }, [&](const float* x) {
            Floats sum = {};
            for (int64_t i = 0; i < HALF_TILE; i += WIDTH) sum += exponential(load(x + i) - largest_);
            for (int i = 0; i < WIDTH; ++i) lanes[i] += sum[i];
        });
        double sum = 0.0;
        for (const double lane : lanes) sum += lane;
        return float(double(largest_) + std::log(sum));
    }

    // Those that are at minus infinity come last.
    void list(int64_t places, float* values, int64_t* tokens) const {
        rank(places, tokens);
        int64_t least = 0;
        for (int64_t place = 0; place < places; ++place) {
            if (tokens[place] < 0) {
                while (logits_[least] > -INFINITY) ++least;
                tokens[place] = least++;
            }
            values[place] = logits_[tokens[place]];
        }
    }
};

inline void rank(const Rankings& all, int threads) {
    Team::run(all.rows == 1 ? 1 : threads, [&](Team& team) {
        static thread_local std::vector<float> memory;
        const size_t needed = Ranking::padded(all.vocab_size);
        if (memory.size() < needed) memory.resize(needed);
        team.each(all.rows, 1, [&](int64_t nth) {
            const Ranking ranking(all, all.at == nullptr ? nth : all.at[nth], memory.data());
            all.totals[nth] = ranking.total();
            if (all.places && all.totals[nth] == all.totals[nth]) {
                ranking.list(all.places, all.values + nth * all.places, all.tokens + nth * all.places);
            }
        });
    });
}

}  // namespace
