// A row of logits by its tiles: which of them are worth opening.

#pragma once

#include <cstring>
#include <vector>

#include "float_order.h"
#include "lanes.h"
#include "masks.h"
#include "maxima.h"
#include "podium.h"

namespace {

constexpr int64_t FETCHED = 16;  // half tiles ahead

// One row, and what may come of it.
class Tops {
  public:
    static int64_t padded(int64_t vocab_size) { return (tiles_of(vocab_size) + WIDTH - 1) / WIDTH * WIDTH; }

  protected:
    const int64_t vocab_size_, num_tiles_, padded_;
    const float *const logits_, *const halves_;  // see Maxima
    Mask mask_;
    float* const maxima_;  // [padded_]
    float largest_;

    // ``memory``: so many floats as are padded.
    Tops(const float* logits, const float* halves, int64_t vocab_size, Mask mask, float* memory)
        : vocab_size_(vocab_size), num_tiles_(tiles_of(vocab_size)), padded_(padded(vocab_size)), logits_(logits), halves_(halves),
          mask_(mask), maxima_(memory) {}

    // The largest of each tile, and of all.
    void join() {
        const Lanes even = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
        const Lanes odd = {1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31};
        Floats top = Floats{} - INFINITY;
        int64_t tile = 0;
        for (; tile + WIDTH <= num_tiles_; tile += WIDTH) {
            Floats a = load(halves_ + 2 * tile), b = load(halves_ + 2 * tile + WIDTH);
            Floats joined = larger(__builtin_shuffle(a, b, even), __builtin_shuffle(a, b, odd));
            store(maxima_ + tile, joined);
            top = larger(joined, top);
        }
        for (; tile < padded_; ++tile) {
            Floats joined = Floats{} - INFINITY;
            if (tile < num_tiles_) joined = larger(Floats{} + halves_[2 * tile], Floats{} + halves_[2 * tile + 1]);
            maxima_[tile] = joined[0];
            top = larger(joined, top);
        }
        largest_ = top[0];
        for (int i = 1; i < WIDTH; ++i) largest_ = larger(Floats{} + top[i], Floats{} + largest_)[0];
    }

    // The likeliest of those that may come. Of other tiles ``maxima_`` are what they promise: they are looked into where that is no
    // less than what is found.
    void find_kept() {
        largest_ = -INFINITY;
        for (int64_t tile = 0; tile < padded_; tile += WIDTH) {
            const Floats tops = mask_.keeps_any(tile) ? load(maxima_ + tile) : Floats{} - INFINITY;
            store(maxima_ + tile, tops);
            largest_ = std::max(largest_, largest(tops, tops));
        }
        if (largest_ == -INFINITY) return;
        float held[LOGITS];
        auto look = [&](int64_t tile) { return maxima_[tile] = mask_.largest_of(open(tile, held), tile); };
        float found = look(likeliest_tile());
        for (int64_t tile = 0; tile < padded_; tile += WIDTH) {
            const Floats tops = load(maxima_ + tile);
            each_bit(bits_of((tops >= found) & (tops > -INFINITY)), [&](int i) { found = std::max(found, look(tile + i)); });
        }
        largest_ = found;
    }

    // Of equals the first.
    int64_t likeliest_tile() const {
        int64_t tile = 0;
        uint32_t found;
        while (!(found = bits_of(load(maxima_ + tile) == largest_))) tile += WIDTH;
        return tile + __builtin_ctz(found);
    }

    int64_t likeliest() const {
        int64_t token = likeliest_tile() * LOGITS;
        while (logits_[token] != largest_ || !mask_.has(token)) ++token;
        return token;
    }

    // The likeliest: all of them are in tiles whose maximum is no smaller than the last of so many of theirs.
    void rank(int64_t tries, int64_t* chosen) const {
        const float least = tries < num_tiles_ ? last_among(maxima_, padded_, tries) : -INFINITY;
        Podium podium(tries);
        float held[LOGITS];
        for (int64_t tile = 0; tile < num_tiles_; ++tile) {
            if (maxima_[tile] < least || maxima_[tile] == -INFINITY) continue;
            const float* x = open(tile, held);
            for (int i = 0; i < LOGITS; ++i) {
                if (x[i] > podium.last()) podium.enter(x[i], tile * LOGITS + i);
            }
        }
        std::copy(podium.tokens, podium.tokens + tries, chosen);
    }

    // Some logits of a tile or of half of one, in ``held`` if there are not as many.
    const float* open(int64_t first, int64_t size, float* held) const {
        const int64_t some = vocab_size_ - first;
        if (some >= size) return logits_ + first;
        for (int64_t i = 0; i < size; ++i) held[i] = i < some ? logits_[first + i] : -INFINITY;
        return held;
    }
    const float* open(int64_t tile, float* held) const { return open(tile * LOGITS, LOGITS, held); }

    // body(half a tile's logits), for each whose maximum passes. They lie far apart: some are on their way while one is read.
    template <typename Passes, typename Body>
    void each_open(Passes passes, Body body) const {
        static thread_local std::vector<int32_t> held;
        if (int64_t(held.size()) < 2 * padded_ + WIDTH) held.resize(2 * padded_ + WIDTH);
        int32_t* const begin = held.data();
        int32_t* end = begin;
        sweep<float>(2 * num_tiles_, [&](auto place) {
            const Floats tops = first_of(place.get_from(halves_), place.count);
            end = put_those(bits_of(passes(tops)), numbered() + int32_t(place.at), end);
        });
        auto fetch = [&](int32_t half) {
            for (int i = 0; i < HALF_TILE; i += WIDTH) __builtin_prefetch(logits_ + int64_t(half) * HALF_TILE + i, 0, 2);
        };
        for (int32_t* one = begin; one < std::min(begin + FETCHED, end); ++one) fetch(*one);
        alignas(64) float partial[HALF_TILE];
        for (int32_t* one = begin; one < end; ++one) {
            if (end - one > FETCHED) fetch(one[FETCHED]);
            body(open(int64_t(*one) * HALF_TILE, HALF_TILE, partial));
        }
    }

    // What the k largest logits reach. Of the k largest tiles each has a logit no smaller than the smallest of their maxima: so is the
    // k-th largest logit, and it is in a tile whose maximum is.
    float last_of(int32_t k) const {
        const float least = k < num_tiles_ ? last_among(maxima_, padded_, k) : -INFINITY;
        static thread_local std::vector<float> found;
        int64_t num = 0;
        auto passes = [&](Floats x) { return (x >= least) & (x > -INFINITY); };
        each_open(passes, [&](const float* x) {
            if (int64_t(found.size()) < num + HALF_TILE + WIDTH) found.resize(2 * num + HALF_TILE + WIDTH);
            float* to = found.data() + num;
            for (int i = 0; i < HALF_TILE; i += WIDTH) to = put_those(bits_of(passes(load(x + i))), load(x + i), to);
            num = to - found.data();
        });
        if (num < k) return least;
        for (; num % WIDTH; ++num) found[num] = -INFINITY;
        // What was not found is below ``least``.
        return std::max(least, last_among(found.data(), num, k));
    }
};

}  // namespace
