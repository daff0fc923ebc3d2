// The softmax of attention and its gradient on a CPU, between the products (cpu.py): a row of scores
// holds one query of one head over the keys from the first that any query of the block sees on.
#include "../numbers.h"

using namespace ridgeline;

struct Seen {  // by a query
    int64_t first, end;
};

// `place` is the query's among the keys; `window` 0 is none.
static Seen seen_by(int64_t place, int64_t window) {
    const int64_t first = window && place + 1 > window ? place + 1 - window : 0;
    return {first, place + 1};
}

static void clear(float* row, Seen seen, int64_t keys) {
    std::memset(row, 0, seen.first * sizeof(float));
    std::memset(row + seen.end, 0, (keys - seen.end) * sizeof(float));
}

static void exponentials(float* __restrict row, float scale, float less, int64_t size) {
    for (int64_t i = 0; i < size; ++i) row[i] = exponential(row[i] * scale - less);
}

static void multiply(float* __restrict row, float factor, int64_t size) {
    for (int64_t i = 0; i < size; ++i) row[i] *= factor;
}

static void gradient(const float* __restrict share, float* __restrict grad, float scale,
                     int64_t size) {
    const float mean = sum_of(size, [=](int64_t i) { return share[i] * grad[i]; });
    for (int64_t i = 0; i < size; ++i) grad[i] = share[i] * (grad[i] - mean) * scale;
}

// Scores become shares; each row's logarithm of its sum is written, or with `is_known` read.
extern "C" void ridgeline_document_attention_shares(void* scores, void* sums, float scale,
                                                    int64_t rows, int64_t keys, int64_t place,
                                                    int64_t group, int64_t window, int is_known,
                                                    int threads) {
#pragma omp parallel for num_threads(threads) if (rows * keys > WORTH_THREADS)
    for (int64_t number = 0; number < rows; ++number) {
        const Seen seen = seen_by(place + number / group, window);
        float* row = static_cast<float*>(scores) + number * keys;
        float* own = row + seen.first;
        float& sum = static_cast<float*>(sums)[number];
        const int64_t size = seen.end - seen.first;
        clear(row, seen, keys);
        if (is_known) {
            exponentials(own, scale, sum, size);
            continue;
        }
        const float most = largest_of(own, size) * scale;
        exponentials(own, scale, most, size);
        const float total = sum_of(size, [=](int64_t i) { return own[i]; });
        multiply(own, 1.0f / total, size);
        sum = std::log(total) + most;
    }
}

// The gradients of shares become those of the products of queries and keys.
extern "C" void ridgeline_document_attention_gradients(const void* shares, void* grads, float scale,
                                                       int64_t rows, int64_t keys, int64_t place,
                                                       int64_t group, int64_t window,
                                                       int threads) {
#pragma omp parallel for num_threads(threads) if (rows * keys > WORTH_THREADS)
    for (int64_t number = 0; number < rows; ++number) {
        const Seen seen = seen_by(place + number / group, window);
        float* row = static_cast<float*>(grads) + number * keys;
        clear(row, seen, keys);
        gradient(static_cast<const float*>(shares) + number * keys + seen.first, row + seen.first,
                 scale, seen.end - seen.first);
    }
}
