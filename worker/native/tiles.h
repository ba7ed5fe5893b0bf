// Products of bfloat16 tiles, 16 x 32 by 32 x 16, added up in 16 x 16 float32: by AMX where the processor has it and the
// system lets us, else pair by pair. Both round differently, so a process uses one of them from its start to its end; but see
// linear.h for one row.

#pragma once

#include "floats.h"

#if defined(__AVX512BF16__)

#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512VNNI__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define HAVE_TILES 1
#endif

namespace {

constexpr int TILE = 16;                 // rows of a tile; also its columns, of 32 bits
constexpr int DEPTH = 32;                // products that one step sums
constexpr int TILE_SIZE = TILE * DEPTH;  // bfloat16 of a tile

#if defined(HAVE_TILES)
// Linux gives the tiles' state to processes that ask for it (Documentation/arch/x86/xstate.rst).
inline bool may_use_tiles() {
    const int REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILE_DATA
    static const bool granted = syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
    return granted;
}
#endif

// While it lives, this thread may multiply. oneDNN configures the tiles for itself in each of its calls, and expects to
// find them released.
struct Tiles {
#if defined(HAVE_TILES)
    const bool configured;

    explicit Tiles(bool wanted) : configured(wanted && may_use_tiles()) {
        if (!configured) return;
        struct alignas(64) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {TILE, TILE, TILE, TILE, TILE, TILE, TILE, TILE};
        } config;
        asm volatile("" ::"m"(config));
        _tile_loadconfig(&config);
    }
    ~Tiles() {
        if (configured) _tile_release();
    }
    Tiles(const Tiles&) = delete;
#else
    explicit Tiles(bool) {}
#endif
};

// ``multiply`` without tiles and by floats. Not inlined, so that nothing of it is done before floats are Flushing.
template <int M, int N, bool ADD>
[[gnu::noinline]] void multiply_floats(const bf16* const (&a)[M], int64_t row_bytes, int64_t a_step, const bf16* const (&b)[N],
                                       int64_t b_step, int64_t steps, float* const (&sums)[M][N]) {
    alignas(64) float wide[M][2][TILE][TILE];  // of a step of a: the first of its pairs, and the second
    for (int64_t step = 0; step < steps; ++step) {
        for (int i = 0; i < M; ++i) {
            for (int row = 0; row < TILE; ++row) {
                const __m512i pairs = _mm512_loadu_si512((const char*)(a[i] + step * a_step) + row * row_bytes);
                _mm512_store_ps(wide[i][0][row], firsts_of(pairs)), _mm512_store_ps(wide[i][1][row], seconds_of(pairs));
            }
        }
        for (int i = 0; i < M; ++i) {
            for (int j = 0; j < N; ++j) {
                __m512 rows[TILE];
                for (int row = 0; row < TILE; ++row) {
                    rows[row] = ADD || step ? _mm512_loadu_ps(sums[i][j] + row * TILE) : _mm512_setzero_ps();
                }
                const bf16* line = b[j] + step * b_step;
                for (int pair = 0; pair < TILE; ++pair, line += DEPTH) {
                    const __m512i pairs = _mm512_loadu_si512(line);
                    const __m512 second = seconds_of(pairs), first = firsts_of(pairs);
#pragma GCC unroll 16
                    for (int row = 0; row < TILE; ++row) {
                        rows[row] = _mm512_fmadd_ps(_mm512_set1_ps(wide[i][1][row][pair]), second, rows[row]);
                    }
#pragma GCC unroll 16
                    for (int row = 0; row < TILE; ++row) {
                        rows[row] = _mm512_fmadd_ps(_mm512_set1_ps(wide[i][0][row][pair]), first, rows[row]);
                    }
                }
                for (int row = 0; row < TILE; ++row) _mm512_storeu_ps(sums[i][j] + row * TILE, rows[row]);
            }
        }
    }
}

// ``multiply`` without tiles. ROW_BYTES: ``row_bytes``, or 0.
template <int M, int N, bool ADD, int ROW_BYTES>
[[gnu::noinline]] void multiply_pairs(const bf16* const (&a)[M], int64_t row_bytes, int64_t a_step, const bf16* const (&b)[N],
                                      int64_t b_step, int64_t steps, float* const (&sums)[M][N]) {
    constexpr int AT_ONCE = TILE / N;  // rows: sixteen sums, so that none waits for another
    const int64_t distance = ROW_BYTES ? ROW_BYTES : row_bytes;
    for (int i = 0; i < M; ++i) {
        for (int first = 0; first < TILE; first += AT_ONCE) {
            __m512 rows[AT_ONCE][N];
#pragma GCC unroll 16
            for (int row = 0; row < AT_ONCE; ++row) {
#pragma GCC unroll 2
                for (int j = 0; j < N; ++j) {
                    rows[row][j] = ADD ? _mm512_loadu_ps(sums[i][j] + (first + row) * TILE) : _mm512_setzero_ps();
                }
            }
            const char* from = (const char*)a[i] + first * distance;
            const bf16* line[N];
            for (int j = 0; j < N; ++j) line[j] = b[j];
            for (int64_t step = 0; step < steps; ++step, from += a_step * sizeof(bf16)) {
#pragma GCC unroll 2
                for (int pair = 0; pair < TILE; ++pair) {
                    __m512bh columns[N];
#pragma GCC unroll 2
                    for (int j = 0; j < N; ++j) columns[j] = (__m512bh)_mm512_loadu_si512(line[j] + pair * 2 * TILE);
#pragma GCC unroll 16
                    for (int row = 0; row < AT_ONCE; ++row) {
                        int32_t both;
                        std::memcpy(&both, from + row * distance + pair * 4, 4);
#pragma GCC unroll 2
                        for (int j = 0; j < N; ++j) {
                            rows[row][j] = _mm512_dpbf16_ps(rows[row][j], columns[j], (__m512bh)_mm512_set1_epi32(both));
                        }
                    }
                }
                for (int j = 0; j < N; ++j) line[j] += b_step;
            }
#pragma GCC unroll 16
            for (int row = 0; row < AT_ONCE; ++row) {
#pragma GCC unroll 2
                for (int j = 0; j < N; ++j) _mm512_storeu_ps(sums[i][j] + (first + row) * TILE, rows[row][j]);
            }
        }
    }
}

// sums[i][j] (16 rows of 16 floats, side by side) of a[i] times b[j]. Rows of a[i] are ``row_bytes`` apart, its steps
// ``a_step`` elements; b[j] is whole tiles of [16 pairs][16 columns][2], its steps ``b_step`` elements apart.
template <int M, int N, bool ADD>
inline void multiply(const bf16* const (&a)[M], int64_t row_bytes, int64_t a_step, const bf16* const (&b)[N],
                     int64_t b_step, int64_t steps, float* const (&sums)[M][N]) {
#if defined(HAVE_TILES)
    if (may_use_tiles()) {
        asm volatile("" ::: "memory");  // the compiler does not know that tiles are read from memory
        if (ADD) {
            _tile_loadd(0, sums[0][0], 64);
            if constexpr (N > 1) _tile_loadd(1, sums[0][N - 1], 64);
            if constexpr (M > 1) _tile_loadd(2, sums[M - 1][0], 64);
            if constexpr (M > 1 && N > 1) _tile_loadd(3, sums[M - 1][N - 1], 64);
        } else {
            _tile_zero(0);
            if constexpr (N > 1) _tile_zero(1);
            if constexpr (M > 1) _tile_zero(2);
            if constexpr (M > 1 && N > 1) _tile_zero(3);
        }
        for (int64_t step = 0; step < steps; ++step) {
            _tile_loadd(4, a[0] + step * a_step, row_bytes);
            _tile_loadd(6, b[0] + step * b_step, 64);
            _tile_dpbf16ps(0, 4, 6);
            if constexpr (N > 1) {
                _tile_loadd(7, b[N - 1] + step * b_step, 64);
                _tile_dpbf16ps(1, 4, 7);
            }
            if constexpr (M > 1) {
                _tile_loadd(5, a[M - 1] + step * a_step, row_bytes);
                _tile_dpbf16ps(2, 5, 6);
                if constexpr (N > 1) _tile_dpbf16ps(3, 5, 7);
            }
        }
        _tile_stored(0, sums[0][0], 64);
        if constexpr (N > 1) _tile_stored(1, sums[0][N - 1], 64);
        if constexpr (M > 1) _tile_stored(2, sums[M - 1][0], 64);
        if constexpr (M > 1 && N > 1) _tile_stored(3, sums[M - 1][N - 1], 64);
        return;
    }
#endif
    if (steps && pairs_are_slow()) {
        Flushing session;
        return multiply_floats<M, N, ADD>(a, row_bytes, a_step, b, b_step, steps, sums);
    }
    // At distances that the compiler knows it has registers enough.
    if (row_bytes == 64) return multiply_pairs<M, N, ADD, 64>(a, row_bytes, a_step, b, b_step, steps, sums);
    if (row_bytes == 128) return multiply_pairs<M, N, ADD, 128>(a, row_bytes, a_step, b, b_step, steps, sums);
    if (row_bytes == 256) return multiply_pairs<M, N, ADD, 256>(a, row_bytes, a_step, b, b_step, steps, sums);
    multiply_pairs<M, N, ADD, 0>(a, row_bytes, a_step, b, b_step, steps, sums);
}

}  // namespace

#endif
