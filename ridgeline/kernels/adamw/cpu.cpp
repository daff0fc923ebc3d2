// AdamW on a CPU where weights, moments and gradients are fp32, as reference.py defines it: one pass
// over memory, and one wait for threads a tensor. Every operation is rounded on its own, so that the
// bits are the reference's: no product and sum may become one instruction.
#ifdef __clang__
#pragma clang fp contract(off)
#else
#pragma GCC optimize("fp-contract=off")
#endif
#include "../host.h"

using namespace ridgeline;

struct Numbers {
    float beta1, rest1, beta2, rest2, eps, rate, kept, root;
};

static int update(float* __restrict weight, float* __restrict first, float* __restrict second,
                      const float* __restrict grad, int64_t size, Numbers n, float factor) {
    int lost = 0;
    for (int64_t i = 0; i < size; ++i) {
        const float g = grad[i] * factor;
        const float square = (g * g) * n.rest2;
        first[i] = first[i] * n.beta1 + g * n.rest1;
        second[i] = second[i] * n.beta2 + square;
        const float divisor = __builtin_sqrtf(second[i]) * n.root + n.eps;
        const float change = first[i] / divisor * n.rate;
        const float before = weight[i];
        weight[i] = before * n.kept - change;
        lost += (weight[i] == before) & (change != 0.0f);
    }
    return lost;
}

extern "C" void ridgeline_adamw_fp32(void* weight, void* first, void* second, const void* grad,
                                     int64_t size, const void* numbers, float factor, void* lost,
                                     int threads) {
    constexpr int64_t PIECE = 1 << 14;
    const Numbers own = *static_cast<const Numbers*>(numbers);
    int64_t count = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : count) if (size > WORTH_THREADS)
    for (int64_t start = 0; start < size; start += PIECE) {
        const int64_t length = size - start < PIECE ? size - start : PIECE;
        count += update(static_cast<float*>(weight) + start, static_cast<float*>(first) + start,
                        static_cast<float*>(second) + start,
                        static_cast<const float*>(grad) + start, length, own, factor);
    }
    *static_cast<int64_t*>(lost) += count;
}
