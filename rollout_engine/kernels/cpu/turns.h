// Barriers of processes that share memory: each rank of a model that is cut over processes calls meet() in the same turns.
#pragma once

#include <sched.h>
#include <time.h>

#include <atomic>
#include <cstdint>

// In shared memory, zeros at first; `Turns` of turns.py knows its size.
struct Turns {
    alignas(64) std::atomic<uint32_t> arrived;
    alignas(64) std::atomic<uint32_t> turn;
    alignas(64) std::atomic<uint32_t> broken;  // nobody waits any more: a rank has ended or failed

    // Returns once all `ranks` have called it: true. False, at once and for ever, when it is broken.
    bool meet(uint32_t ranks) {
        if (broken.load(std::memory_order_acquire)) return false;
        const uint32_t now = turn.load(std::memory_order_relaxed);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == ranks) {
            arrived.store(0, std::memory_order_relaxed);
            turn.store(now + 1, std::memory_order_release);
            return true;
        }
        for (int waits = 0; turn.load(std::memory_order_acquire) == now; waits++) {
            if (broken.load(std::memory_order_relaxed)) return false;
            wait(waits);
        }
        return true;
    }

    static constexpr int SPINS = 2000;    // about 40 microseconds: a quiet machine needs less
    static constexpr int YIELDS = 20000;  // some milliseconds; then another rank computes alone, or has no core

    // The wait before the next look, if there were `waits` before.
    static void wait(int waits) {
        if (waits < SPINS) {
#if defined(__x86_64__) || defined(__i386__)
            __builtin_ia32_pause();
#elif defined(__aarch64__)
            __asm__ volatile("yield");
#endif
        } else if (waits < SPINS + YIELDS) {
            sched_yield();
        } else {
            const timespec nap = {0, 50000};
            nanosleep(&nap, nullptr);
        }
    }
};
static_assert(std::atomic<uint32_t>::is_always_lock_free, "processes share them");
