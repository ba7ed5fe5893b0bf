// A token from each row of logits: what worker/sampling does in torch, with the same noise, a thread for each row.
//
// worker/sampling/race.py says what the noise is, and why few tiles need be opened. Here rough logarithms, or
// none, find out which tokens may win; of those few the clocks are computed as everywhere else.

#pragma once

#include <vector>

#include "lanes.h"
#include "masks.h"
#include "noise.h"
#include "order.h"
#include "podium.h"

namespace {

typedef double Doubles __attribute__((vector_size(64)));

// What is asked of a row: temperature 0 takes the likeliest token, top_k 0, top_p 1 and min_p 0 leave all of them.
struct Wish {
    uint64_t start;  // of its noise
    float temperature, top_p, min_p;
    int32_t top_k;
};

struct Draws {
    int64_t rows, vocab_size;
    float* logits;         // [rows, vocab_size]; masks are laid over rows that are filtered, or have several tries
    float* maxima;         // see Maxima
    const Wish* wishes;
    int64_t* chosen;       // [rows, tries], -1 where the logits are no distribution, or nobody is left
    int64_t tries;         // so many in their order: who would have won without those before it; of a row that is filtered the first
    const int64_t* at;     // which rows of all these arrays they are; null: they are all
    const uint32_t* const* bits;  // [rows] of those that are drawn, null where all may come: see Mask; null: all may everywhere
    int64_t words;                // of each
    const int64_t* forced;        // [rows] of those that are drawn: the token that comes whatever its logits are, if none is NaN or +inf; below 0: one is drawn; null: of all
};

constexpr float SLACK = 1e-3f;  // how far roughness may put a bound below what it bounds, and more
constexpr float LOG_LOGITS = 4.1588830833596715f;
constexpr int64_t FETCHED = 8;  // tiles ahead
constexpr int MOST_AT_ONCE = 16;  // tiles opened before it is asked again what there is to beat
constexpr int64_t FEW_TOKENS = 1024;  // that a mask leaves: rather than their tiles, they are looked at one by one
constexpr int64_t FEW_LOGITS = 1 << 17;  // that one thread has drawn from before another has woken
constexpr int64_t LIKELIEST_ALONE = 32;  // rows that take their likeliest token: no more of them are worth a thread

// One row of a batch.
class Contest {
    const Draws& all_;
    const int64_t forced_;
    const int64_t row_, num_tiles_, padded_;
    const Wish& wish_;
    const float* logits_;
    Mask mask_;
    const uint64_t start_;
    float* const maxima_;  // [padded_]
    float largest_, temperature_, inverse_;
    double mass_ = -1.0;  // of all tokens that are kept by top-k, once it is known
    float threshold_ = -INFINITY, above_ = -INFINITY;  // what may win is no smaller, and larger

  public:
    static int64_t padded(int64_t vocab_size) { return (tiles_of(vocab_size) + WIDTH - 1) / WIDTH * WIDTH; }

    // Of the ``nth`` that is drawn; ``memory``: so many floats.
    Contest(const Draws& all, int64_t nth, float* memory)
        : all_(all), forced_(all.forced == nullptr ? -1 : all.forced[nth]), row_(all.at == nullptr ? nth : all.at[nth]), num_tiles_(tiles_of(all.vocab_size)), padded_(padded(all.vocab_size)),
          wish_(all.wishes[row_]), logits_(all.logits + row_ * all.vocab_size),
          mask_{all.bits == nullptr ? nullptr : all.bits[nth], all.words}, start_(wish_.start), maxima_(memory) {}

    // Into [tries].
    void winners(int64_t* chosen) {
        const bool is_filtered = wish_.top_k > 0 || wish_.top_p < 1.0f || wish_.min_p > 0.0f;
        std::fill(chosen, chosen + all_.tries, -1);
        if (forced_ >= 0) {
            join_halves();
            if (largest_ < INFINITY) *chosen = forced_;
            return;
        }
        if (mask_.bits && (is_filtered || all_.tries > 1)) {
            mask_.lay(all_.logits + row_ * all_.vocab_size, all_.maxima + row_ * 2 * num_tiles_, all_.vocab_size);
            mask_.bits = nullptr;
        }
        join_halves();
        if (!(std::abs(largest_) < INFINITY)) return;
        temperature_ = std::max(wish_.temperature, 1e-30f);  // smaller ones are zero in float32
        inverse_ = 1.0f / temperature_;
        if (mask_.bits) {
            static thread_local std::vector<int32_t> few;
            few.resize(FEW_TOKENS);
            const int64_t count = mask_.tokens(all_.vocab_size, FEW_TOKENS, few.data());
            if (count <= FEW_TOKENS) return choose(few.data(), count, chosen);
            find_kept();
        }
        if (largest_ == -INFINITY) return;
        if (wish_.temperature <= 0.0f) {
            if (all_.tries == 1) *chosen = likeliest();
            else rank(chosen);
            return;
        }
        const int32_t top_k = wish_.top_k;
        const float top_p = wish_.top_p, min_p = wish_.min_p;
        if (top_k > 0 && top_k < all_.vocab_size) threshold_ = last_of(top_k);
        const float kept = threshold_;
        if (min_p > 0.0f) {
            // In two roundings, as elsewhere.
            volatile float below = temperature_ * logarithm(min_p);
            threshold_ = std::max(threshold_, largest_ + below);
        }
        for (;;) {
            Podium podium(is_filtered ? 1 : all_.tries);
            race(podium);
            const float drawn = logits_[podium.tokens[0]];
            if (top_p >= 1.0f || !is_outside(drawn, kept, top_p)) {
                std::copy(podium.tokens, podium.tokens + all_.tries, chosen);
                return;
            }
            above_ = drawn;
        }
    }

  private:
    void join_halves() {
        const Lanes even = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
        const Lanes odd = {1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31};
        const float* halves = all_.maxima + row_ * 2 * num_tiles_;
        Floats top = Floats{} - INFINITY;
        int64_t tile = 0;
        for (; tile + WIDTH <= num_tiles_; tile += WIDTH) {
            Floats a = load(halves + 2 * tile), b = load(halves + 2 * tile + WIDTH);
            Floats joined = larger(__builtin_shuffle(a, b, even), __builtin_shuffle(a, b, odd));
            store(maxima_ + tile, joined);
            top = larger(joined, top);
        }
        for (; tile < padded_; ++tile) {
            Floats joined = Floats{} - INFINITY;
            if (tile < num_tiles_) joined = larger(Floats{} + halves[2 * tile], Floats{} + halves[2 * tile + 1]);
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

    // Of these, in their order.
    void choose(const int32_t* tokens, int64_t count, int64_t* chosen) {
        alignas(64) float logits[FEW_TOKENS + WIDTH], bounds[FEW_TOKENS + WIDTH];
        for (int64_t i = 0; i < count; ++i) __builtin_prefetch(logits_ + tokens[i]);
        soonest_of(tokens, count, bounds);
        int64_t best = 0;
        for (int64_t i = 0; i < count; ++i) {
            logits[i] = logits_[tokens[i]];
            if (logits[i] > logits[best]) best = i;
        }
        if (count == 0 || logits[best] == -INFINITY) return;
        largest_ = logits[best];
        if (wish_.temperature <= 0.0f) {
            *chosen = tokens[best];
            return;
        }
        for (int64_t i = count; i % WIDTH; ++i) logits[i] = -INFINITY, bounds[i] = 1.0f;
        for (int64_t i = 0; i < count; i += WIDTH) {
            store(bounds + i, (load(logits + i) - largest_) * inverse_ - rough_logarithm(load(bounds + i)) + SLACK);
        }
        Podium podium(1);
        auto try_one = [&](int64_t i) {
            const uint64_t tile_word = word_of(start_, TILE_WORDS + tokens[i] / LOGITS);
            const bool is_first = int(tile_word % LOGITS) == tokens[i] % LOGITS;
            const float earliest = uniform_of(tile_word) / LOGITS;
            finish({tokens[i], is_first ? earliest : earliest + uniform_of(word_of(start_, tokens[i])), is_first}, podium);
        };
        best = std::max_element(bounds, bounds + count) - bounds;
        try_one(best);
        for (int64_t i = 0; i < count; i += WIDTH) {
            each_bit(bits_of(load(bounds + i) >= podium.last()), [&](int lane) {
                if (i + lane != best && i + lane < count) try_one(i + lane);
            });
        }
        *chosen = podium.tokens[0];
    }

    // Before these no clock of some tokens is over; a whole number of vectors.
    void soonest_of(const int32_t* tokens, int64_t count, float* soonest) const {
        constexpr int EIGHT = WIDTH / 2;
        for (int64_t i = 0; i < count; i += EIGHT) {
            Longs token;
            for (int lane = 0; lane < EIGHT; ++lane) token[lane] = tokens[std::min(i + lane, count - 1)];
            const Longs tile_word = mixed(start_ + (TILE_WORDS + token / LOGITS) * GAMMA), word = mixed(start_ + token * GAMMA);
            const SignedLongs is_other = (tile_word % LOGITS) != (token % LOGITS);
            const EightFloats own = eight_uniforms(word) * -__builtin_convertvector(is_other, EightFloats);
            const EightFloats sum = eight_uniforms(tile_word) / float(LOGITS) + own;
            std::memcpy(soonest + i, &sum, sizeof sum);
        }
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
    void rank(int64_t* chosen) const {
        const float least = all_.tries < num_tiles_ ? last_among(maxima_, padded_, all_.tries) : -INFINITY;
        Podium podium(all_.tries);
        float held[LOGITS];
        for (int64_t tile = 0; tile < num_tiles_; ++tile) {
            if (maxima_[tile] < least || maxima_[tile] == -INFINITY) continue;
            const float* x = open(tile, held);
            for (int i = 0; i < LOGITS; ++i) {
                if (x[i] > podium.last()) podium.enter(x[i], tile * LOGITS + i);
            }
        }
        std::copy(podium.tokens, podium.tokens + all_.tries, chosen);
    }

    // A tile's logits, in ``held`` if it is not whole.
    const float* open(int64_t tile, float* held) const {
        const int64_t first = tile * LOGITS, some = all_.vocab_size - first;
        if (some >= LOGITS) return logits_ + first;
        for (int64_t i = 0; i < LOGITS; ++i) held[i] = i < some ? logits_[first + i] : -INFINITY;
        return held;
    }

    void fetch(int64_t tile) const {
        for (int i = 0; i < LOGITS; i += WIDTH) __builtin_prefetch(logits_ + tile * LOGITS + i, 0, 2);
    }

    // body(a tile's logits), for each whose maximum passes. They lie far apart: some are on their way while one is read.
    template <typename Passes, typename Body>
    void each_open(Passes passes, Body body) const {
        static thread_local std::vector<int32_t> held;
        if (int64_t(held.size()) < padded_ + WIDTH) held.resize(padded_ + WIDTH);
        const Lanes lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        int32_t* const tiles = held.data();
        int32_t* end = tiles;
        for (int64_t tile = 0; tile < padded_; tile += WIDTH) {
            end = put_those(bits_of(passes(load(maxima_ + tile))), lanes + int32_t(tile), end);
        }
        for (int32_t* one = tiles; one < std::min(tiles + FETCHED, end); ++one) fetch(*one);
        alignas(64) float partial[LOGITS];
        for (int32_t* one = tiles; one < end; ++one) {
            if (end - one > FETCHED) fetch(one[FETCHED]);
            body(open(*one, partial));
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
            if (int64_t(found.size()) < num + LOGITS + WIDTH) found.resize(2 * num + LOGITS + WIDTH);
            float* to = found.data() + num;
            for (int i = 0; i < LOGITS; i += WIDTH) to = put_those(bits_of(passes(load(x + i))), load(x + i), to);
            num = to - found.data();
        });
        if (num < k) return least;
        for (; num % WIDTH; ++num) found[num] = -INFINITY;
        // What was not found is below ``least``.
        return std::max(least, last_among(found.data(), num, k));
    }

    // The tile of the likeliest token first. Of the others those that may beat what it had, the most promising of them first.
    void race(Podium& podium) const {
        const int64_t first = likeliest_tile();
        enter(first, podium);
        static thread_local std::vector<std::pair<float, int64_t>> left;
        left.clear();
        const float offset = LOG_LOGITS + SLACK - podium.last();
        for (int64_t tile = 0; tile < padded_; tile += WIDTH) {
            Floats maxima = load(maxima_ + tile);
            Lanes is_in = (maxima >= threshold_) & (maxima > above_);
            if (!bits_of(is_in)) continue;
            // A clock is later than its uniform number: who has a larger one than this comes too late, without a logarithm.
            Floats score = (maxima - largest_) * inverse_, uniform = uniforms_of(start_, TILE_WORDS + tile);
            const uint32_t early = bits_of(is_in & (uniform <= exponential(score + offset) * 1.0001f));
            if (!early) continue;
            Floats bound = score - rough_logarithm(rough_exponentials(uniform)) + LOG_LOGITS;
            each_bit(early, [&](int i) {
                if (tile + i != first) left.emplace_back(bound[i], tile + i);
            });
        }
        if (left.empty()) return;
        std::iter_swap(std::max_element(left.begin(), left.end()), left.end() - 1);
        enter(left.back().second, podium);
        left.pop_back();
        auto is_late = [&](const auto& tile) { return tile.first + SLACK < podium.last(); };
        left.erase(std::remove_if(left.begin(), left.end(), is_late), left.end());
        // The most promising of them first, two, four, eight at a time: soon there is more to beat.
        std::make_heap(left.begin(), left.end());
        static thread_local std::vector<Runner> runners;
        for (int at_once = 2; !left.empty() && !is_late(left.front()); at_once = std::min(2 * at_once, MOST_AT_ONCE)) {
            runners.clear();
            for (int nth = 0; nth < at_once && !left.empty() && !is_late(left.front()); ++nth) {
                find_runners(left.front().second, podium.last(), runners);
                std::pop_heap(left.begin(), left.end());
                left.pop_back();
            }
            for (const Runner& runner : runners) __builtin_prefetch(logits_ + runner.token);
            for (const Runner& runner : runners) finish(runner, podium);
        }
    }

    // A token that may win, as far as its noise says.
    struct Runner {
        int64_t token;
        float soonest;  // its clock is no earlier
        bool is_first;  // of its tile
    };

    // The tokens of a tile that would beat ``best`` if each were as likely as the likeliest of them: its logits need not be read for
    // that.
    void find_runners(int64_t tile, float best, std::vector<Runner>& found) const {
        const uint64_t tile_word = word_of(start_, TILE_WORDS + tile);
        // No clock is earlier than its uniform number.
        const float earliest = uniform_of(tile_word) / LOGITS;
        const float latest = std::exp((maxima_[tile] - largest_) * inverse_ + SLACK - best) * 1.0001f - earliest;
        if (!(latest >= 0.0f)) return;
        const int first = int(tile_word % LOGITS);
        const uint64_t kept = mask_.kept(tile);
        auto add = [&](int lane, float soonest) {
            const int64_t token = tile * LOGITS + lane;
            if (token < all_.vocab_size && (kept >> lane & 1)) found.push_back({token, soonest, lane == first});
        };
        add(first, earliest);
        for (int i = 0; i < LOGITS; i += WIDTH) {
            if (!uint16_t(kept >> i)) continue;
            const Floats uniform = uniforms_of(start_, tile * LOGITS + i);
            each_bit(bits_of(uniform <= latest), [&](int lane) {
                if (i + lane != first) add(i + lane, earliest + uniform[lane]);
            });
        }
    }

    void finish(const Runner& runner, Podium& podium) const {
        const float logit = logits_[runner.token];
        if (!(logit >= threshold_ && logit > above_)) return;
        const float head_start = (logit - largest_) / temperature_;
        if (head_start == -INFINITY || head_start - std::log(runner.soonest) + SLACK < podium.last()) return;
        const float own = runner.is_first ? 0.0f : exponential_of(word_of(start_, runner.token));
        const float earliest = exponential_of(word_of(start_, TILE_WORDS + runner.token / LOGITS)) / LOGITS;
        podium.enter(head_start - logarithm(own + earliest), runner.token);
    }

    void enter(int64_t tile, Podium& podium) const {
        static thread_local std::vector<Runner> runners;
        runners.clear();
        find_runners(tile, podium.last(), runners);
        for (const Runner& runner : runners) finish(runner, podium);
    }

    Floats weights(Floats x) const {
#if defined(__AVX512BF16__)
        return power_of_two((__m512)((x - largest_) * (inverse_ * 1.44269504088896341f)));
#else
        return exponential((x - largest_) * inverse_);
#endif
    }

    // What the tokens weigh whose logit passes, of the tiles whose maximum does.
    template <typename Passes>
    double mass_of(Passes passes) const {
        Doubles mass = {};
        each_open(passes, [&](const float* x) {
            Floats sum = {};
            for (int64_t i = 0; i < LOGITS; i += WIDTH) {
                Floats logit = load(x + i);
                sum += passes(logit) ? weights(logit) : Floats{};
            }
            EightFloats halves[2];
            std::memcpy(halves, &sum, sizeof sum);
            mass += __builtin_convertvector(halves[0], Doubles) + __builtin_convertvector(halves[1], Doubles);
        });
        double all = 0.0;
        for (int i = 0; i < WIDTH / 2; ++i) all += mass[i];
        return all;
    }

    // Whether the tokens likelier than the one drawn have ``top_p`` of the mass of all that are kept.
    bool is_outside(float drawn, float kept, float top_p) {
        if (drawn >= largest_) return false;
        const double above = mass_of([&](Floats x) { return x > drawn; }), share = top_p;
        if (mass_ < 0.0) {
            // Every other half tile has its largest token at least: mostly this is enough to know.
            const float* halves = all_.maxima + row_ * 2 * num_tiles_;
            Floats rest = {};
            sweep<float>(2 * num_tiles_, [&](auto place) {
                Floats top = first_of(place.get_from(halves), place.count);
                rest += (top <= drawn) & (top >= kept) ? weights(top) : Floats{};
            });
            if (above < share * (above + sum_of(rest)) * 0.99999) return false;
            // What weighs e to the -40 adds nothing that could be seen.
            const float least = std::max(kept, largest_ - 40.0f * temperature_);
            mass_ = mass_of([&](Floats x) { return x >= least; });
        }
        return above > 0.0 && above >= share * mass_;
    }
};

// Whether one thread has drawn before another has woken, which beside others may take it as long as a step takes.
inline bool are_soon_drawn(const Draws& draws) {
    if (draws.rows == 1 || draws.rows * draws.vocab_size < FEW_LOGITS) return true;
    int64_t num_long = draws.rows / LIKELIEST_ALONE;
    for (int64_t nth = 0; nth < draws.rows; ++nth) {
        const Wish& wish = draws.wishes[draws.at == nullptr ? nth : draws.at[nth]];
        num_long += wish.temperature > 0.0f || draws.tries > 1 || (draws.bits != nullptr && draws.bits[nth] != nullptr);
    }
    return num_long <= 1;
}

inline void draw(const Draws& draws, int threads) {
    Team::run(are_soon_drawn(draws) ? 1 : threads, [&](Team& team) {
        static thread_local std::vector<float> memory;
        const size_t needed = Contest::padded(draws.vocab_size);
        if (memory.size() < needed) memory.resize(needed);
        team.each(draws.rows, 1, [&](int64_t nth) {
            Contest(draws, nth, memory.data()).winners(draws.chosen + nth * draws.tries);
        });
    });
}

}  // namespace
