// Where the threads of a team run.

#pragma once

#if defined(__linux__)
#include <sched.h>
#endif

namespace {

#if defined(__linux__)

// The CPUs that the thread which makes it may run on. Where a team has as many threads, each keeps to one of its own while they
// compute: else the system, which looks for a better place every few milliseconds only, leaves two of them on one CPU and the other
// one idle, whenever somebody else has run there for a moment.
class Cores {
    cpu_set_t all_{};
    bool is_shared_out_;

  public:
    explicit Cores(int threads) {
        is_shared_out_ = threads > 1 && !sched_getaffinity(0, sizeof all_, &all_) && CPU_COUNT(&all_) == threads;
    }

    // A thread of the team keeps to its own; the one that the others wait for is given back what it had, unless somebody has told it
    // meanwhile where to run.
    class Own {
        const cpu_set_t* back_ = nullptr;
        cpu_set_t own_;

      public:
        Own(const Cores& cores, int thread) {
            static thread_local cpu_set_t kept;
            static thread_local bool keeps = false;
            const cpu_set_t wanted = cores.is_shared_out_ ? cores.nth(thread) : cores.all_;
            if (!thread) {
                if (cores.is_shared_out_ && !sched_setaffinity(0, sizeof wanted, &wanted)) back_ = &cores.all_, own_ = wanted;
            } else if (cores.is_shared_out_ ? !keeps || !CPU_EQUAL(&kept, &wanted) : keeps) {
                sched_setaffinity(0, sizeof wanted, &wanted);
                kept = wanted, keeps = cores.is_shared_out_;
            }
        }
        ~Own() {
            cpu_set_t now;
            if (!back_ || sched_getaffinity(0, sizeof now, &now) || !CPU_EQUAL(&now, &own_)) return;
            sched_setaffinity(0, sizeof *back_, back_);
        }
        Own(const Own&) = delete;
    };

  private:
    cpu_set_t nth(int thread) const {
        cpu_set_t one;
        CPU_ZERO(&one);
        int cpu = 0;
        while (!CPU_ISSET(cpu, &all_) || thread--) ++cpu;
        CPU_SET(cpu, &one);
        return one;
    }
};

#else

struct Cores {
    explicit Cores(int) {}
    struct Own {
        Own(const Cores&, int) {}
    };
};

#endif

}  // namespace
