// Threads that stay together through a pass: one OpenMP region, and in it stages whose items are taken
// by whoever gets to them. A stage is over when its items are done, not when all threads have come:
// where others use the cores too, a thread that waits for one holds up nobody unless it has an item,
// and goes past what was done without it. Who waits, spins: a join through the system costs 10 to 50
// µs, of which a token of a small model would pay three hundred; after a moment others may have the
// core.
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

struct Stage {
    alignas(64) std::atomic<int64_t> taken{0};
    alignas(64) std::atomic<int64_t> done{0};
};

class Team {
public:
    Team(int size, int64_t num_stages) : size(size), stages(new Stage[num_stages]) {}

    // `run(item)` once for each item of a stage, by one of the threads, all of which call this; and
    // all see what was written. What a thread has read before, for itself, was not changed since if
    // it gets an item: the next stage begins when this one's items are done.
    template <class Run>
    void share(int64_t number, int64_t items, Run run) {
        Stage& stage = stages[number];
        const int64_t at_once = items / (size * 16) + 1;
        for (;;) {
            const int64_t first = stage.taken.fetch_add(at_once, std::memory_order_acquire);
            if (first >= items) break;
            const int64_t end = first + at_once < items ? first + at_once : items;
            for (int64_t item = first; item < end; ++item) run(item);
            stage.done.fetch_add(end - first, std::memory_order_acq_rel);
        }
        for (int tries = 0; stage.done.load(std::memory_order_acquire) < items; ++tries) {
            if (tries < SPINS) wait_a_moment();
            else sched_yield();
        }
    }

    const int size;

private:
    static constexpr int SPINS = 4000;  // about 100 µs
    std::unique_ptr<Stage[]> stages;
};

}  // namespace ridgeline
