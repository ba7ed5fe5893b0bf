// Paged attention of chunks of prompts: one pass over the keys for many queries, in blocks, with a running softmax (Milakov
// and Gimelshein 2018, Dao et al. 2022).

#pragma once

#include <algorithm>
#include <vector>

#include "forms.h"
#include "step.h"

namespace {

constexpr int ROWS = 256;          // query rows that one task takes
constexpr float NOTHING = -1e30f;  // the greatest of no scores: finite, so that differences are numbers

inline int64_t rounded_down(int64_t key) { return key / STRIDE * STRIDE; }
inline int64_t rounded_up(int64_t key) { return rounded_down(key + STRIDE - 1); }

// What is left of a thread's memory; every piece starts a cache line.
class Scratch {
    float* at_;

  public:
    explicit Scratch(std::vector<float>& held) : at_((float*)(((uintptr_t)held.data() + 63) & ~uintptr_t(63))) {}
    float* take(int64_t size) {
        float* taken = at_;
        at_ += (size + WIDTH - 1) / WIDTH * WIDTH;
        return taken;
    }
};

// What the rows of a task add up to, over some of the keys: for each tile of sixteen rows, in lanes.
struct Sums {
    float* mixed;     // [tiles, head_dim, 16]
    float* greatest;  // [tiles, 16]
    float* total;     // [tiles, 16]

    static int64_t size(int64_t tiles, int64_t head_dim) { return tiles * WIDTH * (head_dim + 2); }
    static Sums at(float* place, int64_t tiles, int64_t head_dim) {
        float* greatest = place + tiles * head_dim * WIDTH;
        return {place, greatest, greatest + tiles * WIDTH};
    }
};

// Rows [first, first + count) of one KV head of a chunk: row r is head r % group of token r / group.
template <typename T, typename Form>
struct Rows {
    const Step& step;
    Chunk chunk;
    Past<typename Form::Stored> past;
    const T* queries;  // of the KV head's first query head, at the chunk's first token
    int64_t group, window, first, count;
    const int32_t* tokens = nullptr;  // rows of the step, from ``queries`` on, where they are no neighbours

    static int64_t scratch_size(int64_t head_dim) {
        return ROWS * head_dim + 2 * KEYS * head_dim + 2 * KEYS * WIDTH + Sums::size(ROWS / WIDTH, head_dim) + 8 * WIDTH;
    }
    static int64_t num_tiles(int64_t count) { return (count + WIDTH - 1) / WIDTH; }

    // A tile's rows past the last repeat it.
    int64_t position(int64_t row) const { return chunk.start + (first + std::min(row, count - 1)) / group; }
    // Of the first key that counts for the rows from this one on.
    int64_t begin(int64_t row) const {
        return window ? rounded_down(std::max<int64_t>(0, position(row) - window + 1)) : 0;
    }

    // Over the keys [from, to), of which ``from`` is a multiple of STRIDE.
    void run(int64_t from, int64_t to, Sums sums, Scratch scratch) const {
        int64_t head_dim = step.head_dim, tiles = num_tiles(count), size = Form::turned_size(head_dim);
        float* turned = scratch.take(ROWS * head_dim);
        float* keys = scratch.take(KEYS * head_dim);
        float* values = scratch.take(KEYS * head_dim);
        float* scores = scratch.take(2 * KEYS * WIDTH);
        const T* rows[ROWS];
        alignas(64) int32_t positions[ROWS];
        find(rows, positions);
        for (int64_t tile = 0; tile < tiles; ++tile) Form::turn(rows + tile * WIDTH, head_dim, turned + tile * size);
        std::fill(sums.mixed, sums.mixed + tiles * head_dim * WIDTH, 0.0f);
        std::fill(sums.greatest, sums.greatest + tiles * WIDTH, NOTHING);
        std::fill(sums.total, sums.total + tiles * WIDTH, 0.0f);
        to = rounded_up(std::min(to, position(count - 1) + 1));
        for (int64_t at = from; at < to; at += KEYS) {
            int64_t stop = std::min(at + KEYS, to);
            Form::hold(past, at, stop, keys, values);
            int64_t tile = 0;
            // Two tiles share what they read.
            for (; tile + 1 < tiles; tile += 2) {
                visit<2>(tile, at, stop, positions, turned + tile * size, keys, values, scores, sums);
            }
            if (tile < tiles) visit<1>(tile, at, stop, positions, turned + tile * size, keys, values, scores, sums);
        }
    }

    // Where all rows lie, on their way into the second cache from now on, and their positions; no division for each.
    void find(const T** rows, int32_t* positions) const {
        int64_t token = first / group, head = first % group;
        for (int64_t row = 0; row < num_tiles(count) * WIDTH; ++row) {
            const T* from = queries + (tokens ? tokens[token] : token) * step.row_stride + head * step.head_dim;
            for (int64_t d = 0; d < step.head_dim; d += 64 / sizeof(T)) __builtin_prefetch(from + d, 0, 2);
            rows[row] = from, positions[row] = int32_t(chunk.start + token);
            if (row + 1 < count && ++head == group) ++token, head = 0;
        }
    }

    // N tiles of rows over the keys held, [at, stop).
    template <int N>
    void visit(int64_t tile, int64_t at, int64_t stop, const int32_t* positions, const float* turned, const float* keys,
               const float* values, float* scores, Sums sums) const {
        int64_t low = std::max(at, begin(tile * WIDTH));
        int64_t size = std::min(stop, rounded_up(position((tile + N) * WIDTH - 1) + 1)) - low;
        if (size <= 0) return;
        Form::template score<N>(past, at, low - at, size, turned, keys, scores);
        for (int one = 0; one < N; ++one) {
            weigh(tile + one, low, size, positions + (tile + one) * WIDTH, scores + one * KEYS * WIDTH, sums);
        }
        Form::template mix<N>(step.head_dim, low - at, size, scores, values, sums.mixed + tile * step.head_dim * WIDTH);
    }

    // The scores of one tile become weights, where they lie, and what was summed before is scaled to the new greatest score.
    void weigh(int64_t tile, int64_t low, int64_t size, const int32_t* of_rows, float* scores, Sums sums) const {
        Lanes positions;
        std::memcpy(&positions, of_rows, sizeof positions);
        // Keys that every row of the tile sees: [clear, clouded).
        int64_t clear = window ? std::clamp<int64_t>(positions[WIDTH - 1] - window + 1 - low, 0, size) : 0;
        int64_t clouded = std::clamp<int64_t>(positions[0] + 1 - low, clear, size);
        Floats before = load(sums.greatest + tile * WIDTH), top = before;
        auto see = [&](int64_t from, int64_t to, bool is_clear) {
            for (int64_t i = from; i < to; ++i) {
                Floats score = load(scores + i * WIDTH);
                if (step.softcap != 0.0f) score = step.softcap * hyperbolic_tangent(score * (step.scale / step.softcap));
                if (!is_clear) {
                    Lanes key = Lanes{} + int32_t(low + i);
                    score = positions >= key ? score : Floats{} - INFINITY;
                    if (window) score = positions - int32_t(window) < key ? score : Floats{} - INFINITY;
                }
                if (!is_clear || step.softcap != 0.0f) store(scores + i * WIDTH, score);
                top = greater(score, top);
            }
        };
        see(0, clear, false);
        if (step.softcap == 0.0f) {
            // Several at a time: each comparison waits for the one before.
            Floats tops[] = {top, top, top, top};
            for (; clear + 4 <= clouded; clear += 4) {
                for (int i = 0; i < 4; ++i) tops[i] = greater(load(scores + (clear + i) * WIDTH), tops[i]);
            }
            top = greater(greater(tops[0], tops[1]), greater(tops[2], tops[3]));
        }
        see(clear, clouded, true);
        see(clouded, size, false);

        const float factor = Form::BASE * unit();
        Floats fading = fading_of(before, top, factor);
        bool fades = false;
        for (int lane = 0; lane < WIDTH; ++lane) fades |= before[lane] != top[lane];
        float* mixed = sums.mixed + tile * step.head_dim * WIDTH;
        if (fades) {
            for (int64_t d = 0; d < step.head_dim; ++d) store(mixed + d * WIDTH, load(mixed + d * WIDTH) * fading);
        }
        Floats added = {}, added_too = {}, base = top * factor;
        for (int64_t i = 0; i < size; i += 2) {
            Floats even = Form::power(load(scores + i * WIDTH) * factor - base);
            Floats odd = Form::power(load(scores + (i + 1) * WIDTH) * factor - base);
            added += even;
            added_too += odd;
            Form::keep(scores, i, even, odd);
        }
        store(sums.greatest + tile * WIDTH, top);
        store(sums.total + tile * WIDTH, load(sums.total + tile * WIDTH) * fading + added + added_too);
    }

    // By what sums that were scaled to one score become sums scaled to another; what stays, stays to the bit, whatever the
    // other rows of the tile do.
    static Floats fading_of(Floats before, Floats top, float factor) {
        Floats fading = Form::power((before - top) * factor);
        return before == top ? Floats{} + 1.0f : fading;
    }

    // Scores are multiplied by it before they are exponents.
    float unit() const { return step.softcap != 0.0f ? 1.0f : step.scale; }

    // What a part of the keys adds up to becomes what it does with ``before``, the parts before it.
    void join(Sums before, Sums part) const {
        const int64_t head_dim = step.head_dim;
        const float factor = Form::BASE * unit();
        for (int64_t tile = 0; tile < num_tiles(count); ++tile) {
            const int64_t lanes = tile * WIDTH;
            Floats a = load(before.greatest + lanes), b = load(part.greatest + lanes), top = greater(a, b);
            Floats mine = fading_of(a, top, factor), theirs = fading_of(b, top, factor);
            store(part.greatest + lanes, top);
            store(part.total + lanes, load(before.total + lanes) * mine + load(part.total + lanes) * theirs);
            for (int64_t at = tile * head_dim * WIDTH; at < (tile + 1) * head_dim * WIDTH; at += WIDTH) {
                store(part.mixed + at, load(before.mixed + at) * mine + load(part.mixed + at) * theirs);
            }
        }
    }

    // To place_of(row), for each row of a tile, its dimensions times ``factor``. Compilers to whom sixteen floats are no register
    // take three times as long where it is inlined.
    template <typename PlaceOf>
    [[gnu::noinline]] void hand_out(Sums sums, int64_t tile, Floats factor, PlaceOf place_of) const {
        int64_t head_dim = step.head_dim, valid = std::min<int64_t>(WIDTH, count - tile * WIDTH);
        decltype(place_of(first)) places[WIDTH];
        for (int64_t lane = 0; lane < valid; ++lane) places[lane] = place_of(first + tile * WIDTH + lane);
        for (int64_t d = 0; d < head_dim; d += WIDTH) {
            Words square[WIDTH];
            for (int i = 0; i < WIDTH; ++i) {
                square[i] = (Words)(load(sums.mixed + (tile * head_dim + d + i) * WIDTH) * factor);
            }
            transpose(square);
            for (int64_t lane = 0; lane < valid; ++lane) store(places[lane] + d, (Floats)square[lane]);
        }
    }

    // out: as ``queries``, with all query heads side by side and nothing else. sinks [group]: see attend.h, or null.
    void put_out(Sums sums, const float* sinks, T* out) const {
        for (int64_t tile = 0; tile < num_tiles(count); ++tile) {
            Floats total = load(sums.total + tile * WIDTH);
            if (sinks) {
                for (int lane = 0; lane < WIDTH; ++lane) {
                    const int64_t at = tile * WIDTH + lane;
                    total[lane] += std::exp(sinks[(first + at) % group] - sums.greatest[at] * unit());
                }
            }
            hand_out(sums, tile, 1.0f / total, [&](int64_t row) {
                return out + (row / group * step.num_heads + row % group) * step.head_dim;
            });
        }
    }

    // As parts of decodes (see decode.h), to be joined with others: part_of(token) is its place.
    template <typename PartOf>
    void put_parts(Sums sums, PartOf part_of) const {
        const int64_t head_dim = step.head_dim;
        for (int64_t tile = 0; tile < num_tiles(count); ++tile) {
            hand_out(sums, tile, Floats{} + 1.0f,
                     [&](int64_t row) { return part_of(row / group) + row % group * head_dim; });
            for (int64_t at = tile * WIDTH; at < std::min((tile + 1) * WIDTH, count); ++at) {
                float* part = part_of((first + at) / group) + group * head_dim + (first + at) % group;
                part[0] = sums.greatest[at] * unit();
                part[group] = sums.total[at];
            }
        }
    }
};

}  // namespace
