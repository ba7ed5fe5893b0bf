// The likeliest continuation of several sequences, one step after the other with nobody in between: what a draft model is for.

#pragma once

#include "whole.h"
#include "whole_floats.h"

namespace {

// A step.
template <typename Network>
void run_whole(const Network& network, const Step& step, const typename Network::Pass& pass) {
    with_whole(network, [&](auto computed) {
        typename decltype(computed)::Whole whole(network, step, pass);
        Team::run(step.threads, [&](Team& team) { whole.run(team); });
    });
}

// What comes after a first step, which catches up with the sequences: a token for each row of its logits, and steps of those. Their
// pass has positions as many as there are slots and lengths in their step; the first one's memory is theirs, too.
struct Following {
    int64_t num_steps, vocab_size;
    int64_t* chosen;  // [1 + num_steps, num_logits]
};

inline int64_t likeliest(const float* logits, int64_t size) {
    Floats tops = Floats{} - INFINITY;
    sweep<float>(size, [&](auto place) { tops = larger(first_of(place.get_from(logits), place.count), tops); });
    return std::find(logits, logits + size - 1, largest(tops, tops)) - logits;
}

// One of the steps that follow.
template <typename Pass>
struct Later {
    Step step;
    Pass pass;

    Later(const Step& all, const Pass& of_all, const Following& following, int64_t index) : step(all), pass(of_all) {
        const int64_t at = index * step.num_tokens;
        step.slots += at, step.lengths += at;
        pass.positions += at, pass.token_ids = following.chosen + at;
    }
};

constexpr int64_t FEW_PRODUCTS = 1 << 22;  // of a step that one thread has computed before another has woken

template <typename Network>
int64_t num_products(const Network& network) {
    int64_t num = 0;
    each_matrix(network, [&](const auto& matrix) { num += matrix.size * matrix.columns; });
    return num;
}

// By one team, since to wake one takes as long as a step of a small model; where that is small enough, by one thread.
template <typename Whole, typename Network, typename Pass = typename Network::Pass>
void follow_by(const Network& network, const Step& first, const Pass& pass, const Step& step, const Pass& more,
               const Following& following) {
    std::deque<Later<Pass>> later;
    std::deque<Whole> wholes;
    wholes.emplace_back(network, first, pass);
    for (int64_t index = 0; index < following.num_steps; ++index) {
        later.emplace_back(step, more, following, index);
        wholes.emplace_back(network, later.back().step, later.back().pass);
    }
    const bool is_small = num_products(network) * first.num_tokens < FEW_PRODUCTS;
    Team::run(is_small ? 1 : first.threads, [&](Team& team) {
        int64_t* chosen = following.chosen;
        for (Whole& whole : wholes) {
            whole.run(team);
            team.each(pass.num_logits, 1, [&](int64_t row) {
                chosen[row] = likeliest(pass.logits + row * following.vocab_size, following.vocab_size);
            });
            chosen += pass.num_logits;
        }
    });
}

template <typename Network>
void follow(const Network& network, const Step& first, const typename Network::Pass& pass, const Step& step,
            const typename Network::Pass& more, const Following& following) {
    with_whole(network, [&](auto computed) {
        follow_by<typename decltype(computed)::Whole>(network, first, pass, step, more, following);
    });
}

}  // namespace
