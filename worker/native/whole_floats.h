// A whole step of a decoder that computes in float32, for processors that multiply nothing smaller, and for whoever asks for it:
// the same arithmetic as the operations one by one, in the same order, to the bit. Adapters are not known here.

#pragma once

#include "as_floats.h"
#include "between.h"
#include "stored_matrix.h"

namespace {

// A matrix that float32 is multiplied with. Rows of x are taken for that tile by tile: where it is multiplied as floats by those of
// a Product, where they are rounded for its codes one by one.
struct FloatsMatrix : StoredMatrix {
    const as_floats::Matrix& floats() const { return *(const as_floats::Matrix*)matrix; }

    int64_t num_tiles(int64_t rows) const { return form == FLOATS ? as_floats::Tiling{rows}.count() : rows; }
    int64_t first(int64_t tile, int64_t rows) const { return form == FLOATS ? as_floats::Tiling{rows}.first(tile) : tile; }
    int64_t rows_of(int64_t tile, int64_t rows) const { return first(tile + 1, rows) - first(tile, rows); }
    // Inputs that may be taken at a time: of rows that are rounded all.
    int64_t inputs_at_once() const { return form == FLOATS ? std::min<int64_t>(size, 512) : size; }

    int64_t taken_bytes(int64_t rows) const {
#if defined(HAVE_INT8)
        if (form != FLOATS) return code_bytes(rows);
#endif
        return rows * size * int64_t(sizeof(float));
    }

    // Of a tile's rows inputs [from, from + count), x [rows_of(tile), count], ``apart`` from row to row.
    void take(const float* x, int64_t apart, int64_t tile, int64_t rows, int64_t from, int64_t count, void* taken) const {
#if defined(HAVE_INT8)
        if (form != FLOATS) return round_to_codes(x, tile, rows, taken);
#endif
        const int64_t own = rows_of(tile, rows);
        as_floats::lay(x, apart, own, count, (float*)taken + first(tile, rows) * size + from * own);
    }

    // y [rows, columns]. Every thread of the team calls it, each with Tiles of its own.
    void multiply(Team& team, void* taken, int64_t rows, float* y) const {
#if defined(HAVE_INT8)
        if (form != FLOATS) return multiply_codes(team, taken, rows, {y, WIDE, 0});
#endif
        const as_floats::Product product{floats(), (const float*)taken, rows, y};
        as_floats::with_form(floats().form, [&](auto form) { product.run<form()>(team); });
    }
};

typedef NetworkOf<float, FloatsMatrix> FloatNetwork;

// [rows, size] each.
struct FloatActivations {
    float* x;
    float* delta;   // what a product has made, to be added to x; then what the next one is multiplied with
    float* opened;  // of the attention's heads, and of the gates
    float* mixed;
    void* taken;    // what is multiplied next, as its matrix takes it
    int64_t num_bytes;

    FloatActivations(const FloatNetwork& network, int64_t rows, void* memory) {
        char *begin = (char*)(((uintptr_t)memory + 63) & ~uintptr_t(63)), *at = begin;
        auto take = [&](int64_t bytes) {
            char* taken = at;
            at += (bytes + 63) / 64 * 64;
            return (float*)taken;
        };
        int64_t most_columns = 0, most_taken = network.head.taken_bytes(rows);
        for (int64_t index = 0; index < network.num_layers; ++index) {
            const FloatNetwork::Layer& layer = network.layers[index];
            most_columns = std::max({most_columns, layer.qkv.columns, layer.gate_up.columns});
            each_matrix(layer, [&](const FloatsMatrix& matrix) { most_taken = std::max(most_taken, matrix.taken_bytes(rows)); });
        }
        const int64_t of_hidden = rows * network.hidden_size * sizeof(float);
        x = take(of_hidden), delta = take(of_hidden);
        opened = take(rows * most_columns * sizeof(float)), mixed = take(rows * network.layers[0].output.size * sizeof(float));
        taken = take(most_taken);
        num_bytes = at - begin + 64;
    }
};

template <typename Stored>
class FloatWhole : Between<float, FloatsMatrix, FloatForm<float, Stored>> {
    typedef Between<float, FloatsMatrix, FloatForm<float, Stored>> Base;
    using typename Base::Layer, typename Base::Pass;
    using Base::each_row, Base::network_, Base::pass_, Base::step_;

    FloatActivations own_;

  public:
    FloatWhole(const FloatNetwork& network, const Step& step, const Pass& pass)
        : Base(network, step, pass), own_(network, step.num_tokens, pass.memory) {}

    // Every thread of the team calls it.
    void run(Team& team) {
#if defined(HAVE_TILES)
        Tiles session(true);
#endif
        int64_t rows = step_.num_tokens, tap = 0;
        const Layer& first = network_.layers[0];
        each_row(team, rows, [&](int64_t row, Claim& claim) {
            if (claim.may_write()) this->embed(row, own_.x);
        });
        norm(team, rows, nullptr, nullptr, first.attention_pre_norm, first.qkv);
        for (int64_t index = 0; index < network_.num_layers; ++index) {
            const Layer& layer = network_.layers[index];
            this->keep_tapped(team, index, tap, own_.x);
            layer.qkv.multiply(team, own_.taken, rows, own_.opened);
            this->attend(team, layer, own_.opened, own_.mixed);
            if (this->is_last(index) && pass_.num_logits < rows) {
                // Past the last layer's keys and values only the rows that are asked for matter.
                rows = pass_.num_logits;
                if (!rows) return;
                this->keep_wanted(team, own_.x, own_.mixed, layer.output.size);
            }
            each_tile(team, rows, layer.output, [&](int64_t tile, int64_t row, int64_t) {
                const int64_t size = layer.output.size;
                layer.output.take(own_.mixed + row * size, size, tile, rows, 0, size, own_.taken);
            });
            layer.output.multiply(team, own_.taken, rows, own_.delta);
            norm(team, rows, own_.delta, layer.attention_post_norm, layer.mlp_pre_norm, layer.gate_up);
            layer.gate_up.multiply(team, own_.taken, rows, own_.opened);
            gate(team, rows, layer.down);
            layer.down.multiply(team, own_.taken, rows, own_.delta);
            norm(team, rows, own_.delta, layer.mlp_post_norm, this->norm_behind(index), this->matrix_behind(index));
        }
        network_.head.multiply(team, own_.taken, rows, pass_.logits);
        if (pass_.maxima) find_maxima({pass_.logits, pass_.maxima, network_.head.columns}, rows, team);
    }

  private:
    // body(tile, row, count) of those in which ``next`` takes the rows, from ``row`` on.
    template <typename Body>
    static void each_tile(Team& team, int64_t rows, const FloatsMatrix& next, const Body& body) {
        each_row(team, next.num_tiles(rows), [&](int64_t tile, Claim& claim) {
            if (claim.may_write()) body(tile, next.first(tile, rows), next.rows_of(tile, rows));
        });
    }

    // x, and what ``next`` is multiplied with.
    void norm(Team& team, int64_t rows, const float* delta, const float* post, const float* pre, const FloatsMatrix& next) const {
        const int64_t size = network_.hidden_size;
        each_tile(team, rows, next, [&](int64_t tile, int64_t row, int64_t count) {
            for (int64_t at = row * size, end = at + count * size; at < end; at += size) {
                add_norm(own_.x + at, delta ? delta + at : nullptr, post, pre, own_.delta + at, size, network_.eps);
            }
            const float* normed = (pre ? own_.delta : own_.x) + row * size;
            if (pass_.hidden && &next == &network_.head) std::memcpy(pass_.hidden + row * size, normed, count * size * sizeof(float));
            next.take(normed, size, tile, rows, 0, size, own_.taken);
        });
    }

    // What ``next`` is multiplied with, some inputs of a tile at a time.
    void gate(Team& team, int64_t rows, const FloatsMatrix& next) const {
        const int64_t size = next.size, at_once = next.inputs_at_once(), parts = (size + at_once - 1) / at_once;
        each_row(team, next.num_tiles(rows) * parts, [&](int64_t task, Claim& claim) {
            static thread_local std::vector<float> gated;
            const int64_t tile = task / parts, from = task % parts * at_once, some = std::min(at_once, size - from);
            const int64_t row = next.first(tile, rows), count = next.rows_of(tile, rows);
            if (int64_t(gated.size()) < count * at_once) gated.resize(count * at_once);
            for (int64_t each = 0; each < count; ++each) {
                const float* opened = own_.opened + (row + each) * 2 * size + from;
                ::gate(opened, opened + size, gated.data() + each * at_once, some, int(network_.activation));
            }
            if (claim.may_write()) next.take(gated.data(), at_once, tile, rows, from, some, own_.taken);
        });
    }
};

// use(what computes it) of such a step.
template <typename Use>
void with_whole(const FloatNetwork& network, const Use& use) {
    if (network.stored == AS_INT8) use(Computed<FloatWhole<int8_t>>());
    else if (network.stored == AS_BF16) use(Computed<FloatWhole<bf16>>());
    else use(Computed<FloatWhole<float>>());
}

inline int64_t whole_bytes(const FloatNetwork& network, int64_t num_tokens, int64_t) {
    return FloatActivations(network, num_tokens, nullptr).num_bytes;
}

}  // namespace
