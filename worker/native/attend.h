// Paged attention of one step: keys and values into their slots, then all tasks of all sequences, by whoever is free.

#pragma once

#include <algorithm>
#include <vector>

#include "chunk.h"
#include "decode.h"
#include "parts.h"
#include "team.h"

namespace {

constexpr int SPAN = 2048;   // keys that one task of a chunk reads; more are split and joined
constexpr int SHARED = 1024;  // of what several decodes have in common

// Where a sequence is cut depends on itself alone, so what else is in the batch cannot change its sums, but for those that begin
// as it does.
struct DecodeTask {
    int64_t decode, kv_head, begin, end, place;
};

// Rows of all decodes that begin alike, over the ``part``-th stretch of keys of that beginning: read once for them all (Ye et
// al. 2024, cascade inference).
struct SharedTask {
    int64_t share, kv_head, first, count, begin, end, part;
};

// Of a chunk: ``num_parts`` tasks in a row, each with the ``part``-th stretch of keys, are joined. ``number``: of all such parts.
struct ChunkTask {
    Chunk chunk;
    int64_t kv_head, first, count, begin, end, part, num_parts, number;
};

// How a step is cut into tasks: the same in all layers of one window.
template <typename T, typename Form>
class Cut {
    const Step& step_;
    const int64_t group_;

  public:
    const int64_t window;
    std::vector<DecodeTask> decodes;
    std::vector<int64_t> first_parts;  // of each decode and KV head, and the end
    std::vector<SharedTask> shared;
    std::vector<int32_t> sharing;  // the step's row of each of its ``sharers``
    std::vector<ChunkTask> chunks;
    std::vector<float> decode_parts;
    Parts chunk_parts;
    int64_t work = 0;  // elements of keys that are read

    Cut(const Step& step, int64_t window) : step_(step), group_(step.num_heads / step.num_kv_heads), window(window) {
        int64_t num_decode_parts = 0, num_chunk_parts = 0;
        std::vector<int64_t> begins(step_.num_decodes);
        // A window sees its own beginning.
        for (int64_t index = 0; index < (window ? 0 : step_.num_shares); ++index) cut_shared(index, begins);
        for (int64_t index = 0; index < step_.num_chunks; ++index) cut_chunk(index, num_chunk_parts);
        for (int64_t decode = 0; decode < step_.num_decodes; ++decode) cut_decode(decode, begins[decode], num_decode_parts);
        first_parts.push_back(num_decode_parts);
        decode_parts.resize(num_decode_parts * part_size());
        if (num_chunk_parts) chunk_parts.begin(num_chunk_parts, Sums::size(ROWS / WIDTH, step_.head_dim), step_.threads);
    }

    int64_t part_size() const { return group_ * (step_.head_dim + 2); }

    Rows<T, Form> rows_of(const SharedTask& task, Past<typename Form::Stored> past, const T* queries) const {
        const int32_t* share = step_.shares + 3 * task.share;
        return {step_, {0, share[1], share[2], past.table}, past, queries, group_, 0, task.first, task.count,
                sharing.data() + share[0]};
    }

    Rows<T, Form> rows_of(const ChunkTask& task, Past<typename Form::Stored> past, const T* queries) const {
        return {step_, task.chunk, past, queries, group_, window, task.first, task.count};
    }

  private:
    void cut_shared(int64_t index, std::vector<int64_t>& begins) {
        const int32_t* share = step_.shares + 3 * index;
        const int64_t length = share[2], num_rows = share[1] * group_, pieces = (num_rows + ROWS - 1) / ROWS;
        const int64_t rows_each = ((num_rows + pieces - 1) / pieces + WIDTH - 1) / WIDTH * WIDTH;
        sharing.resize(share[0] + share[1]);
        for (int64_t at = share[0]; at < share[0] + share[1]; ++at) {
            begins[step_.sharers[at]] = length;
            sharing[at] = step_.rows[step_.sharers[at]];
        }
        for (int64_t head = 0; head < step_.num_kv_heads; ++head) {
            for (int64_t begin = 0; begin < length; begin += SHARED) {
                for (int64_t first = 0; first < num_rows; first += rows_each) {
                    shared.push_back({index, head, first, std::min(rows_each, num_rows - first), begin,
                                      std::min(begin + SHARED, length), begin / SHARED});
                }
            }
        }
        work += length * step_.num_kv_heads * step_.head_dim * ((num_rows + WIDTH - 1) / WIDTH);
    }

    // From ``begin`` on, what it shares with others has parts in front of its own.
    void cut_decode(int64_t decode, int64_t begin, int64_t& num_parts) {
        const int64_t length = step_.lengths[decode], num_shared = (begin + SHARED - 1) / SHARED;
        if (window && window < length) begin = length - window;
        int64_t pieces = (length - begin + PART - 1) / PART;
        int64_t size = ((length - begin + pieces - 1) / pieces + WIDTH - 1) / WIDTH * WIDTH;
        for (int64_t head = 0; head < step_.num_kv_heads; ++head) {
            first_parts.push_back(num_parts);
            num_parts += num_shared;
            for (int64_t at = begin; at < length; at += size) {
                decodes.push_back({decode, head, at, std::min(at + size, length), num_parts++});
            }
        }
        work += (length - begin) * step_.num_kv_heads * step_.head_dim;
    }

    // Its longest tasks, the last rows', come first.
    void cut_chunk(int64_t index, int64_t& num_chunk_parts) {
        const int32_t* numbers = step_.chunks + 3 * index;
        Chunk chunk{numbers[0], numbers[1], numbers[2], step_.chunk_tables + index * step_.chunk_table_stride};
        int64_t num_rows = chunk.num_tokens * group_;
        int64_t pieces = (num_rows + ROWS - 1) / ROWS;
        int64_t rows_each = ((num_rows + pieces - 1) / pieces + WIDTH - 1) / WIDTH * WIDTH;
        for (int64_t first = (num_rows - 1) / rows_each * rows_each; first >= 0; first -= rows_each) {
            ChunkTask task{chunk, 0, first, std::min(rows_each, num_rows - first), 0, 0, 0, 1, 0};
            Rows<T, Form> rows = rows_of(task, {}, nullptr);
            int64_t begin = rows.begin(0), end = rows.position(task.count - 1) + 1;
            // Where parts and blocks of keys begin depends on the chunk, or else on the position alone; keys that a row does
            // not see change none of its bits.
            int64_t base = begin, keys_each = SPAN;
            if (step_.is_repeatable) base = begin / SPAN * SPAN, begin = begin / KEYS * KEYS;
            task.num_parts = (end - base + SPAN - 1) / SPAN;
            if (!step_.is_repeatable) keys_each = rounded_up((end - base + task.num_parts - 1) / task.num_parts);
            task.num_parts = (end - base + keys_each - 1) / keys_each;
            for (task.kv_head = 0; task.kv_head < step_.num_kv_heads; ++task.kv_head) {
                for (task.part = 0; task.part < task.num_parts; ++task.part) {
                    task.begin = std::max(begin, base + task.part * keys_each);
                    task.end = std::min(base + (task.part + 1) * keys_each, end);
                    task.number = num_chunk_parts;
                    if (task.num_parts > 1) ++num_chunk_parts;
                    chunks.push_back(task);
                }
            }
            work += (end - begin) * step_.num_kv_heads * step_.head_dim * rows.num_tiles(task.count);
        }
    }
};

// One layer's attention, as cut.
template <typename T, typename Form>
class Attention {
    typedef typename Form::Stored Stored;

    const Step& step_;
    Cut<T, Form>& cut_;
    const T *queries_, *keys_, *values_;
    Pool<Stored> pool_;
    const float* sinks_;
    int64_t head_dim_, group_;
    T* out_;

  public:
    // sinks [num_heads]: a score that is in each softmax beside the keys' and belongs to no value, or null.
    Attention(const Step& step, Cut<T, Form>& cut, const T* queries, const T* keys, const T* values,
              Pool<Stored> pool, const float* sinks, T* out)
        : step_(step), cut_(cut), queries_(queries), keys_(keys), values_(values), pool_(pool), sinks_(sinks),
          head_dim_(step.head_dim), group_(step.num_heads / step.num_kv_heads), out_(out) {}

    // A row's key and value into their slots.
    void write(int64_t token) const {
        for (int64_t head = 0; head < step_.num_kv_heads; ++head) {
            int64_t to = head * step_.num_slots + step_.slots[token];
            int64_t from = token * step_.row_stride + head * head_dim_;
            keep_row(keys_ + from, head_dim_, pool_.keys + to * head_dim_, pool_.key_scales + to);
            keep_row(values_ + from, head_dim_, pool_.values + to * head_dim_, pool_.value_scales + to);
        }
    }

    // All rows, once all are written. Every thread of the team calls it, each with a Form::Session of its own.
    void run(Team& team) const {
        static thread_local std::vector<float> own, held;
        const int64_t num_chunks = int64_t(cut_.chunks.size()), num_decodes = int64_t(cut_.decodes.size());
        const int64_t num_shared = int64_t(cut_.shared.size());
        grow(own, num_decodes ? Part<T, Stored>::work_size(group_, head_dim_) + cut_.part_size() : 0);
        grow(held, num_chunks + num_shared ? Rows<T, Form>::scratch_size(head_dim_) : 0);
        Scratch scratch(held);
        team.each_claimed(num_chunks + num_shared + num_decodes, 1, [&](int64_t index, Claim& claim) {
            if (index >= num_chunks + num_shared) return attend(cut_.decodes[index - num_chunks - num_shared], own.data(), claim);
            if (!claim.may_write()) return;
            if (index < num_chunks) attend(cut_.chunks[index], scratch, team);
            else attend(cut_.shared[index - num_chunks], scratch);
        });
        const int64_t at_once = 16 / step_.num_kv_heads + 1;
        if (!num_decodes) return;
        team.each_claimed(step_.num_decodes, at_once, [&](int64_t decode, Claim& claim) {
            if (claim.may_write()) join_parts(decode);
        });
    }

  private:
    static void grow(std::vector<float>& memory, int64_t size) {
        if (int64_t(memory.size()) < size) memory.resize(size);
    }

    // Of the query heads of one KV head.
    const float* sinks_of(int64_t kv_head) const { return sinks_ ? sinks_ + kv_head * group_ : nullptr; }

    Past<Stored> past_of(int64_t kv_head, const int32_t* table, int64_t end, int64_t begin = 0) const {
        const int64_t first = kv_head * step_.num_slots, base = first * head_dim_;
        return {pool_.keys + base, pool_.values + base, pool_.key_scales + first, pool_.value_scales + first,
                table, head_dim_, step_.block_size, end, begin};
    }

    Rows<T, Form> rows_of(const ChunkTask& task) const {
        const Chunk& chunk = task.chunk;
        const int64_t begin = cut_.window ? std::max<int64_t>(0, chunk.start - cut_.window + 1) : 0;
        return cut_.rows_of(task, past_of(task.kv_head, chunk.table, chunk.start + chunk.num_tokens, begin),
                            queries_ + chunk.row * step_.row_stride + task.kv_head * group_ * head_dim_);
    }

    T* out_of(const ChunkTask& task) const {
        return out_ + (task.chunk.row * step_.num_heads + task.kv_head * group_) * head_dim_;
    }

    void attend(const ChunkTask& task, Scratch scratch, const Team& team) const {
        Rows<T, Form> rows = rows_of(task);
        const int64_t tiles = rows.num_tiles(task.count);
        if (task.num_parts > 1) {
            rows.run(task.begin, task.end, Sums::at(cut_.chunk_parts.take(task.number, team), tiles, head_dim_), scratch);
            return join_parts(task, rows);
        }
        Sums sums = Sums::at(scratch.take(Sums::size(tiles, head_dim_)), tiles, head_dim_);
        rows.run(task.begin, task.end, sums, scratch);
        rows.put_out(sums, sinks_of(task.kv_head), out_of(task));
    }

    // The parts before a task's, its own and those behind it, as far as they wait for each other.
    void join_parts(const ChunkTask& task, const Rows<T, Form>& rows) const {
        Parts& parts = cut_.chunk_parts;
        const int64_t tiles = rows.num_tiles(task.count), first = task.number - task.part, last = first + task.num_parts - 1;
        auto sums_of = [&](int64_t number) { return Sums::at(parts.at(number), tiles, head_dim_); };
        for (int64_t number = task.number;; ++number) {
            if (number > first) {
                if (!parts.are_met(number)) return;
                rows.join(sums_of(number - 1), sums_of(number));
                parts.leave(number - 1);
            }
            if (number == last) break;
        }
        rows.put_out(sums_of(last), sinks_of(task.kv_head), out_of(task));
        parts.leave(last);
    }

    void attend(const SharedTask& task, Scratch scratch) const {
        const int32_t* share = step_.shares + 3 * task.share;
        const int32_t* sharers = step_.sharers + share[0];
        Past<Stored> past = past_of(task.kv_head, step_.tables + sharers[0] * step_.table_stride, share[2]);
        Rows<T, Form> rows = cut_.rows_of(task, past, queries_ + task.kv_head * group_ * head_dim_);
        const int64_t tiles = rows.num_tiles(task.count);
        Sums sums = Sums::at(scratch.take(Sums::size(tiles, head_dim_)), tiles, head_dim_);
        rows.run(task.begin, task.end, sums, scratch);
        rows.put_parts(sums, [&](int64_t token) {
            const int64_t place = cut_.first_parts[sharers[token] * step_.num_kv_heads + task.kv_head] + task.part;
            return cut_.decode_parts.data() + place * cut_.part_size();
        });
    }

    // ``own``: room for the part, and for what finds it.
    void attend(const DecodeTask& task, float* own, Claim& claim) const {
        const int64_t first = task.kv_head * step_.num_slots, base = first * head_dim_;
        Part<T, Stored> part{step_,
                     queries_ + step_.rows[task.decode] * step_.row_stride + task.kv_head * group_ * head_dim_,
                     pool_.keys + base,
                     pool_.values + base,
                     pool_.key_scales + first,
                     pool_.value_scales + first,
                     step_.tables + task.decode * step_.table_stride,
                     group_};
        const int64_t size = cut_.part_size();
        part.run(task.begin, task.end, own, own + group_ * head_dim_, own + group_ * (head_dim_ + 1), own + size);
        if (claim.may_write()) std::copy(own, own + size, cut_.decode_parts.data() + task.place * size);
    }

    void join_parts(int64_t decode) const {
        for (int64_t head = 0; head < step_.num_kv_heads; ++head) {
            const int64_t* parts = &cut_.first_parts[decode * step_.num_kv_heads + head];
            T* to = out_ + (step_.rows[decode] * step_.num_heads + head * group_) * head_dim_;
            const float* all = cut_.decode_parts.data() + parts[0] * cut_.part_size();
            join(all, parts[1] - parts[0], head_dim_, group_, sinks_of(head), to);
        }
    }
};

template <typename T, typename Form>
void attend_as(const Step& step, const T* queries, const T* keys, const T* values, Pool<typename Form::Stored> pool,
               int64_t window, const float* sinks, T* out) {
    Cut<T, Form> cut(step, window);
    Attention<T, Form> attention(step, cut, queries, keys, values, pool, sinks, out);
    for (int64_t token = 0; token < step.num_tokens; ++token) attention.write(token);
    Team::run(cut.work > 32768 ? step.threads : 1, [&](Team& team) {
        typename Form::Session session(true);
        attention.run(team);
    });
}

template <typename T, typename Stored>
void attend(const Step& step, const T* queries, const T* keys, const T* values, Pool<Stored> pool, int64_t window,
            const float* sinks, T* out) {
#if defined(__AVX512BF16__)
    if constexpr (sizeof(T) == 2) {
        if (step.head_dim % STRIDE == 0) {
            return attend_as<T, PairForm<Stored>>(step, queries, keys, values, pool, window, sinks, out);
        }
    }
#endif
    attend_as<T, FloatForm<T, Stored>>(step, queries, keys, values, pool, window, sinks, out);
}

// The pool is of the type that ``stored`` says.
template <typename T>
void attend_over(int stored, const Step& step, const T* queries, const T* keys, const T* values, Pool<void> pool, int64_t window,
                 const float* sinks, T* out) {
    auto attend_to = [&](auto to) { attend(step, queries, keys, values, to, window, sinks, out); };
    if (stored == AS_INT8) attend_to(pool.as<int8_t>());
    else if (stored == AS_BF16) attend_to(pool.as<bf16>());
    else attend_to(pool.as<T>());
}

}  // namespace
