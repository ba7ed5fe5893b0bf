// A packed matrix of any form, and, where it is of codes that x is rounded for, what it is multiplied with.

#pragma once

#include "output.h"
#include "widened.h"

namespace {

enum Kind { PLAIN, INT8, INT4, FLOATS };

struct StoredMatrix {
    int64_t form;
    const void* matrix;  // as its form is declared
    int64_t size, columns;

#if defined(HAVE_INT8)
    const int8::Matrix& int8_matrix() const { return *(const int8::Matrix*)matrix; }
    const int4::Matrix& int4_matrix() const { return *(const int4::Matrix*)matrix; }

    // Whether so many rows are rounded by token.
    bool is_by_token(int64_t rows) const {
        return form == INT8 || (form == INT4 && int4::is_widened(int4_matrix(), rows));
    }

    // Of memory that so many rows take once they are rounded, or fewer: by group these may take more.
    int64_t code_bytes(int64_t rows) const {
        const int64_t by_token = is_by_token(rows) ? int8::Tokens::bytes(rows, size) : 0;
        if (form == INT8) return by_token;
        const int64_t by_group = by_token ? int4::WIDENED : rows;
        return std::max(by_token, int4::Tokens::bytes(by_group, size, int4_matrix().group));
    }

    // One of so many rows, for ``multiply_codes``.
    template <typename T>
    void round_to_codes(const T* x, int64_t row, int64_t rows, void* rounded) const {
        if (is_by_token(rows)) int8::Tokens(rows, size, rounded).take(row, x, size);
        else int4::Tokens(rows, size, int4_matrix().group, rounded).take(row, x);
    }

    // Every thread of the team calls it, each with Tiles of its own.
    void multiply_codes(Team& team, void* rounded, int64_t rows, Output output) const {
        if (form == INT8) {
            int8::Product{int8_matrix(), {rows, size, rounded}, rows, output}.run(team);
        } else if (is_by_token(rows)) {
            int4::WidenedProduct{int4_matrix(), {rows, size, rounded}, rows, output}.run(team);
        } else {
            int4::Product{int4_matrix(), {rows, size, int4_matrix().group, rounded}, rows, output}.run(team);
        }
    }
#endif
};

}  // namespace
