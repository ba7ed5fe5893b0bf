// What is multiplied next, asked of memory ahead of time, into the second cache: memory is as busy then as the multipliers are.

#pragma once

#include <algorithm>
#include <cstdint>

namespace {

class Prefetch {
    const char *at_ = nullptr, *end_ = nullptr;
    int64_t rest_ = 0;  // of a turn's number, whose turn it is where it is 0

  public:
    Prefetch() = default;  // nothing

    // So many bytes within so many turns at least; some lines of a cache with every so many of them.
    Prefetch(const void* begin, int64_t bytes, int64_t turns) : at_((const char*)begin), end_(at_ + bytes) {
        int64_t every = 1;
        while (2 * every * bytes <= 64 * turns) every *= 2;
        rest_ = every - 1;
    }

    void fetch(int64_t turn, int64_t lines = 1) {
        if (turn & rest_ || at_ >= end_) return;
        for (int64_t line = 0; line < lines; ++line, at_ += 64) __builtin_prefetch(at_, 0, 2);
    }
};

// The same in turns so rare that there may be fewer of them than lines.
class PrefetchSteps {
    Prefetch next_;
    int64_t lines_ = 1;

  public:
    PrefetchSteps() = default;
    PrefetchSteps(const void* begin, int64_t bytes, int64_t steps)
        : next_(begin, bytes, steps), lines_(std::max<int64_t>(1, (bytes + 64 * steps - 1) / (64 * steps))) {}

    void fetch(int64_t step) { next_.fetch(step, lines_); }
};

}  // namespace
