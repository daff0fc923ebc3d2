// SwiGLU and GeGLU on a CPU, as reference.py defines them, and SwiGLU's gradients.
#include "../numbers.h"

using namespace ridgeline;

template <class T>
static void silu_row(const T* __restrict gate, const T* __restrict up, T* __restrict to,
                     int64_t size) {
    for (int64_t i = 0; i < size; ++i) {
        const float own = number(gate[i]);
        put(to[i], own / (1.0f + exponential(-own)) * number(up[i]));
    }
}

template <class T>
static void gate_rows(const T* gate_up, int64_t stride, T* out, int64_t rows, int64_t size,
                      int kind, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * size > WORTH_THREADS)
    for (int64_t row = 0; row < rows; ++row) {
        const T* gate = gate_up + row * stride;
        if (kind == SILU && !WHOLE_REGISTERS) {
            silu_row(gate, gate + size, out + row * size, size);
            continue;
        }
        for (int64_t i = 0; i < size; i += LANES) {
            const int count = lanes_left(size, i);
            const Floats activated = activate(load(gate + i, count), kind);
            store(out + row * size + i, activated * load(gate + size + i, count), count);
        }
    }
}

// With `remakes` the gradient that was read is overwritten by the activation's result.
template <bool remakes, class T>
static void silu_gradient_row(const T* __restrict gate, const T* __restrict up, T* __restrict grad,
                              T* __restrict to_gate, T* __restrict to_up, int64_t size) {
    for (int64_t i = 0; i < size; ++i) {
        const float own = number(grad[i]);
        const float share = 1.0f / (1.0f + exponential(-number(gate[i])));
        const float activated = number(gate[i]) * share;
        put(to_gate[i], (share + activated * (1.0f - share)) * own * number(up[i]));
        put(to_up[i], activated * own);
        if (remakes) put(grad[i], activated * number(up[i]));
    }
}

template <class T>
static void silu_gradient_rows(const T* gate_up, int64_t stride, T* grad, T* out, int64_t rows,
                               int64_t size, int remakes, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * size > WORTH_THREADS)
    for (int64_t row = 0; row < rows; ++row) {
        const T* gate = gate_up + row * stride;
        T* to = out + row * 2 * size;
        const auto run = remakes ? silu_gradient_row<true, T> : silu_gradient_row<false, T>;
        run(gate, gate + size, grad + row * size, to, to + size, size);
    }
}

#define EXPORT(name, T)                                                                           \
    extern "C" void ridgeline_gated_activation_##name(const void* gate_up, int64_t stride,        \
                                                      void* out, int64_t rows, int64_t size,      \
                                                      int kind, int threads) {                    \
        gate_rows(static_cast<const T*>(gate_up), stride, static_cast<T*>(out), rows, size, kind, \
                  threads);                                                                       \
    }                                                                                             \
    extern "C" void ridgeline_gated_activation_silu_gradient_##name(                              \
        const void* gate_up, int64_t stride, void* grad, void* out, int64_t rows, int64_t size,   \
        int remakes, int threads) {                                                               \
        silu_gradient_rows(static_cast<const T*>(gate_up), stride, static_cast<T*>(grad),         \
                           static_cast<T*>(out), rows, size, remakes, threads);                   \
    }

EXPORT(bf16, Bf16)
EXPORT(fp16, Fp16)
EXPORT(fp32, float)
