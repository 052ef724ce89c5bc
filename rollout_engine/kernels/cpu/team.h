// A team of threads that meets many times in one parallel region.
#pragma once

#include <sched.h>

#include <atomic>

#include "openmp.h"

// OpenMP's own barriers spin for milliseconds. Where other processes want the cores, the thread that all wait for may not
// have one, and every barrier of a step costs a slice of the scheduler's time: here who waits soon gives its core away.
class Team {
  public:
    // Runs work(team) on at most `threads` threads.
    template <typename Work>
    static void run(int threads, Work work) {
        Team team;
#pragma omp parallel num_threads(threads) if (threads > 1)
        work(team);
    }

    // Returns once every thread of the team is here.
    void meet() {
        const int size = omp_get_num_threads();
        if (size == 1) return;
        const unsigned turn = turn_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
            arrived_.store(0, std::memory_order_relaxed);
            turn_.store(turn + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; turn_.load(std::memory_order_acquire) == turn; spins++)
            if (spins < SPINS)
                pause();
            else
                sched_yield();
    }

  private:
    static constexpr int SPINS = 1000;  // about 20 microseconds: longer than most waits in a quiet machine

    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<unsigned> turn_{0};

    static void pause() {
#if defined(__x86_64__) || defined(__i386__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        __asm__ volatile("yield");
#endif
    }
};
