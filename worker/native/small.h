// The small operations between the matrices: norms, rotations, gates.

#pragma once

#include <type_traits>

#include "vectors.h"

namespace {

template <typename T>
float inverse_rms(const T* values, int64_t size, float eps) {
    Floats squares = {};
    sweep<T>(size, [&](auto place) {
        Floats x = place.get_from(values);
        squares += x * x;
    });
    return 1.0f / std::sqrt(sum_of(squares) / float(size) + eps);
}

// One row of ``size``: x += norm(delta, post) or delta; out = norm(x, pre). Any of delta, post and pre may be null.
template <typename T>
void add_norm(T* x, const T* delta, const float* post, const float* pre, T* out, int64_t size, float eps) {
    if (delta) {
        float scale = post ? inverse_rms(delta, size, eps) : 1.0f;
        sweep<T>(size, [&](auto place) {
            Floats change = place.get_from(delta);
            if (post) change = change * scale * place.get_from_floats(post);
            place.put_into(x, place.get_from(x) + change);
        });
    }
    if (pre) {
        float scale = inverse_rms(x, size, eps);
        sweep<T>(size, [&](auto place) {
            place.put_into(out, place.get_from(x) * scale * place.get_from_floats(pre));
        });
    }
}

// Normed by ``weight`` where there is one, then turned; in place.
template <typename T>
void turn_head(T* head, int64_t head_dim, int64_t rotary_dim, const float* cos, const float* sin, const float* weight,
               float scale) {
    float held[MAX_HEAD_DIM];
    for (int64_t i = 0; i < head_dim; ++i) held[i] = get(head[i]) * (weight ? scale * weight[i] : 1.0f);
    int64_t half = rotary_dim / 2;
    sweep<T>(half, [&](auto place) {
        Floats low = place.get_from_floats(held), high = place.get_from_floats(held + half);
        place.put_into(head, low * place.get_from_floats(cos) + high * place.get_from_floats(sin));
        place.put_into(head + half, high * place.get_from_floats(cos + half) + low * place.get_from_floats(sin + half));
    });
    if (weight) {
        for (int64_t i = rotary_dim; i < head_dim; ++i) put(head + i, held[i]);
    }
}

// How queries and keys are turned: the same in all layers but for the weights of their norms.
struct Turning {
    int64_t num_heads, num_kv_heads, head_dim, rotary_dim;
    int32_t over_width;  // the norms are over all heads together
    float eps;
};

// The heads of one row, queries and then keys.
template <typename T>
void turn(const Turning& how, T* queries, const float* cos, const float* sin, const float* query_norm,
          const float* key_norm) {
    const int64_t num_heads = how.num_heads, head_dim = how.head_dim;
    T* keys = queries + num_heads * head_dim;
    float query_scale = 0.0f, key_scale = 0.0f;
    if (query_norm && how.over_width) {
        query_scale = inverse_rms(queries, num_heads * head_dim, how.eps);
        key_scale = inverse_rms(keys, how.num_kv_heads * head_dim, how.eps);
    }
    for (int64_t head = 0; head < num_heads + how.num_kv_heads; ++head) {
        bool is_query = head < num_heads;
        T* here = queries + head * head_dim;
        const float* weight = is_query ? query_norm : key_norm;
        float scale = is_query ? query_scale : key_scale;
        if (weight && how.over_width) weight += (is_query ? head : head - num_heads) * head_dim;
        if (weight && !how.over_width) scale = inverse_rms(here, head_dim, how.eps);
        turn_head(here, head_dim, how.rotary_dim, cos, sin, weight, scale);
    }
}

enum Activation { SILU, GELU, GELU_TANH, RELU, CLAMPED_SWIGLU };

// use(a constant) of the one that it is: loops have it for all of their turns.
template <typename Use>
[[gnu::always_inline]] inline void with_activation(int activation, const Use& use) {
    switch (activation) {
        case SILU: return use(std::integral_constant<int, SILU>());
        case GELU: return use(std::integral_constant<int, GELU>());
        case GELU_TANH: return use(std::integral_constant<int, GELU_TANH>());
        case RELU: return use(std::integral_constant<int, RELU>());
        case CLAMPED_SWIGLU: return use(std::integral_constant<int, CLAMPED_SWIGLU>());
    }
}

constexpr float SWIGLU_ALPHA = 1.702f, SWIGLU_LIMIT = 7.0f;  // of the clamped one, as gpt-oss has them

// x / (1 + e to the -x), for a result that is stored as T.
template <typename T>
[[gnu::always_inline]] inline Floats sigmoid_times(Floats x) {
#if defined(__AVX512BF16__)
    // Above it 2 to the power has no inverse that is a normal number.
    __m512 power = _mm512_min_ps(_mm512_set1_ps(125.0f), (__m512)(x * -1.44269504088896341f));
    // Rounded to bfloat16, nothing is left of an error a thirtieth of what that rounds by.
    if constexpr (sizeof(T) == 2) return x * (Floats)_mm512_rcp14_ps((__m512)(rough_power_of_two((Floats)power) + 1.0f));
    Floats below = (Floats)power_of_two(power) + 1.0f;
    // Within 2 to the -14, and, after a step of Newton's, as close as a division.
    Floats inverse = (Floats)_mm512_rcp14_ps((__m512)below);
    return x * (inverse + inverse * (1.0f - below * inverse));
#else
    return x / (1.0f + exponential(-x));
#endif
}

[[gnu::noinline]] inline Floats gelu(Floats x) {
    for (int i = 0; i < WIDTH; ++i) x[i] = 0.5f * x[i] * (1.0f + std::erf(x[i] * 0.70710678118654752f));
    return x;
}

// Inlined, since a call would take as long as the most usual one.
template <typename T>
[[gnu::always_inline]] inline Floats activate(Floats x, int activation) {
    switch (activation) {
        case SILU:
            return sigmoid_times<T>(x);
        case GELU_TANH:
            return 0.5f * x * (1.0f + hyperbolic_tangent(0.79788456080286536f * (x + 0.044715f * x * x * x)));
        case GELU:
            return gelu(x);
        default:
            return x > 0.0f ? x : Floats{};
    }
}

// activation(opened) * up; the clamped one is not only a function of what is opened.
template <typename T>
[[gnu::always_inline]] inline Floats gated(Floats opened, Floats up, int activation) {
    if (activation != CLAMPED_SWIGLU) return activate<T>(opened, activation) * up;
    const Floats limit = Floats{} + SWIGLU_LIMIT;
    opened = lesser(limit, opened), up = greater(-limit, lesser(limit, up));  // what is no number stays none
    return sigmoid_times<T>(SWIGLU_ALPHA * opened) * (1.0f / SWIGLU_ALPHA) * (up + 1.0f);
}

// out [size] = opened [size] times up [size], see ``gated``.
template <typename T>
void gate(const T* opened, const T* up, T* out, int64_t size, int activation) {
    sweep<T>(size, [&](auto place) { place.put_into(out, gated<T>(place.get_from(opened), place.get_from(up), activation)); });
}

// body(row), which does not throw, for all rows, on so many threads.
template <typename Body>
void each_row(int64_t rows, int threads, const Body& body) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; ++row) body(row);
}

}  // namespace
