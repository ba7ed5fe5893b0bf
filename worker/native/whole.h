// A whole step of a decoder whose matrices are packed: from the tokens' embeddings to logits, by one team.
//
// The same arithmetic as the operations one by one, in the same order, rounded at the same places; but what adapters add to a
// product of bfloat16 is added before that is rounded.

#pragma once

#include "adapt.h"
#include "any_matrix.h"
#include "between.h"

#if defined(HAVE_WHOLE)

namespace {

typedef NetworkOf<bf16, AnyMatrix> Network;

// [rows, size] each; after the last row there is room for what fills two tiles, whatever it holds.
struct Activations {
    bf16 *x, *normed, *delta, *qkv, *mixed, *gated;
    bf16* adapted;  // of a product: what adapters add to it, or, where it is rounded before, both
    void* rounded;  // what is to be multiplied next, where a matrix takes it rounded
    Middles middles;
    int64_t num_bytes;

    // ``rank``: of adapters, or 0.
    Activations(const Network& network, int64_t rows, int64_t rank, void* memory) {
        const Network::Layer& layer = network.layers[0];
        char *begin = (char*)(((uintptr_t)memory + 63) & ~uintptr_t(63)), *at = begin;
        auto take = [&](int64_t size) {
            bf16* taken = (bf16*)at;
            at += (Laid::size_of(rows, size) * sizeof(bf16) + 63) / 64 * 64;
            return taken;
        };
        x = take(network.hidden_size), normed = take(network.hidden_size), delta = take(network.hidden_size);
        qkv = take(layer.qkv.columns), mixed = take(layer.output.size), gated = take(layer.down.size);
        adapted = rank ? take(std::max({layer.qkv.columns, layer.output.columns, layer.gate_up.columns})) : nullptr;
        middles = {rank ? take(MAX_FACTORS * Middles::held_of(rank)) : nullptr, Middles::held_of(rank)};
        int64_t most = 0;
        each_matrix(network, [&](const AnyMatrix& matrix) { most = std::max(most, matrix.rounded_bytes(rows)); });
        rounded = at;
        at += (most + 63) / 64 * 64;
        num_bytes = at - begin + 64;
    }
};

template <typename Stored>
class Whole : Between<bf16, AnyMatrix, PairForm<Stored>> {
    static constexpr int PLACES = 4;  // products of a layer

    typedef Between<bf16, AnyMatrix, PairForm<Stored>> Base;
    using typename Base::Layer, typename Base::Pass;
    using Base::each_row, Base::network_, Base::pass_, Base::step_;

    Activations own_;
    const Owners adapted_, adapted_last_;

  public:
    Whole(const Network& network, const Step& step, const Pass& pass)
        : Base(network, step, pass), own_(network, step.num_tokens, pass.rank, pass.memory),
          adapted_(pass.adapted, step.num_tokens, true), adapted_last_(pass.adapted_last, pass.num_logits, true) {}

    // Every thread of the team calls it.
    void run(Team& team) {
        Tiles session(true);
        int64_t rows = step_.num_tokens;
        int64_t tap = 0;
        const Owners* adapted = &adapted_;
        each_row(team, rows, [&](int64_t row, Claim& claim) {
            if (!claim.may_write()) return;
            this->embed(row, own_.x);
            norm(row, rows, nullptr, nullptr, network_.layers[0].attention_pre_norm, network_.layers[0].qkv, claim);
        });
        for (int64_t index = 0; index < network_.num_layers; ++index) {
            const Layer& layer = network_.layers[index];
            this->keep_tapped(team, index, tap, own_.x);
            attend(team, layer, index, rows);
            if (this->is_last(index) && pass_.num_logits < rows) {
                // Past the last layer's keys and values only the rows that are asked for matter.
                rows = pass_.num_logits, adapted = &adapted_last_;
                if (!rows) return;
                this->keep_wanted(team, own_.x, own_.mixed, layer.output.size);
            }
            round(team, own_.mixed, rows, layer.output);
            const bf16* change = change_of(*adapted, layer.output, layer.attention_post_norm);
            adapted_product(team, *adapted, {index, 1}, own_.mixed, rows, layer.output, output_of(change));
            each_row(team, rows, [&](int64_t row, Claim& claim) {
                norm(row, rows, change, layer.attention_post_norm, layer.mlp_pre_norm, layer.gate_up, claim);
            });
            const bf16* opened = layer.mlp_pre_norm ? own_.normed : own_.x;
            const bool is_plain = layer.gate_up.form == PLAIN && layer.down.form == PLAIN;
            const bool is_laid = layer.gate_up.lays(rows) && layer.down.takes_laid(rows) && (is_plain || !adapted->groups.count);
            if (adapted->groups.count && layer.gate_up.form != PLAIN) {
                adapted_product(team, *adapted, {index, 2}, opened, rows, layer.gate_up, {own_.adapted, ROUNDED, 0});
                each_row(team, rows, [&](int64_t row, Claim& claim) {
                    if (claim.may_write()) gate_one(row, rows, layer.down);
                });
            } else {
                adapted_product(team, *adapted, {index, 2}, opened, rows, layer.gate_up,
                                {own_.gated, GATED, int(network_.activation), nullptr, is_laid});
                if (is_laid) round_laid(team, own_.gated, rows, layer.down);
                else round(team, own_.gated, rows, layer.down);
            }
            change = change_of(*adapted, layer.down, layer.mlp_post_norm);
            adapted_product(team, *adapted, {index, 3}, own_.gated, rows, layer.down, output_of(change),
                            is_laid && layer.down.form == PLAIN);
            each_row(team, rows, [&](int64_t row, Claim& claim) {
                norm(row, rows, change, layer.mlp_post_norm, this->norm_behind(index), this->matrix_behind(index), claim);
            });
        }
        network_.head.multiply(team, own_.normed, own_.rounded, rows, {pass_.logits, WIDE, 0, pass_.maxima});
    }

  private:
    // Where a product waits to be added to x, or null: then it is at once.
    const bf16* change_of(const Owners& adapted, const AnyMatrix& matrix, const float* post_norm) const {
        return (adapted.groups.count && matrix.form != PLAIN) || post_norm ? own_.delta : nullptr;
    }
    Output output_of(const bf16* change) const {
        return change ? Output{own_.delta, ROUNDED, 0} : Output{own_.x, ADDED, 0};
    }

    struct Number {
        int64_t layer, place;  // of a product
        int64_t first() const { return (layer * PLACES + place) * MAX_FACTORS; }
    };

    // A layer's product and what adapters add to it. ``is_laid``: x is, and not what was rounded of it.
    void adapted_product(Team& team, const Owners& adapted, Number number, const bf16* x, int64_t rows, const AnyMatrix& matrix,
                         Output output, bool is_laid = false) const {
        void* rounded = is_laid ? (void*)x : own_.rounded;
        if (!adapted.groups.count) return matrix.multiply(team, x, rounded, rows, output);
        if (matrix.form == PLAIN) {
            const bool are_many = rows > FEW_ROWS;
            const Input input{are_many ? (const bf16*)rounded : x, matrix.size, are_many};
            prepare(team, adapted, number.first(), input, own_.middles, own_.adapted, matrix.columns);
            const Expansion expansion(adapted, own_.middles, number.first(), own_.adapted, matrix.columns);
            return matrix.multiply(team, x, rounded, rows, output, &expansion);
        }
        matrix.multiply(team, x, rounded, rows, output);
        adapt(team, adapted, number.first(), {x, matrix.size, false}, own_.middles, (bf16*)output.y, matrix.columns);
    }

    void gate_one(int64_t row, int64_t rows, const AnyMatrix& next) const {
        bf16* gated = own_.gated + row * next.size;
        const bf16* opened = own_.adapted + row * 2 * next.size;
        gate(opened, opened + next.size, gated, next.size, int(network_.activation));
        next.round(gated, row, rows, own_.rounded);
    }

    // For ``next``, where it asks for that.
    void round(Team& team, const bf16* x, int64_t rows, const AnyMatrix& next) const {
        if (next.form == PLAIN && rows <= FEW_ROWS) return;
        each_row(team, rows, [&](int64_t row, Claim& claim) {
            if (claim.may_write()) next.round(x + row * next.size, row, rows, own_.rounded);
        });
    }

    void round_laid(Team& team, const bf16* laid, int64_t rows, const AnyMatrix& next) const {
        if (next.form == PLAIN) return;
        team.each((rows + TILE - 1) / TILE, 1, [&](int64_t tile) { next.round_laid(laid, tile, rows, own_.rounded); });
    }

    // What ``next`` is multiplied with, rounded where it asks for that.
    void norm(int64_t row, int64_t rows, const bf16* delta, const float* post, const float* pre, const AnyMatrix& next,
              Claim& claim) const {
        const int64_t size = network_.hidden_size, at = row * size;
        // Where nobody reads it but to round it, it need not leave the cache.
        static thread_local std::vector<bf16> held;
        if (int64_t(held.size()) < size) held.resize(size);
        const bool is_read = next.form == PLAIN ? rows <= FEW_ROWS : pass_.adapted.count > 0;
        bf16* normed = is_read ? own_.normed + at : held.data();
        if ((delta || is_read) && !claim.may_write()) return;
        add_norm(own_.x + at, delta ? delta + at : nullptr, post, pre, normed, size, network_.eps);
        if (!claim.may_write()) return;
        if (pass_.hidden && &next == &network_.head) std::memcpy(pass_.hidden + at, normed, size * sizeof(bf16));
        next.round(pre ? normed : own_.x + at, row, rows, own_.rounded);
    }

    void attend(Team& team, const Layer& layer, int64_t index, int64_t rows) {
        const bf16* normed = layer.attention_pre_norm ? own_.normed : own_.x;
        adapted_product(team, adapted_, {index, 0}, normed, rows, layer.qkv, {own_.qkv, ROUNDED, 0});
        Base::attend(team, layer, own_.qkv, own_.mixed);
    }
};

// use(what computes it) of such a step.
template <typename Use>
void with_whole(const Network& network, const Use& use) {
    if (network.stored == AS_INT8) use(Computed<Whole<int8_t>>());
    else use(Computed<Whole<bf16>>());
}

inline int64_t whole_bytes(const Network& network, int64_t num_tokens, int64_t rank) {
    return Activations(network, num_tokens, rank, nullptr).num_bytes;
}

}  // namespace

#endif
