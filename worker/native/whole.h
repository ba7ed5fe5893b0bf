// A whole step of a decoder whose matrices are packed: from the tokens' embeddings to logits, by one team.
//
// The same arithmetic as the operations one by one, in the same order, rounded at the same places; but what adapters add to a
// product of bfloat16 is added before that is rounded.

#pragma once

#include "adapt.h"
#include "any_matrix.h"
#include "attend.h"

#if defined(HAVE_WHOLE)

#include <deque>

namespace {

// Norms that a family does not have are null.
struct Layer {
    AnyMatrix qkv, output, gate_up, down;
    const float *attention_pre_norm, *attention_post_norm, *mlp_pre_norm, *mlp_post_norm, *query_norm, *key_norm;
    Pool<void> pool;
    int64_t window;
    int64_t rope;  // which of the step's angles
};

struct Network {
    Turning turning;
    int64_t num_layers, hidden_size;
    const Layer* layers;
    const bf16* embedding;  // [vocab_size, hidden_size]
    float embedding_scale, eps;
    int64_t activation;
    const float* norm;
    AnyMatrix head;
    int64_t stored;  // a StoredType
};

// What one step brings, and where it may compute.
struct Pass {
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
    bf16* hidden;          // [num_logits, hidden_size]: what the head is given, or null
    const int64_t* taps;   // layers, ascending, of which what goes in is wanted
    int64_t num_taps;
    bf16* tapped;          // [num_taps, num_tokens, hidden_size]
    int64_t rank;          // the largest of the adapters
    const Step* windowed;  // of the pool that layers with windows have to themselves, or null
};

// [rows, size] each; after the last row there is room for what fills two tiles, whatever it holds.
struct Activations {
    bf16 *x, *normed, *delta, *qkv, *mixed, *gated;
    bf16* adapted;  // of a product: what adapters add to it, or, where it is rounded before, both
    void* rounded;  // what is to be multiplied next, where a matrix takes it rounded
    Middles middles;
    int64_t num_bytes;

    // ``rank``: of adapters, or 0.
    Activations(const Network& network, int64_t rows, int64_t rank, void* memory) {
        const Layer& layer = network.layers[0];
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
        int64_t most = network.head.rounded_bytes(rows);
        for (int64_t index = 0; index < network.num_layers; ++index) most = std::max(most, of_layer(network.layers[index], rows));
        rounded = at;
        at += (most + 63) / 64 * 64;
        num_bytes = at - begin + 64;
    }

    static int64_t of_layer(const Layer& layer, int64_t rows) {
        int64_t most = 0;
        for (const AnyMatrix* matrix : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down}) {
            most = std::max(most, matrix->rounded_bytes(rows));
        }
        return most;
    }
};

template <typename Stored>
class Whole {
    static constexpr int PLACES = 4;  // products of a layer

    typedef PairForm<Stored> Form;

    const Network& network_;
    const Step& step_;
    const Pass& pass_;
    Activations own_;
    const Owners adapted_, adapted_last_;
    std::deque<Cut<bf16, Form>> cuts_;

  public:
    Whole(const Network& network, const Step& step, const Pass& pass)
        : network_(network), step_(step), pass_(pass), own_(network, step.num_tokens, pass.rank, pass.memory),
          adapted_(pass.adapted, step.num_tokens, true), adapted_last_(pass.adapted_last, pass.num_logits, true) {
        for (int64_t index = 0; index < network.num_layers; ++index) {
            const Layer& layer = network.layers[index];
            if (!cut_of(layer.window)) cuts_.emplace_back(step_of(layer), layer.window);
        }
    }

    // Every thread of the team calls it.
    void run(Team& team) {
        Tiles session(true);
        int64_t rows = step_.num_tokens;
        int64_t tap = 0;
        const Owners* adapted = &adapted_;
        each_row(team, rows, [&](int64_t row, Claim& claim) {
            if (!claim.may_write()) return;
            embed(row);
            norm(row, rows, nullptr, nullptr, network_.layers[0].attention_pre_norm, network_.layers[0].qkv, claim);
        });
        for (int64_t index = 0; index < network_.num_layers; ++index) {
            const Layer& layer = network_.layers[index];
            const bool is_last = index + 1 == network_.num_layers;
            const float* next_norm = is_last ? network_.norm : network_.layers[index + 1].attention_pre_norm;
            const AnyMatrix& next = is_last ? network_.head : network_.layers[index + 1].qkv;
            if (tap < pass_.num_taps && pass_.taps[tap] == index) {
                const int64_t size = network_.hidden_size;
                bf16* tapped = pass_.tapped + tap++ * rows * size;
                each_row(team, rows, [&](int64_t row, Claim& claim) {
                    if (!claim.may_write()) return;
                    std::memcpy(tapped + row * size, own_.x + row * size, size * sizeof(bf16));
                });
            }
            attend(team, layer, index, rows);
            if (is_last && pass_.num_logits < rows) {
                // Past the last layer's keys and values only the rows that are asked for matter.
                rows = pass_.num_logits, adapted = &adapted_last_;
                if (!rows) return;
                team.each(1, 1, [&](int64_t) { keep(layer.output.size); });
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
                norm(row, rows, change, layer.mlp_post_norm, next_norm, next, claim);
            });
        }
        network_.head.multiply(team, own_.normed, own_.rounded, rows, {pass_.logits, WIDE, 0, pass_.maxima});
    }

  private:
    const Step& step_of(const Layer& layer) const { return layer.window && pass_.windowed ? *pass_.windowed : step_; }

    Cut<bf16, Form>* cut_of(int64_t window) {
        for (Cut<bf16, Form>& cut : cuts_) {
            if (cut.window == window) return &cut;
        }
        return nullptr;
    }

    template <typename Body>
    static void each_row(Team& team, int64_t rows, const Body& body) {
        team.each_claimed(rows, std::clamp<int64_t>(rows / (4 * team.size()), 1, TILE), body);
    }

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
        gate(own_.adapted + row * 2 * next.size, gated, next.size, int(network_.activation));
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

    void embed(int64_t row) const {
        const int64_t size = network_.hidden_size;
        bf16* x = own_.x + row * size;
        std::memcpy(x, network_.embedding + pass_.token_ids[row] * size, size * sizeof(bf16));
        if (network_.embedding_scale == 1.0f) return;
        sweep<bf16>(size, [&](auto place) { place.put_into(x, place.get_from(x) * network_.embedding_scale); });
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
        const Turning& turning = network_.turning;
        const int64_t stride = layer.qkv.columns, head_dim = turning.head_dim;
        const bf16* normed = layer.attention_pre_norm ? own_.normed : own_.x;
        adapted_product(team, adapted_, {index, 0}, normed, rows, layer.qkv, {own_.qkv, ROUNDED, 0});
        const bf16* keys = own_.qkv + turning.num_heads * head_dim;
        Attention<bf16, Form> attention(step_of(layer), *cut_of(layer.window), own_.qkv, keys,
                                        keys + turning.num_kv_heads * head_dim, layer.pool.template as<Stored>(), nullptr,
                                        own_.mixed);
        each_row(team, rows, [&](int64_t row, Claim& claim) {
            if (!claim.may_write()) return;
            const float *cosines = pass_.cosines[layer.rope], *sines = pass_.sines[layer.rope];
            const int64_t angles = pass_.positions[row] * turning.rotary_dim;
            turn(turning, own_.qkv + row * stride, cosines + angles, sines + angles, layer.query_norm, layer.key_norm);
            attention.write(row);
        });
        attention.run(team);
    }

    // Of x and what was attended to. The rows ascend, so none is overwritten before it has moved.
    void keep(int64_t mixed_size) const {
        for (int64_t place = 0; place < pass_.num_logits; ++place) {
            const int64_t row = pass_.rows[place], size = network_.hidden_size;
            std::memmove(own_.x + place * size, own_.x + row * size, size * sizeof(bf16));
            std::memmove(own_.mixed + place * mixed_size, own_.mixed + row * mixed_size, mixed_size * sizeof(bf16));
        }
    }
};

inline void run_whole(const Network& network, const Step& step, const Pass& pass) {
    auto run = [&](auto whole) { Team::run(step.threads, [&](Team& team) { whole.run(team); }); };
    if (network.stored == AS_INT8) run(Whole<int8_t>(network, step, pass));
    else run(Whole<bf16>(network, step, pass));
}

}  // namespace

#endif
