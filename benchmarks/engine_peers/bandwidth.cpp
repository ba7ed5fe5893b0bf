// How fast the cores of this machine read memory that they only pass by: the limit of a decode step.
#include <sys/mman.h>

#include <chrono>
#include <cstddef>
#include <cstdint>

// Seconds of the fastest of `passes` over `size` bytes by all threads, in huge pages where the system gives them;
// negative where it gives no memory. `size` is rounded down to a multiple of 4 KiB.
extern "C" double fastest_pass_s(size_t size, int passes) {
    size &= ~size_t{4095};
    void *memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return -1.0;
    madvise(memory, size, MADV_HUGEPAGE);
    auto *words = static_cast<uint64_t *>(memory);
    const ptrdiff_t count = static_cast<ptrdiff_t>(size / sizeof(uint64_t)), chunk = 512;
#pragma omp parallel for schedule(static)
    for (ptrdiff_t i = 0; i < count; i++) words[i] = static_cast<uint64_t>(i);
    double best = 1e9;
    volatile uint64_t sink = 0;
    for (int pass = 0; pass < passes; pass++) {
        const auto began_at = std::chrono::steady_clock::now();
        uint64_t total = 0;
#pragma omp parallel for schedule(static) reduction(+ : total)
        for (ptrdiff_t first = 0; first < count; first += chunk) {
            const uint64_t *from = words + first;
            uint64_t sums[64] = {};
            for (ptrdiff_t i = 0; i < chunk; i += 64) {
                // A kibibyte ahead is what measured best; the hardware's own reading ahead stops at a page.
                for (int line = 0; line < 8; line++) __builtin_prefetch(from + i + 8 * line + 128);
                for (int lane = 0; lane < 64; lane++) sums[lane] += from[i + lane];
            }
            for (uint64_t sum : sums) total += sum;
        }
        sink = sink + total;
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began_at;
        if (took.count() < best) best = took.count();
    }
    munmap(memory, size);
    return best;
}
