// Products of x in bf16 with 4-bit groups, and of x in bf16 or fp32 with 8-bit codes, in integers: 64
// codes an instruction (AVX-512 VNNI), or 16 (NEON with dot products), where lanes of fp32 take
// sixteen, or four, and have to be made first. 1.4 to 1.9 times as fast on a Xeon (4 bits, 1 thread,
// 1 to 32 rows, 2026-11-15).
//
// x becomes whole numbers of 16 bits, group by group, each two digits of 8: what it loses is 2^-16 of
// the group's largest number, where bf16 has kept 2^-9 of each. Of x in fp32 what is lost becomes two
// more digits, with a scale of their own. Digits meet the codes as they lie, the sum of a group is
// exact, and it is scaled in fp32. What the codes' zero point adds is a sum over x alone, taken off at
// the end.
#pragma once

#include "../host.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define RIDGELINE_DIGITS 1
#elif defined(__ARM_NEON) && defined(__ARM_FEATURE_DOTPROD)
#define RIDGELINE_DIGITS 1
#endif

#ifdef RIDGELINE_DIGITS

namespace ridgeline {

constexpr int64_t CHUNK = 128;         // 4-bit codes in 64 bytes
constexpr int64_t CHUNK_PIECES = 4;    // of 32 codes
constexpr float MOST = 127 * 256 + 127;  // the largest number of two digits

// Of a chunk of x, what meets the lower halves of its 64 bytes of codes, and the upper ones.
struct alignas(64) Digits {
    int8_t high[2][64], low[2][64];
    float scale[LANES];  // by lane of a sum: of the group whose codes it adds up
};

inline int64_t num_chunks(int64_t depth) { return (depth + CHUNK - 1) / CHUNK; }

// A row that lies as the codes do, as digits; `sums` has what each group adds up to. Behind its end
// the row has zeros up to a whole vector. What the digits leave of it stands in the row then.
inline void find_digits(float* row, int64_t depth, int64_t group, Digits* chunks, float* sums) {
    if (depth % CHUNK) std::memset(chunks + depth / CHUNK, 0, sizeof(Digits));
    for (int64_t start = 0; start < depth; start += group) {
        const int64_t end = start + group < depth ? start + group : depth;
        Words most = {};
        Floats all = {};
        for (int64_t i = start; i < end; i += LANES) {
            const Words size = same_bits<Words>(load(row + i)) & 0x7fffffff;
            const Words larger = size > most;  // numbers without a sign are ordered as their bits
            most = (larger & size) | (~larger & most);
            all += same_bits<Floats>(size);
        }
        // What is not finite makes the whole group so.
        const float scale = std::fmax(largest(same_bits<Floats>(most)), 1e-30f) * (1.0f / MOST) +
                            0.0f * sum(all);
        const Floats inverse = fill(1.0f / scale);
        Words total = {};
        for (int64_t i = start; i < end; i += LANES) {
            const Words whole = rounded(load(row + i) * inverse);
            store(row + i, load(row + i) - converted<Floats>(whole) * scale);
            const Words high = (whole + 128) >> 8;
            const int64_t piece = i / (2 * LANES), half = i / LANES % 2;
            Digits& to = chunks[piece / CHUNK_PIECES];
            const int64_t at = piece % CHUNK_PIECES * LANES;
            const Bytes first = narrowed(high), second = narrowed(whole - (high << 8));
            std::memcpy(to.high[half] + at, &first, sizeof(first));
            std::memcpy(to.low[half] + at, &second, sizeof(second));
            total += whole;
            for (int lane = 0; lane < 4; ++lane) to.scale[at / 4 + lane] = scale;
        }
        sums[start / group] = scale * sum(converted<Floats>(total));
    }
}

#ifdef __AVX512VNNI__
using DigitSums = __m512;

// Lanes for the scales of the groups in a chunk; `scales` has sixteen outputs' for each group.
template <int PIECES>
inline __m512 scale_lanes(const float* scales) {
    __m512 lanes = _mm512_set1_ps(scales[0]);
    if constexpr (PIECES == 2) {
        lanes = _mm512_mask_broadcastss_ps(lanes, 0xff00, _mm_load_ss(scales + LANES));
    } else if constexpr (PIECES == 1) {
        lanes = _mm512_mask_broadcastss_ps(lanes, 0x00f0, _mm_load_ss(scales + LANES));
        lanes = _mm512_mask_broadcastss_ps(lanes, 0x0f00, _mm_load_ss(scales + 2 * LANES));
        lanes = _mm512_mask_broadcastss_ps(lanes, 0xf000, _mm_load_ss(scales + 3 * LANES));
    }
    return lanes;
}

inline __m512 digit_product(__m512i lower, __m512i upper, const Digits& x) {
    __m512i total = _mm512_dpbusd_epi32(_mm512_setzero_si512(), lower, _mm512_load_si512(x.high[0]));
    total = _mm512_dpbusd_epi32(total, upper, _mm512_load_si512(x.high[1]));
    total = _mm512_slli_epi32(total, 8);
    total = _mm512_dpbusd_epi32(total, lower, _mm512_load_si512(x.low[0]));
    return _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(total, upper, _mm512_load_si512(x.low[1])));
}

// Of O neighbouring outputs, whose codes lie `depth / 2` bytes apart, a chunk with R rows of x.
// With one row the scales have x's in them already.
template <int R, int O, int PIECES>
inline void digit_chunk(const uint8_t* codes, int64_t depth, __mmask64 there, const float* scales,
                        const Digits* x, int64_t stride, __m512 (*own)[R]) {
    const __m512i mask = _mm512_set1_epi8(15);
#pragma GCC unroll 4
    for (int output = 0; output < O; ++output) {
        const __m512i bytes = _mm512_maskz_loadu_epi8(there, codes + output * (depth / 2));
        const __m512i lower = _mm512_and_si512(bytes, mask);
        const __m512i upper = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), mask);
        const __m512 scale = scale_lanes<PIECES>(scales + output);
        for (int row = 0; row < R; ++row) {
            const Digits& digits = x[row * stride];
            __m512 both = scale;
            if constexpr (R > 1) both = _mm512_mul_ps(scale, _mm512_load_ps(digits.scale));
            own[output][row] =
                _mm512_fmadd_ps(digit_product(lower, upper, digits), both, own[output][row]);
        }
    }
}

// All chunks: lanes to be added up. Rows of x lie `stride` chunks apart.
template <int R, int O, int PIECES>
inline void digit_sums(const uint8_t* codes, const float* scales, const Digits* x, int64_t stride,
                       int64_t depth, int64_t ahead, __m512* totals) {
    constexpr int64_t GROUPS = CHUNK_PIECES / PIECES;
    __m512 own[O][R] = {};
    int64_t chunk = 0;
    for (; (chunk + 1) * CHUNK <= depth; ++chunk) {
        for (int output = 0; output < O; ++output) {
            __builtin_prefetch(codes + output * (depth / 2) + chunk * 64 + ahead);
        }
        digit_chunk<R, O, PIECES>(codes + chunk * 64, depth, ~0ull, scales + chunk * GROUPS * LANES,
                                  x + chunk, stride, own);
    }
    if (chunk * CHUNK < depth) {
        const __mmask64 there = (1ull << (depth - chunk * CHUNK) / 2) - 1;
        digit_chunk<R, O, PIECES>(codes + chunk * 64, depth, there, scales + chunk * GROUPS * LANES,
                                  x + chunk, stride, own);
    }
    for (int output = 0; output < O; ++output) {
        for (int row = 0; row < R; ++row) totals[row * LANES + output] = own[output][row];
    }
}

#define RIDGELINE_INT8_DIGITS 1
constexpr float CODES_ABOVE = 128;  // the codes are multiplied as bytes without a sign

// Of one output, whose codes have 8 bits, all chunks with R rows of x: lanes to be added up.
template <int R>
inline void int8_sums(const int8_t* codes, const Digits* x, int64_t stride, int64_t depth,
                      int64_t ahead, __m512* totals) {
    const __m512i sign = _mm512_set1_epi8(static_cast<char>(128));
    __m512 own[R] = {};
    for (int64_t start = 0; start < depth; start += CHUNK, ++x) {
        const int64_t left = depth - start;
        const __mmask64 first = left >= 64 ? ~0ull : (1ull << left) - 1;
        const __mmask64 second =
            left >= CHUNK ? ~0ull : left > 64 ? (1ull << (left - 64)) - 1 : 0;
        const __m512i near = _mm512_maskz_loadu_epi8(first, codes + start);
        const __m512i far = _mm512_maskz_loadu_epi8(second, codes + start + 64);
        __builtin_prefetch(codes + start + ahead);
        __builtin_prefetch(codes + start + ahead + 64);
        // Pieces of 16 in turns, as find_digits lays x out.
        const __m512i even = _mm512_xor_si512(_mm512_shuffle_i64x2(near, far, 0x88), sign);
        const __m512i odd = _mm512_xor_si512(_mm512_shuffle_i64x2(near, far, 0xdd), sign);
#pragma GCC unroll 4
        for (int row = 0; row < R; ++row) {
            const Digits& digits = x[row * stride];
            own[row] = _mm512_fmadd_ps(digit_product(even, odd, digits),
                                       _mm512_load_ps(digits.scale), own[row]);
        }
    }
#pragma GCC unroll 4
    for (int row = 0; row < R; ++row) totals[row * LANES] = own[row];
}

// The sums of sixteen vectors' lanes.
inline Floats added_up(const __m512* v) {
    __m512 fours[4];
    for (int i = 0; i < 4; ++i) {
        const __m512 *a = v + 4 * i, *b = a + 1, *c = a + 2, *d = a + 3;
        const __m512 ab = _mm512_unpacklo_ps(*a, *b) + _mm512_unpackhi_ps(*a, *b);
        const __m512 cd = _mm512_unpacklo_ps(*c, *d) + _mm512_unpackhi_ps(*c, *d);
        const __m512d x = _mm512_castps_pd(ab), y = _mm512_castps_pd(cd);
        fours[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(x, y)) +
                   _mm512_castpd_ps(_mm512_unpackhi_pd(x, y));
    }
    __m512 twos[2];
    for (int i = 0; i < 2; ++i) {
        const __m512 x = fours[2 * i], y = fours[2 * i + 1];
        twos[i] = _mm512_shuffle_f32x4(x, y, 0x44) + _mm512_shuffle_f32x4(x, y, 0xee);
    }
    return same_bits<Floats>(_mm512_shuffle_f32x4(twos[0], twos[1], 0x88) +
                             _mm512_shuffle_f32x4(twos[0], twos[1], 0xdd));
}

#else
using DigitSums = float32x4_t;

// Of O neighbouring outputs, whose codes lie `depth / 2` bytes apart, all groups with R rows of x:
// lanes to be added up. Rows of x lie `stride` chunks apart; `scales` has sixteen outputs' for each
// group, with x's in them where there is one row.
template <int R, int O, int PIECES>
inline void digit_sums(const uint8_t* codes, const float* scales, const Digits* x, int64_t stride,
                       int64_t depth, int64_t ahead, DigitSums* totals) {
    const uint8x16_t mask = vdupq_n_u8(15);
    float32x4_t own[O][R] = {};
    for (int64_t piece = 0; piece * 32 < depth; piece += PIECES, scales += LANES) {
        const Digits* chunk = x + piece / CHUNK_PIECES;
        const int64_t at = piece % CHUNK_PIECES * LANES;
        int32x4_t high[O][R] = {}, low[O][R] = {};
#pragma GCC unroll 4
        for (int i = 0; i < PIECES; ++i) {
#pragma GCC unroll 4
            for (int output = 0; output < O; ++output) {
                const uint8_t* from = codes + output * (depth / 2) + (piece + i) * LANES;
                if ((piece + i) % 4 == 0) __builtin_prefetch(from + ahead);
                const uint8x16_t bytes = vld1q_u8(from);
                const int8x16_t lower = vreinterpretq_s8_u8(vandq_u8(bytes, mask));
                const int8x16_t upper = vreinterpretq_s8_u8(vshrq_n_u8(bytes, 4));
                for (int row = 0; row < R; ++row) {
                    const Digits& own_x = chunk[row * stride];
                    const int64_t place = at + i * LANES;
                    int32x4_t &big = high[output][row], &small = low[output][row];
                    big = vdotq_s32(big, lower, vld1q_s8(own_x.high[0] + place));
                    big = vdotq_s32(big, upper, vld1q_s8(own_x.high[1] + place));
                    small = vdotq_s32(small, lower, vld1q_s8(own_x.low[0] + place));
                    small = vdotq_s32(small, upper, vld1q_s8(own_x.low[1] + place));
                }
            }
        }
        for (int output = 0; output < O; ++output) {
            for (int row = 0; row < R; ++row) {
                const float of_x = R > 1 ? chunk[row * stride].scale[at / 4] : 1.0f;
                const int32x4_t both = vaddq_s32(vshlq_n_s32(high[output][row], 8), low[output][row]);
                own[output][row] =
                    vfmaq_n_f32(own[output][row], vcvtq_f32_s32(both), scales[output] * of_x);
            }
        }
    }
    for (int output = 0; output < O; ++output) {
        for (int row = 0; row < R; ++row) totals[row * LANES + output] = own[output][row];
    }
}

#define RIDGELINE_INT8_DIGITS 1
constexpr float CODES_ABOVE = 0;

// Of one output, whose codes have 8 bits, all chunks with R rows of x: lanes to be added up.
template <int R>
inline void int8_sums(const int8_t* codes, const Digits* x, int64_t stride, int64_t depth,
                      int64_t ahead, DigitSums* totals) {
    float32x4_t own[R] = {};
    for (int64_t start = 0; start < depth; start += CHUNK, ++x) {
        int32x4_t high[R] = {}, low[R] = {};
        auto add = [&](int8x16_t weights, int64_t part) {
            const int64_t half = part % 2, at = part / 2 * LANES;
#pragma GCC unroll 4
            for (int row = 0; row < R; ++row) {
                const Digits& digits = x[row * stride];
                high[row] = vdotq_s32(high[row], weights, vld1q_s8(digits.high[half] + at));
                low[row] = vdotq_s32(low[row], weights, vld1q_s8(digits.low[half] + at));
            }
        };
        const int8_t* from = codes + start;
        __builtin_prefetch(from + ahead);
        __builtin_prefetch(from + ahead + 64);
        if (start + CHUNK <= depth) {
#pragma GCC unroll 8
            for (int part = 0; part < CHUNK / LANES; ++part) add(vld1q_s8(from + part * LANES), part);
        } else {
            const int64_t left = depth - start;
            int64_t part = 0;
            for (; (part + 1) * LANES <= left; ++part) add(vld1q_s8(from + part * LANES), part);
            if (part * LANES < left) {
                int8_t some[LANES] = {};
                std::memcpy(some, from + part * LANES, left - part * LANES);
                add(vld1q_s8(some), part);
            }
        }
#pragma GCC unroll 4
        for (int row = 0; row < R; ++row) {
            const int32x4_t both = vaddq_s32(vshlq_n_s32(high[row], 8), low[row]);
            own[row] = vfmaq_n_f32(own[row], vcvtq_f32_s32(both), x[row * stride].scale[0]);
        }
    }
#pragma GCC unroll 4
    for (int row = 0; row < R; ++row) totals[row * LANES] = own[row];
}

// The sums of sixteen vectors' lanes.
inline Floats added_up(const DigitSums* v) {
    Floats sums;
    for (int i = 0; i < 4; ++i, v += 4) {
        sums.parts[i] = vpaddq_f32(vpaddq_f32(v[0], v[1]), vpaddq_f32(v[2], v[3]));
    }
    return sums;
}
#endif

}  // namespace ridgeline

#endif
