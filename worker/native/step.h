// What one step asks of attention.

#pragma once

#include "vectors.h"

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
    int64_t num_shares;          // of beginnings that several decodes have in common
    const int32_t* shares;       // [num_shares, 3]: the first of its ``sharers``, how many, and positions
    const int32_t* sharers;      // decodes
    int64_t num_chunks;
    const int32_t* chunks;        // [num_chunks, 3]: first row, tokens, position of the first
    const int32_t* chunk_tables;  // [num_chunks, chunk_table_stride]
    int64_t chunk_table_stride;
    float scale, softcap;
    int32_t threads;
    int32_t is_repeatable;  // a chunk's row gets the same bits whatever chunk it is part of
};

// One sequence's tokens [start, start + num_tokens), the rows of the step from ``row`` on.
struct Chunk {
    int64_t row, num_tokens, start;
    const int32_t* table;
};
