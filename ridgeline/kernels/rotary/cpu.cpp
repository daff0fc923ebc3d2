// Rotary embedding on a CPU, as reference.py defines it, or the turn back; `out` may be x itself.
#include "../host.h"

using namespace ridgeline;

template <class T>
static void rotate_rows(const T* x, int64_t x_stride, T* out, int64_t out_stride, const float* cos,
                        const float* sin, float sign, int64_t tokens, int64_t heads,
                        int64_t head_dim, int64_t half, int threads) {
#pragma omp parallel for num_threads(threads) if (tokens * heads * head_dim > WORTH_THREADS)
    for (int64_t token = 0; token < tokens; ++token) {
        const float* across = cos + token * half;
        const float* up = sin + token * half;
        for (int64_t head = 0; head < heads; ++head) {
            const T* from = x + token * x_stride + head * head_dim;
            T* to = out + token * out_stride + head * head_dim;
            for (int64_t i = 0; i < half; i += LANES) {
                const int count = lanes_left(half, i);
                const Floats c = load(across + i, count), s = load(up + i, count) * sign;
                const Floats first = load(from + i, count), second = load(from + half + i, count);
                store(to + i, first * c - second * s, count);
                store(to + half + i, second * c + first * s, count);
            }
            if (to != from) {
                std::memcpy(to + 2 * half, from + 2 * half, (head_dim - 2 * half) * sizeof(T));
            }
        }
    }
}

#define EXPORT(name, T)                                                                           \
    extern "C" void ridgeline_rotary_##name(                                                      \
        const void* x, int64_t x_stride, void* out, int64_t out_stride, const void* cos,          \
        const void* sin, float sign, int64_t tokens, int64_t heads, int64_t head_dim,             \
        int64_t half, int threads) {                                                              \
        rotate_rows(static_cast<const T*>(x), x_stride, static_cast<T*>(out), out_stride,         \
                    static_cast<const float*>(cos), static_cast<const float*>(sin), sign, tokens, \
                    heads, head_dim, half, threads);                                              \
    }

EXPORT(bf16, Bf16)
EXPORT(fp16, Fp16)
EXPORT(fp32, float)
