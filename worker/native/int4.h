// y = x times the transpose of a matrix of four-bit codes with a scale and an offset for each group of inputs. Each group of a
// token is rounded to int8 by its own largest, so sums within a group are integers, and groups are added up in one order:
// however many rows come together, and by whichever instructions, each gets the same.

#pragma once

#include "int4_row.h"
#include "int8.h"

#if defined(HAVE_INT8)

namespace {

namespace int4 {

constexpr int64_t NO_TILES = 4;      // rows for which VNNI is no slower than tiles
constexpr int FEW = 2;               // rows that are multiplied as they come
constexpr int MANY = 8;              // rows that VNNI multiplies at once, of both halves of a panel
constexpr int AHEAD = 4096;          // bytes by which a panel is fetched before it is multiplied, into the second cache
constexpr int FEW_AHEAD = 8192;      // the same, of few rows
constexpr int64_t GROUPS = 4;        // of a panel, that stay in the first cache

struct Product {
    const Matrix& matrix;
    const Tokens x;
    int64_t rows;
    Output output;

    int64_t row_tiles() const { return (rows + SIDE - 1) / SIDE; }

    static void fetch_few(const uint8_t* at) {
        int8::fetch(at + FEW_AHEAD);
        __builtin_prefetch(at + NEAR);
    }

    // R rows from ``first`` of a panel, as it lies in memory. Not inlined: beside the other ways there were no registers for its loop.
    template <int R>
    [[gnu::noinline]] void few(int64_t first, int64_t panel, Claim& claim) const {
        const int8_t* from[R];
        const float *scales[R], *sums[R];
        for (int row = 0; row < R; ++row) {
            from[row] = x.tile(first + row) + (first + row) % SIDE * DEEP;
            scales[row] = x.scales + x.place(first + row), sums[row] = x.sums + x.place(first + row);
        }
        const int64_t group = matrix.group;
        const uint8_t* at = matrix.panel_at(panel);
        __m512 totals[R][2];
        for (auto& of_row : totals) of_row[0] = of_row[1] = _mm512_setzero_ps();
        for (int64_t index = 0; index < x.groups; ++index) {
            const int64_t begin = x.begin_of(index);
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
                const __m512 scale = Matrix::scales_of(at), offset = Matrix::offsets_of(at);
                fetch_few(at);
                at += UNIT_BYTES;
                __m512i parts[R][2];
                for (auto& of_row : parts) of_row[0] = of_row[1] = _mm512_setzero_si512();
                for (int64_t input = 0; input < group; input += 8, at += 64) {
                    fetch_few(at);
                    const __m512i codes = _mm512_load_si512(at);
                    const __m512i even = Matrix::low(codes), odd = Matrix::high(codes);
                    const int64_t place = begin + Tokens::place_in(input);
#pragma GCC unroll 2
                    for (int row = 0; row < R; ++row) {
                        const __m512i first_four = int8::four_of(from[row] + place), last_four = int8::four_of(from[row] + place + 4);
                        parts[row][0] = _mm512_dpbusd_epi32(parts[row][0], even, first_four);
                        parts[row][1] = _mm512_dpbusd_epi32(parts[row][1], odd, last_four);
                    }
                }
                for (int row = 0; row < R; ++row) {
                    totals[row][half] = Matrix::add(totals[row][half], _mm512_add_epi32(parts[row][0], parts[row][1]), scale,
                                                    offset, scales[row][index * SIDE], sums[row][index * SIDE]);
                }
            }
        }
        if (!claim.may_write()) return;
        for (int row = 0; row < R; ++row) matrix.put_out(output, first + row, panel, totals[row][0], totals[row][1]);
    }

    // MANY rows from ``first`` of a panel, both halves at once: what is read of x serves both, and what is unpacked of the panel all
    // rows. ARRIVES: it comes from memory, not from a cache.
    template <bool ARRIVES>
    void many(int64_t first, int64_t panel, Claim& claim) const {
        const int64_t group = matrix.group, unit_bytes = matrix.unit_bytes();
        const int8_t* from = x.tile(first) + first % SIDE * DEEP;
        const float *row_scales = x.scales + x.place(first), *row_sums = x.sums + x.place(first);
        const uint8_t* at = matrix.panel_at(panel);
        alignas(64) float totals[2][MANY][SIDE] = {};
        for (int64_t index = 0; index < x.groups; ++index, at += 2 * unit_bytes) {
            if (ARRIVES) fetch_few(at), fetch_few(at + unit_bytes);
            __m512i sums[2][MANY];
#pragma GCC unroll 8
            for (int row = 0; row < MANY; ++row) sums[0][row] = sums[1][row] = _mm512_setzero_si512();
            const int8_t* const of_group = from + x.begin_of(index);
            const uint8_t* line = at + UNIT_BYTES;
            for (int64_t input = 0; input < group; input += 8, line += 64) {
                if (ARRIVES) fetch_few(line), fetch_few(line + unit_bytes);
                const __m512i low = _mm512_load_si512(line), high = _mm512_load_si512(line + unit_bytes);
                const __m512i low_even = Matrix::low(low), low_odd = Matrix::high(low);
                const __m512i high_even = Matrix::low(high), high_odd = Matrix::high(high);
                const int8_t* eight = of_group + Tokens::place_in(input);
#pragma GCC unroll 8
                for (int row = 0; row < MANY; ++row) {
                    const __m512i even = int8::four_of(eight + row * DEEP), odd = int8::four_of(eight + row * DEEP + 4);
                    sums[0][row] = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(sums[0][row], low_even, even), low_odd, odd);
                    sums[1][row] = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(sums[1][row], high_even, even), high_odd, odd);
                }
            }
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
                const __m512 scale = Matrix::scales_of(at + half * unit_bytes), offset = Matrix::offsets_of(at + half * unit_bytes);
#pragma GCC unroll 8
                for (int row = 0; row < MANY; ++row) {
                    float* total = totals[half][row];
                    _mm512_store_ps(total, Matrix::add(_mm512_load_ps(total), sums[half][row], scale, offset,
                                                       row_scales[index * SIDE + row], row_sums[index * SIDE + row]));
                }
            }
        }
        if (!claim.may_write()) return;
        for (int row = 0; row < std::min<int64_t>(MANY, rows - first); ++row) {
            matrix.put_out(output, first + row, panel, _mm512_load_ps(totals[0][row]), _mm512_load_ps(totals[1][row]));
        }
    }

    // All rows of a panel, by VNNI; of a few that are left MANY take no longer than they do.
    void all(int64_t panel, Claim& claim) const {
        if (rows > FEW) many<true>(0, panel, claim);
        int64_t first = rows > FEW ? MANY : 0;
        for (; first + FEW < rows && !claim.is_lost(); first += MANY) many<false>(first, panel, claim);
        if (claim.is_lost()) return;
        switch (rows - first) {
            case 2: return few<2>(first, panel, claim);
            case 1: return few<1>(first, panel, claim);
        }
    }

#if defined(HAVE_TILES)
    // Of one half of a panel the groups [begin, end) as bytes, [inputs / 64][16 quads][16][4], and their scales and offsets,
    // [groups][2][16].
    void unpack(int64_t panel, int half, int64_t begin, int64_t end, uint8_t* to, float* terms) const {
        const uint8_t* at = matrix.panel_at(panel) + (2 * begin + half) * matrix.unit_bytes();
        for (int64_t index = begin; index < end; ++index, terms += 2 * SIDE, at += matrix.unit_bytes()) {
            _mm512_store_ps(terms, Matrix::scales_of(at));
            _mm512_store_ps(terms + SIDE, Matrix::offsets_of(at));
            int8::fetch(at + AHEAD);
            at += UNIT_BYTES;
            for (int64_t input = 0; input < matrix.group; input += 8, at += 64, to += 128) {
                int8::fetch(at + AHEAD);
                const __m512i codes = _mm512_load_si512(at);
                _mm512_store_si512(to, Matrix::low(codes));
                _mm512_store_si512(to + 64, Matrix::high(codes));
            }
        }
    }

    // Of one tile of rows and the two of a panel: the sums of the groups from ``begin`` on, [count][2][16][16].
    void sum_up(int64_t first, int64_t begin, int64_t count, const uint8_t* left, const uint8_t* right, int32_t* sums) const {
        const int64_t tiles = x.tiles_of_group();
        const int8_t* a = x.tile(first) + begin * tiles * TILE_BYTES;
        asm volatile("" ::: "memory");  // the compiler does not know that tiles are read from memory
        for (int64_t index = 0; index < count; ++index, sums += 2 * SIDE * SIDE) {
            _tile_zero(0);
            _tile_zero(1);
            for (int64_t step = 0; step < tiles; ++step, a += TILE_BYTES) {
                const int64_t tile = (index * matrix.group / DEEP + step) * TILE_BYTES;
                _tile_loadd(4, a, 64);
                _tile_loadd(6, left + tile, 64);
                _tile_dpbsud(0, 4, 6);
                _tile_loadd(7, right + tile, 64);
                _tile_dpbsud(1, 4, 7);
            }
            _tile_stored(0, sums, 64);
            _tile_stored(1, sums + SIDE * SIDE, 64);
        }
        asm volatile("" ::: "memory");
    }

    // What they add to ROWS rows of sixteen columns; ``sums`` lie two tiles apart.
    template <int ROWS>
    void add_up(int64_t first, int64_t begin, int64_t count, const int32_t* sums, const float* terms, float* to) const {
        const float *row_scales = x.scales + x.place(first) + begin * SIDE, *row_sums = x.sums + x.place(first) + begin * SIDE;
        __m512 totals[ROWS];
        for (int row = 0; row < ROWS; ++row) totals[row] = begin ? _mm512_load_ps(to + row * SIDE) : _mm512_setzero_ps();
        for (int64_t index = 0; index < count; ++index, sums += 2 * SIDE * SIDE, terms += 2 * SIDE) {
            const __m512 scale = _mm512_load_ps(terms), offset = _mm512_load_ps(terms + SIDE);
#pragma GCC unroll 16
            for (int row = 0; row < ROWS; ++row) {
                totals[row] = Matrix::add(totals[row], _mm512_load_si512(sums + row * SIDE), scale, offset,
                                          row_scales[index * SIDE + row], row_sums[index * SIDE + row]);
            }
        }
        for (int row = 0; row < ROWS; ++row) _mm512_store_ps(to + row * SIDE, totals[row]);
    }

    // Row tiles [first, last) of a panel, so much of it at a time that it stays in the first cache while all rows pass; ``room``
    // has some for it as bytes, and for a panel of floats.
    void block(int64_t first, int64_t last, int64_t panel, float* room, Claim& claim) const {
        const int64_t at_once = groups_at_once(), terms = at_once * 2 * SIDE, half_size = terms + at_once * matrix.group * 4;
        float* totals = room + 2 * half_size;
        // Stored tiles are read only once many have been: what is read at once waits until it has arrived in the cache.
        alignas(64) int32_t sums[GROUPS * 2 * SIDE * SIDE];
        for (int64_t begin = 0; begin < x.groups; begin += at_once) {
            const int64_t end = std::min(begin + at_once, x.groups), count = end - begin;
            for (int half = 0; half < 2; ++half) {
                float* own = room + half * half_size;
                unpack(panel, half, begin, end, (uint8_t*)(own + terms), own);
            }
            for (int64_t tile = first; tile < last; ++tile) {
                sum_up(tile * SIDE, begin, count, (uint8_t*)(room + terms), (uint8_t*)(room + half_size + terms), sums);
                for (int half = 0; half < 2; ++half) {
                    const float* own = room + half * half_size;
                    float* to = totals + ((tile - first) * 2 + half) * SIDE * SIDE;
                    if (rows - tile * SIDE > 8) add_up<16>(tile * SIDE, begin, count, sums + half * SIDE * SIDE, own, to);
                    else add_up<8>(tile * SIDE, begin, count, sums + half * SIDE * SIDE, own, to);
                }
            }
        }
        if (!claim.may_write()) return;
        for (int64_t row = first * SIDE; row < std::min(last * SIDE, rows); ++row) {
            const float* low = totals + ((row / SIDE - first) * 2 * SIDE + row % SIDE) * SIDE;
            matrix.put_out(output, row, panel, _mm512_load_ps(low), _mm512_load_ps(low + SIDE * SIDE));
        }
    }

    int64_t groups_at_once() const { return matrix.group > DEEP ? GROUPS / 2 : GROUPS; }

    void by_tiles(Team& team) const {
        static thread_local std::vector<char> held;
        const int64_t panels = matrix.num_panels(), block_tiles = int8::tiles_at_once(rows, x.tiles * DEEP);
        const int64_t unpacked = groups_at_once() * (2 * SIDE * 4 + matrix.group * SIDE);
        float* own = (float*)int8::room(held, 2 * unpacked + block_tiles * 2 * SIDE * SIDE * 4);
        const int64_t row_blocks = (row_tiles() + block_tiles - 1) / block_tiles;
        team.each_apart(row_blocks * panels, std::max<int64_t>(1, panels / int8::RUNS), [&](int64_t task, Claim& claim) {
            const int64_t first = task / panels * block_tiles;
            block(first, std::min(first + block_tiles, row_tiles()), task % panels, own, claim);
        });
    }
#endif

    // Every thread of the team calls it, each with Tiles of its own.
    void run(Team& team) const {
#if defined(HAVE_TILES)
        if (rows > NO_TILES && may_use_tiles()) return by_tiles(team);
#endif
        if (rows == 1) return Row{matrix, x, output}.run(team);
        const int64_t panels = matrix.num_panels(), at_once = std::max<int64_t>(1, panels / int8::RUNS);
        team.each_apart(panels, at_once, [&](int64_t panel, Claim& claim) { all(panel, claim); });
    }
};

}  // namespace int4

}  // namespace

#endif
