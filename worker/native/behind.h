// What is read next, on its way into the second cache: memory is as busy then as the multipliers are.

#pragma once

#include <cstdint>

namespace {

class Behind {
    const char *at_ = nullptr, *end_ = nullptr;
    int64_t rest_ = 0;  // of a turn's number, whose turn it is where it is 0

  public:
    Behind() = default;  // nothing

    // So many bytes within so many turns at least; one line of a cache with every so many of them.
    Behind(const void* begin, int64_t bytes, int64_t turns) : at_((const char*)begin), end_(at_ + bytes) {
        int64_t every = 1;
        while (2 * every * bytes <= 64 * turns) every *= 2;
        rest_ = every - 1;
    }

    void fetch(int64_t turn) {
        if (turn & rest_ || at_ >= end_) return;
        __builtin_prefetch(at_, 0, 2);
        at_ += 64;
    }
};

}  // namespace
