// SwiGLU and GeGLU on a CPU, as reference.py defines them.
#include "../host.h"

using namespace ridgeline;

template <class T>
static void gate_rows(const T* gate_up, int64_t stride, T* out, int64_t rows, int64_t size,
                      int kind, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * size > WORTH_THREADS)
    for (int64_t row = 0; row < rows; ++row) {
        const T* gate = gate_up + row * stride;
        for (int64_t i = 0; i < size; i += LANES) {
            const int count = lanes_left(size, i);
            const Floats activated = activate(load(gate + i, count), kind);
            store(out + row * size + i, activated * load(gate + size + i, count), count);
        }
    }
}

#define EXPORT(name, T)                                                                           \
    extern "C" void ridgeline_gated_activation_##name(const void* gate_up, int64_t stride,        \
                                                      void* out, int64_t rows, int64_t size,      \
                                                      int kind, int threads) {                    \
        gate_rows(static_cast<const T*>(gate_up), stride, static_cast<T*>(out), rows, size, kind, \
                  threads);                                                                       \
    }

EXPORT(bf16, Bf16)
EXPORT(fp16, Fp16)
EXPORT(fp32, float)
