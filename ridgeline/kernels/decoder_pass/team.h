// Threads that stay together through a pass: one OpenMP region, and in it barriers that spin. A join
// through the system costs 10 to 50 µs, of which a token of a small model would pay three hundred.
// Where others use the cores too a thread that waits soon lets them.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#include <sched.h>

namespace ridgeline {

inline void wait_a_moment() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

struct alignas(64) Counter {
    std::atomic<int64_t> value{0};
};

class Team {
public:
    Team(int size, int64_t num_counters) : size(size), counters(new Counter[num_counters]) {}

    // All have come here, and see what the others have written.
    void meet() {
        if (size == 1) return;
        const int64_t round = rounds.value.load(std::memory_order_acquire);
        if (arrived.value.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
            arrived.value.store(0, std::memory_order_relaxed);
            rounds.value.store(round + 1, std::memory_order_release);
            return;
        }
        for (int tries = 0; rounds.value.load(std::memory_order_acquire) == round; ++tries) {
            if (tries < SPINS) wait_a_moment();
            else sched_yield();
        }
    }

    // `run(item)` for each item once, by whoever gets to it; `number` tells these items from others'.
    template <class Run>
    void share(int64_t number, int64_t items, Run run) {
        const int64_t at_once = items / (size * 16) + 1;
        std::atomic<int64_t>& next = counters[number].value;
        for (;;) {
            const int64_t first = next.fetch_add(at_once, std::memory_order_relaxed);
            if (first >= items) return;
            const int64_t end = first + at_once < items ? first + at_once : items;
            for (int64_t item = first; item < end; ++item) run(item);
        }
    }

    const int size;

private:
    static constexpr int SPINS = 4000;  // about 100 µs
    Counter arrived, rounds;
    std::unique_ptr<Counter[]> counters;
};

}  // namespace ridgeline
