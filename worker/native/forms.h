// The two forms in which a chunk's attention is multiplied: pairs of bfloat16 in tiles, and floats in vectors for all else.
//
// Both are transposed: a vector is one key's score, or one dimension's sum, for sixteen queries.

#pragma once

#include <algorithm>

#include "stored.h"
#include "tiles.h"

namespace {

constexpr int KEYS = 256;  // keys scored before they are mixed
constexpr int STRIDE = 32;  // keys by which everything is rounded: a step of a tile

template <typename T, typename S>
struct FloatForm {
    typedef S Stored;

    struct Session {  // what a thread holds while it multiplies: nothing
        explicit Session(bool) {}
    };

    static int64_t turned_size(int64_t head_dim) { return WIDTH * head_dim; }

    // Sixteen queries as columns: [head_dim, 16].
    static void turn(const T* const* rows, int64_t head_dim, float* turned) {
        for (int64_t d = 0; d < head_dim; d += WIDTH, turned += WIDTH * WIDTH) {
            Words square[WIDTH];
            for (int lane = 0; lane < WIDTH; ++lane) square[lane] = (Words)load(rows[lane] + d);
            transpose(square);
            std::memcpy(turned, square, sizeof square);
        }
    }

    // Keys and values of the positions [at, stop) as rows of floats.
    static void hold(const Past<Stored>& past, int64_t at, int64_t stop, float* keys, float* values) {
        for (int64_t key = at; key < stop; ++key, keys += past.head_dim, values += past.head_dim) {
            past.take_key(key, keys);
            past.take_value(key, values);
        }
    }

    // scores [N, KEYS, 16] of N tiles of queries against ``size`` keys, the first of them ``skipped`` after the held ones'
    template <int N>
    static void score(const Past<Stored>& past, int64_t, int64_t skipped, int64_t size, const float* turned, const float* keys,
                      float* scores) {
        int64_t head_dim = past.head_dim;
        for (int one = 0; one < N; ++one, turned += turned_size(head_dim), scores += KEYS * WIDTH) {
            for (int64_t key = 0; key < size; key += AT_ONCE) {
                add<false>(turned, head_dim, keys + (skipped + key) * head_dim, head_dim, 1, scores + key * WIDTH);
            }
        }
    }

    static constexpr float BASE = 1.0f;  // of weights as powers: e
    // Of what is masked nothing is left, not even the least number.
    static Floats power(Floats x) {
        return picked(x, exponential(x), [](Register from, Register to) { return from < -87.0f ? Register{} : to; });
    }

    // weights [KEYS, 16] of the keys ``key`` and ``key`` + 1
    static void keep(float* weights, int64_t key, Floats even, Floats odd) {
        store(weights + key * WIDTH, even);
        store(weights + (key + 1) * WIDTH, odd);
    }

    // sums [N, head_dim, 16] += weights [N, KEYS, 16] times the values
    template <int N>
    static void mix(int64_t head_dim, int64_t skipped, int64_t size, const float* weights, const float* values,
                    float* sums) {
        for (int one = 0; one < N; ++one, weights += KEYS * WIDTH, sums += head_dim * WIDTH) {
            for (int64_t d = 0; d < head_dim; d += AT_ONCE) {
                add<true>(weights, size, values + skipped * head_dim + d, 1, head_dim, sums + d * WIDTH);
            }
        }
    }

  private:
    static constexpr int PARTS = WIDTH / REGISTER_FLOATS, AT_ONCE = 8 / PARTS;  // that as many registers add up

    // sums [AT_ONCE, 16] = or += columns [count, 16] by the numbers at ``rows``, ``apart`` from row to row and ``step`` from one to the
    // next of a row.
    template <bool ADDS>
    static void add(const float* columns, int64_t count, const float* rows, int64_t apart, int64_t step, float* sums) {
        Register added[AT_ONCE][PARTS];
        for (int i = 0; i < AT_ONCE; ++i) {
            for (int part = 0; part < PARTS; ++part) {
                added[i][part] = ADDS ? load_part(sums + i * WIDTH + part * REGISTER_FLOATS) : Register{};
            }
        }
        for (int64_t at = 0; at < count; ++at, columns += WIDTH, rows += step) {
            for (int part = 0; part < PARTS; ++part) {
                const Register column = load_part(columns + part * REGISTER_FLOATS);
                for (int i = 0; i < AT_ONCE; ++i) added[i][part] += column * rows[i * apart];
            }
        }
        for (int i = 0; i < AT_ONCE; ++i) {
            for (int part = 0; part < PARTS; ++part) store_part(sums + i * WIDTH + part * REGISTER_FLOATS, added[i][part]);
        }
    }
};

#if defined(__AVX512BF16__)

// For head_dim a multiple of 32. Keys are multiplied where they lie in the cache; values are turned into tiles once for all
// queries of a task; weights leave the softmax as the columns of tiles. Of int8 both are brought to bfloat16 first.
template <typename S>
struct PairForm {
    typedef Tiles Session;
    typedef S Stored;
    static constexpr bool IS_OWN = std::is_same_v<S, bf16>;

    static int64_t turned_size(int64_t head_dim) { return TILE * head_dim / 2; }

    // Sixteen queries as columns: [head_dim / 32][16 pairs][16][2] bfloat16.
    static void turn(const bf16* const* rows, int64_t head_dim, float* turned) {
        for (int64_t d = 0; d < head_dim; d += DEPTH, turned += TILE * TILE) {
            Words square[TILE];
            for (int lane = 0; lane < TILE; ++lane) std::memcpy(&square[lane], rows[lane] + d, 64);
            transpose(square);
            std::memcpy(turned, square, sizeof square);
        }
    }

    // Values of [at, stop) as tiles [head_dim / 16][KEYS / 32][16 dims][32 keys]. Keys are copied only where they are not
    // bfloat16, or a block is not whole tiles.
    static void hold(const Past<Stored>& past, int64_t at, int64_t stop, float* keys, float* values) {
        if (!is_in_place(past)) {
            for (int64_t key = at; key < stop; ++key) past.take_key(key, (bf16*)keys + (key - at) * past.head_dim);
        }
        // The tiles take half of the room.
        bf16* taken = (bf16*)values + KEYS * past.head_dim;
        for (int64_t key = at; key < stop; key += DEPTH) {
            const bf16* rows[DEPTH];
            for (int i = 0; i < DEPTH; ++i) {
                if constexpr (IS_OWN) {
                    rows[i] = past.values + past.value_slot(key + i) * past.head_dim;
                } else {
                    past.take_value(key + i, taken + i * past.head_dim);
                    rows[i] = taken + i * past.head_dim;
                }
            }
            // What was never written may be no number, and no weight of zero makes it one.
            int64_t written = std::min<int64_t>(DEPTH, past.end - key);
            turn_values(rows, written, past.head_dim, (bf16*)values + (key - at) / DEPTH * TILE_SIZE);
        }
    }

    static bool is_in_place(const Past<Stored>& past) { return IS_OWN && past.block_size % TILE == 0; }

    static const bf16* key_at(const Past<Stored>& past, int64_t position) {
        return (const bf16*)(past.keys + past.offset(position));
    }

    static void turn_values(const bf16* const* rows, int64_t written, int64_t head_dim, bf16* tiles) {
        for (int64_t d = 0; d < head_dim; d += 2 * TILE) {
            Words low[TILE], high[TILE];
            for (int pair = 0; pair < TILE; ++pair) {
                __m512i zero = _mm512_setzero_si512();
                __m512i even = 2 * pair < written ? _mm512_loadu_si512(rows[2 * pair] + d) : zero;
                __m512i odd = 2 * pair + 1 < written ? _mm512_loadu_si512(rows[2 * pair + 1] + d) : zero;
                low[pair] = (Words)_mm512_unpacklo_epi16(even, odd);
                high[pair] = (Words)_mm512_unpackhi_epi16(even, odd);
            }
            transpose(low);
            transpose(high);
            // Unpacking works in quarters of a vector: dimensions 0-3, 8-11, ... are low, 4-7, 12-15, ... are high.
            for (int row = 0; row < TILE; ++row) {
                int64_t dim = d + row / 4 * 8 + row % 4;
                bf16* to = tiles + dim / TILE * KEYS * TILE + dim % TILE * DEPTH;
                std::memcpy(to, &low[row], 64);
                std::memcpy(to + 4 * DEPTH, &high[row], 64);
            }
        }
    }

    template <int N>
    static void score(const Past<Stored>& past, int64_t at, int64_t skipped, int64_t size, const float* turned,
                      const float* keys, float* scores) {
        int64_t head_dim = past.head_dim, last = (past.end - 1) / TILE * TILE;
        const bf16* held = (const bf16*)keys + skipped * head_dim;
        const bf16* b0 = (const bf16*)turned;
        const bf16* b1 = b0 + TILE * head_dim;
        const bool in_place = is_in_place(past);
        for (int64_t key = 0; key < size; key += 2 * TILE) {
            int64_t position = at + skipped + key;
            const bf16* a0 = in_place ? key_at(past, position) : held + key * head_dim;
            const bf16* a1 = in_place ? key_at(past, std::min(position + TILE, last)) : a0 + TILE * head_dim;
            float* s0 = scores + key * TILE;
            float* s1 = s0 + TILE * TILE;
            if constexpr (N == 2) {
                multiply<2, 2, false>({a0, a1}, head_dim * 2, DEPTH, {b0, b1}, TILE_SIZE, head_dim / DEPTH,
                                      {{s0, s0 + KEYS * TILE}, {s1, s1 + KEYS * TILE}});
            } else {
                multiply<2, 1, false>({a0, a1}, head_dim * 2, DEPTH, {b0}, TILE_SIZE, head_dim / DEPTH, {{s0}, {s1}});
            }
        }
    }

    static constexpr float BASE = 1.44269504088896341f;  // log2(e): of weights as powers of two
    static Floats power(Floats x) { return rough_power_of_two(x); }

    // weights [KEYS / 2][16][2] bfloat16 of the keys ``key`` and ``key`` + 1
    static void keep(float* weights, int64_t key, Floats even, Floats odd) {
        const __m512i in_turn = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22,
                                                 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
        __m512i halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
        _mm512_storeu_si512(weights + key / 2 * WIDTH, _mm512_permutexvar_epi16(in_turn, halves));
    }

    template <int N>
    static void mix(int64_t head_dim, int64_t skipped, int64_t size, const float* weights, const float* values,
                    float* sums) {
        const int64_t across = KEYS * TILE;  // from a row of tiles to the next sixteen dimensions'
        const bf16* tiles = (const bf16*)values + skipped / DEPTH * TILE_SIZE;
        const bf16* b0 = (const bf16*)weights;
        const bf16* b1 = (const bf16*)(weights + KEYS * WIDTH);
        for (int64_t d = 0; d < head_dim; d += 2 * TILE) {
            const bf16* a0 = tiles + d / TILE * across;
            const bf16* a1 = a0 + across;
            float* s0 = sums + d * TILE;
            float* s1 = s0 + TILE * TILE;
            if constexpr (N == 2) {
                multiply<2, 2, true>({a0, a1}, 64, TILE_SIZE, {b0, b1}, TILE_SIZE, size / DEPTH,
                                     {{s0, s0 + head_dim * TILE}, {s1, s1 + head_dim * TILE}});
            } else {
                multiply<2, 1, true>({a0, a1}, 64, TILE_SIZE, {b0}, TILE_SIZE, size / DEPTH, {{s0}, {s1}});
            }
        }
    }
};

#endif

}  // namespace
