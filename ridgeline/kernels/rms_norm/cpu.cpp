// RMSNorm on a CPU, as reference.py defines it: one pass for the sum of squares, one for the result.
// Its gradients likewise; those of the weight are summed over each thread's rows, in one order.
#include "../numbers.h"

using namespace ridgeline;

template <class T>
static float scale_of(const T* __restrict row, int64_t size, float eps) {
    const float squares = sum_of(size, [=](int64_t i) { return number(row[i]) * number(row[i]); });
    return 1.0f / std::sqrt(squares / static_cast<float>(size) + eps);
}

template <class T>
static void norm_row(const T* __restrict from, const T* __restrict weight, float scale,
                     float offset, T* __restrict to, int64_t size) {
    for (int64_t i = 0; i < size; ++i) {
        put(to[i], number(from[i]) * scale * (number(weight[i]) + offset));
    }
}

template <class T>
static void add_row(const T* __restrict x, const T* __restrict residual, T* __restrict to,
                    int64_t size) {
    for (int64_t i = 0; i < size; ++i) put(to[i], number(x[i]) + number(residual[i]));
}

template <class T>
static void norm_rows(const T* x, int64_t x_stride, const T* residual, int64_t residual_stride,
                      const T* weight, float eps, float offset, T* out, T* sum_out, int64_t rows,
                      int64_t size, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * size > WORTH_THREADS)
    for (int64_t row = 0; row < rows; ++row) {
        const T* from = x + row * x_stride;
        if (residual) {  // the sum, rounded, is what is normed
            T* added = sum_out + row * size;
            add_row(from, residual + row * residual_stride, added, size);
            from = added;
        }
        norm_row(from, weight, scale_of(from, size, eps), offset, out + row * size, size);
    }
}

template <bool adds, class T>
static void gradient_row(const T* __restrict x, const T* __restrict weight,
                         const T* __restrict grad, const T* __restrict added, float eps,
                         float offset, T* __restrict out, float* __restrict sums, int64_t size) {
    const float scale = scale_of(x, size, eps);
    const float along = sum_of(size, [=](int64_t i) {
        return number(grad[i]) * number(x[i]) * (number(weight[i]) + offset);
    });
    const float mean = along * scale * scale / static_cast<float>(size);
    for (int64_t i = 0; i < size; ++i) {
        const float each = number(grad[i]);
        sums[i] += each * number(x[i]) * scale;
        const float own = (each * (number(weight[i]) + offset) - number(x[i]) * mean) * scale;
        put(out[i], adds ? own + number(added[i]) : own);
    }
}

template <class T>
static void gradient_rows(const T* hidden, const T* weight, const T* grad, int64_t grad_stride,
                          const T* grad_hidden, float eps, float offset, T* out, float* sums,
                          int64_t rows, int64_t size, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * size > WORTH_THREADS)
    for (int part = 0; part < threads; ++part) {
        for (int64_t row = part * rows / threads; row < (part + 1) * rows / threads; ++row) {
            const auto run = grad_hidden ? gradient_row<true, T> : gradient_row<false, T>;
            run(hidden + row * size, weight, grad + row * grad_stride, grad_hidden + row * size,
                eps, offset, out + row * size, sums + part * size, size);
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
    }                                                                                             \
    extern "C" void ridgeline_rms_norm_gradient_##name(                                           \
        const void* hidden, const void* weight, const void* grad, int64_t grad_stride,            \
        const void* grad_hidden, float eps, float offset, void* out, void* sums, int64_t rows,    \
        int64_t size, int threads) {                                                              \
        gradient_rows(static_cast<const T*>(hidden), static_cast<const T*>(weight),               \
                      static_cast<const T*>(grad), grad_stride,                                   \
                      static_cast<const T*>(grad_hidden), eps, offset, static_cast<T*>(out),      \
                      static_cast<float*>(sums), rows, size, threads);                            \
    }

EXPORT(bf16, Bf16)
EXPORT(fp16, Fp16)
EXPORT(fp32, float)
