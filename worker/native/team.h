// The threads that compute one step together.
//
// A step is some hundreds of short stretches of work. A thread that slept between them would take as long to wake as the
// work takes, and one that never slept would burn the core that the gateway waits for: so whoever waits turns for a few
// microseconds, then sleeps.

#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int TURNS = 500;  // about 20 us where a pause takes 140 cycles, less elsewhere

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// A thread's part in a team. All threads make the same calls; a task is done by whoever is free, and nobody waits for a thread
// but for its tasks: one that the system has put aside finds out later that its share was done.
class Team {
    // Tasks of all calls are counted through, so that whoever is late cannot take one of a later call for its own.
    struct Shared {
        alignas(64) std::atomic<int64_t> next{0};
        alignas(64) std::atomic<int64_t> done{0};
        alignas(64) std::atomic<uint32_t> calls{0};  // changes with the end of each
        std::atomic<int32_t> sleepers{0};
    };

    Shared& shared_;
    const int size_;
    int64_t begin_ = 0;  // of the next call's tasks

    Team(Shared& shared, int size) : shared_(shared), size_(size) {}

  public:
    Team(const Team&) = delete;
    int size() const { return size_; }

    // All tasks [0, count), up to ``at_once`` in a row; returns when all are done.
    template <typename Body>
    void each(int64_t count, int64_t at_once, const Body& body) {
        if (size_ == 1) {
            for (int64_t task = 0; task < count; ++task) body(task);
            return;
        }
        const int64_t begin = begin_, end = begin_ += count;
        for (int64_t at = shared_.next.load(); at < end;) {
            const int64_t stop = std::min(at + at_once, end);
            if (!shared_.next.compare_exchange_weak(at, stop)) continue;
            for (int64_t task = at; task < stop; ++task) body(task - begin);
            if (shared_.done.fetch_add(stop - at) + stop - at == end) {
                shared_.calls.fetch_add(1);
                if (shared_.sleepers.load()) wake();
            }
            at = shared_.next.load();
        }
        wait(end);
    }

    // The same in runs of ``at_once``, each thread's one behind the other as long as they take turns: so that it reads what lies
    // in a row, and ahead.
    template <typename Body>
    void each_apart(int64_t count, int64_t at_once, const Body& body) {
        const int64_t runs = (count + at_once - 1) / at_once, of_thread = (runs + size_ - 1) / size_;
        each(of_thread * size_, 1, [&](int64_t turn) {
            const int64_t begin = (turn % size_ * of_thread + turn / size_) * at_once;
            for (int64_t task = begin; task < std::min(begin + at_once, count); ++task) body(task);
        });
    }

    // body(team) on so many threads, or on as many as there are.
    template <typename Body>
    static void run(int threads, const Body& body) {
        Shared shared;
        if (threads <= 1) {
            Team team(shared, 1);
            return body(team);
        }
#pragma omp parallel num_threads(threads)
        {
            Team team(shared, omp_get_num_threads());
            body(team);
        }
    }

  private:
    void wait(int64_t end) {
        for (int turn = 0; turn < TURNS; ++turn) {
            if (shared_.done.load(std::memory_order_acquire) >= end) return;
            pause();
        }
        shared_.sleepers.fetch_add(1);
        for (uint32_t calls; calls = shared_.calls.load(), shared_.done.load() < end;) sleep(calls);
        shared_.sleepers.fetch_sub(1);
    }

#if defined(__linux__)
    void sleep(uint32_t calls) { syscall(SYS_futex, &shared_.calls, FUTEX_WAIT_PRIVATE, calls, nullptr, nullptr, 0); }
    void wake() { syscall(SYS_futex, &shared_.calls, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0); }
#else
    void sleep(uint32_t) { std::this_thread::yield(); }
    void wake() {}
#endif
};

}  // namespace
