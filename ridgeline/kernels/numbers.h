// Single numbers, for plain loops that the compiler turns into vectors of the machine's own width: on
// NEON these are several times as fast as host.h's sixteen lanes where a loop does little else than
// read, multiply and write (GCC 12, Neoverse-N1: a norm 0.11 instead of 0.76 ms, 2026-11-18).
#pragma once

#include "host.h"

namespace ridgeline {

inline float number(float from) { return from; }
inline float number(Fp16 from) { return static_cast<float>(from); }
inline float number(Bf16 from) {
    return __builtin_bit_cast(float, static_cast<uint32_t>(from.bits) << 16);
}

inline void put(float& to, float value) { to = value; }
inline void put(Fp16& to, float value) { to = static_cast<Fp16>(value); }
inline void put(Bf16& to, float value) {
    const uint32_t bits = __builtin_bit_cast(uint32_t, value);
    const uint32_t nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // halves to even
    to.bits = static_cast<uint16_t>(value != value ? 0x7fc0 : nearest);
}

// As host.h's: e^x to two units in the last place; below -87 e^-87, above 88 e^88.
inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    const float shifted = x * 1.44269504f + 12582912.0f;  // the nearest integer in the low bits
    const float whole = shifted - 12582912.0f;
    const float rest = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
    float power = 1.9875691500e-4f;
    power = power * rest + 1.3981999507e-3f;
    power = power * rest + 8.3334519073e-3f;
    power = power * rest + 4.1665795894e-2f;
    power = power * rest + 1.6666665459e-1f;
    power = power * rest + 5.0000001201e-1f;
    power = power * rest * rest + rest + 1.0f;
    const uint32_t exponent = __builtin_bit_cast(uint32_t, shifted) << 23;
    return __builtin_bit_cast(float, __builtin_bit_cast(uint32_t, power) + exponent);
}

// A sum of sixteen that are added lane by lane: in one order, and in vectors.
struct LaneSum {
    float lanes[LANES] = {};

    float total() const {
        float sums[4];
        for (int i = 0; i < 4; ++i) {
            sums[i] = (lanes[i] + lanes[i + 4]) + (lanes[i + 8] + lanes[i + 12]);
        }
        return (sums[0] + sums[2]) + (sums[1] + sums[3]);
    }
};

// The sum of term(i) for i below size.
template <class Term>
inline float sum_of(int64_t size, Term term) {
    LaneSum sums;
    int64_t start = 0;
    for (; start + LANES <= size; start += LANES) {
        for (int i = 0; i < LANES; ++i) sums.lanes[i] += term(start + i);
    }
    float rest = 0.0f;
    for (; start < size; ++start) rest += term(start);
    return sums.total() + rest;
}

// The largest of the numbers.
inline float largest_of(const float* __restrict from, int64_t size) {
    float most[LANES];
    for (float& each : most) each = -__builtin_inff();
    int64_t start = 0;
    for (; start + LANES <= size; start += LANES) {
        for (int i = 0; i < LANES; ++i) {
            most[i] = from[start + i] > most[i] ? from[start + i] : most[i];
        }
    }
    float result = -__builtin_inff();
    for (; start < size; ++start) result = from[start] > result ? from[start] : result;
    for (float each : most) result = each > result ? each : result;
    return result;
}

}  // namespace ridgeline
