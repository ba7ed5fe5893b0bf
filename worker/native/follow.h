// The likeliest continuation of several sequences, one step after the other with nobody in between: what a draft model is for.

#pragma once

#include "whole.h"

#if defined(HAVE_WHOLE)

#include <vector>

namespace {

// Beside the first step and its pass, whose arrays over tokens (slots, lengths, angles) go on with those of the later steps.
struct Following {
    int64_t num_steps, vocab_size, num_ropes;
    int64_t* chosen;  // [num_steps, num_tokens]
};

inline int64_t likeliest(const float* logits, int64_t size) {
    float top = logits[0];
#pragma omp simd reduction(max : top)
    for (int64_t i = 0; i < size; ++i) top = std::max(top, logits[i]);
    return std::find(logits, logits + size - 1, top) - logits;
}

inline void follow(const Network& network, const Step& first, const Pass& pass, const Following& following) {
    Step step = first;
    Pass own = pass;
    std::vector<const float*> cosines(pass.cosines, pass.cosines + following.num_ropes);
    std::vector<const float*> sines(pass.sines, pass.sines + following.num_ropes);
    own.cosines = cosines.data(), own.sines = sines.data();
    for (int64_t index = 0; index < following.num_steps; ++index) {
        run_whole(network, step, own);
        int64_t* chosen = following.chosen + index * step.num_tokens;
        for (int64_t row = 0; row < step.num_tokens; ++row) {
            chosen[row] = likeliest(own.logits + row * following.vocab_size, following.vocab_size);
        }
        own.token_ids = chosen;
        step.slots += step.num_tokens, step.lengths += step.num_tokens;
        for (const float*& angles : cosines) angles += step.num_tokens * network.turning.rotary_dim;
        for (const float*& angles : sines) angles += step.num_tokens * network.turning.rotary_dim;
    }
}

}  // namespace

#endif
