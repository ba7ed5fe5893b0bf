// Which adapters a step's rows have.

#pragma once

#include "vectors.h"

namespace {

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

}  // namespace

#if defined(__AVX512BF16__)

#include <algorithm>
#include <vector>

#include "team.h"
#include "tiles.h"

namespace {

constexpr int MAX_FACTORS = 3;     // queries, keys and values
constexpr int ROWS_AT_ONCE = 32;   // that one task takes of a group
constexpr int LANES = 2 * TILE;    // bfloat16 of a line: sixteen columns of a pair of inputs
constexpr int LINES_AHEAD = 64;    // into the second cache: the first one waits for no more than sixteen lines at once

// Of a step's rows, by tiles: one that has a single adapter is multiplied as a tile, the rows of others one by one.
class Owners {
  public:
    // Of a group, which is ``index``: its tiles [first, first + count), one behind the other, or ``count`` of its loose rows.
    struct Task {
        int32_t index, first, count;
        bool is_tiles;
    };

  private:
    std::vector<int32_t> groups_, loose_;
    std::vector<bool> tiles_;
    std::vector<Task> tasks_;

  public:
    const Groups groups;

    // ``by_tiles``: none but where this holds.
    Owners(const Groups& of, int64_t rows, bool by_tiles) : groups(of) {
        if (!groups.count) return;
        groups_.assign(rows, -1);
        for (int64_t index = 0; index < groups.count; ++index) {
            const Group& group = groups.groups[index];
            for (int64_t at = 0; at < group.num_rows; ++at) groups_[group.rows[at]] = int32_t(index);
        }
        tiles_.resize((rows + TILE - 1) / TILE);
        for (int64_t tile = 0; tile < int64_t(tiles_.size()); ++tile) {
            const int32_t* begin = groups_.data() + tile * TILE;
            tiles_[tile] = by_tiles && (tile + 1) * TILE <= rows && *begin >= 0 &&
                           std::all_of(begin, begin + TILE, [&](int32_t one) { return one == *begin; });
            if (!tiles_[tile]) continue;
            Task* last = tile % 2 && !tasks_.empty() ? &tasks_.back() : nullptr;
            if (last && last->index == *begin && last->first + last->count == tile) ++last->count;
            else tasks_.push_back({*begin, int32_t(tile), 1, true});
        }
        for (int64_t index = 0; index < groups.count; ++index) {
            const Group& group = groups.groups[index];
            for (int64_t at = 0, held = 0; at < group.num_rows; ++at) {
                if (tiles_[group.rows[at] / TILE]) continue;
                if (held++ % ROWS_AT_ONCE == 0) tasks_.push_back({int32_t(index), int32_t(loose_.size()), 0, false});
                loose_.push_back(group.rows[at]);
                ++tasks_.back().count;
            }
        }
    }

    // Every thread of the team calls it: body(task, factors) of one product's, ``first`` among all of an adapter.
    template <typename Body>
    void each(Team& team, int64_t first, const Body& body) const {
        team.each(int64_t(tasks_.size()), 1, [&](int64_t number) {
            // Whoever is free takes the next task: its adapter lies elsewhere, and begins to arrive meanwhile.
            const int64_t later = std::min<int64_t>(number + team.size(), tasks_.size() - 1);
            const char* next = (const char*)factors_of(tasks_[later].index)[first].down;
            for (int line = 0; line < LINES_AHEAD; ++line) _mm_prefetch(next + 64 * line, _MM_HINT_T1);
            body(tasks_[number], factors_of(tasks_[number].index) + first);
        });
    }

    // All rows of this tile have the same.
    bool is_tile(int64_t tile) const { return tiles_[tile]; }
    const int32_t* loose(const Task& task) const { return loose_.data() + task.first; }
    // Of a row, the factors of all layers and places, or null.
    const Factor* factors(int64_t row) const { return groups_[row] < 0 ? nullptr : factors_of(groups_[row]); }

  private:
    const Factor* factors_of(int64_t index) const { return groups.groups[index].factors; }
};

}  // namespace

#endif
