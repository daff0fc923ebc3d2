// Losses of rows of fp32 logits on a CPU, which become their own gradient in place: three passes
// over a row that is in the cache.
#include "../numbers.h"

using namespace ridgeline;

static float exponentials(float* __restrict row, float most, float scale, int64_t size) {
    for (int64_t i = 0; i < size; ++i) row[i] = exponential((row[i] - most) * scale);
    return sum_of(size, [=](int64_t i) { return row[i]; });
}

static void multiply(float* __restrict row, float factor, int64_t size) {
    for (int64_t i = 0; i < size; ++i) row[i] *= factor;
}

// Without `has_gradient` the logits are scratch. A target that is no token makes the loss NaN.
extern "C" void ridgeline_linear_cross_entropy_rows(void* logits, const void* targets, void* losses,
                                                    float scale, int64_t rows, int64_t size,
                                                    int64_t ignored, int has_gradient,
                                                    int threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t number = 0; number < rows; ++number) {
        float* row = static_cast<float*>(logits) + number * size;
        float& loss = static_cast<float*>(losses)[number];
        const int64_t target = static_cast<const int64_t*>(targets)[number];
        if (target < 0 || target >= size) {
            loss = target == ignored ? 0.0f : __builtin_nanf("");
            if (has_gradient) std::memset(row, 0, size * sizeof(float));
            continue;
        }
        const float most = largest_of(row, size), own = row[target];
        const float total = exponentials(row, most, scale, size);
        loss = std::log(total) + (most - own) * scale;
        if (!has_gradient) continue;
        multiply(row, scale / total, size);
        row[target] -= scale;
    }
}
