// A token from each row of logits: what worker/sampling does in torch, with the same noise, a thread for each row.
//
// worker/sampling/race.py says what the noise is, and why few tiles need be opened. Here rough logarithms find out which tokens
// may win; of those few the clocks are computed as everywhere else.

#pragma once

#include <cmath>
#include <vector>

#include "maxima.h"

namespace {

typedef uint64_t Longs __attribute__((vector_size(64)));
typedef int64_t SignedLongs __attribute__((vector_size(64)));
typedef float EightFloats __attribute__((vector_size(32)));

// A batch; temperature 0 takes the likeliest token, top_k 0, top_p 1 and min_p 0 leave all of them.
struct Draws {
    int64_t rows, vocab_size;
    const float* logits;   // [rows, vocab_size]
    const float* maxima;   // see Maxima
    const uint64_t* starts;
    const float* temperatures;
    const int32_t* top_ks;
    const float *top_ps, *min_ps;
    int64_t* chosen;       // -1 where the logits are no distribution
};

constexpr uint64_t TILE_WORDS = uint64_t(1) << 40;
constexpr float SLACK = 1e-3f;  // how far roughness may put a bound below what it bounds, and more
constexpr float LOG_LOGITS = 4.1588830833596715f;

// Word ``at`` of a stream, of one or of a vector.
template <typename Word>
inline Word word_of(uint64_t start, Word at) {
    Word z = at * uint64_t(0x9E3779B97F4A7C15) + start;
    z = (z ^ (z >> 30)) * uint64_t(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * uint64_t(0x94D049BB133111EB);
    return z ^ (z >> 31);
}

inline float uniform_of(uint64_t word) {
    float upper = float(int64_t(word >> 11 | 1)) * 0x1p-53f;
    return std::min(upper, 1.0f - 0x1p-24f);
}

inline float exponential_of(uint64_t word) { return float(-std::log1p(-double(uniform_of(word)))); }

inline float logarithm(float x) { return float(std::log(double(x))); }

// Natural, of what is above zero, with a relative error of 1e-6 near one and as small an absolute one elsewhere: whole powers of
// two, and what is left by the series of the area tangent.
inline Floats rough_logarithm(Floats x) {
    Words bits = (Words)x;
    Words away = bits - 0x3f3504f3u;  // from the root of a half
    Floats exponents = __builtin_convertvector((Lanes)away >> 23, Floats);
    Floats rest = (Floats)((away & 0x007fffffu) + 0x3f3504f3u) - 1.0f;
    Floats s = rest / (rest + 2.0f), square = s * s;
    Floats series = 1.0f + square * (1.0f / 3.0f + square * (1.0f / 5.0f + square * (1.0f / 7.0f)));
    return exponents * 0.6931471805599453f + 2.0f * s * series;
}

// Of words [first, first + 16) of a stream.
inline Floats uniforms_of(uint64_t start, uint64_t first) {
    const Longs steps = {0, 1, 2, 3, 4, 5, 6, 7};
    Floats uniform;
    for (int half = 0; half < 2; ++half) {
        Longs words = word_of<Longs>(start, steps + (first + 8 * half));
        EightFloats some = __builtin_convertvector((SignedLongs)(words >> 11 | 1), EightFloats);
        std::memcpy((float*)&uniform + 8 * half, &some, sizeof some);
    }
    uniform *= 0x1p-53f;
    return uniform < 1.0f - 0x1p-24f ? uniform : Floats{} + (1.0f - 0x1p-24f);
}

inline Floats rough_exponentials(Floats uniform) {
    // Next to one the difference to it says too little.
    Floats series = uniform * (1.0f + uniform * (0.5f + uniform * (1.0f / 3.0f)));
    return uniform < 0.00390625f ? series : -rough_logarithm(1.0f - uniform);
}

inline bool any_of(Lanes lanes) {
#if defined(__AVX512BF16__)
    return _mm512_test_epi32_mask((__m512i)lanes, (__m512i)lanes);
#else
    int32_t any = 0;
    for (int i = 0; i < WIDTH; ++i) any |= lanes[i];
    return any;
#endif
}

// One row of a batch.
class Contest {
    const Draws& all_;
    const int64_t row_, num_tiles_, padded_;
    const float* logits_;
    const uint64_t start_;
    float* const maxima_;  // [padded_]
    float largest_, temperature_, inverse_;
    double mass_ = -1.0;  // of all tokens that are kept by top-k, once it is known
    float threshold_ = -INFINITY, above_ = -INFINITY;  // what may win is no smaller, and larger

  public:
    static int64_t padded(int64_t vocab_size) { return (tiles_of(vocab_size) + WIDTH - 1) / WIDTH * WIDTH; }

    // ``memory``: so many floats.
    Contest(const Draws& all, int64_t row, float* memory)
        : all_(all), row_(row), num_tiles_(tiles_of(all.vocab_size)), padded_(padded(all.vocab_size)),
          logits_(all.logits + row * all.vocab_size), start_(all.starts[row]), maxima_(memory) {}

    int64_t winner() {
        join_halves();
        if (!(std::abs(largest_) < INFINITY)) return -1;
        temperature_ = all_.temperatures[row_];
        if (temperature_ <= 0.0f) return likeliest();
        temperature_ = std::max(temperature_, 1e-30f);  // smaller ones are zero in float32
        inverse_ = 1.0f / temperature_;
        const int32_t top_k = all_.top_ks[row_];
        const float top_p = all_.top_ps[row_], min_p = all_.min_ps[row_];
        if (top_k > 0 && top_k < all_.vocab_size) threshold_ = last_of(top_k);
        const float kept = threshold_;
        if (min_p > 0.0f) {
            // In two roundings, as elsewhere.
            volatile float below = temperature_ * logarithm(min_p);
            threshold_ = std::max(threshold_, largest_ + below);
        }
        for (;;) {
            const int64_t token = race();
            const float drawn = logits_[token];
            if (top_p >= 1.0f || !is_outside(drawn, kept, top_p)) return token;
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

    // Of equals the first.
    int64_t likeliest_tile() const {
        int64_t tile = 0;
        while (maxima_[tile] != largest_) ++tile;
        return tile;
    }

    int64_t likeliest() const {
        int64_t token = likeliest_tile() * LOGITS;
        while (logits_[token] != largest_) ++token;
        return token;
    }

    // A tile's logits, in ``held`` if it is not whole.
    const float* open(int64_t tile, float* held) const {
        const int64_t first = tile * LOGITS, some = all_.vocab_size - first;
        if (some >= LOGITS) return logits_ + first;
        for (int64_t i = 0; i < LOGITS; ++i) held[i] = i < some ? logits_[first + i] : -INFINITY;
        return held;
    }

    // What the k largest logits reach. Of the k largest tiles each has a logit no smaller than the smallest of their maxima: so is the
    // k-th largest logit, and it is in a tile whose maximum is.
    float last_of(int32_t k) const {
        const float least = k < num_tiles_ ? last_among(maxima_, padded_, k) : -INFINITY;
        static thread_local std::vector<float> found;
        found.clear();
        float held[LOGITS];
        for (int64_t tile = 0; tile < num_tiles_; ++tile) {
            if (maxima_[tile] < least || maxima_[tile] == -INFINITY) continue;
            const float* x = open(tile, held);
            for (int i = 0; i < LOGITS; ++i) {
                if (x[i] >= least) found.push_back(x[i]);
            }
        }
        while (int64_t(found.size()) < k || found.size() % WIDTH) found.push_back(-INFINITY);
        // What was not found is below ``least``.
        return std::max(least, last_among(found.data(), int64_t(found.size()), k));
    }

    // What the k largest of a whole number of vectors reach, by halving what it may be.
    static float last_among(const float* from, int64_t count, int64_t k) {
        auto at_least = [&](float least) {
            Lanes found = {};
            for (int64_t i = 0; i < count; i += WIDTH) found -= load(from + i) >= least;
            int64_t sum = 0;
            for (int i = 0; i < WIDTH; ++i) sum += found[i];
            return sum;
        };
        int64_t low = key_of(-INFINITY), high = int64_t(key_of(INFINITY));
        while (high - low > 1) {
            const int64_t middle = low + (high - low) / 2, num = at_least(number_of(middle));
            (num >= k ? low : high) = middle;
            if (num == k) break;  // whatever is between the k-th and the next will do
        }
        return number_of(low);
    }

    // The place of a float in the order of all, and back.
    static int64_t key_of(float x) {
        const int32_t bits = int32_t(float_to_bits(x));
        return bits < 0 ? bits ^ 0x7fffffff : bits;
    }
    static float number_of(int64_t key) {
        const int32_t bits = int32_t(key);
        return bits_to_float(uint32_t(bits < 0 ? bits ^ 0x7fffffff : bits));
    }

    // The tile of the likeliest token first. Of the others those that may beat what it had, the most promising of them first.
    int64_t race() const {
        int64_t token = -1;
        float best = -INFINITY;
        const int64_t first = likeliest_tile();
        enter(first, best, token);
        static thread_local std::vector<std::pair<float, int64_t>> left;
        left.clear();
        const float offset = LOG_LOGITS + SLACK - best;
        for (int64_t tile = 0; tile < padded_; tile += WIDTH) {
            Floats maxima = load(maxima_ + tile);
            Lanes is_in = (maxima >= threshold_) & (maxima > above_);
            if (!any_of(is_in)) continue;
            // A clock is later than its uniform number: who has a larger one than this comes too late, without a logarithm.
            Floats score = (maxima - largest_) * inverse_, uniform = uniforms_of(start_, TILE_WORDS + tile);
            Lanes is_early = is_in & (uniform <= exponential(score + offset) * 1.0001f);
            if (!any_of(is_early)) continue;
            Floats bound = score - rough_logarithm(rough_exponentials(uniform)) + LOG_LOGITS;
            for (int i = 0; i < WIDTH; ++i) {
                if (!is_early[i] || tile + i == first) continue;
                left.emplace_back(bound[i], tile + i);
            }
        }
        if (left.empty()) return token;
        std::iter_swap(std::max_element(left.begin(), left.end()), left.end() - 1);
        enter(left.back().second, best, token);
        left.pop_back();
        left.erase(std::remove_if(left.begin(), left.end(), [&](auto& one) { return one.first + SLACK < best; }), left.end());
        for (const auto& one : left) {
            for (int i = 0; i < LOGITS; i += WIDTH) __builtin_prefetch(logits_ + one.second * LOGITS + i);
        }
        std::make_heap(left.begin(), left.end());
        while (!left.empty() && left.front().first + SLACK >= best) {
            enter(left.front().second, best, token);
            std::pop_heap(left.begin(), left.end());
            left.pop_back();
        }
        return token;
    }

    // The tokens of a tile that may be the best.
    void enter(int64_t tile, float& best, int64_t& token) const {
        const uint64_t tile_word = word_of<uint64_t>(start_, TILE_WORDS + tile);
        const float earliest = exponential_of(tile_word) / LOGITS;
        const int first = int(tile_word % LOGITS);
        alignas(64) float held[LOGITS], scores[LOGITS];
        const float* x = open(tile, held);
        for (int64_t i = 0; i < LOGITS; i += WIDTH) {
            Floats clock = rough_exponentials(uniforms_of(start_, tile * LOGITS + i)) + earliest;
            if (first / WIDTH == i / WIDTH) clock[first % WIDTH] = earliest;
            Floats logit = load(x + i), score = (logit - largest_) * inverse_ - rough_logarithm(clock);
            store(scores + i, (logit >= threshold_) & (logit > above_) ? score : Floats{} - INFINITY);
        }
        for (int i = 0; i < LOGITS; ++i) {
            if (!(scores[i] + SLACK >= best) || scores[i] == -INFINITY) continue;
            const float own = i == first ? 0.0f : exponential_of(word_of<uint64_t>(start_, tile * LOGITS + i));
            const float score = (x[i] - largest_) / temperature_ - logarithm(own + earliest);
            if (token < 0 || score > best) best = score, token = tile * LOGITS + i;
        }
    }

    Floats weights(Floats x) const { return exponential((x - largest_) * inverse_); }

    // What the tokens weigh whose logit passes, of the tiles whose maximum does.
    template <typename Passes>
    double mass_of(Passes passes) const {
        double mass = 0.0;
        alignas(64) float held[LOGITS];
        for (int64_t tile = 0; tile < num_tiles_; ++tile) {
            if (!passes(maxima_[tile])) continue;
            const float* x = open(tile, held);
            Floats sum = {};
            for (int64_t i = 0; i < LOGITS; i += WIDTH) {
                Floats logit = load(x + i);
                sum += passes(logit) ? weights(logit) : Floats{};
            }
            mass += sum_of(sum);
        }
        return mass;
    }

    // Whether the tokens likelier than the one drawn have ``top_p`` of the mass of all that are kept.
    bool is_outside(float drawn, float kept, float top_p) {
        if (drawn >= largest_) return false;
        const double above = mass_of([&](auto x) { return x > drawn; }), share = top_p;
        if (mass_ < 0.0) {
            // Every other tile has its largest token at least: mostly this is enough to know.
            Floats closed = {};
            for (int64_t tile = 0; tile < padded_; tile += WIDTH) {
                Floats top = load(maxima_ + tile);
                closed += (top <= drawn) & (top >= kept) ? weights(top) : Floats{};
            }
            if (above < share * (above + sum_of(closed)) * 0.99999) return false;
            // What weighs e to the -40 adds nothing that could be seen.
            const float least = std::max(kept, largest_ - 40.0f * temperature_);
            mass_ = mass_of([&](auto x) { return x >= least; });
        }
        return above > 0.0 && above >= share * mass_;
    }
};

inline void draw(const Draws& draws, int threads) {
    Team::run(draws.rows > 1 ? threads : 1, [&](Team& team) {
        static thread_local std::vector<float> memory;
        const size_t needed = Contest::padded(draws.vocab_size);
        if (memory.size() < needed) memory.resize(needed);
        team.each(draws.rows, 1, [&](int64_t row) { draws.chosen[row] = Contest(draws, row, memory.data()).winner(); });
    });
}

}  // namespace
