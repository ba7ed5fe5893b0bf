// A decoder whose steps are computed at once, and what such a step brings: as the caller hands them over.

#pragma once

#include "owners.h"
#include "small.h"
#include "step.h"
#include "stored.h"

namespace {

// Norms that a family does not have are null.
template <typename Matrix>
struct LayerOf {
    Matrix qkv, output, gate_up, down;
    const float *attention_pre_norm, *attention_post_norm, *mlp_pre_norm, *mlp_post_norm, *query_norm, *key_norm;
    Pool<void> pool;
    int64_t window;
    int64_t rope;  // which of the step's angles
};

// What one step brings, and where it may compute.
template <typename T>
struct PassOf {
    const int64_t* token_ids;  // [num_tokens]
    const int64_t* rows;       // [num_logits], ascending: the rows whose logits are wanted
    int64_t num_logits;
    const int64_t* positions;     // [num_tokens]
    const float* const* cosines;  // for each rope [positions, rotary_dim]
    const float* const* sines;
    float* logits;  // [num_logits, vocab_size]
    float* maxima;  // of them, for each half tile (see Maxima), or null
    void* memory;   // ``whole_bytes`` of it
    Groups adapted, adapted_last;  // those that have adapters, of all rows and of those whose logits are wanted
    T* hidden;             // [num_logits, hidden_size]: what the head is given, or null
    const int64_t* taps;   // layers, ascending, of which what goes in is wanted
    int64_t num_taps;
    T* tapped;             // [num_taps, num_tokens, hidden_size]
    int64_t rank;          // the largest of the adapters
    const Step* windowed;  // of the pool that layers with windows have to themselves, or null
};

template <typename T, typename Matrix>
struct NetworkOf {
    typedef LayerOf<Matrix> Layer;
    typedef PassOf<T> Pass;

    Turning turning;
    int64_t num_layers, hidden_size;
    const Layer* layers;
    const T* embedding;  // [vocab_size, hidden_size]
    float embedding_scale, eps;
    int64_t activation;
    const float* norm;
    Matrix head;
    int64_t stored;  // a StoredType
};

// body(matrix) of all of a layer, or of a whole network.
template <typename Matrix, typename Body>
void each_matrix(const LayerOf<Matrix>& layer, const Body& body) {
    for (const Matrix* matrix : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down}) body(*matrix);
}
template <typename T, typename Matrix, typename Body>
void each_matrix(const NetworkOf<T, Matrix>& network, const Body& body) {
    for (int64_t index = 0; index < network.num_layers; ++index) each_matrix(network.layers[index], body);
    body(network.head);
}

}  // namespace
