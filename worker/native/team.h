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

class Team {
    std::atomic<int32_t> size_{1};
    alignas(64) std::atomic<int64_t> next_{0};
    alignas(64) std::atomic<int32_t> arrived_{0};
    alignas(64) std::atomic<uint32_t> round_{0};
    std::atomic<int32_t> sleepers_{0};

  public:
    // Of one thread.
    static bool is_first() { return omp_get_thread_num() == 0; }

    int size() const { return size_.load(std::memory_order_relaxed); }

    // All tasks [0, count), ``at_once`` in a row by whoever is free. Every thread calls it, and returns when all are done.
    template <typename Body>
    void each(int64_t count, int64_t at_once, const Body& body) {
        for (int64_t at; (at = next_.fetch_add(at_once, std::memory_order_relaxed)) < count;) {
            for (int64_t task = at; task < std::min(at + at_once, count); ++task) body(task);
        }
        wait();
    }

    // Until every thread is here.
    void wait() {
        uint32_t round = round_.load();
        if (arrived_.fetch_add(1) + 1 == size()) {
            arrived_.store(0);
            next_.store(0);
            round_.store(round + 1);
            if (sleepers_.load()) wake();
            return;
        }
        for (int turn = 0; turn < TURNS; ++turn) {
            if (round_.load(std::memory_order_acquire) != round) return;
            pause();
        }
        sleepers_.fetch_add(1);
        while (round_.load() == round) sleep(round);
        sleepers_.fetch_sub(1);
    }

    // body(team) on so many threads, or on as many as there are.
    template <typename Body>
    static void run(int threads, const Body& body) {
        Team team;
        if (threads <= 1) return body(team);
#pragma omp parallel num_threads(threads)
        {
            // Whoever comes first says how many there are; all say the same.
            team.size_.store(omp_get_num_threads(), std::memory_order_relaxed);
            body(team);
        }
    }

  private:
#if defined(__linux__)
    void sleep(uint32_t round) { syscall(SYS_futex, &round_, FUTEX_WAIT_PRIVATE, round, nullptr, nullptr, 0); }
    void wake() { syscall(SYS_futex, &round_, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0); }
#else
    void sleep(uint32_t) { std::this_thread::yield(); }
    void wake() {}
#endif
};

}  // namespace
