// Memory of a thread's own, for what it lays out.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace {

// Memory that begins with a cache line.
template <typename T>
class AlignedBuffer {
    std::vector<T> held_;

  public:
    T* begin() { return (T*)(((uintptr_t)held_.data() + 63) & ~uintptr_t(63)); }
    void grow(size_t size) {
        if (held_.size() < size + 64 / sizeof(T)) held_.resize(size + 64 / sizeof(T));
    }
};

}  // namespace
