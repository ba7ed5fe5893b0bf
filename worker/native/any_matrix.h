// A packed matrix of any form that bfloat16 is multiplied with.

#pragma once

#include "expansion.h"
#include "linear.h"
#include "stored_matrix.h"

#if defined(__AVX512BF16__) && defined(HAVE_INT8)
#define HAVE_WHOLE 1

namespace {

struct AnyMatrix : StoredMatrix {
    // Of memory that so many rows take once they are rounded.
    int64_t rounded_bytes(int64_t rows) const {
        if (form != PLAIN) return code_bytes(rows);
        return rows > FEW_ROWS ? Laid::size_of(rows, size) * int64_t(sizeof(bf16)) : 0;
    }

    // One of so many rows, for ``multiply``; bfloat16 is only laid out, and only where it is many.
    void round(const bf16* x, int64_t row, int64_t rows, void* rounded) const {
        if (form != PLAIN) round_to_codes(x, row, rows, rounded);
        else if (rows > FEW_ROWS) Laid::take(x, 0, size, (bf16*)rounded + Laid::place(row, 0, size));
    }

    // Whether what is gated of so many rows goes where Laid has them, and whether ``round_laid`` takes them there.
    bool lays(int64_t rows) const {
#if defined(HAVE_TILES)
        if (is_by_token(rows)) return rows > FEW_ROWS && may_use_tiles();
#endif
        return rows > FEW_ROWS && form == PLAIN;
    }
    bool takes_laid(int64_t rows) const { return form == PLAIN || (is_by_token(rows) && size % int8::DEEP == 0); }

    // A tile of them, for ``multiply``; bfloat16 is taken as it is laid.
    void round_laid(const bf16* laid, int64_t tile, int64_t rows, void* rounded) const {
#if defined(HAVE_TILES)
        if (is_by_token(rows)) int8::Tokens(rows, size, rounded).take_laid(tile, laid, size);
#endif
    }

    // With the rows of x [rows, size], or, but for few rows of bfloat16, what ``round`` left of them. Every thread of the
    // team calls it, each with Tiles of its own.
    // ``expansion`` only of what is PLAIN.
    void multiply(Team& team, const bf16* x, void* rounded, int64_t rows, Output output, const Expansion* expansion = nullptr) const {
        if (form != PLAIN) return multiply_codes(team, rounded, rows, output);
        const bool is_laid = rows > FEW_ROWS;
        Product{is_laid ? (const bf16*)rounded : x, nullptr, rows, *(const Matrix*)matrix, output, is_laid, expansion}.run(team);
    }
};

}  // namespace

#endif
