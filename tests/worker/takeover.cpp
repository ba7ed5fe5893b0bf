// A team whose tasks count how often they are begun and written, under clocks as some systems have them.
//
//     takeover exact|ticks|refused THREADS CALLS TASKS SEED
//
// Prints how many tasks there were, how often any was begun, and how many were not written exactly once by when their call ended.

#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

// In place of the processor's own: now and then a thread is put aside while it waits, and what it waits for goes on.
static void put_aside() {
    static thread_local unsigned turns = 0;
    if (++turns % 61 == 0) usleep(200);
}
#define __builtin_ia32_pause put_aside

#include "team.h"

static const char* clocks = "exact";

// In place of libc's: a thread's time passes in steps of a second, or is told to itself alone.
extern "C" int clock_gettime(clockid_t clock, timespec* time) noexcept {
    if (clock < 0 && !std::strcmp(clocks, "refused")) return -1;
    const int failed = int(syscall(SYS_clock_gettime, clock, time));
    if ((clock < 0 || clock == CLOCK_THREAD_CPUTIME_ID) && !std::strcmp(clocks, "ticks")) time->tv_nsec = 0;
    return failed;
}

struct Call {
    int kind;
    int64_t count, at_once, turns;  // of a loop in each task, before it is written
    std::vector<int> written;
};

constexpr int MOST_BEGUN = 200;  // of one task, which is then held at once: it ends whatever the clocks say

int main(int, char** arguments) {
    clocks = arguments[1];
    const int threads = std::atoi(arguments[2]), num_calls = std::atoi(arguments[3]), most = std::atoi(arguments[4]);
    std::mt19937 random(unsigned(std::atoi(arguments[5])));
    std::vector<Call> calls(num_calls);
    std::vector<std::vector<std::atomic<int>>> begun(num_calls);
    int64_t num_tasks = 0;
    for (int index = 0; index < num_calls; ++index) {
        const int64_t count = 1 + random() % most;
        calls[index] = {int(random() % 3), count, int64_t(1 + random() % 9), int64_t(random() % (60000 / count)), {}};
        calls[index].written.resize(count);
        begun[index] = std::vector<std::atomic<int>>(count);
        num_tasks += count;
    }
    std::atomic<int64_t> num_wrong{0};
    Team::run(threads, [&](Team& team) {
        for (int index = 0; index < num_calls; ++index) {
            Call& call = calls[index];
            auto write = [&](int64_t task) { ++call.written[task]; };
            auto attempt = [&](int64_t task, Claim& claim) {
                if (begun[index][task].fetch_add(1) > MOST_BEGUN && !claim.may_write()) return;
                for (volatile int64_t turn = 0; turn < call.turns;) turn = turn + 1;
                if (task % 5 == 0) usleep(300);  // put aside before it writes
                if (claim.may_write()) write(task);
            };
            auto once = [&](int64_t task) { ++begun[index][task], write(task); };
            if (call.kind == 0) team.each(call.count, call.at_once, once);
            else if (call.kind == 1) team.each_claimed(call.count, call.at_once, attempt);
            else team.each_apart(call.count, call.at_once, attempt);
            for (const int times : call.written) num_wrong += times != 1;
        }
    });
    int64_t num_begun = 0;
    for (const auto& call : begun) {
        for (const auto& times : call) num_begun += times;
    }
    std::printf("%ld %ld %ld\n", long(num_tasks), long(num_begun), long(num_wrong));
}
