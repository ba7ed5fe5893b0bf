// A token from each row of logits: what worker/sampling does in torch, with the same noise, a thread for each row.
//
// worker/sampling/race.py says what the noise is, and why few tiles need be opened. Here rough logarithms, or
// none, find out which tokens may win; of those few the clocks are computed as everywhere else.

#pragma once

#include <functional>
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
constexpr int64_t ADDED_AT_ONCE = 4;  // half tiles whose weights are one sum in float32 before they go to that in float64
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
        : Tops(all.logits + row_of(all, nth) * all.vocab_size, all.maxima + row_of(all, nth) * 2 * tiles_of(all.vocab_size),
               all.vocab_size, {all.bits == nullptr ? nullptr : all.bits[nth], all.words}, memory),
          all_(all), row_(row_of(all, nth)), forced_(all.forced == nullptr ? -1 : all.forced[nth]), wish_(all.wishes[row_]),
          start_(wish_.start) {}

    // Into [tries].
    void winners(int64_t* chosen) {
        const bool is_filtered = wish_.top_k > 0 || wish_.top_p < 1.0f || wish_.min_p > 0.0f;
        std::fill(chosen, chosen + all_.tries, -1);
        if (forced_ >= 0) {
            join();
            if (largest_ < INFINITY) *chosen = forced_;
            return;
        }
        if (mask_.bits && (is_filtered || all_.tries > 1)) {
            mask_.lay(all_.logits + row_ * vocab_size_, all_.maxima + row_ * 2 * num_tiles_, vocab_size_);
            mask_.bits = nullptr;
        }
        join();
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
            const float head_start = (logits[i] - largest_) / temperature_;
            if (head_start > -INFINITY) finish(tokens[i], head_start, podium);
        };
        best = std::max_element(bounds, bounds + count) - bounds;
        try_one(best);
        for (int64_t i = 0; i < count; i += WIDTH) {
            each_bit(bits_of(load(bounds + i) >= podium.last()), [&](int lane) {
                if (i + lane != best && i + lane < count && bounds[i + lane] >= podium.last()) try_one(i + lane);
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
        const int32_t first = int32_t(likeliest_tile());
        enter(&first, 1, podium);
        // Those that are early enough, as far as their uniform numbers say: a clock is later than its own, so who has a larger one than
        // this comes too late, without a logarithm.
        static thread_local std::vector<float> scores, uniforms;
        static thread_local std::vector<int32_t> tiles;
        if (int64_t(tiles.size()) < padded_ + WIDTH) {
            for (auto* held : {&scores, &uniforms}) held->resize(padded_ + WIDTH);
            tiles.resize(padded_ + WIDTH);
        }
        const float offset = LOG_LOGITS + SLACK - podium.last();
        int64_t count = 0;
        for (int64_t tile = 0; tile < padded_; tile += WIDTH) {
            const Floats maxima = load(maxima_ + tile);
            const Lanes is_in = (maxima >= threshold_) & (maxima > above_);
            if (!bits_of(is_in)) continue;
            const Floats score = (maxima - largest_) * inverse_, uniform = uniforms_of(start_, TILE_WORDS + tile);
            const uint32_t early = bits_of(is_in & (uniform <= rough_exponential(score + offset) * 1.0001f));
            put_those(early, score, scores.data() + count);
            put_those(early, uniform, uniforms.data() + count);
            count = put_those(early, numbered() + int32_t(tile), tiles.data() + count) - tiles.data();
        }
        static thread_local std::vector<std::pair<float, int32_t>> left;
        left.clear();
        for (int64_t i = 0; i < count; i += WIDTH) {
            const Floats logarithms = rough_logarithm(rough_exponentials(load(uniforms.data() + i)));
            const Floats bounds = load(scores.data() + i) - logarithms + LOG_LOGITS;
            for (int64_t lane = 0; lane < std::min<int64_t>(WIDTH, count - i); ++lane) {
                if (tiles[i + lane] != first) left.emplace_back(bounds[lane], tiles[i + lane]);
            }
        }
        if (left.empty()) return;
        std::iter_swap(std::max_element(left.begin(), left.end()), left.end() - 1);
        enter(&left.back().second, 1, podium);
        left.pop_back();
        auto is_late = [&](const auto& tile) { return tile.first + SLACK < podium.last(); };
        left.erase(std::remove_if(left.begin(), left.end(), is_late), left.end());
        // The more promising of them first: soon there is more to beat.
        if (left.size() > WIDTH) std::nth_element(left.begin(), left.begin() + WIDTH, left.end(), std::greater<>());
        for (size_t next = 0; next < left.size();) {
            int32_t some[WIDTH];
            int64_t num = 0;
            for (; num < WIDTH && next < left.size(); ++next) {
                if (!is_late(left[next])) some[num++] = left[next].second;
            }
            if (num) enter(some, num, podium);
        }
    }

    // Tokens that may win, as far as their noise says.
    struct Runners {
        int64_t count = 0;
        int32_t tokens[WIDTH * LOGITS + WIDTH];
        float soonest[WIDTH * LOGITS + WIDTH];  // no clock of theirs is earlier

        void add(int64_t token, float its_soonest) { tokens[count] = int32_t(token), soonest[count++] = its_soonest; }
    };

    // The tokens of some tiles, at most WIDTH, that may win.
    void enter(const int32_t* tiles, int64_t count, Podium& podium) const {
        Runners found;
        find_runners(tiles, count, podium.last(), found);
        for (int64_t i = 0; i < found.count; ++i) __builtin_prefetch(logits_ + found.tokens[i]);
        for (int64_t i = 0; i < found.count; i += WIDTH) {
            const int64_t some = std::min<int64_t>(WIDTH, found.count - i);
            Floats logits = Floats{} - INFINITY;
            for (int64_t lane = 0; lane < some; ++lane) logits[lane] = logits_[found.tokens[i + lane]];
            const Floats head_starts = (logits - largest_) / temperature_;
            const Floats bounds = head_starts - rough_logarithm(load(found.soonest + i)) + SLACK;
            const Lanes is_in = (logits >= threshold_) & (logits > above_) & (head_starts > -INFINITY);
            each_bit(bits_of(is_in & (bounds >= podium.last())) & ((1u << some) - 1), [&](int lane) {
                if (bounds[lane] >= podium.last()) finish(found.tokens[i + lane], head_starts[lane], podium);
            });
        }
    }

    // The tokens that would beat ``best`` if each were as likely as the likeliest of its half tile: no logit need be read for that.
    void find_runners(const int32_t* tiles, int64_t count, float best, Runners& found) const {
        Longs words[2];
        Lanes firsts;
        Floats tops[2];
        for (int64_t lane = 0; lane < WIDTH; ++lane) {
            const int64_t tile = tiles[std::min(lane, count - 1)];
            const uint64_t word = word_of(start_, TILE_WORDS + tile);
            words[lane / 8][lane % 8] = word;
            firsts[lane] = int32_t(word % LOGITS);
            for (int half = 0; half < 2; ++half) tops[half][lane] = std::min(maxima_[tile], halves_[2 * tile + half]);
        }
        // No clock is earlier than its uniform number.
        const Floats earliest = uniforms_of(words[0], words[1]) / float(LOGITS);
        Floats latest[2];  // that a token's own clock may be, behind its tile's
        uint32_t opened[2];
        for (int half = 0; half < 2; ++half) {
            latest[half] = rough_exponential((tops[half] - largest_) * inverse_ + (SLACK - best)) * 1.0001f - earliest;
            opened[half] = bits_of(latest[half] >= 0.0f) & ((1u << count) - 1);
        }
        const uint32_t upper = bits_of(firsts >= HALF_TILE);
        each_bit((opened[0] & ~upper) | (opened[1] & upper), [&](int lane) {
            const int64_t token = int64_t(tiles[lane]) * LOGITS + firsts[lane];
            if (token < vocab_size_ && mask_.has(token)) found.add(token, earliest[lane]);
        });
        for (int half = 0; half < 2; ++half) {
            each_bit(opened[half], [&](int opened_lane) {
                const int64_t tile = tiles[opened_lane];
                const uint64_t kept = mask_.kept(tile);
                for (int i = half * HALF_TILE; i < (half + 1) * HALF_TILE; i += WIDTH) {
                    const Floats uniform = uniforms_of(start_, tile * LOGITS + i);
                    each_bit(bits_of(uniform <= latest[half][opened_lane]) & uint16_t(kept >> i), [&](int lane) {
                        const int64_t token = tile * LOGITS + i + lane;
                        if (i + lane != firsts[opened_lane] && token < vocab_size_) {
                            found.add(token, earliest[opened_lane] + uniform[lane]);
                        }
                    });
                }
            });
        }
    }

    void finish(int64_t token, float head_start, Podium& podium) const {
        const uint64_t tile_word = word_of(start_, TILE_WORDS + token / LOGITS);
        const bool is_first = int(tile_word % LOGITS) == token % LOGITS;
        const float own = is_first ? 0.0f : exponential_of(word_of(start_, token));
        podium.enter(head_start - logarithm(own + exponential_of(tile_word) / LOGITS), token);
    }

    Floats weights(Floats x) const { return rough_exponential((x - largest_) * inverse_); }

    // What the tokens weigh whose logit passes, of the half tiles whose maximum does.
    template <typename Passes>
    double mass_of(Passes passes) const {
        Doubles mass = {};
        Floats sum = {};
        auto add = [&] {
            EightFloats halves[2];
            std::memcpy(halves, &sum, sizeof sum);
            mass += __builtin_convertvector(halves[0], Doubles) + __builtin_convertvector(halves[1], Doubles);
            sum = Floats{};
        };
        int64_t count = 0;
        each_open(passes, [&](const float* x) {
            for (int64_t i = 0; i < HALF_TILE; i += WIDTH) {
                const Floats logit = load(x + i);
                sum += passes(logit) ? weights(logit) : Floats{};
            }
            if (++count % ADDED_AT_ONCE == 0) add();
        });
        add();
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
            Floats rest = {};
            sweep<float>(2 * num_tiles_, [&](auto place) {
                Floats top = first_of(place.get_from(halves_), place.count);
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
