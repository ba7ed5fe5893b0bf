// y = x times the transpose of a matrix, all in float32, whatever the weights are stored in: float32, bfloat16 or codes become
// floats on their way through the first cache. For processors that multiply nothing smaller, and for whoever wants inputs as
// they are; by the compiler's own vectors, as wide as the processor's.
//
// Inputs are added up in their order, one chain for each column of each row: however many rows come together, each gets the same.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "aligned.h"
#include "team.h"
#include "vectors.h"

namespace {

namespace as_floats {

constexpr int MOST_ROWS = REGISTER_FLOATS == 16 ? 12 : 6;  // whose sums, of two registers each, stay in registers
constexpr int PANEL = 2 * REGISTER_FLOATS;  // columns that are multiplied together
constexpr int64_t INPUTS = 4096 / PANEL;    // that become floats at a time: 16 KiB, half of the first cache
constexpr int64_t BLOCK_ROWS = 192;         // of x, of which so many inputs stay in the second cache while some panels pass
constexpr int64_t BLOCK_PANELS = 8;
constexpr int64_t ALONE = 400000;           // bytes and a 64th of the products, for which no other thread is woken
constexpr int64_t AHEAD = 2048;             // bytes by which a panel is fetched before one row is multiplied by it
constexpr int64_t RUNS = 16;                // that each thread reads the matrix in, where rows are few

enum Form { FLOAT32, BFLOAT16, INT8, FLOAT8, INT4 };

struct Matrix {
    int64_t form;
    const void* packed;   // by panel: floats, int8 or float8 (e4m3) [size][PANEL]; pairs of bfloat16 or eights of codes, the first
                          // input in the lowest bits, [size / 2 or 8][PANEL] words
    const float* groups;  // of INT4: [panels][size / group][2][PANEL], what codes are multiplied by and what is added then
    const float* scales;  // [panels][PANEL], of sums; or null
    const float* bias;    // the same
    int64_t size, columns, group;  // inputs are even where they are paired; whole groups, and these whole eights

    int64_t num_panels() const { return (columns + PANEL - 1) / PANEL; }
    int64_t bits() const { return form == FLOAT32 ? 32 : form == BFLOAT16 ? 16 : form == INT4 ? 4 : 8; }
    const char* at(int64_t panel, int64_t input) const { return (const char*)packed + (panel * size + input) * PANEL * bits() / 8; }
};

// Of e4m3: its exponent and mantissa where a float has them, whose exponents begin 120 lower.
inline Register of_float8(Integers codes) {
    return (Register)((codes & 0x7f) << 20 | (codes & int32_t(0x80000000))) * 0x1p120f;
}

// Inputs of a column that lie in one word.
template <int FORM>
constexpr int STEP = FORM == BFLOAT16 ? 2 : FORM == INT4 ? 8 : 1;

// As many columns of a panel as a register holds: how a form becomes floats there.
template <int FORM>
struct Part {
    static constexpr int64_t BYTES = FORM == INT8 || FORM == FLOAT8 ? PANEL : 4 * PANEL;  // of a step of the whole panel

    const char* at;
    Register scale = {}, offset = {};

    Part() = default;
    // From an input on, which begins a word; of INT4 as far as its group goes.
    Part(const Matrix& matrix, int64_t panel, int64_t input, int part)
        : at(matrix.at(panel, input) + part * BYTES / 2) {
        if constexpr (FORM == INT4) {
            const int64_t group = panel * (matrix.size / matrix.group) + input / matrix.group;
            const float* terms = matrix.groups + 2 * group * PANEL + part * REGISTER_FLOATS;
            scale = load_part(terms), offset = load_part(terms + PANEL);
        }
    }

    // Inputs of a step, the so manieth.
    [[gnu::always_inline]] void take(int64_t step, Register* to) const {
        const char* from = at + step * BYTES;
        if constexpr (FORM == FLOAT32) {
            to[0] = load_part((const float*)from);
        } else if constexpr (FORM == BFLOAT16) {
            const Bits both = words(from);
            to[0] = (Register)(both << 16), to[1] = (Register)(both & 0xffff0000u);
        } else if constexpr (FORM == INT8) {
            to[0] = load_part((const int8_t*)from);
        } else if constexpr (FORM == FLOAT8) {
            to[0] = of_float8(bytes((const int8_t*)from));
        } else {
            const Bits codes = words(from);
#pragma GCC unroll 8
            for (int input = 0; input < 8; ++input) {
                to[input] = __builtin_convertvector((Integers)(codes >> (4 * input) & 15), Register) * scale + offset;
            }
        }
    }
};

// body(from, count) of inputs [from, stop), of INT4 within one group each.
template <int FORM, typename Body>
inline void each_group(const Matrix& matrix, int64_t from, int64_t stop, const Body& body) {
    while (from < stop) {
        const int64_t end = FORM == INT4 ? std::min(stop, (from / matrix.group + 1) * matrix.group) : stop;
        body(from, end - from);
        from = end;
    }
}

// use(a constant) of the matrix's form.
template <typename Use>
inline void with_form(int64_t form, const Use& use) {
    switch (form) {
        case FLOAT32: return use(std::integral_constant<int, FLOAT32>());
        case BFLOAT16: return use(std::integral_constant<int, BFLOAT16>());
        case INT8: return use(std::integral_constant<int, INT8>());
        case FLOAT8: return use(std::integral_constant<int, FLOAT8>());
        case INT4: return use(std::integral_constant<int, INT4>());
    }
}

// Inputs [from, from + count) of a panel: where they lie as floats [count][PANEL], which may be ``held``.
template <int FORM>
inline const float* expanded(const Matrix& matrix, int64_t panel, int64_t from, int64_t count, float* held) {
    if constexpr (FORM == FLOAT32) return (const float*)matrix.at(panel, from);
    each_group<FORM>(matrix, from, from + count, [&](int64_t first, int64_t inputs) {
        for (int part = 0; part < 2; ++part) {
            const Part<FORM> own(matrix, panel, first, part);
            float* to = held + (first - from) * PANEL + part * REGISTER_FLOATS;
            for (int64_t step = 0; step < inputs / STEP<FORM>; ++step) {
                Register values[STEP<FORM>];
                own.take(step, values);
#pragma GCC unroll 8
                for (int input = 0; input < STEP<FORM>; ++input, to += PANEL) store_part(to, values[input]);
            }
        }
    });
    return held;
}

// One row, x [size], by PANELS panels from ``first`` on, straight from where they lie: sums [PANELS][PANEL].
template <int FORM, int PANELS>
inline void multiply_one(const Matrix& matrix, const float* x, int64_t first, float* sums) {
    Register own[PANELS][2] = {};
    each_group<FORM>(matrix, 0, matrix.size, [&](int64_t from, int64_t inputs) {
        Part<FORM> parts[PANELS][2];
        for (int panel = 0; panel < PANELS; ++panel) {
            for (int part = 0; part < 2; ++part) parts[panel][part] = Part<FORM>(matrix, first + panel, from, part);
        }
        const float* a = x + from;
        for (int64_t step = 0; step < inputs / STEP<FORM>; ++step, a += STEP<FORM>) {
#pragma GCC unroll 4
            for (int panel = 0; panel < PANELS; ++panel) {
                __builtin_prefetch(parts[panel][0].at + step * Part<FORM>::BYTES + AHEAD);
#pragma GCC unroll 2
                for (int part = 0; part < 2; ++part) {
                    Register values[STEP<FORM>];
                    parts[panel][part].take(step, values);
#pragma GCC unroll 8
                    for (int input = 0; input < STEP<FORM>; ++input) own[panel][part] += values[input] * a[input];
                }
            }
        }
    });
    for (int panel = 0; panel < PANELS; ++panel) {
        for (int part = 0; part < 2; ++part) store_part(sums + panel * PANEL + part * REGISTER_FLOATS, own[panel][part]);
    }
}

// Some inputs of a panel as floats, and what is fetched meanwhile, as much of it for each of them.
struct Piece {
    const float* floats;
    const char* ahead;
};

// sums [PANELS][ROWS][PANEL] of ROWS rows, x [count][ROWS], by PANELS panels; added to what is there, unless ``is_first``. For each
// input ``fetched`` bytes of what is ahead.
template <int ROWS, int PANELS>
inline void multiply(const float* x, const Piece* panels, int64_t count, int64_t fetched, float* sums, bool is_first) {
    Register own[PANELS][ROWS][2];
#pragma GCC unroll 4
    for (int panel = 0; panel < PANELS; ++panel) {
#pragma GCC unroll 12
        for (int row = 0; row < ROWS; ++row) {
            const float* before = sums + (panel * ROWS + row) * PANEL;
            own[panel][row][0] = is_first ? Register{} : load_part(before);
            own[panel][row][1] = is_first ? Register{} : load_part(before + REGISTER_FLOATS);
        }
    }
    for (int64_t input = 0; input < count; ++input) {
#pragma GCC unroll 4
        for (int panel = 0; panel < PANELS; ++panel) {
            const float* b = panels[panel].floats + input * PANEL;
            __builtin_prefetch(panels[panel].ahead + input * fetched);
            Register left = load_part(b), right = load_part(b + REGISTER_FLOATS);
            keep_in_registers(left, right);
#pragma GCC unroll 12
            for (int row = 0; row < ROWS; ++row) {
                const Register a = x[input * ROWS + row] - Register{};  // in every lane; to add to zeros would be an addition
                own[panel][row][0] += left * a, own[panel][row][1] += right * a;
            }
        }
    }
#pragma GCC unroll 4
    for (int panel = 0; panel < PANELS; ++panel) {
#pragma GCC unroll 12
        for (int row = 0; row < ROWS; ++row) {
            float* to = sums + (panel * ROWS + row) * PANEL;
            store_part(to, own[panel][row][0]), store_part(to + REGISTER_FLOATS, own[panel][row][1]);
        }
    }
}

// The same of one panel and as many rows as there are, at most ROWS.
template <int ROWS = MOST_ROWS>
inline void multiply_rows(int64_t rows, const float* x, const Piece* panel, int64_t count, int64_t fetched, float* sums,
                          bool is_first) {
    if (rows == ROWS) return multiply<ROWS, 1>(x, panel, count, fetched, sums, is_first);
    if constexpr (ROWS > 1) multiply_rows<ROWS - 1>(rows, x, panel, count, fetched, sums, is_first);
}

// Rows that are multiplied together: nearly as many in each tile.
struct Tiling {
    int64_t rows;

    int64_t count() const { return (rows + MOST_ROWS - 1) / MOST_ROWS; }
    int64_t first(int64_t tile) const { return tile * rows / count(); }
    int64_t rows_of(int64_t tile) const { return first(tile + 1) - first(tile); }
};

struct Product {
    const Matrix& matrix;
    const float* x;  // by tile: [size][rows]
    int64_t rows;
    float* y;  // [rows, columns]

    // Of some rows of a panel.
    void put(int64_t row, int64_t count, int64_t panel, const float* sums) const {
        const int64_t left = panel * PANEL, width = std::min<int64_t>(PANEL, matrix.columns - left);
        for (int64_t end = row + count; row < end; ++row, sums += PANEL) {
            float* to = y + row * matrix.columns + left;
            for (int64_t column = 0; column < width; ++column) {
                float value = sums[column];
                if (matrix.scales) value *= matrix.scales[left + column];
                to[column] = matrix.bias ? value + matrix.bias[left + column] : value;
            }
        }
    }

    // So many panels from ``first`` on, of so few rows that they are summed at once.
    template <int FORM, int PANELS>
    void few(int64_t first, Claim& claim) const {
        alignas(64) float held[PANELS][INPUTS * PANEL / PANELS];
        alignas(64) float sums[PANELS * MOST_ROWS * PANEL];
        const int64_t most = INPUTS / PANELS, fetched = PANEL * matrix.bits() / 8;
        Piece panels[PANELS];
        if (PANELS == 4 || rows == 1) {
            multiply_one<FORM, PANELS>(matrix, x, first, sums);
        } else {
            for (int64_t from = 0; from < matrix.size; from += most) {
                const int64_t count = std::min(most, matrix.size - from);
                for (int panel = 0; panel < PANELS; ++panel) {
                    const float* floats = expanded<FORM>(matrix, first + panel, from, count, held[panel]);
                    panels[panel] = {floats, matrix.at(first + panel, from + count)};
                }
                if constexpr (PANELS == 2) multiply<2, 2>(x + 2 * from, panels, count, fetched, sums, !from);
                else multiply_rows(rows, x + from * rows, panels, count, fetched, sums, !from);
            }
        }
        if (!claim.may_write()) return;
        for (int panel = 0; panel < PANELS; ++panel) put(0, rows, first + panel, sums + panel * rows * PANEL);
    }

    // Tiles [first, last) of rows by panels [left, right).
    template <int FORM>
    void block(int64_t first, int64_t last, int64_t left, int64_t right, float* sums) const {
        alignas(64) float held[INPUTS * PANEL];
        const Tiling tiles{rows};
        const int64_t begin = tiles.first(first), count = tiles.first(last) - begin;
        for (int64_t from = 0; from < matrix.size; from += INPUTS) {
            const int64_t inputs = std::min(INPUTS, matrix.size - from);
            for (int64_t panel = left; panel < right; ++panel) {
                const float* floats = expanded<FORM>(matrix, panel, from, inputs, held);
                // While the first tile is multiplied by it the next one is fetched.
                Piece piece{floats, panel + 1 < right ? matrix.at(panel + 1, from) : matrix.at(left, from + inputs)};
                int64_t fetched = PANEL * matrix.bits() / 8;
                for (int64_t tile = first; tile < last; ++tile) {
                    const int64_t row = tiles.first(tile), own = tiles.rows_of(tile);
                    float* to = sums + ((panel - left) * count + row - begin) * PANEL;
                    multiply_rows(own, x + row * matrix.size + from * own, &piece, inputs, fetched, to, !from);
                    piece.ahead = (const char*)floats, fetched = 0;
                }
            }
        }
        for (int64_t panel = left; panel < right; ++panel) put(begin, count, panel, sums + (panel - left) * count * PANEL);
    }

    template <int FORM>
    void run(Team& team) const {
        const int64_t panels = matrix.num_panels();
        if (rows <= MOST_ROWS) {
            // Sums of one or two rows and one panel would wait for each other.
            const int64_t most = rows == 1 ? (FORM == INT4 ? 2 : 4) : rows == 2 ? 2 : 1, tasks = (panels + most - 1) / most;
            const int64_t at_once = std::max<int64_t>(1, tasks / (RUNS * team.size()));
            return team.each_apart(tasks, at_once, [&](int64_t task, Claim& claim) {
                const int64_t first = task * most, end = std::min(first + most, panels);
                if (end - first == 4) return few<FORM, 4>(first, claim);
                if (end - first == 2) return few<FORM, 2>(first, claim);
                for (int64_t panel = first; panel < end; ++panel) few<FORM, 1>(panel, claim);
            });
        }
        const int64_t tiles = Tiling{rows}.count(), blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
        const int64_t of_block = (tiles + blocks - 1) / blocks;
        // As many tasks for each thread as for the others.
        const int64_t most = BLOCK_PANELS * team.size(), groups = std::min(panels, (panels + most - 1) / most * team.size());
        const int64_t group = (panels + groups - 1) / groups;
        static thread_local AlignedBuffer<float> sums;
        sums.grow(of_block * MOST_ROWS * group * PANEL);
        team.each(blocks * groups, 1, [&](int64_t task) {
            const int64_t first = std::min(task / groups * of_block, tiles), left = task % groups * group;
            block<FORM>(first, std::min(first + of_block, tiles), left, std::min(left + group, panels), sums.begin());
        });
    }
};

// As many inputs of a tile's rows, x [count, ...], ``apart`` from row to row, as a Product has them.
inline void lay(const float* x, int64_t apart, int64_t count, int64_t inputs, float* to) {
    if (count == 1) {
        std::memcpy(to, x, inputs * sizeof(float));
        return;
    }
    for (int64_t input = 0; input < inputs; ++input, to += count) {
        for (int64_t row = 0; row < count; ++row) to[row] = x[row * apart + input];
    }
}

inline void linear(const Matrix& matrix, const float* x, int64_t rows, float* y, int threads) {
    if (!rows) return;
    static AlignedBuffer<float> laid;
    const int64_t work = matrix.size * matrix.columns * matrix.bits() / 8;
    if (work + matrix.size * matrix.columns / 64 * rows < ALONE) threads = 1;
    if (rows > 1) laid.grow(rows * matrix.size);
    Team::run(threads, [&](Team& team) {
        if (rows > 1) {
            const Tiling tiles{rows};
            team.each(tiles.count(), 1, [&](int64_t tile) {
                const int64_t first = tiles.first(tile) * matrix.size;
                lay(x + first, matrix.size, tiles.rows_of(tile), matrix.size, laid.begin() + first);
            });
        }
        const Product product{matrix, rows > 1 ? laid.begin() : x, rows, y};
        with_form(matrix.form, [&](auto form) { product.run<form()>(team); });
    });
}

}  // namespace as_floats

}  // namespace
