// RMSNorm on a CPU, as reference.py defines it: one pass for the sum of squares, one for the result.
#include "../host.h"

using namespace ridgeline;

template <class T>
static void norm_rows(const T* x, int64_t x_stride, const T* residual, int64_t residual_stride,
                      const T* weight, float eps, float offset, T* out, T* sum_out, int64_t rows,
                      int64_t size, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * size > WORTH_THREADS)
    for (int64_t row = 0; row < rows; ++row) {
        const T* from = x + row * x_stride;
        if (residual) {  // the sum, rounded, is what is normed
            T* added = sum_out + row * size;
            for (int64_t i = 0; i < size; i += LANES) {
                const int count = lanes_left(size, i);
                const Floats other = load(residual + row * residual_stride + i, count);
                store(added + i, load(from + i, count) + other, count);
            }
            from = added;
        }
        const float scale = inverse_rms(from, size, eps);
        for (int64_t i = 0; i < size; i += LANES) {
            const int count = lanes_left(size, i);
            const Floats gain = load(weight + i, count) + offset;
            store(out + row * size + i, load(from + i, count) * scale * gain, count);
        }
    }
}

#define EXPORT(name, T)                                                                           \
    extern "C" void ridgeline_rms_norm_##name(                                                    \
        const void* x, int64_t x_stride, const void* residual, int64_t residual_stride,           \
        const void* weight, float eps, float offset, void* out, void* sum_out, int64_t rows,      \
        int64_t size, int threads) {                                                              \
        norm_rows(static_cast<const T*>(x), x_stride, static_cast<const T*>(residual),            \
                  residual_stride, static_cast<const T*>(weight), eps, offset,                    \
                  static_cast<T*>(out), static_cast<T*>(sum_out), rows, size, threads);           \
    }

EXPORT(bf16, Bf16)
EXPORT(fp16, Fp16)
EXPORT(fp32, float)
