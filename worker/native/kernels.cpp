// The CPU's small operations and its decode attention, fused. A plain C interface, called through ctypes.
//
// Vectors are the compiler's own (GCC and Clang), so one source serves AVX-512, AVX2 and NEON; sums are float32 whatever
// the tensors hold. The caller vouches for pointers and sizes; every function here is called from one thread at a time.

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

typedef float Floats __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef int32_t Lanes __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

constexpr int WIDTH = 16;       // floats in a vector
constexpr int TILE = 256;       // positions whose scores are held at once
constexpr int PART = 512;       // positions one task takes; longer sequences are split and joined
constexpr int MAX_GROUP = 8;    // query heads that share one pass over the values

struct bf16 {
    uint16_t bits;
};

inline float bits_to_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline uint32_t float_to_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

inline float get(float value) { return value; }
inline float get(bf16 value) { return bits_to_float(uint32_t(value.bits) << 16); }

inline void put(float* to, float value) { *to = value; }
inline void put(bf16* to, float value) {  // to the nearest, ties to even; a NaN stays one
    uint32_t bits = float_to_bits(value);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    to->bits = uint16_t(value != value ? 0x7fc0u : rounded);
}

inline Floats load(const float* from) {
    Floats values;
    std::memcpy(&values, from, 64);
    return values;
}
inline Floats load(const bf16* from) {
    Halves halves;
    std::memcpy(&halves, from, 32);
    return (Floats)(__builtin_convertvector(halves, Words) << 16);
}
inline void store(float* to, Floats values) { std::memcpy(to, &values, 64); }

// e to the x: Cephes' expf (Moshier), within 2 ulp; below -87 it is 0 for our purposes.
inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : (x > 88.0f ? 88.0f : x);
    float turns = x * 1.44269504088896341f;
    int32_t whole = int32_t(turns + (turns < 0 ? -0.5f : 0.5f));
    float n = float(whole);
    float r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * bits_to_float(uint32_t(whole + 127) << 23);
}

inline float hyperbolic_tangent(float x) {
    float e = exponential(2.0f * x);
    return 1.0f - 2.0f / (e + 1.0f);
}

template <typename T>
float inverse_rms(const T* values, int64_t size, float eps) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < size; ++i) sum += get(values[i]) * get(values[i]);
    return 1.0f / std::sqrt(sum / float(size) + eps);
}

template <typename T>
void add_norm(T* x, const T* delta, const float* post, const float* pre, T* out, int64_t rows, int64_t size, float eps,
              int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; ++row) {
        T* here = x + row * size;
        if (delta) {
            const T* added = delta + row * size;
            if (post) {
                float scale = inverse_rms(added, size, eps);
#pragma omp simd
                for (int64_t i = 0; i < size; ++i) put(here + i, get(here[i]) + get(added[i]) * scale * post[i]);
            } else {
#pragma omp simd
                for (int64_t i = 0; i < size; ++i) put(here + i, get(here[i]) + get(added[i]));
            }
        }
        if (pre) {
            T* there = out + row * size;
            float scale = inverse_rms(here, size, eps);
#pragma omp simd
            for (int64_t i = 0; i < size; ++i) put(there + i, get(here[i]) * scale * pre[i]);
        }
    }
}

// Normed by ``weight`` where there is one, then turned; in place.
template <typename T>
void turn_head(T* head, int64_t head_dim, int64_t rotary_dim, const float* cos, const float* sin, const float* weight,
               float scale) {
    float held[1024];
    if (weight) {
#pragma omp simd
        for (int64_t i = 0; i < head_dim; ++i) held[i] = get(head[i]) * scale * weight[i];
    } else {
#pragma omp simd
        for (int64_t i = 0; i < head_dim; ++i) held[i] = get(head[i]);
    }
    int64_t half = rotary_dim / 2;
#pragma omp simd
    for (int64_t i = 0; i < half; ++i) {
        put(head + i, held[i] * cos[i] + held[i + half] * sin[i]);
        put(head + i + half, held[i + half] * cos[i + half] + held[i] * sin[i + half]);
    }
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

template <typename T>
void gate(const T* gate_up, T* out, int64_t rows, int64_t size, int activation, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; ++row) {
        const T* opened = gate_up + row * 2 * size;
        const T* up = opened + size;
        T* to = out + row * size;
        switch (activation) {
            case SILU:
#pragma omp simd
                for (int64_t i = 0; i < size; ++i) {
                    float x = get(opened[i]);
                    put(to + i, x / (1.0f + exponential(-x)) * get(up[i]));
                }
                break;
            case GELU:
                for (int64_t i = 0; i < size; ++i) {
                    float x = get(opened[i]);
                    put(to + i, 0.5f * x * (1.0f + std::erf(x * 0.70710678118654752f)) * get(up[i]));
                }
                break;
            case GELU_TANH:
#pragma omp simd
                for (int64_t i = 0; i < size; ++i) {
                    float x = get(opened[i]);
                    float inner = 0.79788456080286536f * (x + 0.044715f * x * x * x);
                    put(to + i, 0.5f * x * (1.0f + hyperbolic_tangent(inner)) * get(up[i]));
                }
                break;
            case RELU:
#pragma omp simd
                for (int64_t i = 0; i < size; ++i) {
                    float x = get(opened[i]);
                    put(to + i, (x > 0.0f ? x : 0.0f) * get(up[i]));
                }
                break;
        }
    }
}

// Lane i of the result is the sum of all lanes of sums[i].
inline Floats sums_across(Floats* sums) {
    const Lanes even = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
    const Lanes odd = {1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31};
    for (int left = WIDTH / 2; left > 0; left /= 2) {
        for (int i = 0; i < left; ++i) {
            Floats a = sums[2 * i], b = sums[2 * i + 1];
            sums[i] = __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, odd);
        }
    }
    return sums[0];
}

}  // namespace

// What attention over one step has in common between layers.
struct Step {
    int64_t num_tokens;          // rows of the step, for writing
    const int64_t* slots;        // [num_tokens]
    int64_t row_stride;          // elements between the rows of queries, keys and values
    int64_t num_slots;           // of the pool, a head
    int64_t num_heads, num_kv_heads, head_dim, block_size;
    int64_t num_decodes;
    const int32_t* rows;         // [num_decodes]: the row of each
    const int32_t* lengths;      // [num_decodes]: positions it sees, its own the last
    const int32_t* tables;       // [num_decodes, table_stride]
    int64_t table_stride;
    float scale, softcap;
    int32_t threads;
};

namespace {

// One query group (the heads of one KV head) over positions [begin, end): unnormalised output, greatest score, sum of weights.
template <typename T>
struct Part {
    const Step& step;
    const T* queries;            // [group, head_dim]
    const T* keys;               // of this KV head, [num_slots, head_dim]
    const T* values;
    const int32_t* table;
    int64_t group;

    // Where the rows of positions [begin, begin + count) start, in elements from ``keys`` and ``values``; the last is
    // repeated to a whole vector.
    void find(int64_t begin, int64_t count, int64_t* offsets) const {
        int64_t block = begin / step.block_size, inside = begin % step.block_size;
        for (int64_t i = 0; i < count; ++block, inside = 0) {
            int64_t slot = table[block] * step.block_size + inside;
            for (; i < count && inside < step.block_size; ++i, ++inside, ++slot) offsets[i] = slot * step.head_dim;
        }
        for (int64_t i = count; i % WIDTH; ++i) offsets[i] = offsets[count - 1];
    }

    // scores [group, TILE] of up to TILE positions
    void score(const int64_t* offsets, int64_t count, const float* held_queries, float* held_keys, float* scores) const {
        int64_t head_dim = step.head_dim;
#if defined(__AVX512BF16__)
        if constexpr (sizeof(T) == 2) {
            if (head_dim % (2 * WIDTH) == 0) return score_pairs(offsets, count, scores);
        }
#endif
        for (int64_t first = 0; first < count; first += WIDTH) {
            for (int64_t i = 0; i < WIDTH; ++i) {
                const T* row = keys + offsets[first + i];
                for (int64_t d = 0; d < head_dim; d += WIDTH) store(held_keys + i * head_dim + d, load(row + d));
            }
            for (int64_t g = 0; g < group; ++g) {
                Floats sums[WIDTH] = {};
                for (int64_t d = 0; d < head_dim; d += WIDTH) {
                    Floats query = load(held_queries + g * head_dim + d);
                    for (int i = 0; i < WIDTH; ++i) sums[i] += query * load(held_keys + i * head_dim + d);
                }
                store(scores + g * TILE + first, sums_across(sums) * step.scale);
            }
        }
    }

#if defined(__AVX512BF16__)
    // The same with the instruction that multiplies pairs of bfloat16, exactly, and adds them in float32.
    void score_pairs(const int64_t* offsets, int64_t count, float* scores) const {
        int64_t head_dim = step.head_dim;
        for (int64_t first = 0; first < count; first += WIDTH) {
            for (int64_t g = 0; g < group; ++g) {
                __m512 sums[WIDTH];
                for (int i = 0; i < WIDTH; ++i) sums[i] = _mm512_setzero_ps();
                for (int64_t d = 0; d < head_dim; d += 2 * WIDTH) {
                    __m512bh query = (__m512bh)_mm512_loadu_si512(queries + g * head_dim + d);
                    for (int i = 0; i < WIDTH; ++i) {
                        __m512bh key = (__m512bh)_mm512_loadu_si512(keys + offsets[first + i] + d);
                        sums[i] = _mm512_dpbf16_ps(sums[i], query, key);
                    }
                }
                store(scores + g * TILE + first, sums_across((Floats*)sums) * step.scale);
            }
        }
    }
#endif

    // out [GROUP, head_dim] += weights [GROUP, TILE] times the values of ``count`` positions
    template <int GROUP>
    void mix(const int64_t* offsets, int64_t count, const float* weights, float* out) const {
        int64_t head_dim = step.head_dim;
        int64_t d = 0;
        for (; d + 2 * WIDTH <= head_dim; d += 2 * WIDTH) {
            Floats low[GROUP], high[GROUP];
            for (int g = 0; g < GROUP; ++g) {
                low[g] = load(out + g * head_dim + d);
                high[g] = load(out + g * head_dim + d + WIDTH);
            }
            for (int64_t i = 0; i < count; ++i) {
                Floats a = load(values + offsets[i] + d), b = load(values + offsets[i] + d + WIDTH);
                for (int g = 0; g < GROUP; ++g) {
                    float weight = weights[g * TILE + i];
                    low[g] += a * weight;
                    high[g] += b * weight;
                }
            }
            for (int g = 0; g < GROUP; ++g) {
                store(out + g * head_dim + d, low[g]);
                store(out + g * head_dim + d + WIDTH, high[g]);
            }
        }
        for (; d < head_dim; d += WIDTH) {
            for (int g = 0; g < GROUP; ++g) {
                Floats sum = load(out + g * head_dim + d);
                for (int64_t i = 0; i < count; ++i) sum += load(values + offsets[i] + d) * weights[g * TILE + i];
                store(out + g * head_dim + d, sum);
            }
        }
    }

    void mix_all(const int64_t* offsets, int64_t count, const float* weights, float* out) const {
        for (int64_t g = 0; g < group; g += MAX_GROUP) {
            const float* w = weights + g * TILE;
            float* o = out + g * step.head_dim;
            switch (std::min<int64_t>(MAX_GROUP, group - g)) {
                case 1: mix<1>(offsets, count, w, o); break;
                case 2: mix<2>(offsets, count, w, o); break;
                case 3: mix<3>(offsets, count, w, o); break;
                case 4: mix<4>(offsets, count, w, o); break;
                case 5: mix<5>(offsets, count, w, o); break;
                case 6: mix<6>(offsets, count, w, o); break;
                case 7: mix<7>(offsets, count, w, o); break;
                case 8: mix<8>(offsets, count, w, o); break;
            }
        }
    }

    // out [group, head_dim], greatest [group], total [group]; ``work`` holds group * (head_dim + TILE) + 16 * head_dim floats
    void run(int64_t begin, int64_t end, float* out, float* greatest, float* total, float* work) const {
        int64_t head_dim = step.head_dim;
        float* held_queries = work;
        float* scores = held_queries + group * head_dim;
        float* held_keys = scores + group * TILE;
        for (int64_t i = 0; i < group * head_dim; ++i) held_queries[i] = get(queries[i]);
        std::fill(out, out + group * head_dim, 0.0f);
        std::fill(greatest, greatest + group, -INFINITY);
        std::fill(total, total + group, 0.0f);
        int64_t offsets[TILE];
        for (int64_t at = begin; at < end; at += TILE) {
            int64_t count = std::min<int64_t>(TILE, end - at);
            find(at, count, offsets);
            score(offsets, count, held_queries, held_keys, scores);
            for (int64_t g = 0; g < group; ++g) {
                float* row = scores + g * TILE;
                if (step.softcap != 0.0f) {
                    for (int64_t i = 0; i < count; ++i) row[i] = step.softcap * hyperbolic_tangent(row[i] / step.softcap);
                }
                float top = greatest[g];
#pragma omp simd reduction(max : top)
                for (int64_t i = 0; i < count; ++i) top = row[i] > top ? row[i] : top;
                float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
                for (int64_t i = 0; i < count; ++i) {
                    row[i] = exponential(row[i] - top);
                    sum += row[i];
                }
                if (at != begin) {
                    float fade = exponential(greatest[g] - top);
                    total[g] *= fade;
                    for (int64_t d = 0; d < head_dim; ++d) out[g * head_dim + d] *= fade;
                }
                greatest[g] = top;
                total[g] += sum;
            }
            mix_all(offsets, count, scores, out);
        }
    }
};

struct Task {
    int64_t decode, kv_head, begin, end, place;
};

template <typename T>
void attend(const Step& step, const T* queries, const T* keys, const T* values, T* key_cache, T* value_cache,
            int64_t window, T* out) {
    int64_t head_dim = step.head_dim, group = step.num_heads / step.num_kv_heads;
    for (int64_t token = 0; token < step.num_tokens; ++token) {
        for (int64_t head = 0; head < step.num_kv_heads; ++head) {
            int64_t to = (head * step.num_slots + step.slots[token]) * head_dim;
            int64_t from = token * step.row_stride + head * head_dim;
            std::memcpy(key_cache + to, keys + from, head_dim * sizeof(T));
            std::memcpy(value_cache + to, values + from, head_dim * sizeof(T));
        }
    }
    static std::vector<Task> tasks;
    static std::vector<float> parts;
    static std::vector<int64_t> first_parts;
    tasks.clear();
    first_parts.clear();
    int64_t num_parts = 0, work = 0;
    for (int64_t decode = 0; decode < step.num_decodes; ++decode) {
        int64_t length = step.lengths[decode];
        int64_t begin = window && window < length ? length - window : 0;
        // Where a sequence is cut depends on its length alone, so what else is in the batch cannot change its sums.
        int64_t pieces = (length - begin + PART - 1) / PART;
        int64_t size = ((length - begin + pieces - 1) / pieces + WIDTH - 1) / WIDTH * WIDTH;
        for (int64_t head = 0; head < step.num_kv_heads; ++head) {
            first_parts.push_back(num_parts);
            for (int64_t at = begin; at < length; at += size) {
                tasks.push_back({decode, head, at, std::min(at + size, length), num_parts++});
            }
        }
        work += (length - begin) * step.num_kv_heads * head_dim;
    }
    first_parts.push_back(num_parts);
    int64_t part_size = group * (head_dim + 2);
    if (int64_t(parts.size()) < num_parts * part_size) parts.resize(num_parts * part_size);
    float* all_parts = parts.data();
    const Task* all_tasks = tasks.data();
    int64_t num_tasks = int64_t(tasks.size());
    int threads = work > 32768 ? int(step.threads) : 1;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        std::vector<float> own(group * (head_dim + TILE) + WIDTH * head_dim);
#pragma omp for schedule(dynamic, 1)
        for (int64_t index = 0; index < num_tasks; ++index) {
            const Task& task = all_tasks[index];
            int64_t base = task.kv_head * step.num_slots * head_dim;
            Part<T> part{step,
                         queries + step.rows[task.decode] * step.row_stride + task.kv_head * group * head_dim,
                         key_cache + base,
                         value_cache + base,
                         step.tables + task.decode * step.table_stride,
                         group};
            float* place = all_parts + task.place * part_size;
            part.run(task.begin, task.end, place, place + group * head_dim, place + group * (head_dim + 1), own.data());
        }
    }
    for (int64_t decode = 0; decode < step.num_decodes; ++decode) {
        for (int64_t head = 0; head < step.num_kv_heads; ++head) {
            int64_t first = first_parts[decode * step.num_kv_heads + head];
            int64_t last = first_parts[decode * step.num_kv_heads + head + 1];
            T* to = out + step.rows[decode] * step.num_heads * head_dim + head * group * head_dim;
            for (int64_t g = 0; g < group; ++g) {
                float top = -INFINITY, total = 0.0f;
                for (int64_t i = first; i < last; ++i) {
                    top = std::max(top, all_parts[i * part_size + group * head_dim + g]);
                }
                float sums[1024] = {};
                for (int64_t i = first; i < last; ++i) {
                    const float* place = all_parts + i * part_size;
                    float weight = exponential(place[group * head_dim + g] - top);
                    total += weight * place[group * (head_dim + 1) + g];
#pragma omp simd
                    for (int64_t d = 0; d < head_dim; ++d) sums[d] += weight * place[g * head_dim + d];
                }
#pragma omp simd
                for (int64_t d = 0; d < head_dim; ++d) put(to + g * head_dim + d, sums[d] / total);
            }
        }
    }
}

}  // namespace

#define EACH_TYPE(call)      \
    if (is_bf16) {           \
        typedef bf16 T;      \
        call;                \
    } else {                 \
        typedef float T;     \
        call;                \
    }

extern "C" {

// x += norm(delta, post) or delta; out = norm(x, pre). Any of delta, post and pre may be null.
void penstock_add_norm(int is_bf16, void* x, const void* delta, const float* post, const float* pre, void* out,
                       int64_t rows, int64_t size, float eps, int threads) {
    if (rows * size < 65536) threads = 1;
    EACH_TYPE(add_norm((T*)x, (const T*)delta, post, pre, (T*)out, rows, size, eps, threads))
}

// Queries and keys of qkv [rows, stride], normed where there are weights, then turned, in place. head_dim is at most 1024.
void penstock_turn(int is_bf16, void* qkv, int64_t rows, int64_t stride, int64_t num_heads, int64_t num_kv_heads,
                   int64_t head_dim, int64_t rotary_dim, const float* cos, const float* sin, const float* query_norm,
                   const float* key_norm, int over_width, float eps, int threads) {
    if (rows * stride < 65536) threads = 1;
    EACH_TYPE(turn((T*)qkv, rows, stride, num_heads, num_kv_heads, head_dim, rotary_dim, cos, sin, query_norm, key_norm,
                   over_width, eps, threads))
}

// out [rows, size] = activation(gate_up[:, :size]) * gate_up[:, size:]
void penstock_gate(int is_bf16, const void* gate_up, void* out, int64_t rows, int64_t size, int activation, int threads) {
    if (rows * size < 32768) threads = 1;
    EACH_TYPE(gate((const T*)gate_up, (T*)out, rows, size, activation, threads))
}

// Writes all rows' keys and values, then attends for the step's decodes. head_dim is a multiple of 16, at most 1024.
void penstock_attend(int is_bf16, const Step* step, const void* queries, const void* keys, const void* values,
                     void* key_cache, void* value_cache, int64_t window, void* out) {
    EACH_TYPE(attend(*step, (const T*)queries, (const T*)keys, (const T*)values, (T*)key_cache, (T*)value_cache, window,
                     (T*)out))
}
}
