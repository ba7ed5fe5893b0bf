// What adapters add to one product of the decoder: for the rows of each, y += up (down x), in bfloat16.
//
// A row or two of each adapter, as where everybody decodes: it is the adapters that take their time to arrive, and they are
// read once, in order. Whole tiles of rows, as of a prompt, go through the narrow matrix by tiles.

#pragma once

#include "team.h"
#include "tiles.h"

#if defined(__AVX512BF16__)

#include <algorithm>
#include <vector>

namespace {

constexpr int LANES = 2 * TILE;  // bfloat16 of a line: sixteen columns of a pair of inputs

// One matrix's addition, in lines: ``down`` [rank / 16][size / 2][16][2], ``up`` [width / 16][rank / 2][16][2], both filled up
// with zeros to whole lines and sixteens; after ``up`` there is something to read ahead in. ``width`` 0: nothing is added.
struct Factor {
    const bf16 *down, *up;
    int64_t rank, left, width;  // of the columns of y: the first, and how many
};

// The rows of one adapter.
struct Group {
    const Factor* factors;  // of all layers and places, MAX_FACTORS each
    const int32_t* rows;
    int64_t num_rows;
};

// The groups of a step's rows, or of those that are left of them.
struct Groups {
    const Group* groups;
    int64_t count;
};

constexpr int MAX_FACTORS = 3;    // queries, keys and values
constexpr int ROWS_AT_ONCE = 32;  // that one task takes of a group
constexpr int LINES_AHEAD = 64;  // into the second cache: the first one waits for no more than sixteen lines at once

inline __m512bh pair_of(const bf16* at) {
    int32_t both;
    std::memcpy(&both, at, 4);
    return (__m512bh)_mm512_set1_epi32(both);
}

inline __m512bh line_at(const bf16* at) { return (__m512bh)_mm512_loadu_si512(at); }

// sums [N] of N rows of ``inputs`` times ``pairs`` lines. Few rows have several sums each, so that none waits for another.
template <int N>
inline void products(const bf16* const* inputs, const bf16* lines, int64_t pairs, __m512* sums) {
    constexpr int EACH = N == 1 ? 4 : N == 2 ? 2 : 1;
    __m512 parts[N][EACH];
    for (int row = 0; row < N; ++row) {
        parts[row][0] = sums[row];
        for (int part = 1; part < EACH; ++part) parts[row][part] = _mm512_setzero_ps();
    }
    int64_t pair = 0;
    for (; pair + EACH <= pairs; pair += EACH) {
        for (int part = 0; part < EACH; ++part) {
            const bf16* at = lines + (pair + part) * LANES;
            _mm_prefetch((const char*)(at + LINES_AHEAD * LANES), _MM_HINT_T1);
            const __m512bh line = line_at(at);
            for (int row = 0; row < N; ++row) {
                parts[row][part] = _mm512_dpbf16_ps(parts[row][part], line, pair_of(inputs[row] + 2 * (pair + part)));
            }
        }
    }
    for (; pair < pairs; ++pair) {
        const __m512bh line = line_at(lines + pair * LANES);
        for (int row = 0; row < N; ++row) {
            parts[row][0] = _mm512_dpbf16_ps(parts[row][0], line, pair_of(inputs[row] + 2 * pair));
        }
    }
    for (int row = 0; row < N; ++row) {
        for (int part = 1; part < EACH; ++part) parts[row][0] = _mm512_add_ps(parts[row][0], parts[row][part]);
        sums[row] = parts[row][0];
    }
}

// Some rows of x through one matrix's narrow middle, [rank filled up] bfloat16 each, and on to y.
struct Addition {
    const bf16* x;
    bf16* y;
    int64_t size, columns;
    const Factor& factor;

    int64_t held() const { return (factor.rank + DEPTH - 1) / DEPTH * DEPTH; }

    template <int N>
    void narrow(const int32_t* rows, bf16* middle) const {
        const bf16* inputs[N];
        for (int row = 0; row < N; ++row) inputs[row] = x + rows[row] * size;
        for (int64_t at = 0; at < factor.rank; at += TILE) {
            __m512 sums[N];
            for (int row = 0; row < N; ++row) sums[row] = _mm512_setzero_ps();
            products<N>(inputs, factor.down + at * size, size / 2, sums);
            for (int row = 0; row < N; ++row) store(middle + row * held() + at, (Floats)sums[row]);
        }
    }

    // Sixteen rows that lie behind each other, or twice as many.
    template <int N>
    void tiles(int64_t row, bf16* middle) const {
        alignas(64) float sums[N][2][TILE * TILE];
        const int64_t stride = held(), pairs = (factor.rank + 1) / 2;
        std::memset(middle, 0, N * TILE * stride * sizeof(bf16));
        for (int64_t at = 0; at < factor.rank; at += TILE) {
            const bf16* down = factor.down + at * size;
            if constexpr (N == 1) {
                multiply<1, 1, false>({x + row * size}, size * 2, DEPTH, {down}, TILE_SIZE, size / DEPTH, {{sums[0][0]}});
            } else {
                multiply<2, 1, false>({x + row * size, x + (row + TILE) * size}, size * 2, DEPTH, {down}, TILE_SIZE,
                                      size / DEPTH, {{sums[0][0]}, {sums[1][0]}});
            }
            for (int own = 0; own < N * TILE; ++own) {
                store(middle + own * stride + at, load(sums[own / TILE][0] + own % TILE * TILE));
            }
        }
        // A tile of ``up`` reaches into what comes behind it, which the zeros of the middle meet.
        const int64_t steps = stride / DEPTH;
        for (int64_t at = 0; at < factor.width; at += 2 * TILE) {
            const bf16 *left = factor.up + at * 2 * pairs, *right = at + TILE < factor.width ? left + TILE * 2 * pairs : left;
            if constexpr (N == 1) {
                multiply<1, 2, false>({middle}, stride * 2, DEPTH, {left, right}, TILE_SIZE, steps, {{sums[0][0], sums[0][1]}});
            } else {
                multiply<2, 2, false>({middle, middle + TILE * stride}, stride * 2, DEPTH, {left, right}, TILE_SIZE, steps,
                                      {{sums[0][0], sums[0][1]}, {sums[1][0], sums[1][1]}});
            }
            for (int own = 0; own < N * TILE; ++own) {
                bf16* to = y + (row + own) * columns + factor.left + at;
                for (int side = 0; side < 2 && at + side * TILE < factor.width; ++side) {
                    const Place<bf16> place{side * TILE, int(std::min<int64_t>(TILE, factor.width - at - side * TILE))};
                    place.put_into(to, place.get_from(to) + load(sums[own / TILE][side] + own % TILE * TILE));
                }
            }
        }
    }

    template <int N>
    void widen(const int32_t* rows, const bf16* middle) const {
        const bf16* inputs[N];
        for (int row = 0; row < N; ++row) inputs[row] = middle + row * held();
        const int64_t pairs = (factor.rank + 1) / 2;
        for (int64_t at = 0; at < factor.width; at += TILE) {
            const Place<bf16> place{factor.left + at, int(std::min<int64_t>(TILE, factor.width - at))};
            __m512 sums[N];
            for (int row = 0; row < N; ++row) sums[row] = (__m512)place.get_from(y + rows[row] * columns);
            products<N>(inputs, factor.up + at * 2 * pairs, pairs, sums);
            for (int row = 0; row < N; ++row) place.put_into(y + rows[row] * columns, (Floats)sums[row]);
        }
    }

    static bool are_neighbours(const int32_t* rows, int count) { return rows[count - 1] == rows[0] + count - 1; }

    template <int N>
    void some(const int32_t* rows, bf16* middle) const {
        narrow<N>(rows, middle);
        widen<N>(rows, middle);
    }

    void run(const int32_t* rows, int64_t count, bf16* middle) const {
        int64_t at = 0;
        if (size % DEPTH == 0) {
            for (; at + 2 * TILE <= count && are_neighbours(rows + at, 2 * TILE); at += 2 * TILE) tiles<2>(rows[at], middle);
            for (; at + TILE <= count && are_neighbours(rows + at, TILE); at += TILE) tiles<1>(rows[at], middle);
        }
        for (; at + 8 <= count; at += 8) some<8>(rows + at, middle);
        for (; at + 4 <= count; at += 4) some<4>(rows + at, middle);
        for (; at + 2 <= count; at += 2) some<2>(rows + at, middle);
        if (at < count) some<1>(rows + at, middle);
    }
};

// Every thread of the team calls it, each with Tiles of its own. ``first``: of the product's factors, among all of an adapter.
// x [rows, size], y [rows, columns].
inline void adapt(Team& team, const Groups& adapted, int64_t first, const bf16* x, int64_t size, bf16* y, int64_t columns) {
    struct Task {
        const Group* group;
        int64_t from;
    };
    static thread_local std::vector<Task> tasks;
    static thread_local std::vector<bf16> held;
    tasks.clear();
    for (const Group* group = adapted.groups; group != adapted.groups + adapted.count; ++group) {
        for (int64_t from = 0; from < group->num_rows; from += ROWS_AT_ONCE) tasks.push_back({group, from});
    }
    team.each(int64_t(tasks.size()), 1, [&](int64_t task) {
        const Group& group = *tasks[task].group;
        // Whoever is free takes the next task: its adapter lies elsewhere, and begins to arrive meanwhile.
        const int64_t later = std::min<int64_t>(task + team.size(), tasks.size() - 1);
        const char* next = (const char*)tasks[later].group->factors[first].down;
        for (int line = 0; line < LINES_AHEAD; ++line) _mm_prefetch(next + 64 * line, _MM_HINT_T1);
        const int64_t from = tasks[task].from, count = std::min<int64_t>(ROWS_AT_ONCE, group.num_rows - from);
        for (const Factor* factor = group.factors + first; factor != group.factors + first + MAX_FACTORS; ++factor) {
            if (!factor->width) continue;
            const Addition addition{x, y, size, columns, *factor};
            if (int64_t(held.size()) < 2 * TILE * addition.held()) held.resize(2 * TILE * addition.held());
            addition.run(group.rows + from, count, held.data());
        }
    });
}

}  // namespace

#endif
