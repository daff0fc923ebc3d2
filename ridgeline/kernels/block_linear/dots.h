// Sixteen outputs' codes times four inputs at a time, in whole numbers: byte 4i + j of a vector of 64
// is output i's code for input j, and lane i of the sums gets the four products. One instruction of
// AVX-512 VNNI, two of AVX-VNNI, four of NEON with dot products; AVX2 multiplies in pairs; all else
// is a plain loop. The build for the machine that it runs on chooses (host_library.py).
#pragma once

#include "../host.h"

#if defined(__AVX2__) && !defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace ridgeline {

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)

constexpr bool UNSIGNED_CODES = true;  // 8-bit codes lie with 128 added to them
constexpr int MOST_ROWS = 12;          // of x at once: their sums stay in registers

struct Sums {
    __m512i lanes;
};
struct CodeBytes {
    __m512i bytes;
};
inline Sums begin(int32_t value) { return {_mm512_set1_epi32(value)}; }
inline CodeBytes code_bytes(const uint8_t* from) { return {_mm512_loadu_si512(from)}; }
template <bool EIGHT_BITS>
inline void dot(Sums& sums, CodeBytes codes, const int8_t* four) {
    // GCC 12 would read the four bytes with an instruction of their own.
    asm("vpdpbusd %2%{1to16%}, %1, %0"
        : "+v"(sums.lanes)
        : "v"(codes.bytes), "m"(*reinterpret_cast<const int32_t*>(four)));
}
inline CodeBytes masked(CodeBytes codes, uint8_t mask) {
    return {_mm512_and_si512(codes.bytes, _mm512_set1_epi8(static_cast<char>(mask)))};
}
template <int RIGHT>  // left where it is negative; bits of other bytes come in, to be masked
inline CodeBytes shifted(CodeBytes codes) {
    if constexpr (RIGHT >= 0) return {_mm512_srli_epi16(codes.bytes, RIGHT)};
    return {_mm512_slli_epi16(codes.bytes, RIGHT < 0 ? -RIGHT : 0)};
}
inline CodeBytes either(CodeBytes a, CodeBytes b) { return {_mm512_or_si512(a.bytes, b.bytes)}; }
inline Sums with_digit(Sums high, Sums low) {
    return {_mm512_add_epi32(_mm512_slli_epi32(high.lanes, 8), low.lanes)};
}
inline Floats as_floats(Sums sums) { return same_bits<Floats>(_mm512_cvtepi32_ps(sums.lanes)); }

#elif defined(__AVX2__)

#ifdef __AVXVNNI__
constexpr bool UNSIGNED_CODES = true;
#else
constexpr bool UNSIGNED_CODES = false;  // pairs of products of unsigned ones would not fit 16 bits
#endif
constexpr int MOST_ROWS = 4;

struct Sums {
    __m256i lanes[2];
};
struct CodeBytes {
    __m256i bytes[2];
};
inline Sums begin(int32_t value) { return {{_mm256_set1_epi32(value), _mm256_set1_epi32(value)}}; }
inline CodeBytes code_bytes(const uint8_t* from) {
    const __m256i* halves = reinterpret_cast<const __m256i*>(from);
    return {{_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1)}};
}
template <bool EIGHT_BITS>
inline void dot(Sums& sums, CodeBytes codes, const int8_t* four) {
    int32_t word;
    std::memcpy(&word, four, sizeof(word));
    const __m256i x = _mm256_set1_epi32(word);
    for (int i = 0; i < 2; ++i) {
#ifdef __AVXVNNI__
        sums.lanes[i] = _mm256_dpbusd_avx_epi32(sums.lanes[i], codes.bytes[i], x);
#else
        __m256i size = codes.bytes[i], signed_x = x;
        if constexpr (EIGHT_BITS) {
            size = _mm256_abs_epi8(codes.bytes[i]);
            signed_x = _mm256_sign_epi8(x, codes.bytes[i]);
        }
        const __m256i pairs = _mm256_maddubs_epi16(size, signed_x);
        const __m256i fours = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
        sums.lanes[i] = _mm256_add_epi32(sums.lanes[i], fours);
#endif
    }
}
inline CodeBytes masked(CodeBytes codes, uint8_t mask) {
    const __m256i wide = _mm256_set1_epi8(static_cast<char>(mask));
    return {{_mm256_and_si256(codes.bytes[0], wide), _mm256_and_si256(codes.bytes[1], wide)}};
}
template <int RIGHT>
inline CodeBytes shifted(CodeBytes codes) {
    for (__m256i& half : codes.bytes) {
        half = RIGHT >= 0 ? _mm256_srli_epi16(half, RIGHT >= 0 ? RIGHT : 0)
                          : _mm256_slli_epi16(half, RIGHT < 0 ? -RIGHT : 0);
    }
    return codes;
}
inline CodeBytes either(CodeBytes a, CodeBytes b) {
    return {{_mm256_or_si256(a.bytes[0], b.bytes[0]), _mm256_or_si256(a.bytes[1], b.bytes[1])}};
}
inline Sums with_digit(Sums high, Sums low) {
    for (int i = 0; i < 2; ++i) {
        high.lanes[i] = _mm256_add_epi32(_mm256_slli_epi32(high.lanes[i], 8), low.lanes[i]);
    }
    return high;
}
inline Floats as_floats(Sums sums) {
    const __m256 halves[2] = {_mm256_cvtepi32_ps(sums.lanes[0]), _mm256_cvtepi32_ps(sums.lanes[1])};
    Floats lanes;
    std::memcpy(&lanes, halves, sizeof(lanes));
    return lanes;
}

#elif defined(__ARM_NEON) && defined(__ARM_FEATURE_DOTPROD)

constexpr bool UNSIGNED_CODES = false;
constexpr int MOST_ROWS = 4;

struct Sums {
    int32x4_t lanes[4];
};
struct CodeBytes {
    uint8x16_t bytes[4];
};
inline Sums begin(int32_t value) {
    const int32x4_t all = vdupq_n_s32(value);
    return {{all, all, all, all}};
}
inline CodeBytes code_bytes(const uint8_t* from) {
    return {{vld1q_u8(from), vld1q_u8(from + 16), vld1q_u8(from + 32), vld1q_u8(from + 48)}};
}
template <bool EIGHT_BITS>
inline void dot(Sums& sums, CodeBytes codes, const int8_t* four) {
    const int8x16_t x =
        vreinterpretq_s8_s32(vld1q_dup_s32(reinterpret_cast<const int32_t*>(four)));
    for (int i = 0; i < 4; ++i) {
        sums.lanes[i] = vdotq_s32(sums.lanes[i], vreinterpretq_s8_u8(codes.bytes[i]), x);
    }
}
inline CodeBytes masked(CodeBytes codes, uint8_t mask) {
    for (uint8x16_t& part : codes.bytes) part = vandq_u8(part, vdupq_n_u8(mask));
    return codes;
}
template <int RIGHT>
inline CodeBytes shifted(CodeBytes codes) {
    for (uint8x16_t& part : codes.bytes) {
        part = vshlq_u8(part, vdupq_n_s8(static_cast<int8_t>(-RIGHT)));
    }
    return codes;
}
inline CodeBytes either(CodeBytes a, CodeBytes b) {
    for (int i = 0; i < 4; ++i) a.bytes[i] = vorrq_u8(a.bytes[i], b.bytes[i]);
    return a;
}
inline Sums with_digit(Sums high, Sums low) {
    for (int i = 0; i < 4; ++i) {
        high.lanes[i] = vaddq_s32(vshlq_n_s32(high.lanes[i], 8), low.lanes[i]);
    }
    return high;
}
inline Floats as_floats(Sums sums) {
    float32x4_t parts[4];
    for (int i = 0; i < 4; ++i) parts[i] = vcvtq_f32_s32(sums.lanes[i]);
    Floats lanes;
    std::memcpy(&lanes, parts, sizeof(lanes));
    return lanes;
}

#else

constexpr bool UNSIGNED_CODES = false;
constexpr int MOST_ROWS = 4;

struct Sums {
    int32_t lanes[LANES];
};
struct CodeBytes {
    uint8_t bytes[4 * LANES];
};
inline Sums begin(int32_t value) {
    Sums sums;
    for (int32_t& lane : sums.lanes) lane = value;
    return sums;
}
inline CodeBytes code_bytes(const uint8_t* from) {
    CodeBytes codes;
    std::memcpy(codes.bytes, from, sizeof(codes.bytes));
    return codes;
}
template <bool EIGHT_BITS>
inline void dot(Sums& sums, const CodeBytes& codes, const int8_t* four) {
    for (int i = 0; i < LANES; ++i) {
        int32_t total = 0;
        for (int j = 0; j < 4; ++j) total += static_cast<int8_t>(codes.bytes[4 * i + j]) * four[j];
        sums.lanes[i] += total;
    }
}
inline CodeBytes masked(CodeBytes codes, uint8_t mask) {
    for (uint8_t& byte : codes.bytes) byte &= mask;
    return codes;
}
template <int RIGHT>
inline CodeBytes shifted(CodeBytes codes) {
    for (uint8_t& byte : codes.bytes) {
        byte = RIGHT >= 0 ? byte >> (RIGHT >= 0 ? RIGHT : 0) : byte << (RIGHT < 0 ? -RIGHT : 0);
    }
    return codes;
}
inline CodeBytes either(CodeBytes a, const CodeBytes& b) {
    for (int i = 0; i < 4 * LANES; ++i) a.bytes[i] |= b.bytes[i];
    return a;
}
inline Sums with_digit(Sums high, const Sums& low) {
    for (int i = 0; i < LANES; ++i) high.lanes[i] = high.lanes[i] * 256 + low.lanes[i];
    return high;
}
inline Floats as_floats(const Sums& sums) {
    Floats lanes;
    for (int i = 0; i < LANES; ++i) lanes[i] = static_cast<float>(sums.lanes[i]);
    return lanes;
}

#endif

// The sum of sixteen words.
inline int32_t added(Words words) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32(same_bits<__m512i>(words));
#else
    int32_t total = 0;
    for (int i = 0; i < LANES; ++i) total += words[i];
    return total;
#endif
}

// Sixteen numbers of two bytes: a loop over them would convert one at a time in GCC 12.
inline Floats from_halves(const void* from) {
#if defined(__AVX512F__)
    const __m256i bits = _mm256_loadu_si256(static_cast<const __m256i*>(from));
    return same_bits<Floats>(_mm512_cvtph_ps(bits));
#elif defined(__F16C__)
    const __m128i* bits = static_cast<const __m128i*>(from);
    const __m256 halves[2] = {_mm256_cvtph_ps(_mm_loadu_si128(bits)),
                              _mm256_cvtph_ps(_mm_loadu_si128(bits + 1))};
    Floats lanes;
    std::memcpy(&lanes, halves, sizeof(lanes));
    return lanes;
#else
    return load(static_cast<const Fp16*>(from));
#endif
}

}  // namespace ridgeline
