// Memory that ends when tests say so, in kernels that were built with this included before all else, and linked to what is here rather
// than to what the process has.

#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>

extern "C" {
std::atomic<int64_t> penstock_allocations{-1};  // that go well from now on, before one fails; below 0: as many as there are
}

static void* penstock_taken(std::size_t size, std::size_t alignment) {
    int64_t left = penstock_allocations.load();
    while (left >= 0 && !penstock_allocations.compare_exchange_weak(left, left - 1)) {
    }
    void* taken = left == 0 ? nullptr : std::aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
    if (!taken) throw std::bad_alloc();
    return taken;
}

void* operator new(std::size_t size) { return penstock_taken(size, 16); }
void* operator new[](std::size_t size) { return penstock_taken(size, 16); }
void* operator new(std::size_t size, std::align_val_t alignment) { return penstock_taken(size, std::size_t(alignment)); }
void* operator new[](std::size_t size, std::align_val_t alignment) { return penstock_taken(size, std::size_t(alignment)); }
void operator delete(void* taken) noexcept { std::free(taken); }
void operator delete[](void* taken) noexcept { std::free(taken); }
void operator delete(void* taken, std::size_t) noexcept { std::free(taken); }
void operator delete[](void* taken, std::size_t) noexcept { std::free(taken); }
void operator delete(void* taken, std::align_val_t) noexcept { std::free(taken); }
void operator delete[](void* taken, std::align_val_t) noexcept { std::free(taken); }
void operator delete(void* taken, std::size_t, std::align_val_t) noexcept { std::free(taken); }
void operator delete[](void* taken, std::size_t, std::align_val_t) noexcept { std::free(taken); }
