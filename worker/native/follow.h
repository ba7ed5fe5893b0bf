// The likeliest continuation of several sequences, one step after the other with nobody in between: what a draft model is for.

#pragma once

#include "whole.h"

#if defined(HAVE_WHOLE)

namespace {

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

inline int64_t num_products(const Network& network) {
    int64_t num = network.head.size * network.head.columns;
    for (int64_t index = 0; index < network.num_layers; ++index) {
        const Layer& layer = network.layers[index];
        for (const AnyMatrix* matrix : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down}) num += matrix->size * matrix->columns;
    }
    return num;
}

// By one team, since to wake one takes as long as a step of a small model; where that is small enough, by one thread.
template <typename Stored>
void follow_in(const Network& network, const Step& first, const Pass& pass, const Step& step, const Pass& more,
               const Following& following) {
    std::deque<Later> later;
    std::deque<Whole<Stored>> wholes;
    wholes.emplace_back(network, first, pass);
    for (int64_t index = 0; index < following.num_steps; ++index) {
        later.emplace_back(step, more, following, index);
        wholes.emplace_back(network, later.back().step, later.back().pass);
    }
    const bool is_small = num_products(network) * first.num_tokens < FEW_PRODUCTS;
    Team::run(is_small ? 1 : first.threads, [&](Team& team) {
        int64_t* chosen = following.chosen;
        for (Whole<Stored>& whole : wholes) {
            whole.run(team);
            team.each(pass.num_logits, 1, [&](int64_t row) {
                chosen[row] = likeliest(pass.logits + row * following.vocab_size, following.vocab_size);
            });
            chosen += pass.num_logits;
        }
    });
}

inline void follow(const Network& network, const Step& first, const Pass& pass, const Step& step, const Pass& more,
                   const Following& following) {
    if (network.stored == AS_INT8) follow_in<int8_t>(network, first, pass, step, more, following);
    else follow_in<bf16>(network, first, pass, step, more, following);
}

}  // namespace

#endif
