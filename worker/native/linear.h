// y = x times the transpose of a packed matrix of bfloat16, in tiles where there are some, else, and of one row where it is
// coded, as pairs.h has it.
//
// For few rows it is the matrix that takes its time to arrive: it is read once, in order, and ahead. For many it is the tiles
// of x: a block of them, laid out as they are multiplied, stays in the second cache while panels of the matrix pass by, the
// next one fetched and the last one's sums made into y meanwhile.

#pragma once

#include "aligned.h"
#include "arriving.h"
#include "finish.h"
#include "pairs.h"
#include "singles.h"
#include "team.h"
#include "tiles.h"

#if defined(__AVX512BF16__)

#include <algorithm>
#include <vector>

namespace {

constexpr int MAX_RUN = 8;               // panels that one task takes of few rows
constexpr int64_t FEW_BY_PAIRS = 1;      // rows of a matrix that is coded
constexpr int BLOCK_ROWS = 512;
constexpr int BLOCK_BYTES = 1 << 20;     // of x, that stay in the second cache
constexpr int SLICE_BYTES = 1 << 19;     // of x, where sums of several panels stay there too
constexpr int HELD = 16;                 // steps of a panel, that stay in the first cache
constexpr int GROUP_PANELS = 14;         // that one task takes of many rows
constexpr int SLICED_PANELS = 7;         // that it takes where x is sliced
constexpr int64_t ALONE = 400000;        // bytes of the matrix, and a 64th of the products, that one thread is done with
                                         // before another has woken

struct Product {
    const bf16* x;     // [rows, size]
    const bf16* tail;  // the last rows of x that are no whole tile, with more after them; null: so has x
    int64_t rows;
    Matrix matrix;
    Output output;
    bool is_laid = false;  // x is laid out; for more than FEW_ROWS
    const Expansion* expansion = nullptr;  // what is added to the sums, or null; columns are whole panels then

    // Every thread of the team calls it, each with Tiles of its own.
    void run(Team& team) const {
#if defined(HAVE_TILES)
        // Few rows wait for the matrix, which is not to wait for being decoded.
        if (may_use_tiles() && !(matrix.coded.panels && rows <= FEW_BY_PAIRS)) return by_tiles(team);
#endif
        if (SingleProduct::pays(rows)) return SingleProduct{x, rows, matrix, output, is_laid, expansion}.run(team);
        PairProduct{x, rows, matrix, output, is_laid, expansion}.run(team);
    }

#if defined(HAVE_TILES)
    int64_t row_tiles() const { return (rows + TILE - 1) / TILE; }
    const bf16* tile_of(int64_t row_tile) const {
        return tail && row_tile == rows / TILE ? tail : x + row_tile * TILE * matrix.size;
    }

    // Whole rows for what is no whole tile, in ``held`` [TILE * size].
    void hold_tail(bf16* held) {
        if (rows % TILE) {
            std::memcpy(held, x + rows / TILE * TILE * matrix.size, rows % TILE * matrix.size * sizeof(bf16));
            tail = held;
        }
    }

    // Few rows, one panel.
    void stream(int64_t panel, Claim& claim) const {
        alignas(64) float sums[4 * TILE * TILE];
        const int64_t last = row_tiles();
        Finish finish(matrix, output, expansion);
        for (int64_t tile = 0; tile < last; tile += 2) {
            if (tile + 1 < last) stream<2>({tile_of(tile), tile_of(tile + 1)}, tile, panel, sums);
            else stream<1>({tile_of(tile)}, tile, panel, sums);
            for (int64_t own = tile; expansion && own < std::min(tile + 2, last); ++own) {
                add_tile(own, panel, sums + 2 * (own - tile) * TILE * TILE);
            }
            if (!claim.may_write()) return;
            finish.begin(tile * TILE, std::min(Laid::ROWS, rows - tile * TILE), panel, sums);
            finish.some(finish.left());
        }
    }

    // The first of them take the panel from memory, others find it in a cache and fetch the next.
    template <int M>
    void stream(const bf16* const (&tiles)[M], int64_t tile, int64_t panel, float* sums) const {
        const int64_t steps = matrix.size / DEPTH;
        const bool is_coded = matrix.coded.panels, is_kept = row_tiles() > 2;
        bf16* held = is_coded ? Matrix::room_for(is_kept ? matrix.size : ArrivingCoded::HELD * DEPTH) : nullptr;
        auto by = [&](auto arriving) { multiply_arriving(tiles, matrix.size * sizeof(bf16), steps, arriving, sums); };
        const bf16* packed = is_coded ? held : (const bf16*)matrix.address(panel);
        if (tile) by(Arrived{packed, PrefetchSteps(matrix.address(panel + 1), matrix.panel_bytes(), steps)});
        else if (is_coded) by(ArrivingCoded(matrix, panel, held, is_kept));
        else by(ArrivingPacked{packed});
    }

    void add_tile(int64_t tile, int64_t panel, float* sums) const {
        const int64_t left = matrix.left(panel);
        if (expansion->is_tile(tile)) expansion->add_tile(tile, left, left + matrix.apart, sums);
    }

    // What else a thread does while the tiles' unit multiplies: in each step it fetches and decodes some of what is multiplied
    // next, and makes some of what was summed before into y.
    struct Meanwhile {
        Finish finish;
        Decoding decoding;
        const char* ahead = nullptr;
        int64_t lines = 0;              // in each step
        int64_t groups = 0, every = 1;  // of what is decoded, in one of so many steps
        int64_t turn = 1;

        void step(int64_t rows) {
            for (int64_t line = 0; line < lines; ++line, ahead += 64) __builtin_prefetch(ahead, 0, 2);
            if (groups && !--turn) decoding.some(groups), turn = every;
            if (rows) finish.some(rows);
        }
    };

    // A piece of a panel: steps of its inputs, from [at, at + count) on.
    struct Piece {
        int64_t panel, at, count;
    };

    // Many rows: tiles [first, last) of them by panels [left, right), columns [from, to) of x. Of a panel only as much at a
    // time as stays in the first cache while all rows pass. ``a`` is where the first two tiles of rows begin, ``pair_size``
    // elements before the next two; ``sums`` holds 1024 floats for each two and, unless all of x is there at once, each panel.
    void block(int64_t first, int64_t last, int64_t left, int64_t right, int64_t from, int64_t to, const bf16* a,
               int64_t pair_size, float* sums, Meanwhile& meanwhile) const {
        const bool is_coded = matrix.coded.panels, is_whole = to - from == matrix.size;
        const int64_t pairs = (last - first + 1) / 2, steps = (to - from) / DEPTH;
        const int64_t pieces = (steps + HELD - 1) / HELD, held = (steps + pieces - 1) / pieces;
        static thread_local AlignedBuffer<bf16> decoded;
        if (is_coded) decoded.grow(2 * steps * 2 * TILE_SIZE);
        auto place = [&](int64_t panel) { return decoded.begin() + panel % 2 * steps * 2 * TILE_SIZE; };
        auto begin_decoding = [&](int64_t panel) {
            meanwhile.decoding = {matrix.coded, panel, matrix.size, from, to, place(panel)};
        };
        if (is_coded) {
            constexpr int64_t OF_STEP = TILE / Coded::PAIRS;
            meanwhile.every = std::max<int64_t>(1, pairs / OF_STEP), meanwhile.turn = meanwhile.every;
            meanwhile.groups = (OF_STEP + pairs - 1) / pairs;
            // The last tasks may have no panels.
            if (left < right) begin_decoding(left), meanwhile.decoding.some(meanwhile.decoding.left());
        }
        Piece piece{left, 0, std::min(held, steps)};
        while (piece.panel < right) {
            const int64_t panel = piece.panel, at = piece.at, count = piece.count;
            const bool is_end = at + count == steps;
            const Piece next = is_end ? Piece{panel + 1, 0, std::min(held, steps)}
                                      : Piece{panel, at + count, std::min(held, steps - at - count)};
            const bf16* b = is_coded ? place(panel) + at * 2 * TILE_SIZE : (const bf16*)matrix.address(panel, from + at * DEPTH);
            if (is_coded) {
                if (!at && panel + 1 < right) begin_decoding(panel + 1);
            } else {
                // What comes next in memory, or what the next slice begins with.
                meanwhile.ahead = (const char*)(!is_end || is_whole  ? b + count * 2 * TILE_SIZE
                                                : panel + 1 < right ? matrix.address(panel + 1, from)
                                                                    : matrix.address(left, to));
                meanwhile.lines = (held * 2 * TILE_SIZE * 2 / 64 + pairs * count - 1) / (pairs * count);
            }
            float* own = sums + (is_whole ? 0 : panel - left) * pairs * 4 * TILE * TILE;
            for (int64_t pair = 0; pair < pairs; ++pair) {
                const int64_t tile = first + 2 * pair;
                float* c = own + pair * 4 * TILE * TILE;
                const bool is_last = to == matrix.size && is_end, is_pair = tile + 1 < last;
                const Expansion* adding = is_last ? expansion : nullptr;
                const int64_t column = matrix.left(panel);
                pass(a + pair * pair_size + at * 2 * TILE_SIZE, is_pair, b, count, from || at, c, meanwhile, [&] {
                    if (!adding) return;
                    adding->add_held(tile, adding->is_tile(tile), adding->is_tile(tile + 1), column, column + matrix.apart);
                });
                if (!is_last) continue;
                if (adding && !is_pair) add_tile(tile, panel, c);
                meanwhile.finish.begin(tile * TILE, std::min(Laid::ROWS, rows - tile * TILE), panel, c);
            }
            if (is_end) meanwhile.decoding.some(meanwhile.decoding.left());
            piece = next;
        }
        meanwhile.finish.some(meanwhile.finish.left());
    }

    // Some steps of two row tiles, or of the last one alone; ``more``() adds to what two have summed.
    template <typename More>
    static void pass(const bf16* a, bool is_pair, const bf16* b, int64_t steps, bool adds, float* sums, Meanwhile& meanwhile,
                     const More& more) {
        if (is_pair && adds) {
            both<true>(a, b, steps, sums, meanwhile, more);
        } else if (is_pair) {
            both<false>(a, b, steps, sums, meanwhile, more);
        } else {
            // Where there is no other tile, these are the sums that are still being finished.
            meanwhile.finish.some(meanwhile.finish.left());
            if (adds) multiply_one<true>(a, b, steps, sums);
            else multiply_one<false>(a, b, steps, sums);
        }
    }

    template <bool ADD>
    static void multiply_one(const bf16* a, const bf16* b, int64_t steps, float* sums) {
        multiply<1, 2, ADD>({a}, 64, 2 * TILE_SIZE, {b, b + TILE_SIZE}, 2 * TILE_SIZE, steps, {{sums, sums + TILE * TILE}});
    }

    template <bool ADD, typename More>
    static void both(const bf16* a, const bf16* b, int64_t steps, float* sums, Meanwhile& meanwhile, const More& more) {
        const int64_t rows = (meanwhile.finish.left() + steps - 1) / steps;
        asm volatile("" ::: "memory");  // the compiler does not know that tiles are read from memory
        if (ADD) {
            _tile_loadd(0, sums, 64);
            _tile_loadd(1, sums + TILE * TILE, 64);
            _tile_loadd(2, sums + 2 * TILE * TILE, 64);
            _tile_loadd(3, sums + 3 * TILE * TILE, 64);
        } else {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
        }
        for (int64_t step = 0; step < steps; ++step, a += 2 * TILE_SIZE, b += 2 * TILE_SIZE) {
            _tile_stream_loadd(4, a, 64);
            _tile_loadd(6, b, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, b + TILE_SIZE, 64);
            _tile_dpbf16ps(1, 4, 7);
            _tile_stream_loadd(5, a + TILE_SIZE, 64);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
            meanwhile.step(rows);
        }
        more();
        _tile_stored(0, sums, 64);
        _tile_stored(1, sums + TILE * TILE, 64);
        _tile_stored(2, sums + 2 * TILE * TILE, 64);
        _tile_stored(3, sums + 3 * TILE * TILE, 64);
    }

    // Columns [from, to) of the rows of tiles [first, last), laid out.
    void lay(int64_t first, int64_t last, int64_t from, int64_t to, bf16* laid) const {
        const int64_t stop = std::min(last * TILE, rows);
        for (int64_t row = first * TILE; row < stop; ++row) {
            Laid::take(x + row * matrix.size, from, to, laid + Laid::place(row - first * TILE, 0, to - from));
        }
    }

    void by_tiles(Team& team) const {
        const int64_t panels = matrix.num_panels(), size = matrix.size;
        if (rows <= FEW_ROWS) {
            // Each thread reads a stretch of the matrix in one go, in runs so short that nobody waits long for the last.
            const int64_t at_once = std::clamp<int64_t>(panels / (16 * team.size()), 1, MAX_RUN);
            return team.each_apart(panels, at_once, [&](int64_t panel, Claim& claim) { stream(panel, claim); });
        }
        const int64_t row_blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
        const int64_t block_tiles = ((row_tiles() + row_blocks - 1) / row_blocks + 1) / 2 * 2;
        const int64_t block_bytes = block_tiles * TILE * size * 2;
        const int64_t num_slices = block_bytes <= BLOCK_BYTES ? 1 : (block_bytes + SLICE_BYTES - 1) / SLICE_BYTES;
        const int64_t slice = (size / DEPTH + num_slices - 1) / num_slices * DEPTH;
        // As many tasks for each thread as for the others.
        const int64_t most = num_slices > 1 ? SLICED_PANELS : GROUP_PANELS, threads = team.size();
        const int64_t groups = std::min(panels, (panels + most * threads - 1) / (most * threads) * threads);
        const int64_t group = (panels + groups - 1) / groups;
        static thread_local AlignedBuffer<float> sums;
        static thread_local AlignedBuffer<bf16> laid;
        sums.grow(block_tiles / 2 * (num_slices > 1 ? group : 1) * 4 * TILE * TILE);
        if (!is_laid) laid.grow(block_tiles * TILE * slice);
        Meanwhile meanwhile{Finish(matrix, output, expansion), {}};
        int64_t lying = -1;
        team.each(row_blocks * groups, 1, [&](int64_t task) {
            const int64_t first = task / groups * block_tiles, left = task % groups * group;
            const int64_t last = std::min(first + block_tiles, row_tiles()), right = std::min(left + group, panels);
            for (int64_t from = 0; from < size; from += slice) {
                const int64_t to = std::min(from + slice, size);
                if (is_laid) {
                    const bf16* a = x + Laid::place(first * TILE, from, size);
                    block(first, last, left, right, from, to, a, Laid::pair_size(size), sums.begin(), meanwhile);
                    continue;
                }
                if (lying != first || num_slices > 1) lay(first, last, from, to, laid.begin());
                lying = first;
                block(first, last, left, right, from, to, laid.begin(), Laid::pair_size(to - from), sums.begin(), meanwhile);
            }
        });
    }
#endif
};

inline void linear(Product product, int threads) {
#if defined(HAVE_TILES)
    static std::vector<bf16> tail;
    if (int64_t(tail.size()) < TILE * product.matrix.size) tail.resize(TILE * product.matrix.size);
    product.hold_tail(tail.data());
#endif
    const int64_t work = product.matrix.size * product.matrix.columns * 2;
    if (work + work / 128 * product.rows < ALONE) threads = 1;
    Team::run(threads, [&](Team& team) {
        Tiles session(true);
        product.run(team);
    });
}

}  // namespace

#endif
