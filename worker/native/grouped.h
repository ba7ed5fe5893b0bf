// The heads of one KV head, one token each, against many keys and values, by AMX tiles (see decode.h).
//
// Sixteen keys are multiplied where they lie. Heads are fewer than a tile has columns, so its columns hold them several times,
// each time for another sixteen keys: what one tile sums is then full of scores.

#pragma once

#include "tiles.h"

#if defined(HAVE_TILES)

namespace {

// How heads stand in the columns of a tile: in each of ``places()`` places, for other keys.
struct Columns {
    int64_t heads, head_dim;

    int64_t span() const { return heads <= 4 ? 4 : heads <= 8 ? 8 : TILE; }
    int64_t places() const { return TILE / span(); }
    int64_t turned_size() const { return places() * TILE * head_dim; }
};

// turned [places][head_dim / 32][16 pairs][16][2]: a place's heads in its columns, zeros in the others.
inline void turn_heads(Columns columns, const bf16* queries, bf16* turned) {
    for (int64_t place = 0; place < columns.places(); ++place) {
        for (int64_t d = 0; d < columns.head_dim; d += DEPTH, turned += TILE_SIZE) {
            Words square[TILE] = {};
            for (int64_t head = 0; head < columns.heads; ++head) {
                std::memcpy(&square[place * columns.span() + head], queries + head * columns.head_dim + d, 64);
            }
            transpose(square);
            std::memcpy(turned, square, sizeof square);
        }
    }
}

// put(head, key, scores of sixteen keys from there on) for ``count`` keys and up to as many more as fill two tiles of scores.
// keys_at(key, half): the rows of sixteen keys, side by side; those of either half stay until the next are asked for.
template <typename KeysAt, typename Put>
void score_heads(Columns columns, const bf16* turned, int64_t count, const KeysAt& keys_at, const Put& put) {
    alignas(64) float sums[2][TILE * TILE];
    const int64_t across = columns.places() * TILE, row_bytes = columns.head_dim * sizeof(bf16);
    for (int64_t first = 0; first < count; first += 2 * across) {
        _tile_zero(0);
        _tile_zero(1);
        for (int64_t place = 0; place < columns.places(); ++place) {
            const bf16* a0 = keys_at(first + place * TILE, 0);
            const bf16* a1 = keys_at(first + across + place * TILE, 1);
            const bf16* b = turned + place * TILE * columns.head_dim;
            asm volatile("" ::: "memory");  // the compiler does not know that tiles are read from memory
            for (int64_t d = 0; d < columns.head_dim; d += DEPTH, b += TILE_SIZE) {
                _tile_loadd(6, b, 64);
                _tile_loadd(4, a0 + d, row_bytes);
                _tile_dpbf16ps(0, 4, 6);
                _tile_loadd(5, a1 + d, row_bytes);
                _tile_dpbf16ps(1, 5, 6);
            }
            asm volatile("" ::: "memory");
        }
        _tile_stored(0, sums[0], 64);
        _tile_stored(1, sums[1], 64);
        asm volatile("" ::: "memory");
        for (int half = 0; half < 2; ++half) {
            Words square[TILE];
            std::memcpy(square, sums[half], sizeof square);
            transpose(square);
            for (int64_t place = 0; place < columns.places(); ++place) {
                for (int64_t head = 0; head < columns.heads; ++head) {
                    put(head, first + half * across + place * TILE, (Floats)square[place * columns.span() + head]);
                }
            }
        }
    }
}

// out [heads, head_dim] = weights times values. weights: sixteen rows, ``row_bytes`` apart, of which the heads' count;
// value_at(key, d): 32 dimensions of a value. All of them whole steps of 32 keys.
template <typename ValueAt>
void mix_heads(Columns columns, const bf16* weights, int64_t row_bytes, int64_t count, const ValueAt& value_at, float* out) {
    alignas(64) bf16 held[2][4][TILE_SIZE];
    alignas(64) float sums[4][TILE * TILE];
    // Unpacking works in quarters of a vector: dimensions 0-3, 8-11, ... are low, 4-7, 12-15, ... are high.
    const __m512i front = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i back = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    for (int64_t d = 0; d < columns.head_dim; d += 2 * DEPTH) {
        const int num_halves = d + DEPTH < columns.head_dim ? 2 : 1;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t key = 0; key < count; key += DEPTH) {
            bf16(*tiles)[TILE_SIZE] = held[key / DEPTH % 2];
            for (int half = 0; half < num_halves; ++half) {
                for (int pair = 0; pair < TILE; ++pair) {
                    const __m512i a = value_at(key + 2 * pair, d + half * DEPTH);
                    const __m512i b = value_at(key + 2 * pair + 1, d + half * DEPTH);
                    _mm512_store_si512(tiles[2 * half] + pair * DEPTH, _mm512_unpacklo_epi16(a, b));
                    _mm512_store_si512(tiles[2 * half + 1] + pair * DEPTH, _mm512_unpackhi_epi16(a, b));
                }
            }
            asm volatile("" ::: "memory");
            _tile_loadd(4, weights + key, row_bytes);
            _tile_loadd(5, tiles[0], 64);
            _tile_dpbf16ps(0, 4, 5);
            _tile_loadd(6, tiles[1], 64);
            _tile_dpbf16ps(1, 4, 6);
            if (num_halves > 1) {
                _tile_loadd(5, tiles[2], 64);
                _tile_dpbf16ps(2, 4, 5);
                _tile_loadd(6, tiles[3], 64);
                _tile_dpbf16ps(3, 4, 6);
            }
            asm volatile("" ::: "memory");
        }
        _tile_stored(0, sums[0], 64);
        _tile_stored(1, sums[1], 64);
        _tile_stored(2, sums[2], 64);
        _tile_stored(3, sums[3], 64);
        asm volatile("" ::: "memory");
        for (int half = 0; half < num_halves; ++half) {
            for (int64_t head = 0; head < columns.heads; ++head) {
                const __m512 low = _mm512_load_ps(sums[2 * half] + head * TILE), high = _mm512_load_ps(sums[2 * half + 1] + head * TILE);
                float* to = out + head * columns.head_dim + d + half * DEPTH;
                store(to, (Floats)_mm512_permutex2var_ps(low, front, high));
                store(to + TILE, (Floats)_mm512_permutex2var_ps(low, back, high));
            }
        }
    }
}

}  // namespace

#endif
