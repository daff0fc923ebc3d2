// What the CPU kernels (each op's cpu.cpp) share: numbers of 8, 16 and 32 bits as vectors of sixteen
// fp32 lanes (lanes.h), an exponential, and the activations. One source serves AVX-512, AVX2 and
// NEON; everything between load and store is fp32.
#pragma once

#include <cmath>

#include "lanes.h"

namespace ridgeline {

constexpr int64_t WORTH_THREADS = 1 << 15;  // elements: with fewer, waiting for threads costs more

struct Bf16 {
    uint16_t bits;
};
struct Fp8 {  // e4m3fn
    uint8_t bits;
};

inline Floats fill(float value) { return Floats{} + value; }
inline Floats pick(Words mask, Floats yes, Floats no) {
    return same_bits<Floats>((mask & same_bits<Words>(yes)) | (~mask & same_bits<Words>(no)));
}

// --- memory to lanes and back --------------------------------------------------------------------

inline Floats load(const float* from) {
    Floats lanes;
    std::memcpy(&lanes, from, sizeof(lanes));
    return lanes;
}
inline Floats load(const Bf16* from) {
    Halves bits;
    std::memcpy(&bits, from, sizeof(bits));
    return same_bits<Floats>(widen(bits) << 16);
}
inline Floats load(const Fp16* from) {
    Float16s lanes;
    std::memcpy(&lanes, from, sizeof(lanes));
    return converted<Floats>(lanes);
}
inline Floats load(const int8_t* from) {
    Bytes codes;
    std::memcpy(&codes, from, sizeof(codes));
    return converted<Floats>(widen(codes));
}
inline Floats load(const Fp8* from) {
    UnsignedBytes codes;
    std::memcpy(&codes, from, sizeof(codes));
    const Unsigned wide = widen(codes);
    // Exponent and mantissa where fp32 has its lowest ones; the product moves the bias, and makes
    // subnormals of one format from those of the other.
    const Floats size = same_bits<Floats>((wide & 0x7f) << 20) * 0x1p120f;
    return same_bits<Floats>(same_bits<Unsigned>(size) | ((wide & 0x80) << 24));
}

inline void store(float* to, Floats lanes) { std::memcpy(to, &lanes, sizeof(lanes)); }
inline void store(Bf16* to, Floats lanes) {
    const Unsigned bits = same_bits<Unsigned>(lanes);
    const Unsigned nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // halves to even
    const Unsigned is_nan = same_bits<Unsigned>(lanes != lanes);
    const Halves rounded = converted<Halves>((is_nan & 0x7fc0) | (~is_nan & nearest));
    std::memcpy(to, &rounded, sizeof(rounded));
}
inline void store(Fp16* to, Floats lanes) {
    const Float16s rounded = converted<Float16s>(lanes);
    std::memcpy(to, &rounded, sizeof(rounded));
}

// How many of the lanes from `start` on lie within `size`.
inline int lanes_left(int64_t size, int64_t start) {
    return static_cast<int>(size - start < LANES ? size - start : LANES);
}

// The first `count` lanes, the others zero; and back.
template <class T>
inline Floats load(const T* from, int count) {
    if (count >= LANES) return load(from);
    T some[LANES] = {};
    std::memcpy(some, from, count * sizeof(T));
    return load(some);
}
template <class T>
inline void store(T* to, Floats lanes, int count) {
    if (count >= LANES) return store(to, lanes);
    T some[LANES];
    store(some, lanes);
    std::memcpy(to, some, count * sizeof(T));
}

// --- arithmetic ----------------------------------------------------------------------------------

using Eight = float __attribute__((vector_size(32)));
using Four = float __attribute__((vector_size(16)));

inline float sum(Floats lanes) {
    Eight eight[2];
    std::memcpy(eight, &lanes, sizeof(lanes));
    const Eight both = eight[0] + eight[1];
    Four four[2];
    std::memcpy(four, &both, sizeof(both));
    const Four last = four[0] + four[1];
    return (last[0] + last[2]) + (last[1] + last[3]);
}

inline float largest(Floats lanes) {
    Eight eight[2];
    std::memcpy(eight, &lanes, sizeof(lanes));
    const Eight both = eight[0] > eight[1] ? eight[0] : eight[1];
    Four four[2];
    std::memcpy(four, &both, sizeof(both));
    const Four last = four[0] > four[1] ? four[0] : four[1];
    const float first = last[0] > last[2] ? last[0] : last[2];
    const float second = last[1] > last[3] ? last[1] : last[3];
    return first > second ? first : second;
}

// e^x to two units in the last place; below -87 e^-87, above 88 e^88, NaN stays NaN.
inline Floats exponential(Floats x) {
    x = pick(x < fill(-87.0f), fill(-87.0f), x);
    x = pick(x > fill(88.0f), fill(88.0f), x);
    const Floats shifted = x * 1.44269504f + 12582912.0f;  // the nearest integer in the low bits
    const Floats whole = shifted - 12582912.0f;
    const Floats rest = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
    Floats power = fill(1.9875691500e-4f);
    power = power * rest + 1.3981999507e-3f;
    power = power * rest + 8.3334519073e-3f;
    power = power * rest + 4.1665795894e-2f;
    power = power * rest + 1.6666665459e-1f;
    power = power * rest + 5.0000001201e-1f;
    power = power * rest * rest + rest + 1.0f;
    return same_bits<Floats>(same_bits<Words>(power) + (same_bits<Words>(shifted) << 23));
}

inline Floats hyperbolic_tangent(Floats x) {
    const Floats square = x * x;
    const Floats small = x + x * square * (-0.333333333f + square * (0.133333333f + square *
                         (-0.0539682540f + square * 0.0218694885f)));
    const Floats large = 1.0f - 2.0f / (exponential(2.0f * x) + 1.0f);
    return pick(square < fill(0.06f), small, large);
}

enum Activation { NONE = 0, SILU = 1, GELU = 2, GELU_TANH = 3 };

inline Floats activate(Floats x, int kind) {
    if (kind == SILU) return x / (1.0f + exponential(-x));
    if (kind == GELU_TANH) {  // 0.5 · (1 + tanh(u)) is the sigmoid of 2u
        const Floats twice = x * (1.59576912f + 0.0713548163f * x * x);
        return x / (1.0f + exponential(-twice));
    }
    Floats result;
    for (int i = 0; i < LANES; ++i) {
        result[i] = 0.5f * x[i] * std::erfc(-0.70710678f * x[i]);
    }
    return result;
}

// --- rows ----------------------------------------------------------------------------------------

// 1 / sqrt(mean(x²) + eps) of a row.
template <class T>
inline float inverse_rms(const T* row, int64_t size, float eps) {
    Floats squares = {};
    for (int64_t i = 0; i < size; i += LANES) {
        const Floats lanes = load(row + i, lanes_left(size, i));
        squares += lanes * lanes;
    }
    return 1.0f / std::sqrt(sum(squares) / static_cast<float>(size) + eps);
}

}  // namespace ridgeline
