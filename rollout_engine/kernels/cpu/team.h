// A team of threads with many barriers in one parallel region.
#pragma once

#include <sched.h>

#include <atomic>

#include "openmp.h"

// OpenMP's own barriers spin for milliseconds. On a busy machine the last thread may then wait for a core, and every
// barrier of a step costs a scheduler time slice. These barriers yield the core after a short spin.
class Team {
  public:
    // Runs work(team) on at most `threads` threads.
    template <typename Work>
    static void run(int threads, Work work) {
        Team team;
#pragma omp parallel num_threads(threads) if (threads > 1)
        work(team);
    }

    // Barrier: returns once every thread of the team has called it.
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
