// Paged attention of single tokens: the heads of one KV head over a part of one sequence.

#pragma once

#include <algorithm>

#include "grouped.h"
#include "step.h"
#include "stored.h"

namespace {

constexpr int PART = 512;     // positions one task takes, whose scores are held at once; longer sequences are split and joined
constexpr int AHEAD = 32;     // positions by which keys are fetched before they are used
constexpr int MAX_GROUP = 8;  // query heads that share one pass over the values
constexpr int PADDING = 2 * WIDTH;
constexpr int TILED_AHEAD = 64;  // positions, by tiles; into the second cache
constexpr float LOG2_E = 1.44269504088896341f;  // of weights as powers of two

// Lane i of the result is the sum of all lanes of sums[i]. Halves of ever smaller pieces change places and are added, first
// where no lane leaves its quarter of a vector for that.
inline Floats sums_across(Floats* sums) {
    const Lanes own = {0, 1, 18, 19, 4, 5, 22, 23, 8, 9, 26, 27, 12, 13, 30, 31};
    const Lanes other = {2, 3, 16, 17, 6, 7, 20, 21, 10, 11, 24, 25, 14, 15, 28, 29};
    const Lanes even = {0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30};
    const Lanes odd = {1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31};
    const Lanes near = {0, 1, 2, 3, 4, 5, 6, 7, 24, 25, 26, 27, 28, 29, 30, 31};
    const Lanes far = {8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23};
    const Lanes first = {0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27};
    const Lanes second = {4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31};
    auto add = [&](int to, int a, int b, Lanes some, Lanes rest) {
        sums[to] = __builtin_shuffle(sums[a], sums[b], some) + __builtin_shuffle(sums[a], sums[b], rest);
    };
    for (int i = 0; i < 8; ++i) add(i, 2 * i, 2 * i + 1, own, other);
    for (int i = 0; i < 4; ++i) add(i, 2 * i, 2 * i + 1, even, odd);
    for (int i = 0; i < 2; ++i) add(i, 2 * i, 2 * i + 1, near, far);
    add(0, 0, 1, first, second);
    return sums[0];
}

// One query group (the heads of one KV head) over positions [begin, end): unnormalised output, greatest score, sum of weights.
template <typename T, typename Stored>
struct Part {
    static constexpr bool IS_OWN = std::is_same_v<T, Stored>, IS_SCALED = std::is_same_v<Stored, int8_t>;

    const Step& step;
    const T* queries;            // [group, head_dim]
    const Stored* keys;          // of this KV head, [num_slots, head_dim]
    const Stored* values;
    const float* key_scales;     // [num_slots], of int8
    const float* value_scales;
    const int32_t* table;
    int64_t group;

    // Where positions' rows start, in elements from ``keys`` and ``values``, and what int8 is multiplied by there.
    struct Places {
        int64_t offsets[PART];
        float key_scales[IS_SCALED ? PART : 1], value_scales[IS_SCALED ? PART : 1];
    };

    // Of the positions [begin, begin + count); the last is repeated to a whole step of tiles.
    void find(int64_t begin, int64_t count, Places& places) const {
        int64_t* offsets = places.offsets;
        int64_t block = begin / step.block_size, inside = begin % step.block_size;
        for (int64_t i = 0; i < count; ++block, inside = 0) {
            int64_t slot = table[block] * step.block_size + inside;
            for (; i < count && inside < step.block_size; ++i, ++inside, ++slot) {
                offsets[i] = slot * step.head_dim;
                if constexpr (IS_SCALED) places.key_scales[i] = key_scales[slot], places.value_scales[i] = value_scales[slot];
            }
        }
        for (int64_t i = count; i % PADDING; ++i) {
            offsets[i] = offsets[count - 1];
            if constexpr (IS_SCALED) {
                places.key_scales[i] = places.key_scales[count - 1];
                places.value_scales[i] = places.value_scales[count - 1];
            }
        }
    }

    // A row on its way into the cache while others are computed with.
    void fetch(const Stored* row) const {
        for (size_t byte = 0; byte < step.head_dim * sizeof(Stored); byte += 64) __builtin_prefetch((const char*)row + byte);
    }

    // scores [group, PART] of ``count`` positions
    void score(const Places& places, int64_t count, const float* held_queries, float* held_keys, float* scores) const {
        const int64_t *offsets = places.offsets, head_dim = step.head_dim;
#if defined(__AVX512BF16__)
        if constexpr (sizeof(T) == 2) {
            if (head_dim % (2 * WIDTH) == 0) return score_pairs(places, count, (bf16*)held_keys, scores);
        }
#endif
        for (int64_t first = 0; first < count; first += WIDTH) {
            for (int64_t i = 0; i < WIDTH; ++i) {
                const Stored* row = keys + offsets[first + i];
                for (int64_t d = 0; d < head_dim; d += WIDTH) store(held_keys + i * head_dim + d, load(row + d));
            }
            for (int64_t g = 0; g < group; ++g) {
                const float* query = held_queries + g * head_dim;
                store(scores + g * PART + first, scaled(products(query, held_keys, head_dim), places, first));
            }
        }
    }

    // Of a query with sixteen keys.
    static Floats products(const float* query, const float* held_keys, int64_t head_dim) {
        if constexpr (REGISTER_FLOATS == WIDTH) {
            Floats sums[WIDTH] = {};
            for (int64_t d = 0; d < head_dim; d += WIDTH) {
                const Floats some = load(query + d);
                for (int i = 0; i < WIDTH; ++i) sums[i] += some * load(held_keys + i * head_dim + d);
            }
            return sums_across(sums);
        }
        alignas(64) float found[WIDTH];
        for (int first = 0; first < WIDTH; first += 4, held_keys += 4 * head_dim) {
            Register sums[4] = {};
            for (int64_t d = 0; d < head_dim; d += REGISTER_FLOATS) {
                const Register some = load_part(query + d);
                for (int i = 0; i < 4; ++i) sums[i] += some * load_part(held_keys + i * head_dim + d);
            }
            sum_four(sums, found + first);
        }
        return load(found);
    }

    Floats scaled(Floats sums, const Places& places, int64_t first) const {
        if constexpr (IS_SCALED) return sums * step.scale * load(places.key_scales + first);
        return sums * step.scale;
    }

#if defined(__AVX512BF16__)
    // The same with the instruction that multiplies pairs of bfloat16, exactly, and adds them in float32.
    void score_pairs(const Places& places, int64_t count, bf16* held_keys, float* scores) const {
        const int64_t *offsets = places.offsets, head_dim = step.head_dim;
        for (int64_t first = 0; first < count; first += WIDTH) {
            if constexpr (!IS_OWN) {
                for (int i = 0; i < WIDTH; ++i) {
                    for (int64_t d = 0; d < head_dim; d += 2 * WIDTH) {
                        _mm512_storeu_si512(held_keys + i * head_dim + d, thirty_two(keys + offsets[first + i] + d));
                    }
                }
            }
            auto row = [&](int i) {
                if constexpr (IS_OWN) return keys + offsets[first + i];
                else return held_keys + i * head_dim;
            };
            for (int64_t g = 0; g < group; ++g) {
                // A part of them with each head: all at once are more than the processor waits for without standing still.
                for (int64_t i = WIDTH * g / group; i < WIDTH * (g + 1) / group; ++i) {
                    fetch(values + offsets[first + i]);
                    if (first + AHEAD < count) fetch(keys + offsets[first + AHEAD + i]);
                }
                __m512 sums[WIDTH];
                for (int i = 0; i < WIDTH; ++i) sums[i] = _mm512_setzero_ps();
                for (int64_t d = 0; d < head_dim; d += 2 * WIDTH) {
                    __m512bh query = (__m512bh)_mm512_loadu_si512(queries + g * head_dim + d);
                    for (int i = 0; i < WIDTH; ++i) {
                        __m512bh key = (__m512bh)_mm512_loadu_si512(row(i) + d);
                        sums[i] = _mm512_dpbf16_ps(sums[i], query, key);
                    }
                }
                store(scores + g * PART + first, scaled(sums_across((Floats*)sums), places, first));
            }
        }
    }
#endif

    // out [GROUP, head_dim] += weights [GROUP, PART] times the values of ``count`` positions
    template <int GROUP>
    void mix(const int64_t* offsets, int64_t count, const float* weights, float* out) const {
        constexpr int PARTS = REGISTER_FLOATS == WIDTH || GROUP <= 4 ? 2 : 1, AT_ONCE = PARTS * REGISTER_FLOATS;
        const int64_t head_dim = step.head_dim;
        int64_t d = 0;
        for (; d + AT_ONCE <= head_dim; d += AT_ONCE) mix_parts<GROUP, PARTS>(offsets, count, weights, d, out);
        for (; d < head_dim; d += REGISTER_FLOATS) mix_parts<GROUP, 1>(offsets, count, weights, d, out);
    }

    // Of dimensions from ``d`` on, as many as so many registers hold.
    template <int GROUP, int PARTS>
    void mix_parts(const int64_t* offsets, int64_t count, const float* weights, int64_t d, float* out) const {
        Register sums[GROUP][PARTS];
        float* const to = out + d;
        for (int g = 0; g < GROUP; ++g) {
            for (int part = 0; part < PARTS; ++part) sums[g][part] = load_part(to + g * step.head_dim + part * REGISTER_FLOATS);
        }
        for (int64_t i = 0; i < count; ++i) {
            Register own[PARTS];
            for (int part = 0; part < PARTS; ++part) own[part] = load_part(values + offsets[i] + d + part * REGISTER_FLOATS);
            for (int g = 0; g < GROUP; ++g) {
                for (int part = 0; part < PARTS; ++part) sums[g][part] += own[part] * weights[g * PART + i];
            }
        }
        for (int g = 0; g < GROUP; ++g) {
            for (int part = 0; part < PARTS; ++part) store_part(to + g * step.head_dim + part * REGISTER_FLOATS, sums[g][part]);
        }
    }

#if defined(__AVX512BF16__)
    // The same with pairs of positions, for weights that are bfloat16.
    template <int GROUP>
    void mix(const int64_t* offsets, int64_t count, const bf16* weights, float* out) const {
        for (int64_t d = 0; d < step.head_dim; d += 2 * WIDTH) {
            __m512 low[GROUP], high[GROUP];
            for (int g = 0; g < GROUP; ++g) low[g] = high[g] = _mm512_setzero_ps();
            for (int64_t i = 0; i < count; i += 2) {
                __m512i a = thirty_two(values + offsets[i] + d), b = thirty_two(values + offsets[i + 1] + d);
                __m512bh lows = (__m512bh)_mm512_unpacklo_epi16(a, b), highs = (__m512bh)_mm512_unpackhi_epi16(a, b);
                for (int g = 0; g < GROUP; ++g) {
                    int32_t both;
                    std::memcpy(&both, weights + g * PART + i, 4);
                    __m512bh weight = (__m512bh)_mm512_set1_epi32(both);
                    low[g] = _mm512_dpbf16_ps(low[g], lows, weight);
                    high[g] = _mm512_dpbf16_ps(high[g], highs, weight);
                }
            }
            // Unpacking works in quarters of a vector: dimensions 0-3, 8-11, ... are low, 4-7, 12-15, ... are high.
            const __m512i front = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
            const __m512i back = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
            for (int g = 0; g < GROUP; ++g) {
                float* to = out + g * step.head_dim + d;
                store(to, load(to) + (Floats)_mm512_permutex2var_ps(low[g], front, high[g]));
                store(to + WIDTH, load(to + WIDTH) + (Floats)_mm512_permutex2var_ps(low[g], back, high[g]));
            }
        }
    }

#endif

    template <typename Weight>
    void mix_all(const int64_t* offsets, int64_t count, const Weight* weights, float* out) const {
        for (int64_t g = 0; g < group; g += MAX_GROUP) {
            const Weight* w = weights + g * PART;
            float* o = out + g * step.head_dim;
            switch (std::min<int64_t>(MAX_GROUP, group - g)) {
                case 1: mix<1>(offsets, count, w, o); break;
                case 2: mix<2>(offsets, count, w, o); break;
                case 3: mix<3>(offsets, count, w, o); break;
                case 4: mix<4>(offsets, count, w, o); break;
                case 5: mix<5>(offsets, count, w, o); break;
                case 6: mix<6>(offsets, count, w, o); break;
                case 7: mix<7>(offsets, count, w, o); break;
                case 8: mix<8>(offsets, count, w, o); break;
            }
        }
    }

    // The scores [group, PART] of ``count`` positions become weights, which it returns as Weight, in rows of PART, in place: as long
    // or shorter, a row ends up before anything that is still to be read.
    template <typename Weight, typename Power>
    Weight* weigh(const Places& places, int64_t count, float* scores, float base, const Power& power, float* greatest,
                  float* total) const {
        Weight* weights = (Weight*)scores;
        for (int64_t g = 0; g < group; ++g) {
            float* row = scores + g * PART;
            Floats tops = Floats{} - INFINITY;
            // Whatever the last vectors hold past the end must not count.
            for (int64_t i = count; i % PADDING; ++i) row[i] = -INFINITY;
            for (int64_t i = 0; i < count; i += WIDTH) {
                Floats score = load(row + i);
                if (step.softcap != 0.0f) {
                    score = step.softcap * hyperbolic_tangent(score / step.softcap);
                    for (int64_t j = count; j < i + WIDTH; ++j) score[j - i] = -INFINITY;
                    store(row + i, score);
                }
                tops = greater(score, tops);
            }
            float top = tops[0];
            for (int i = 1; i < WIDTH; ++i) top = std::max(top, tops[i]);
            Floats sums = {};
            for (int64_t i = 0; i < (count + PADDING - 1) / PADDING * PADDING; i += WIDTH) {
                Floats weight = power((load(row + i) - top) * base);
                sums += weight;
                if constexpr (IS_SCALED) weight *= load(places.value_scales + i);
                store(weights + g * PART + i, weight);
            }
            greatest[g] = top;
            total[g] = sum_of(sums);
        }
        return weights;
    }

    // Room that ``run`` needs, in floats.
    static int64_t work_size(int64_t group, int64_t head_dim) {
        return group * head_dim + std::max<int64_t>(group, WIDTH / 2) * PART + WIDTH * head_dim + 4 * WIDTH * head_dim / 2;
    }

    // out [group, head_dim], greatest [group], total [group], for at most PART positions
    void run(int64_t begin, int64_t end, float* out, float* greatest, float* total, float* work) const {
        int64_t head_dim = step.head_dim, count = end - begin;
        Places places;
        find(begin, count, places);
#if defined(HAVE_TILES)
        if constexpr (sizeof(T) == 2) {
            if (head_dim % DEPTH == 0 && may_use_tiles()) return run_tiled(begin, count, places, out, greatest, total, work);
        }
#endif
        float* held_queries = work;
        float* scores = held_queries + group * head_dim;
        float* held_keys = scores + group * PART;
        for (int64_t i = 0; i < group * head_dim; ++i) held_queries[i] = get(queries[i]);
        std::fill(out, out + group * head_dim, 0.0f);
        score(places, count, held_queries, held_keys, scores);
#if defined(__AVX512BF16__)
        if constexpr (sizeof(T) == 2) {
            if (head_dim % (2 * WIDTH) == 0) {
                auto rough = [](Floats x) { return rough_power_of_two(x); };
                return mix_all(places.offsets, count, weigh<bf16>(places, count, scores, LOG2_E, rough, greatest, total), out);
            }
        }
#endif
        auto natural = [](Floats x) { return exponential(x); };
        mix_all(places.offsets, count, weigh<float>(places, count, scores, 1.0f, natural, greatest, total), out);
    }

#if defined(HAVE_TILES)
    void run_tiled(int64_t begin, int64_t count, const Places& places, float* out, float* greatest, float* total,
                   float* work) const {
        const int64_t *offsets = places.offsets, head_dim = step.head_dim, last = (count - 1) / TILE * TILE;
        float* scores = work;
        bf16* held = (bf16*)(scores + std::max<int64_t>(group, TILE / 2) * PART);
        bf16* turned = held + 2 * TILE * head_dim;
        const bool in_place = IS_OWN && step.block_size % TILE == 0 && begin % TILE == 0;
        for (int64_t i = 0; i < std::min<int64_t>(TILED_AHEAD, count); ++i) fetch_far(keys + offsets[i]);
        for (int64_t head = 0; head < group; head += TILE) {
            const Columns columns{std::min<int64_t>(TILE, group - head), head_dim};
            turn_heads(columns, queries + head * head_dim, turned);
            auto keys_at = [&](int64_t key, int half) -> const bf16* {
                if (!head && key < count) {
                    const int64_t rows = std::min<int64_t>(TILE, count - key);
                    for (int64_t i = 0; i < rows; ++i) fetch_far(values + offsets[key + i]);
                    const int64_t ahead = key + TILED_AHEAD, rows_ahead = std::min<int64_t>(TILE, count - ahead);
                    for (int64_t i = 0; i < rows_ahead; ++i) fetch_far(keys + offsets[ahead + i]);
                }
                key = std::min(key, last);
                if (in_place && key + TILE <= count) return (const bf16*)(keys + offsets[key]);
                bf16* rows = held + half * TILE * head_dim;
                for (int64_t i = 0; i < TILE; ++i) {
                    for (int64_t d = 0; d < head_dim; d += DEPTH) {
                        _mm512_storeu_si512(rows + i * head_dim + d, thirty_two(keys + offsets[key + i] + d));
                    }
                }
                return rows;
            };
            score_heads(columns, turned, count, keys_at, [&](int64_t of, int64_t key, Floats sums) {
                store(scores + (head + of) * PART + key, scaled(sums, places, std::min(key, last)));
            });
        }
        auto rough = [](Floats x) { return rough_power_of_two(x); };
        const bf16* weights = weigh<bf16>(places, count, scores, LOG2_E, rough, greatest, total);
        const int64_t padded = (count + PADDING - 1) / PADDING * PADDING;
        for (int64_t head = 0; head < group; head += TILE) {
            auto value_at = [&](int64_t key, int64_t d) { return thirty_two(values + offsets[key] + d); };
            mix_heads({std::min<int64_t>(TILE, group - head), head_dim}, weights + head * PART, PART * sizeof(bf16), padded, value_at,
                      out + head * head_dim);
        }
    }

    // Into the second cache, which waits for three times as many lines at once as the first.
    void fetch_far(const Stored* row) const {
        for (size_t byte = 0; byte < step.head_dim * sizeof(Stored); byte += 64) __builtin_prefetch((const char*)row + byte, 0, 2);
    }
#endif
};

// out [group, head_dim] from the parts of one query group, each as ``Part::run`` leaves it. sinks [group]: see attend.h, or null.
template <typename T>
void join(const float* parts, int64_t num_parts, int64_t head_dim, int64_t group, const float* sinks, T* out) {
    int64_t part_size = group * (head_dim + 2);
    for (int64_t g = 0; g < group; ++g) {
        float top = sinks ? sinks[g] : -INFINITY;
        for (int64_t i = 0; i < num_parts; ++i) top = std::max(top, parts[i * part_size + group * head_dim + g]);
        float total = sinks ? std::exp(sinks[g] - top) : 0.0f;
        float sums[MAX_HEAD_DIM] = {};
        for (int64_t i = 0; i < num_parts; ++i) {
            const float* part = parts + i * part_size;
            float weight = std::exp(part[group * head_dim + g] - top);
            total += weight * part[group * (head_dim + 1) + g];
#pragma omp simd
            for (int64_t d = 0; d < head_dim; ++d) sums[d] += weight * part[g * head_dim + d];
        }
#pragma omp simd
        for (int64_t d = 0; d < head_dim; ++d) put(out + g * head_dim + d, sums[d] / total);
    }
}

}  // namespace
