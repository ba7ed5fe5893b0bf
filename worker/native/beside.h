// One row and several panels side by side: memory answers faster where it is asked for in several places, and so many more sums wait
// for each other less.

#pragma once

#include "team.h"

#include <type_traits>

namespace {

constexpr int64_t BESIDE_RUNS = 16;  // that each thread has at least, where not all have as many

// As many panels at a time as all threads have in equal parts, or nearly.
inline int64_t num_beside(int64_t panels, int64_t threads) {
    auto serves = [&](int64_t count) { return panels % (count * threads) == 0 || panels >= count * BESIDE_RUNS * threads; };
    return serves(4) ? 4 : serves(2) ? 2 : 1;
}

// body(a constant, panel, claim) of so many of all panels at a time, and of those that are left one by one.
template <typename Body>
void each_beside(Team& team, int64_t panels, int64_t at_once, const Body& body) {
    team.each_apart((panels + at_once - 1) / at_once, 1, [&](int64_t task, Claim& claim) {
        int64_t panel = task * at_once;
        const int64_t last = std::min(panel + at_once, panels);
        if (last - panel == 4) return body(std::integral_constant<int, 4>(), panel, claim);
        if (last - panel == 2) return body(std::integral_constant<int, 2>(), panel, claim);
        for (; panel < last; ++panel) body(std::integral_constant<int, 1>(), panel, claim);
    });
}
template <typename Body>
void each_beside(Team& team, int64_t panels, const Body& body) {
    each_beside(team, panels, num_beside(panels, team.size()), body);
}

}  // namespace
