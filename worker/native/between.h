// What a whole step does between its matrices, whatever these are multiplied by.

#pragma once

#include <deque>

#include "attend.h"
#include "network.h"

namespace {

// The type of what computes a whole step.
template <typename Of>
struct Computed {
    typedef Of Whole;
};

template <typename T, typename Matrix, typename Form>
class Between {
  protected:
    typedef NetworkOf<T, Matrix> Network;
    typedef typename Network::Layer Layer;
    typedef typename Network::Pass Pass;

    const Network& network_;
    const Step& step_;
    const Pass& pass_;

  private:
    std::deque<Cut<T, Form>> cuts_;

  protected:
    Between(const Network& network, const Step& step, const Pass& pass) : network_(network), step_(step), pass_(pass) {
        for (int64_t index = 0; index < network.num_layers; ++index) {
            const Layer& layer = network.layers[index];
            if (!cut_of(layer.window)) cuts_.emplace_back(step_of(layer), layer.window);
        }
    }

    // body(task, claim) of short ones.
    template <typename Body>
    static void each_row(Team& team, int64_t rows, const Body& body) {
        team.each_claimed(rows, std::clamp<int64_t>(rows / (4 * team.size()), 1, WIDTH), body);
    }

    bool is_last(int64_t index) const { return index + 1 == network_.num_layers; }
    // What follows a layer: the norm, and the matrix that is multiplied then.
    const float* norm_behind(int64_t index) const {
        return is_last(index) ? network_.norm : network_.layers[index + 1].attention_pre_norm;
    }
    const Matrix& matrix_behind(int64_t index) const {
        return is_last(index) ? network_.head : network_.layers[index + 1].qkv;
    }

    // A row of x [num_tokens, hidden_size].
    void embed(int64_t row, T* all) const {
        const int64_t size = network_.hidden_size;
        T* x = all + row * size;
        std::memcpy(x, network_.embedding + pass_.token_ids[row] * size, size * sizeof(T));
        if (network_.embedding_scale == 1.0f) return;
        sweep<T>(size, [&](auto place) { place.put_into(x, place.get_from(x) * network_.embedding_scale); });
    }

    // x as it goes into a layer, where that is wanted; ``tap``: of those that are, the next one.
    void keep_tapped(Team& team, int64_t index, int64_t& tap, const T* x) const {
        if (tap == pass_.num_taps || pass_.taps[tap] != index) return;
        const int64_t size = network_.hidden_size, rows = step_.num_tokens;
        T* tapped = pass_.tapped + tap++ * rows * size;
        each_row(team, rows, [&](int64_t row, Claim& claim) {
            if (!claim.may_write()) return;
            std::memcpy(tapped + row * size, x + row * size, size * sizeof(T));
        });
    }

    // mixed [num_tokens, num_heads * head_dim] from qkv, whose queries and keys are turned first.
    void attend(Team& team, const Layer& layer, T* qkv, T* mixed) {
        const Turning& turning = network_.turning;
        const int64_t stride = layer.qkv.columns, head_dim = turning.head_dim;
        const T* keys = qkv + turning.num_heads * head_dim;
        Attention<T, Form> attention(step_of(layer), *cut_of(layer.window), qkv, keys, keys + turning.num_kv_heads * head_dim,
                                     layer.pool.template as<typename Form::Stored>(), nullptr, mixed);
        each_row(team, step_.num_tokens, [&](int64_t row, Claim& claim) {
            if (!claim.may_write()) return;
            const float *cosines = pass_.cosines[layer.rope], *sines = pass_.sines[layer.rope];
            const int64_t angles = pass_.positions[row] * turning.rotary_dim;
            turn(turning, qkv + row * stride, cosines + angles, sines + angles, layer.query_norm, layer.key_norm);
            attention.write(row);
        });
        attention.run(team);
    }

    // Of x and of what was attended to only the rows that are asked for. They ascend, so none is overwritten before it has moved.
    void keep_wanted(Team& team, T* x, T* mixed, int64_t mixed_size) const {
        team.each(1, 1, [&](int64_t) {
            for (int64_t place = 0; place < pass_.num_logits; ++place) {
                const int64_t row = pass_.rows[place], size = network_.hidden_size;
                std::memmove(x + place * size, x + row * size, size * sizeof(T));
                std::memmove(mixed + place * mixed_size, mixed + row * mixed_size, mixed_size * sizeof(T));
            }
        });
    }

  private:
    const Step& step_of(const Layer& layer) const { return layer.window && pass_.windowed ? *pass_.windowed : step_; }

    Cut<T, Form>* cut_of(int64_t window) {
        for (Cut<T, Form>& cut : cuts_) {
            if (cut.window == window) return &cut;
        }
        return nullptr;
    }
};

}  // namespace
