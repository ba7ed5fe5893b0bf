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
#include <exception>
#include <memory>
#include <thread>

#include "cores.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <time.h>
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

// What one thread has in hand: a run of tasks, the one of them that it does, and whether it writes already; or 0.
using Held = std::atomic<int64_t>;

// A thread's claim to the task that it does. While nothing of it is written, others may do it over, from its beginning.
class Claim {
    Held* const held_;  // null: there are no others
    int64_t what_;
    bool is_lost_ = false, is_writing_ = false;

  public:
    static constexpr int64_t WRITING = 1;

    Claim(Held* held, int64_t what) : held_(held), what_(what) {
        if (held_) held_->store(what_);
    }
    bool is_lost() const { return is_lost_; }

    // Asked before anything of a task is written: whether it is still this thread's, which it stays then. Else it is left as it is.
    bool may_write() {
        if (!held_ || is_writing_ || is_lost_) return !is_lost_;
        is_writing_ = held_->compare_exchange_strong(what_, what_ | WRITING);
        is_lost_ = !is_writing_;
        return is_writing_;
    }
};

// A thread's part in a team. All threads make the same calls; a task is done by whoever is free, and nobody waits for a thread
// but for its tasks: one that the system has put aside finds out later that its share was done.
class Team {
    // Tasks of all calls are counted through, so that whoever is late cannot take one of a later call for its own.
    struct Shared {
        alignas(64) std::atomic<int64_t> next{0};
        alignas(64) std::atomic<int64_t> done{0};
        alignas(64) std::atomic<uint32_t> calls{0};  // changes with the end of each
        std::atomic<int32_t> sleepers{0};
        struct alignas(64) Of {
            Held held{0};
#if defined(__linux__)
            clockid_t clock;  // of the time that the thread has run
#endif
        };
        const std::unique_ptr<Of[]> threads;
        std::atomic<bool> has_failed{false};
        std::exception_ptr failure;  // the first of them, for whoever waits until all threads are back

        explicit Shared(int threads) : threads(new Of[threads]) {}

        void fail() {
            if (!has_failed.exchange(true)) failure = std::current_exception();
        }
    };

    Shared& shared_;
    const int size_, own_;
    int64_t begin_ = 0;  // of the next call's tasks

    Team(Shared& shared, int size, int own) : shared_(shared), size_(size), own_(own) {
#if defined(__linux__)
        if (size > 1) pthread_getcpuclockid(pthread_self(), &shared.threads[own].clock);
#endif
    }

  public:
    Team(const Team&) = delete;
    int size() const { return size_; }

    // Whether a task has thrown: nothing of what the team computes counts any more, and tasks that are left are not done.
    bool has_failed() const { return shared_.has_failed.load(std::memory_order_relaxed); }

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
            attempt([&] {
                for (int64_t task = at; task < stop; ++task) body(task - begin);
            });
            count_done(stop - at, end);
            at = shared_.next.load();
        }
        wait(end);
    }

    // The same of body(task, claim), which asks the claim before it writes: what a thread has in hand while it is put aside,
    // whoever would wait for it does over.
    template <typename Body>
    void each_claimed(int64_t count, int64_t at_once, const Body& body) {
        const int64_t runs = (count + at_once - 1) / at_once;
        each_run(runs, count, at_once, [&](int64_t run) { return run * at_once; }, body);
    }

    // The same, each thread's runs of ``at_once`` one behind the other as long as they take turns: so that it reads what lies in a
    // row, and ahead.
    template <typename Body>
    void each_apart(int64_t count, int64_t at_once, const Body& body) {
        const int64_t of_thread = ((count + at_once - 1) / at_once + size_ - 1) / size_;
        auto first_of = [&](int64_t run) { return (run % size_ * of_thread + run / size_) * at_once; };
        each_run(of_thread * size_, count, at_once, first_of, body);
    }

    // body(team) on so many threads, or on as many as there are. Throws what any of them has thrown, once all have ended.
    template <typename Body>
    static void run(int threads, const Body& body) {
        Shared shared(std::max(threads, 1));
        if (threads <= 1) {
            Team team(shared, 1, 0);
            return body(team);
        }
        const Cores cores(threads);
#pragma omp parallel num_threads(threads)
        {
            const Cores::Own core(cores, omp_get_thread_num());
            Team team(shared, omp_get_num_threads(), omp_get_thread_num());
            team.attempt([&] { body(team); });
        }
        if (shared.failure) std::rethrow_exception(shared.failure);
    }

  private:
    static constexpr int64_t RUN = 1 << 20, TASK = 2;  // of what is held
    static constexpr int TRIES = 10;                   // to take something over, before one sleeps
    static constexpr long SLEEP_NS = 200000;           // ten times as long as one turns before

    // Runs of up to ``at_once`` tasks of ``count``, the first of each where ``first_of`` says.
    template <typename First, typename Body>
    void each_run(int64_t runs, int64_t count, int64_t at_once, const First& first_of, const Body& body) {
        if (size_ == 1) {
            for (int64_t task = 0; task < count; ++task) {
                Claim claim(nullptr, 0);
                body(task, claim);
            }
            return;
        }
        const int64_t begin = begin_, end = begin_ += runs;
        Held& held = shared_.threads[own_].held;
        auto go_on = [&](int64_t run, int64_t index) {
            const int64_t first = first_of(run - begin);
            for (const int64_t last = std::min(first + at_once, count); first + index < last; ++index) {
                Claim claim(&held, (run + 1) * RUN + index * TASK);
                attempt([&] { body(first + index, claim); });
                // What has not been done nobody does over, either.
                if (has_failed()) claim.may_write();
                if (claim.is_lost()) return;
            }
            held.store(0);
            count_done(1, end);
        };
        for (int64_t at = shared_.next.load(); at < end;) {
            if (!shared_.next.compare_exchange_weak(at, at + 1)) continue;
            go_on(at, 0);
            at = shared_.next.load();
        }
        do {
            for (int at_try = 0; at_try < TRIES; ++at_try) {
                if (is_soon_done(end, TURNS / TRIES)) return;
                const int64_t what = taken_over((own_ + 1 + at_try % (size_ - 1)) % size_, end);
                if (what) go_on(what / RUN - 1, what % RUN / TASK), at_try = -1;
            }
        } while (!is_done_after_sleep(end));
    }

    template <typename Body>
    void attempt(const Body& body) {
        if (has_failed()) return;
        try {
            body();
        } catch (...) {
            shared_.fail();
        }
    }

    void count_done(int64_t count, int64_t end) {
        if (shared_.done.fetch_add(count) + count != end) return;
        shared_.calls.fetch_add(1);
        if (shared_.sleepers.load()) wake();
    }

    // What a thread that is put aside has in hand of the call that ends with ``end``, and has not begun to write, taken from it; or 0:
    // since the call was seen to be unfinished, the thread may have ended it and be at a later one's tasks.
    int64_t taken_over(int thread, int64_t end) {
        Held& held = shared_.threads[thread].held;
        int64_t what = held.load();
        const bool is_own_call = what && what / RUN <= end;  // runs are held by their number and one
        const bool is_free = is_own_call && !(what & Claim::WRITING) && !runs(shared_.threads[thread]);
        return is_free && held.compare_exchange_strong(what, 0) ? what : 0;
    }

    bool is_soon_done(int64_t end, int turns) const {
        for (int turn = 0; turn < turns; ++turn) {
            if (shared_.done.load(std::memory_order_acquire) >= end) return true;
            pause();
        }
        return false;
    }

    void wait(int64_t end) {
        if (is_soon_done(end, TURNS)) return;
        while (!is_done_after_sleep(end)) {
        }
    }

    // Sleeps until a call ends, or for a while: whoever ran then may have been put aside since.
    bool is_done_after_sleep(int64_t end) {
        shared_.sleepers.fetch_add(1);
        const uint32_t calls = shared_.calls.load();
        if (shared_.done.load() < end) sleep(calls);
        shared_.sleepers.fetch_sub(1);
        return shared_.done.load() >= end;
    }

#if defined(__linux__)
    void sleep(uint32_t calls) {
        const timespec most{0, SLEEP_NS};
        syscall(SYS_futex, &shared_.calls, FUTEX_WAIT_PRIVATE, calls, &most, nullptr, 0);
    }
    void wake() { syscall(SYS_futex, &shared_.calls, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0); }

    // Whether it is on a processor: its time passes. Where that is counted in ticks, as by some sandboxes, the asker's own stands
    // still as well, and nobody knows: threads that ran would else take the same task from each other over and over.
    static bool runs(const Shared::Of& thread) {
        const int64_t before = time_of(thread.clock), own = time_of(CLOCK_THREAD_CPUTIME_ID);
        for (int turn = 0; turn < 5; ++turn) pause();
        const bool is_known = before >= 0 && time_of(CLOCK_THREAD_CPUTIME_ID) != own;
        return !is_known || time_of(thread.clock) != before;
    }
    // -1: it is not told.
    static int64_t time_of(clockid_t clock) {
        timespec time{};
        return clock_gettime(clock, &time) ? -1 : time.tv_sec * 1000000000 + time.tv_nsec;
    }
#else
    void sleep(uint32_t) { std::this_thread::yield(); }
    void wake() {}
    static bool runs(const Shared::Of&) { return true; }  // nobody knows
#endif
};

}  // namespace
