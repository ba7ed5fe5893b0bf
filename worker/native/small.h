// The small operations between the matrices: norms, rotations, gates.

#pragma once

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

template <typename T>
void add_norm(T* x, const T* delta, const float* post, const float* pre, T* out, int64_t rows, int64_t size, float eps,
              int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; ++row) {
        T* here = x + row * size;
        if (delta) {
            const T* added = delta + row * size;
            float scale = post ? inverse_rms(added, size, eps) : 1.0f;
            sweep<T>(size, [&](auto place) {
                Floats change = place.get_from(added);
                if (post) change = change * scale * place.get_from_floats(post);
                place.put_into(here, place.get_from(here) + change);
            });
        }
        if (pre) {
            float scale = inverse_rms(here, size, eps);
            sweep<T>(size, [&](auto place) {
                place.put_into(out + row * size, place.get_from(here) * scale * place.get_from_floats(pre));
            });
        }
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

template <typename T>
void turn(T* qkv, int64_t rows, int64_t stride, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
          int64_t rotary_dim, const float* cos, const float* sin, const float* query_norm, const float* key_norm,
          int over_width, float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; ++row) {
        T* queries = qkv + row * stride;
        T* keys = queries + num_heads * head_dim;
        float query_scale = 0.0f, key_scale = 0.0f;
        if (query_norm && over_width) {
            query_scale = inverse_rms(queries, num_heads * head_dim, eps);
            key_scale = inverse_rms(keys, num_kv_heads * head_dim, eps);
        }
        for (int64_t head = 0; head < num_heads + num_kv_heads; ++head) {
            bool is_query = head < num_heads;
            T* here = queries + head * head_dim;
            const float* weight = is_query ? query_norm : key_norm;
            float scale = is_query ? query_scale : key_scale;
            if (weight && over_width) weight += (is_query ? head : head - num_heads) * head_dim;
            if (weight && !over_width) scale = inverse_rms(here, head_dim, eps);
            turn_head(here, head_dim, rotary_dim, cos + row * rotary_dim, sin + row * rotary_dim, weight, scale);
        }
    }
}

enum Activation { SILU, GELU, GELU_TANH, RELU };

inline Floats activate(Floats x, int activation) {
    switch (activation) {
        case SILU:
            return x / (1.0f + exponential(-x));
        case GELU_TANH:
            return 0.5f * x * (1.0f + hyperbolic_tangent(0.79788456080286536f * (x + 0.044715f * x * x * x)));
        case GELU:
            for (int i = 0; i < WIDTH; ++i) x[i] = 0.5f * x[i] * (1.0f + std::erf(x[i] * 0.70710678118654752f));
            return x;
        default:
            return x > 0.0f ? x : Floats{};
    }
}

template <typename T>
void gate(const T* gate_up, T* out, int64_t rows, int64_t size, int activation, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; ++row) {
        const T* opened = gate_up + row * 2 * size;
        sweep<T>(size, [&](auto place) {
            Floats up = place.get_from(opened + size);
            place.put_into(out + row * size, activate(place.get_from(opened), activation) * up);
        });
    }
}

}  // namespace
