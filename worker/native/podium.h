// Who comes first, second, and so on in a race.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace {

constexpr int64_t MAX_TRIES = 64;

// The best of those who entered, of equals the one that came first.
class Podium {
    const int64_t places_;
    int64_t count_ = 0;
    float scores_[MAX_TRIES];

  public:
    int64_t tokens[MAX_TRIES];

    explicit Podium(int64_t places) : places_(places) { std::fill(tokens, tokens + MAX_TRIES, -1); }

    // What there is to beat.
    float last() const { return count_ < places_ ? -INFINITY : scores_[count_ - 1]; }

    void enter(float score, int64_t token) {
        if (count_ == places_ && !(score > last())) return;
        int64_t place = count_ < places_ ? count_++ : count_ - 1;
        for (; place > 0 && score > scores_[place - 1]; --place) {
            scores_[place] = scores_[place - 1], tokens[place] = tokens[place - 1];
        }
        scores_[place] = score, tokens[place] = token;
    }
};

}  // namespace
