// The CPU's small operations, its attention and its matrices: a plain C interface, called through ctypes.
//
// Sums are float32 whatever the tensors hold. The caller vouches for pointers and sizes; every function here is called from
// one thread at a time. Where one returns an Outcome and it is not FINE, what it was to write counts for nothing.

#include <new>

#include "adapt.h"
#include "as_floats.h"
#include "attend.h"
#include "coding.h"
#include "draws.h"
#include "follow.h"
#include "penalties.h"
#include "ranking.h"
#include "small.h"
#include "widened.h"

#define EACH_TYPE(call)      \
    if (is_bf16) {           \
        typedef bf16 T;      \
        call;                \
    } else {                 \
        typedef float T;     \
        call;                \
    }

namespace {

enum Outcome { FINE = 0, NO_MEMORY = 1, FAILED = 2 };

// No exception leaves by a function of C: it would end the process.
template <typename Body>
int outcome_of(const Body& body) noexcept {
    try {
        body();
        return FINE;
    } catch (const std::bad_alloc&) {
        return NO_MEMORY;
    } catch (...) {
        return FAILED;
    }
}

// use(network), as it is.
template <typename Use>
auto with_network(int is_bf16, const void* network, const Use& use) {
#if defined(HAVE_WHOLE)
    if (is_bf16) return use(*(const Network*)network);
#else
    (void)is_bf16;
#endif
    return use(*(const FloatNetwork*)network);
}

}  // namespace

extern "C" {

// x += norm(delta, post) or delta; out = norm(x, pre). Any of delta, post and pre may be null.
void penstock_add_norm(int is_bf16, void* x, const void* delta, const float* post, const float* pre, void* out,
                       int64_t rows, int64_t size, float eps, int threads) {
    EACH_TYPE(each_row(rows, rows * size < 65536 ? 1 : threads, [&](int64_t row) {
        const T* added = delta ? (const T*)delta + row * size : nullptr;
        add_norm((T*)x + row * size, added, post, pre, (T*)out + row * size, size, eps);
    }))
}

// Queries and keys of qkv [rows, stride], normed where there are weights, then turned, in place. head_dim is at most 1024.
void penstock_turn(int is_bf16, const Turning* how, void* qkv, int64_t rows, int64_t stride, const float* cos,
                   const float* sin, const float* query_norm, const float* key_norm, int threads) {
    EACH_TYPE(each_row(rows, rows * stride < 65536 ? 1 : threads, [&](int64_t row) {
        const int64_t angles = row * how->rotary_dim;
        turn(*how, (T*)qkv + row * stride, cos + angles, sin + angles, query_norm, key_norm);
    }))
}

// out [rows, size] = activation(gate_up[:, :size]) * gate_up[:, size:]
void penstock_gate(int is_bf16, const void* gate_up, void* out, int64_t rows, int64_t size, int activation, int threads) {
    EACH_TYPE(each_row(rows, rows * size < 32768 ? 1 : threads, [&](int64_t row) {
        const T* opened = (const T*)gate_up + row * 2 * size;
        gate(opened, opened + size, (T*)out + row * size, size, activation);
    }))
}

// Writes all rows' keys and values, then attends for the step's decodes and chunks. head_dim is a multiple of 16, at most 1024.
// stored: a StoredType, of the caches; scales are those of int8, or null; sinks [num_heads] or null.
int penstock_attend(int is_bf16, int stored, const Step* step, const void* queries, const void* keys, const void* values,
                    void* key_cache, void* value_cache, float* key_scales, float* value_scales, int64_t window,
                    const float* sinks, void* out) {
    return outcome_of([&] {
        EACH_TYPE(attend_over(stored, *step, (const T*)queries, (const T*)keys, (const T*)values,
                              {key_cache, value_cache, key_scales, value_scales}, window, sinks, (T*)out))
    });
}

// The largest of each half tile of logits [rows, vocab_size] (see maxima.h), NaN where one is.
int penstock_maxima(const float* logits, int64_t rows, int64_t vocab_size, float* maxima, int threads) {
    return outcome_of([&] { find_maxima({logits, maxima, vocab_size}, rows, threads); });
}

// The same of half tiles whose logits, at places [count], have changed.
void penstock_refresh_maxima(const float* logits, int64_t vocab_size, float* maxima, const int64_t* places, int64_t count) {
    refresh_maxima({logits, maxima, vocab_size}, places, count);
}

// Of logits [.., vocab_size], and their maxima or null, what sequences have ``seen`` [num] is penalised (see penalties.h).
int penstock_penalise(const void* seen, int64_t num, float* logits, int64_t vocab_size, float* maxima, int threads) {
    return outcome_of([&] { penalise((const Seen*)seen, num, logits, vocab_size, maxima, threads); });
}

// The likeliest tokens of rows of logits.
int penstock_rank(const Rankings* rankings, int threads) {
    return outcome_of([&] { rank(*rankings, threads); });
}

// A token for each row.
int penstock_draw(const Draws* draws, int threads) {
    return outcome_of([&] { draw(*draws, threads); });
}

// Whether bfloat16 is multiplied in tiles here.
int penstock_has_tiles() {
#if defined(HAVE_TILES)
    return may_use_tiles();
#else
    return 0;
#endif
}

// Whether there is ``penstock_linear``.
int penstock_has_linear() {
#if defined(__AVX512BF16__)
    return 1;
#else
    return 0;
#endif
}

#if defined(__AVX512BF16__)

// Bytes of a matrix in twelve bits a weight (see coded.h), but for its exceptions.
int64_t penstock_coded_bytes(const Matrix* matrix) { return matrix->num_panels() * Coded::panel_bytes(matrix->size); }

// A weight [columns, size] into ``panels``, its ``exceptions`` [most] and [panels + 1] where those of each panel begin. Returns how
// many there are into ``count``, or -1 where they are more.
int penstock_code(const void* weight, const Matrix* matrix, void* panels, int64_t most, void* exceptions, int64_t* firsts,
                  int64_t* count, int threads) {
    return outcome_of([&] {
        Coding coding((const bf16*)weight, *matrix, most);
        *count = coding.run((uint8_t*)panels, threads);
        if (*count <= most) coding.list((Exception*)exceptions, firsts);
        else *count = -1;
    });
}

// y = x [rows, size] times the matrix (see linear.h): [rows, columns] bfloat16, the same values as float32, or, gated,
// [rows, columns / 2]. maxima: of what is float32 (see maxima.h), or null.
int penstock_linear(const void* x, int64_t rows, const Matrix* matrix, int result, int activation, void* y, float* maxima,
                    int threads) {
    return outcome_of([&] { linear({(const bf16*)x, nullptr, rows, *matrix, {y, Result(result), activation, maxima}}, threads); });
}

#endif

// Whether there are whole steps of bfloat16, too.
int penstock_has_whole() {
#if defined(HAVE_WHOLE)
    return 1;
#else
    return 0;
#endif
}

// Bytes of memory that a step of so many tokens computes in, some with adapters of such a rank at most; 0: there are none.
int64_t penstock_whole_bytes(int is_bf16, const void* network, int64_t num_tokens, int64_t rank) {
    return with_network(is_bf16, network, [&](const auto& own) { return whole_bytes(own, num_tokens, rank); });
}

// A step from token ids to logits; of attention's ``step``, slots and what is cut into tasks. ``pass`` as its network has it.
int penstock_whole(int is_bf16, const void* network, const Step* step, const void* pass) {
    return outcome_of([&] {
        with_network(is_bf16, network, [&](const auto& own) {
            typedef typename std::decay_t<decltype(own)>::Pass Pass;
            run_whole(own, *step, *(const Pass*)pass);
        });
    });
}

// Such a step, and several of one token each, every token the likeliest after what is before.
int penstock_follow(int is_bf16, const void* network, const Step* first, const void* pass, const Step* step, const void* more,
                    const Following* following) {
    return outcome_of([&] {
        with_network(is_bf16, network, [&](const auto& own) {
            typedef typename std::decay_t<decltype(own)>::Pass Pass;
            follow(own, *first, *(const Pass*)pass, *step, *(const Pass*)more, *following);
        });
    });
}

// Whether ``penstock_adapt`` computes anything here.
int penstock_has_adapt() {
#if defined(__AVX512BF16__)
    return 1;
#else
    return 0;
#endif
}

// y [rows, columns] += what the groups' adapters (see adapt.h), of at most this rank, make of x [rows, size], all bfloat16; size is
// even.
int penstock_adapt(const void* groups, int64_t num_groups, int64_t rank, int64_t first, const void* x, int64_t rows, int64_t size,
                   void* y, int64_t columns, int threads) {
#if defined(__AVX512BF16__)
    static std::vector<bf16> memory;
    return outcome_of([&] {
        const Owners owners({(const Group*)groups, num_groups}, rows, size % DEPTH == 0);
        Middles middles{nullptr, Middles::held_of(rank)};
        if (int64_t(memory.size()) < rows * middles.stride()) memory.resize(rows * middles.stride());
        middles.begin = memory.data();
        Team::run(threads, [&](Team& team) {
            Tiles session(true);
            adapt(team, owners, first, {(const bf16*)x, size, false}, middles, (bf16*)y, columns);
        });
    });
#else
    (void)groups, (void)num_groups, (void)rank, (void)first, (void)x, (void)rows, (void)size, (void)y, (void)columns, (void)threads;
    return FINE;
#endif
}

// Whether ``penstock_linear_int8`` and ``penstock_linear_int4`` compute anything here.
int penstock_has_int8() {
#if defined(HAVE_INT8)
    return 1;
#else
    return 0;
#endif
}

// x [rows, size] times the matrix (see int8.h), x rounded to int8 row by row; x and result as for ``penstock_linear``, or float32
// and WIDE.
int penstock_linear_int8(int is_bf16, const void* x, int64_t rows, const void* matrix, int result, void* y, int threads) {
#if defined(HAVE_INT8)
    return outcome_of([&] {
        EACH_TYPE(int8::linear(*(const int8::Matrix*)matrix, (const T*)x, rows, {y, Result(result), 0}, threads))
    });
#else
    (void)is_bf16, (void)x, (void)rows, (void)matrix, (void)result, (void)y, (void)threads;
    return FINE;
#endif
}

// The same times groups (see int4.h), x rounded group by group, or, where it may be and rows are many, row by row (see widened.h).
int penstock_linear_int4(int is_bf16, const void* x, int64_t rows, const void* matrix, int result, void* y, int threads) {
#if defined(HAVE_INT8)
    return outcome_of([&] {
        EACH_TYPE(int4::linear(*(const int4::Matrix*)matrix, (const T*)x, rows, {y, Result(result), 0}, threads))
    });
#else
    (void)is_bf16, (void)x, (void)rows, (void)matrix, (void)result, (void)y, (void)threads;
    return FINE;
#endif
}

// Columns that ``penstock_linear_as_floats`` multiplies together.
int penstock_float_panel() { return as_floats::PANEL; }

// y [rows, columns] = x [rows, size] times the matrix (see as_floats.h), both float32.
int penstock_linear_as_floats(const void* x, int64_t rows, const void* matrix, void* y, int threads) {
    return outcome_of([&] { as_floats::linear(*(const as_floats::Matrix*)matrix, (const float*)x, rows, (float*)y, threads); });
}
}
