// AMX in plain C++, for machines that have none: included before all else, so that kernels with tiles run in tests wherever there
// is AVX-512. Semantics: Intel's Software Developer's Manual, volume 2; sums of bfloat16 are rounded one by one here.

#pragma once

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

namespace emulated {

struct Tile {
    alignas(64) char rows[16][64];
};

inline thread_local Tile tiles[8];
inline thread_local bool are_configured = false;

inline void use() {
    if (!are_configured) __builtin_trap();
}

inline void load(int tile, const void* from, int64_t stride) {
    use();
    for (int row = 0; row < 16; ++row) std::memcpy(tiles[tile].rows[row], (const char*)from + row * stride, 64);
}

inline void store(int tile, void* to, int64_t stride) {
    use();
    for (int row = 0; row < 16; ++row) std::memcpy((char*)to + row * stride, tiles[tile].rows[row], 64);
}

template <typename Sum, typename Product>
void multiply(int sums, const Product& product) {
    use();
    for (int m = 0; m < 16; ++m) {
        Sum row[16];
        std::memcpy(row, tiles[sums].rows[m], 64);
        for (int k = 0; k < 16; ++k) {
            for (int n = 0; n < 16; ++n) row[n] = product(row[n], m, k, n);
        }
        std::memcpy(tiles[sums].rows[m], row, 64);
    }
}

inline float wide(const char* row, int place) {
    uint16_t bits;
    std::memcpy(&bits, row + 2 * place, 2);
    const uint32_t all = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &all, 4);
    return value;
}

inline void dpbf16ps(int sums, int a, int b) {
    multiply<float>(sums, [&](float sum, int m, int k, int n) {
        const char *from = tiles[a].rows[m], *by = tiles[b].rows[k];
        sum += wide(from, 2 * k) * wide(by, 2 * n);
        return sum + wide(from, 2 * k + 1) * wide(by, 2 * n + 1);
    });
}

template <typename A, typename B>
void dpb(int sums, int a, int b) {
    multiply<int32_t>(sums, [&](int32_t sum, int m, int k, int n) {
        for (int byte = 0; byte < 4; ++byte) {
            sum += int32_t(A(tiles[a].rows[m][4 * k + byte])) * int32_t(B(tiles[b].rows[k][4 * n + byte]));
        }
        return sum;
    });
}

}  // namespace emulated

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbsud
#define _tile_loadconfig(config) (void)(config), emulated::are_configured = true
#define _tile_release() emulated::are_configured = false
#define _tile_zero(tile) emulated::use(), std::memset(&emulated::tiles[tile], 0, sizeof(emulated::Tile))
#define _tile_loadd(tile, from, stride) emulated::load(tile, from, stride)
#define _tile_stream_loadd _tile_loadd
#define _tile_stored(tile, to, stride) emulated::store(tile, to, stride)
#define _tile_dpbf16ps(sums, a, b) emulated::dpbf16ps(sums, a, b)
#define _tile_dpbsud(sums, a, b) emulated::dpb<int8_t, uint8_t>(sums, a, b)
// Whoever asks the system for tiles is given them.
#define syscall(number, ...) ((number) == SYS_arch_prctl ? 0L : syscall(number, __VA_ARGS__))
