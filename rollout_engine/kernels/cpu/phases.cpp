// Counters of processes that share memory: each raises its own, and waits until all have reached a number.
#include <time.h>

#include <atomic>
#include <climits>
#include <cstdint>

#include "turns.h"

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

// In shared memory, zeros at first; `Phases` of phases.py knows its size.
struct alignas(64) Counter {
    std::atomic<int64_t> value;
};
static_assert(sizeof(Counter) == 64 && std::atomic<int64_t>::is_always_lock_free, "processes share them");

// Linux waits on 32 bits of memory: the lower half, which changes whenever the whole does.
static void* lower_half(Counter* counter) { return &counter->value; }

extern "C" {

int64_t phases_bytes(int64_t count) { return count * (int64_t)sizeof(Counter); }

int64_t phases_read(const Counter* counters, int64_t index) {
    return counters[index].value.load(std::memory_order_acquire);
}

void phases_raise(Counter* counters, int64_t index, int64_t value) {
    counters[index].value.store(value, std::memory_order_release);
}

// Raise a counter and wake those that sleep until it is.
void phases_announce(Counter* counters, int64_t index, int64_t value) {
    counters[index].value.store(value, std::memory_order_seq_cst);
#ifdef __linux__
    syscall(SYS_futex, lower_half(&counters[index]), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#endif
}

// Whether the first `count` counters reach `value` before `waits` looks have passed.
int32_t phases_wait(const Counter* counters, int64_t count, int64_t value, int64_t waits) {
    int64_t reached = 0;
    for (int64_t looks = 0; looks < waits; looks++) {
        while (reached < count && counters[reached].value.load(std::memory_order_acquire) >= value) reached++;
        if (reached == count) return 1;
        Turns::wait(looks < INT_MAX ? (int)looks : INT_MAX);
    }
    return 0;
}

// Whether a counter is raised above `value`, sleeping up to `nanoseconds` until it is.
int32_t phases_sleep(Counter* counters, int64_t index, int64_t value, int64_t nanoseconds) {
    Counter* counter = &counters[index];
    if (counter->value.load(std::memory_order_seq_cst) > value) return 1;
    const timespec most = {(time_t)(nanoseconds / 1000000000), (long)(nanoseconds % 1000000000)};
#ifdef __linux__
    syscall(SYS_futex, lower_half(counter), FUTEX_WAIT, (uint32_t)value, &most, nullptr, 0);
#else
    nanosleep(&most, nullptr);
#endif
    return counter->value.load(std::memory_order_seq_cst) > value;
}
}
