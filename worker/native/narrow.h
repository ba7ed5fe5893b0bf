// What adapters make of a product's input: for each row the narrow middle between their two matrices, in bfloat16.

#pragma once

#include "laid.h"
#include "owners.h"
#include "team.h"

#if defined(__AVX512BF16__)

namespace {

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

// A product's input, whole rows or laid out; where it ends in the midst of a tile there is room for the rest.
struct Input {
    const bf16* x;
    int64_t size;
    bool is_laid;

    const bf16* tile(int64_t number) const { return x + (is_laid ? Laid::place(number * TILE, 0, size) : number * TILE * size); }
    int64_t row_bytes() const { return is_laid ? DEPTH * sizeof(bf16) : size * sizeof(bf16); }
    int64_t step() const { return is_laid ? 2 * TILE_SIZE : DEPTH; }

    // A row as it is multiplied alone; ``held`` [size] is where it may be put together.
    const bf16* row(int64_t row, bf16* held) const {
        if (!is_laid) return x + row * size;
        const bf16* from = x + Laid::place(row, 0, size);
        for (int64_t at = 0; at < size; at += DEPTH, from += 2 * TILE_SIZE) std::memcpy(held + at, from, DEPTH * sizeof(bf16));
        return held;
    }
};

// Middles of all rows, [row, MAX_FACTORS, held], each filled up with zeros to whole steps of a tile.
struct Middles {
    bf16* begin;
    int64_t held;

    static int64_t held_of(int64_t rank) { return (rank + DEPTH - 1) / DEPTH * DEPTH; }
    int64_t stride() const { return MAX_FACTORS * held; }
    bf16* at(int64_t row, int64_t factor) const { return begin + row * stride() + factor * held; }
};

class Narrow {
    const Input input_;
    const Middles middles_;

  public:
    Narrow(Input input, Middles middles) : input_(input), middles_(middles) {}

    // One task's rows, by its adapter's factors of this product.
    void take(const Owners& owners, const Owners::Task& task, const Factor* factors) const {
        if (task.is_tiles && task.count == 2) tiles<2>(factors, task.first);
        else if (task.is_tiles) tiles<1>(factors, task.first);
        else rows(factors, owners.loose(task), task.count);
    }

  private:
    void rows(const Factor* factors, const int32_t* rows, int64_t count) const {
        int64_t at = 0;
        for (; at + 8 <= count; at += 8) some<8>(factors, rows + at);
        for (; at + 4 <= count; at += 4) some<4>(factors, rows + at);
        for (; at + 2 <= count; at += 2) some<2>(factors, rows + at);
        if (at < count) some<1>(factors, rows + at);
    }

    template <int N>
    void some(const Factor* factors, const int32_t* rows) const {
        static thread_local std::vector<bf16> held;
        if (int64_t(held.size()) < N * input_.size) held.resize(N * input_.size);
        const bf16* inputs[N];
        for (int row = 0; row < N; ++row) inputs[row] = input_.row(rows[row], held.data() + row * input_.size);
        for (int number = 0; number < MAX_FACTORS; ++number) {
            const Factor& factor = factors[number];
            if (!factor.width) continue;
            for (int64_t at = 0; at < factor.rank; at += TILE) {
                __m512 sums[N];
                for (int row = 0; row < N; ++row) sums[row] = _mm512_setzero_ps();
                products<N>(inputs, factor.down + at * input_.size, input_.size / 2, sums);
                for (int row = 0; row < N; ++row) keep(middles_.at(rows[row], number), at, factor.rank, (Floats)sums[row]);
            }
        }
    }

    // Tiles of rows, by as many columns at once as there are sums for.
    template <int N>
    void tiles(const Factor* factors, int64_t tile) const {
        struct Columns {
            const bf16* down;
            int64_t factor, at;
        };
        Columns held[2];
        int count = 0;
        for (int number = 0; number < MAX_FACTORS; ++number) {
            if (!factors[number].width) continue;
            for (int64_t at = 0; at < factors[number].rank; at += TILE) {
                held[count++] = {factors[number].down + at * input_.size, number, at};
                if (count == 2) multiply_by<N, 2>(factors, tile, held), count = 0;
            }
        }
        if (count) multiply_by<N, 1>(factors, tile, held);
    }

    template <int N, int M, typename Columns>
    void multiply_by(const Factor* factors, int64_t tile, const Columns* columns) const {
        alignas(64) float sums[N][M][TILE * TILE];
        const bf16 *left = input_.tile(tile), *right = N == 2 ? input_.tile(tile + 1) : left;
        const int64_t row_bytes = input_.row_bytes(), step = input_.step(), steps = input_.size / DEPTH;
        if constexpr (N == 2 && M == 2) {
            multiply<2, 2, false>({left, right}, row_bytes, step, {columns[0].down, columns[1].down}, TILE_SIZE, steps,
                                  {{sums[0][0], sums[0][1]}, {sums[1][0], sums[1][1]}});
        } else if constexpr (N == 2) {
            multiply<2, 1, false>({left, right}, row_bytes, step, {columns[0].down}, TILE_SIZE, steps, {{sums[0][0]}, {sums[1][0]}});
        } else if constexpr (M == 2) {
            multiply<1, 2, false>({left}, row_bytes, step, {columns[0].down, columns[1].down}, TILE_SIZE, steps,
                                  {{sums[0][0], sums[0][1]}});
        } else {
            multiply<1, 1, false>({left}, row_bytes, step, {columns[0].down}, TILE_SIZE, steps, {{sums[0][0]}});
        }
        for (int own = 0; own < N * TILE; ++own) {
            for (int side = 0; side < M; ++side) {
                const Columns& to = columns[side];
                keep(middles_.at(tile * TILE + own, to.factor), to.at, factors[to.factor].rank,
                     load(sums[own / TILE][side] + own % TILE * TILE));
            }
        }
    }

    // Sixteen; behind the last there are zeros to the end of a step.
    static void keep(bf16* to, int64_t at, int64_t rank, Floats sums) {
        store(to + at, sums);
        if (at + TILE >= rank && at % DEPTH == 0) store(to + at + TILE, Floats{});
    }
};

}  // namespace

#endif
