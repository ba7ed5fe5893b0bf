// What parts of chunks add up to, on its way to being joined.
//
// However many parts a step has, few are held at once: each takes the place of one long before it, for which it waits. Sums go
// from a part to the next in their order, whoever computes them and whenever, so that no bit depends on it.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "team.h"

namespace {

constexpr int PLACES_OF_A_THREAD = 4;  // that one which is put aside holds up the others late

struct Abandoned {};  // whoever waits for a part that nobody computes any more

// Those of one layer after the other. A part is known by its number in the order in which they are begun.
class Parts {
    int64_t size_ = 0, count_ = 0, num_places_ = 0;
    std::vector<float> places_;
    std::unique_ptr<std::atomic<int64_t>[]> users_;  // of each place: the part that has it, or may take it
    std::unique_ptr<std::atomic<bool>[]> met_;       // of each part: one of the two that come to it is there

  public:
    // So many parts, each of at most ``size`` floats.
    void begin(int64_t count, int64_t size, int threads) {
        size_ = size, count_ = count;
        num_places_ = std::min<int64_t>(count, PLACES_OF_A_THREAD * std::max(threads, 1));
        places_.resize(num_places_ * size);
        users_.reset(new std::atomic<int64_t>[num_places_]);
        for (int64_t place = 0; place < num_places_; ++place) users_[place] = place;
        met_.reset(new std::atomic<bool>[count]);
        for (int64_t part = 0; part < count; ++part) met_[part] = false;
    }

    float* at(int64_t part) { return places_.data() + part % num_places_ * size_; }

    // Its place, once it is free: those who hold it have begun before, and need nothing that begins later. Throws where some of the
    // team have failed, who may have held it.
    float* take(int64_t part, const Team& team) {
        for (int turn = 0; users_[part % num_places_].load(std::memory_order_acquire) != part; ++turn) {
            if (team.has_failed()) throw Abandoned();
            if (turn < TURNS) pause();
            else std::this_thread::yield();
        }
        return at(part);
    }

    // Its place is free for who comes next, or for the next layer's first.
    void leave(int64_t part) {
        const int64_t place = part % num_places_, next = part + num_places_;
        users_[place].store(next < count_ ? next : place, std::memory_order_release);
    }

    // Said once when it is computed, and once when all before it are joined; true for whoever comes second.
    bool are_met(int64_t part) {
        if (!met_[part].exchange(true)) return false;
        met_[part] = false;
        return true;
    }
};

}  // namespace
