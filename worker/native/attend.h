// Paged attention of one step: keys and values into their slots, then all tasks of all sequences in one parallel region.

#pragma once

#include <algorithm>
#include <vector>

#include "chunk.h"
#include "decode.h"

namespace {

constexpr int SPAN = 2048;  // keys that one task of a chunk reads; more are split and joined

// Where a sequence is cut depends on itself alone, so what else is in the batch cannot change its sums.
struct DecodeTask {
    int64_t decode, kv_head, begin, end, place;
};

// Of a chunk: ``num_parts`` tasks in a row, each with the ``part``-th stretch of keys, are joined.
struct ChunkTask {
    Chunk chunk;
    int64_t kv_head, first, count, begin, end, part, num_parts, place;
};

template <typename T>
class Attention {
    const Step& step_;
    const T *queries_, *keys_, *values_;
    T *key_cache_, *value_cache_;
    int64_t window_, head_dim_, group_;
    T* out_;

  public:
    Attention(const Step& step, const T* queries, const T* keys, const T* values, T* key_cache, T* value_cache,
              int64_t window, T* out)
        : step_(step), queries_(queries), keys_(keys), values_(values), key_cache_(key_cache), value_cache_(value_cache),
          window_(window), head_dim_(step.head_dim), group_(step.num_heads / step.num_kv_heads), out_(out) {}

    void run() {
#if defined(__AVX512BF16__)
        if constexpr (sizeof(T) == 2) {
            if (head_dim_ % STRIDE == 0) return run<PairForm>();
        }
#endif
        run<FloatForm<T>>();
    }

  private:
    template <typename Form>
    void run() {
        write();
        static std::vector<DecodeTask> decodes;
        static std::vector<int64_t> first_parts;
        static std::vector<ChunkTask> chunks;
        static std::vector<float> decode_parts, chunk_parts;
        decodes.clear(), first_parts.clear(), chunks.clear();
        int64_t num_decode_parts = 0, chunk_parts_size = 0, work = 0;
        for (int64_t index = 0; index < step_.num_chunks; ++index) {
            work += cut<Form>(index, chunks, chunk_parts_size);
        }
        for (int64_t decode = 0; decode < step_.num_decodes; ++decode) {
            work += cut(decode, decodes, first_parts, num_decode_parts);
        }
        first_parts.push_back(num_decode_parts);
        int64_t part_size = group_ * (head_dim_ + 2);
        if (int64_t(decode_parts.size()) < num_decode_parts * part_size) decode_parts.resize(num_decode_parts * part_size);
        if (int64_t(chunk_parts.size()) < chunk_parts_size) chunk_parts.resize(chunk_parts_size);
        const ChunkTask* all_chunks = chunks.data();
        const DecodeTask* all_decodes = decodes.data();
        float *all_decode_parts = decode_parts.data(), *all_chunk_parts = chunk_parts.data();
        int64_t num_chunks = int64_t(chunks.size()), num_tasks = num_chunks + int64_t(decodes.size());
        int threads = work > 32768 ? int(step_.threads) : 1;
#pragma omp parallel num_threads(threads) if (threads > 1)
        {
            std::vector<float> own(num_tasks > num_chunks ? group_ * (head_dim_ + PART) + WIDTH * head_dim_ : 0);
            std::vector<float> held(num_chunks ? Rows<T, Form>::scratch_size(head_dim_) : 0);
            Scratch scratch(held);
            {
                typename Form::Session session(num_chunks > 0);
#pragma omp for schedule(dynamic, 1) nowait
                for (int64_t index = 0; index < num_tasks; ++index) {
                    if (index < num_chunks) run<Form>(all_chunks[index], all_chunk_parts, scratch);
                    else run(all_decodes[index - num_chunks], all_decode_parts, own.data());
                }
            }
            if (chunk_parts_size) {
#pragma omp barrier
#pragma omp for schedule(dynamic, 1) nowait
                for (int64_t index = 0; index < num_chunks; ++index) {
                    const ChunkTask& task = all_chunks[index];
                    if (task.num_parts == 1 || task.part) continue;
                    Rows<T, Form> rows = rows_of<Form>(task);
                    rows.join(all_chunk_parts + task.place, task.num_parts);
                    Sums sums = Sums::at(all_chunk_parts + task.place, rows.num_tiles(task.count), head_dim_);
                    rows.put_out(sums, out_of(task));
                }
            }
        }
        for (int64_t decode = 0; decode < step_.num_decodes; ++decode) {
            for (int64_t head = 0; head < step_.num_kv_heads; ++head) {
                const int64_t* parts = &first_parts[decode * step_.num_kv_heads + head];
                T* to = out_ + (step_.rows[decode] * step_.num_heads + head * group_) * head_dim_;
                join(all_decode_parts + parts[0] * part_size, parts[1] - parts[0], head_dim_, group_, to);
            }
        }
    }

    void write() {
        for (int64_t token = 0; token < step_.num_tokens; ++token) {
            for (int64_t head = 0; head < step_.num_kv_heads; ++head) {
                int64_t to = (head * step_.num_slots + step_.slots[token]) * head_dim_;
                int64_t from = token * step_.row_stride + head * head_dim_;
                std::memcpy(key_cache_ + to, keys_ + from, head_dim_ * sizeof(T));
                std::memcpy(value_cache_ + to, values_ + from, head_dim_ * sizeof(T));
            }
        }
    }

    // The work of one decode, in elements of keys read.
    int64_t cut(int64_t decode, std::vector<DecodeTask>& tasks, std::vector<int64_t>& first_parts, int64_t& num_parts) {
        int64_t length = step_.lengths[decode];
        int64_t begin = window_ && window_ < length ? length - window_ : 0;
        int64_t pieces = (length - begin + PART - 1) / PART;
        int64_t size = ((length - begin + pieces - 1) / pieces + WIDTH - 1) / WIDTH * WIDTH;
        for (int64_t head = 0; head < step_.num_kv_heads; ++head) {
            first_parts.push_back(num_parts);
            for (int64_t at = begin; at < length; at += size) {
                tasks.push_back({decode, head, at, std::min(at + size, length), num_parts++});
            }
        }
        return (length - begin) * step_.num_kv_heads * head_dim_;
    }

    // The same of one chunk; its longest tasks, the last rows', come first.
    template <typename Form>
    int64_t cut(int64_t index, std::vector<ChunkTask>& tasks, int64_t& parts_size) {
        const int32_t* numbers = step_.chunks + 3 * index;
        Chunk chunk{numbers[0], numbers[1], numbers[2], step_.chunk_tables + index * step_.chunk_table_stride};
        int64_t num_rows = chunk.num_tokens * group_, work = 0;
        int64_t pieces = (num_rows + ROWS - 1) / ROWS;
        int64_t rows_each = ((num_rows + pieces - 1) / pieces + WIDTH - 1) / WIDTH * WIDTH;
        for (int64_t first = (num_rows - 1) / rows_each * rows_each; first >= 0; first -= rows_each) {
            ChunkTask task{chunk, 0, first, std::min(rows_each, num_rows - first), 0, 0, 0, 1, 0};
            Rows<T, Form> rows = rows_of<Form>(task);
            int64_t begin = rows.begin(0), end = rows.position(task.count - 1) + 1;
            task.num_parts = (end - begin + SPAN - 1) / SPAN;
            int64_t keys_each = rounded_up((end - begin + task.num_parts - 1) / task.num_parts);
            task.num_parts = (end - begin + keys_each - 1) / keys_each;
            int64_t size = Sums::size(rows.num_tiles(task.count), head_dim_);
            for (task.kv_head = 0; task.kv_head < step_.num_kv_heads; ++task.kv_head) {
                for (task.part = 0; task.part < task.num_parts; ++task.part) {
                    task.begin = begin + task.part * keys_each;
                    task.end = std::min(task.begin + keys_each, end);
                    task.place = parts_size;
                    if (task.num_parts > 1) parts_size += size;
                    tasks.push_back(task);
                }
            }
            work += (end - begin) * step_.num_kv_heads * head_dim_ * rows.num_tiles(task.count);
        }
        return work;
    }

    Past<T> past_of(int64_t kv_head, const int32_t* table, int64_t end) const {
        int64_t base = kv_head * step_.num_slots * head_dim_;
        return {key_cache_ + base, value_cache_ + base, table, head_dim_, step_.block_size, end};
    }

    template <typename Form>
    Rows<T, Form> rows_of(const ChunkTask& task) const {
        const Chunk& chunk = task.chunk;
        return {step_, chunk, past_of(task.kv_head, chunk.table, chunk.start + chunk.num_tokens),
                queries_ + chunk.row * step_.row_stride + task.kv_head * group_ * head_dim_,
                group_, window_, task.first, task.count};
    }

    T* out_of(const ChunkTask& task) const {
        return out_ + (task.chunk.row * step_.num_heads + task.kv_head * group_) * head_dim_;
    }

    template <typename Form>
    void run(const ChunkTask& task, float* parts, Scratch scratch) const {
        Rows<T, Form> rows = rows_of<Form>(task);
        int64_t tiles = rows.num_tiles(task.count);
        bool is_whole = task.num_parts == 1;
        float* place = is_whole ? scratch.take(Sums::size(tiles, head_dim_)) : parts + task.place;
        Sums sums = Sums::at(place, tiles, head_dim_);
        rows.run(task.begin, task.end, sums, scratch);
        if (is_whole) rows.put_out(sums, out_of(task));
    }

    void run(const DecodeTask& task, float* parts, float* own) const {
        int64_t base = task.kv_head * step_.num_slots * head_dim_;
        Part<T> part{step_,
                     queries_ + step_.rows[task.decode] * step_.row_stride + task.kv_head * group_ * head_dim_,
                     key_cache_ + base,
                     value_cache_ + base,
                     step_.tables + task.decode * step_.table_stride,
                     group_};
        float* place = parts + task.place * group_ * (head_dim_ + 2);
        part.run(task.begin, task.end, place, place + group_ * head_dim_, place + group_ * (head_dim_ + 1), own);
    }
};

template <typename T>
void attend(const Step& step, const T* queries, const T* keys, const T* values, T* key_cache, T* value_cache,
            int64_t window, T* out) {
    Attention<T>(step, queries, keys, values, key_cache, value_cache, window, out).run();
}

}  // namespace
