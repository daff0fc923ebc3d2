// Vectors of sixteen lanes, for host.h. Where one register holds sixteen fp32 numbers (AVX-512) they
// are the compiler's own vectors. Elsewhere they are registers side by side (`Sixteen`), with the
// same operators: a vector that is wider than the machine's goes through memory in GCC 12, operation
// by operation, and takes minutes to compile.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __AVX512F__
#include <immintrin.h>
#endif
#ifdef __ARM_NEON
#include <arm_neon.h>
#endif

namespace ridgeline {

constexpr int LANES = 16;
#ifdef __aarch64__  // GCC has _Float16 in C++ there from version 13 on
using Fp16 = __fp16;
#else
using Fp16 = _Float16;
#endif

#ifdef __AVX512F__

constexpr bool WHOLE_REGISTERS = true;
template <class E>
using Lanes __attribute__((vector_size(LANES * sizeof(E)))) = E;

template <class To, class From>
inline To converted(From from) {
    return __builtin_convertvector(from, To);
}

#else

constexpr bool WHOLE_REGISTERS = false;
#ifdef __AVX__
constexpr int REGISTER_BYTES = 32;
#else
constexpr int REGISTER_BYTES = 16;
#endif

template <class E>
struct Sixteen {
    static constexpr int BYTES = LANES * sizeof(E);
    static constexpr int PART_BYTES = BYTES < REGISTER_BYTES ? BYTES : REGISTER_BYTES;
    static constexpr int PARTS = BYTES / PART_BYTES, IN_PART = LANES / PARTS;
    using Element = E;
    using Part __attribute__((vector_size(PART_BYTES))) = E;

    Part parts[PARTS];

    Sixteen() = default;
    Sixteen(E value) {
        for (Part& part : parts) part = Part{} + value;
    }
    E& operator[](int lane) { return reinterpret_cast<E*>(parts)[lane]; }
    E operator[](int lane) const { return reinterpret_cast<const E*>(parts)[lane]; }

#define RIDGELINE_OPERATOR(op)                                                              \
    friend inline Sixteen operator op(Sixteen a, Sixteen b) {                               \
        for (int i = 0; i < PARTS; ++i) a.parts[i] = a.parts[i] op b.parts[i];              \
        return a;                                                                           \
    }                                                                                       \
    friend inline Sixteen& operator op##=(Sixteen& a, Sixteen b) { return a = a op b; }
    RIDGELINE_OPERATOR(+)
    RIDGELINE_OPERATOR(-)
    RIDGELINE_OPERATOR(*)
    RIDGELINE_OPERATOR(/)
    RIDGELINE_OPERATOR(&)
    RIDGELINE_OPERATOR(|)
    RIDGELINE_OPERATOR(<<)
    RIDGELINE_OPERATOR(>>)
#undef RIDGELINE_OPERATOR
#define RIDGELINE_COMPARISON(op)                                                            \
    friend inline Sixteen<int32_t> operator op(Sixteen a, Sixteen b) {                      \
        Sixteen<int32_t> mask;                                                              \
        for (int i = 0; i < PARTS; ++i) mask.parts[i] = a.parts[i] op b.parts[i];           \
        return mask;                                                                        \
    }
    RIDGELINE_COMPARISON(<)
    RIDGELINE_COMPARISON(>)
    RIDGELINE_COMPARISON(>=)
    RIDGELINE_COMPARISON(==)
    RIDGELINE_COMPARISON(!=)
#undef RIDGELINE_COMPARISON
    friend inline Sixteen operator-(Sixteen a) {
        for (Part& part : a.parts) part = -part;
        return a;
    }
    friend inline Sixteen operator~(Sixteen a) {
        for (Part& part : a.parts) part = ~part;
        return a;
    }
};
template <class E>
using Lanes = Sixteen<E>;

// As many lanes at a time as a register holds of the wider type.
template <class To, class From>
inline To converted(From from) {
    constexpr int STEP = To::IN_PART < From::IN_PART ? To::IN_PART : From::IN_PART;
    using E = typename From::Element;
    using Other = typename To::Element;
    using Some __attribute__((vector_size(STEP * sizeof(E)))) = E;
    using Made __attribute__((vector_size(STEP * sizeof(Other)))) = Other;
    To to;
    for (int i = 0; i < LANES / STEP; ++i) {
        Some some;
        std::memcpy(&some, reinterpret_cast<const char*>(&from) + i * sizeof(some), sizeof(some));
        const Made made = __builtin_convertvector(some, Made);
        std::memcpy(reinterpret_cast<char*>(&to) + i * sizeof(made), &made, sizeof(made));
    }
    return to;
}

#endif

using Floats = Lanes<float>;
static_assert(sizeof(Floats) == LANES * sizeof(float), "sixteen lanes");
using Words = Lanes<int32_t>;
using Unsigned = Lanes<uint32_t>;
using Halves = Lanes<uint16_t>;
using SignedHalves = Lanes<int16_t>;
using Float16s = Lanes<Fp16>;
using Bytes = Lanes<int8_t>;
using UnsignedBytes = Lanes<uint8_t>;

template <class To, class From>
inline To same_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "a cast keeps the size");
    To to;
    std::memcpy(&to, &from, sizeof(to));
    return to;
}

// One register of fp32 lanes: what a product's sums are kept in.
#ifdef __AVX512F__
using Register = Floats;
#else
using Register = Floats::Part;
#endif
constexpr int WIDTH = sizeof(Register) / sizeof(float);

inline float added(Register lanes) {
#ifdef __ARM_NEON
    return vaddvq_f32(lanes);
#else
    for (int half = WIDTH / 2; half > 0; half /= 2) {
        for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    }
    return lanes[0];
#endif
}

// To the nearest whole numbers, halves to even.
inline Words rounded(Floats lanes) {
#if defined(__AVX512F__)
    return same_bits<Words>(_mm512_cvtps_epi32(same_bits<__m512>(lanes)));
#elif defined(__ARM_NEON)
    Words whole;
    for (int i = 0; i < 4; ++i) whole.parts[i] = vcvtnq_s32_f32(lanes.parts[i]);
    return whole;
#else
    return same_bits<Words>(lanes + 12582912.0f) - 0x4b400000;  // below 2^22 the bits hold them
#endif
}

// Words that fit into bytes.
inline Bytes narrowed(Words words) {
#if defined(__AVX512F__)
    return same_bits<Bytes>(_mm512_cvtepi32_epi8(same_bits<__m512i>(words)));
#elif defined(__ARM_NEON)
    const int16x8_t low = vmovn_high_s32(vmovn_s32(words.parts[0]), words.parts[1]);
    const int16x8_t high = vmovn_high_s32(vmovn_s32(words.parts[2]), words.parts[3]);
    return same_bits<Bytes>(vmovn_high_s16(vmovn_s16(low), high));
#else
    return converted<Bytes>(words);
#endif
}

// Bytes to words: one instruction of AVX-512, of which GCC 12 makes sixty; in two steps it makes
// eight.
#if defined(__AVX512F__)
inline Words widen(Bytes codes) {
    return same_bits<Words>(_mm512_cvtepi8_epi32(same_bits<__m128i>(codes)));
}
inline Unsigned widen(UnsignedBytes codes) {
    return same_bits<Unsigned>(_mm512_cvtepu8_epi32(same_bits<__m128i>(codes)));
}
inline Unsigned widen(Halves bits) { return converted<Unsigned>(bits); }
#elif defined(__ARM_NEON)
inline Words widen(Bytes codes) {
    const int8x16_t own = same_bits<int8x16_t>(codes);
    const int16x8_t low = vmovl_s8(vget_low_s8(own)), high = vmovl_high_s8(own);
    Words wide;
    wide.parts[0] = vmovl_s16(vget_low_s16(low));
    wide.parts[1] = vmovl_high_s16(low);
    wide.parts[2] = vmovl_s16(vget_low_s16(high));
    wide.parts[3] = vmovl_high_s16(high);
    return wide;
}
inline Unsigned widen(Halves bits) {
    Unsigned wide;
    for (int i = 0; i < 2; ++i) {
        wide.parts[2 * i] = vmovl_u16(vget_low_u16(bits.parts[i]));
        wide.parts[2 * i + 1] = vmovl_high_u16(bits.parts[i]);
    }
    return wide;
}
inline Unsigned widen(UnsignedBytes codes) {
    Halves halves;
    halves.parts[0] = vmovl_u8(vget_low_u8(codes.parts[0]));
    halves.parts[1] = vmovl_high_u8(codes.parts[0]);
    return widen(halves);
}
#else
inline Words widen(Bytes codes) { return converted<Words>(converted<SignedHalves>(codes)); }
inline Unsigned widen(Halves bits) { return converted<Unsigned>(bits); }
inline Unsigned widen(UnsignedBytes codes) { return widen(converted<Halves>(codes)); }
#endif

}  // namespace ridgeline
