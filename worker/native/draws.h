// A token from each row of logits: what worker/sampling does in torch, with the same noise, a thread for each row.
//
// worker/sampling/race.py says what the noise is, and why few tiles need be opened. Here rough logarithms, or
// none, find out which tokens may win; of those few the clocks are computed as everywhere else.

#pragma once

#include <vector>

#include "lanes.h"
#include "masks.h"
#include "noise.h"
#include "podium.h"
#include "tops.h"

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
    // [rows] of those that are drawn: the token that comes whatever the logits are, if none is NaN or +inf; below 0, and null: one is drawn.
    const int64_t* forced;
};

constexpr float SLACK = 1e-3f;  // how far roughness may put a bound below what it bounds, and more
constexpr float LOG_LOGITS = 4.1588830833596715f;
constexpr int MOST_AT_ONCE = 16;  // tiles opened before it is asked again what there is to beat
constexpr int64_t FEW_TOKENS = 1024;  // that a mask leaves: rather than their tiles, they are looked at one by one
constexpr int64_t FEW_LOGITS = 1 << 17;  // that one thread has drawn from before another has woken
constexpr int64_t LIKELIEST_ALONE = 32;  // rows that take their likeliest token: no more of them are worth a thread

// One row of a batch.
class Contest : Tops {
    const Draws& all_;
    const int64_t row_, forced_;
    const Wish& wish_;
    const uint64_t start_;
    float temperature_, inverse_;
    double mass_ = -1.0;  // of all tokens that are kept by top-k, once it is known
    float threshold_ = -INFINITY, above_ = -INFINITY;  // what may win is no smaller, and larger

    static int64_t row_of(const Draws& all, int64_t nth) { return all.at == nullptr ? nth : all.at[nth]; }

  public:
    using Tops::padded;

    // Of the ``nth`` that is drawn; ``memory``: see Tops.
    Contest(const Draws& all, int64_t nth, float* memory)
        : Tops(all.logits + row_of(all, nth) * all.vocab_size, all.vocab_size, {all.bits == nullptr ? nullptr : all.bits[nth], all.words},
               memory),
          all_(all), row_(row_of(all, nth)), forced_(all.forced == nullptr ? -1 : all.forced[nth]), wish_(all.wishes[row_]),
          start_(wish_.start) {}

    // Into [tries].
    void winners(int64_t* chosen) {
        const bool is_filtered = wish_.top_k > 0 || wish_.top_p < 1.0f || wish_.min_p > 0.0f;
        std::fill(chosen, chosen + all_.tries, -1);
        if (forced_ >= 0) {
            join(halves());
            if (largest_ < INFINITY) *chosen = forced_;
            return;
        }
        if (mask_.bits && (is_filtered || all_.tries > 1)) {
            mask_.lay(all_.logits + row_ * vocab_size_, all_.maxima + row_ * 2 * num_tiles_, vocab_size_);
            mask_.bits = nullptr;
        }
        join(halves());
        if (!(std::abs(largest_) < INFINITY)) return;
        temperature_ = std::max(wish_.temperature, 1e-30f);  // smaller ones are zero in float32
        inverse_ = 1.0f / temperature_;
        if (mask_.bits) {
            static thread_local std::vector<int32_t> few;
            few.resize(FEW_TOKENS);
            const int64_t count = mask_.tokens(vocab_size_, FEW_TOKENS, few.data());
            if (count <= FEW_TOKENS) return choose(few.data(), count, chosen);
            find_kept();
        }
        if (largest_ == -INFINITY) return;
        if (wish_.temperature <= 0.0f) {
            if (all_.tries == 1) *chosen = likeliest();
            else rank(all_.tries, chosen);
            return;
        }
        const int32_t top_k = wish_.top_k;
        const float top_p = wish_.top_p, min_p = wish_.min_p;
        if (top_k > 0 && top_k < vocab_size_) threshold_ = last_of(top_k);
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
    const float* halves() const { return all_.maxima + row_ * 2 * num_tiles_; }

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
            if (token < vocab_size_ && (kept >> lane & 1)) found.push_back({token, soonest, lane == first});
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
            const float* halves = this->halves();
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
