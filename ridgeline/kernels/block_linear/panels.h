// Weights as GGUF has them, sixteen outputs side by side: a panel. Codes, scales and offsets are those
// of the file, bit for bit; only their order differs, so that one vector holds four codes of each of
// the sixteen outputs and no sum crosses lanes. Of each 32 columns a panel has a record:
//
// | | bytes | columns |
// |---|---|---|
// | 4 bits | 64 c … | lane i's bytes: columns 4c + j in the low halves, 16 + 4c + j in the high ones |
// | 5th bit | 64 | bit q of byte (i, j): column 4q + j |
// | 5th and 6th | 128 | bits 2q of byte (i, j) of the first 64: column 4q + j; of the second: + 16 |
// | 8 bits | 64 q … | columns 4q + j |
//
// and before them what scales these: fp16 for each output, or in the K types 8 bits for each output
// and, once in 256 columns, fp16. A row of x has a scale for each 32 columns too.
#pragma once

#include <algorithm>

#include "dots.h"

namespace ridgeline {

constexpr int64_t BLOCK = 32;        // columns that share a scale
constexpr int64_t SUPER = 8;         // blocks that share the scale of scales
constexpr int64_t PLANE = 4 * LANES;  // bytes of a vector of codes
constexpr int64_t HALVES = 2 * LANES;  // bytes of sixteen fp16

enum Format { Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14,
              ROW_8 = 100 };  // ggml's numbers; ROW_8: int8 codes and one fp32 scale an output

// Where codes lie, by their bits; `quads(codes, q, low, high)`: those of columns 4q and 16 + 4q on.
struct FourBits {
    static constexpr int64_t BYTES = 4 * PLANE;
    static constexpr bool EIGHT = false;
    template <int Q>
    static void quads(const uint8_t* codes, CodeBytes& low, CodeBytes& high) {
        const CodeBytes both = code_bytes(codes + Q * PLANE);
        low = masked(both, 15);
        high = masked(shifted<4>(both), 15);
    }
};
struct FiveBits {
    static constexpr int64_t BYTES = 5 * PLANE;
    static constexpr bool EIGHT = false;
    template <int Q>
    static void quads(const uint8_t* codes, CodeBytes& low, CodeBytes& high) {
        FourBits::quads<Q>(codes, low, high);
        const CodeBytes fifth = code_bytes(codes + 4 * PLANE);
        low = either(low, masked(shifted<Q - 4>(fifth), 16));
        high = either(high, masked(shifted<Q>(fifth), 16));
    }
};
struct SixBits {
    static constexpr int64_t BYTES = 6 * PLANE;
    static constexpr bool EIGHT = false;
    template <int Q>
    static void quads(const uint8_t* codes, CodeBytes& low, CodeBytes& high) {
        FourBits::quads<Q>(codes, low, high);
        low = either(low, masked(shifted<2 * Q - 4>(code_bytes(codes + 4 * PLANE)), 48));
        high = either(high, masked(shifted<2 * Q - 4>(code_bytes(codes + 5 * PLANE)), 48));
    }
};
struct EightBits {
    static constexpr int64_t BYTES = 8 * PLANE;
    static constexpr bool EIGHT = true;
    template <int Q>
    static void quads(const uint8_t* codes, CodeBytes& low, CodeBytes& high) {
        low = code_bytes(codes + Q * PLANE);
        high = code_bytes(codes + (Q + 4) * PLANE);
    }
};

// A type of blocks: its codes, what they have too much (ZERO), whether a float is added to each
// block, and where all of that lies. HALF_SCALES: each 16 columns have a scale.
template <class Codes, int ZERO_CODE, bool OFFSETS>
struct Plain {
    using Bits = Codes;
    static constexpr int ZERO = ZERO_CODE;
    static constexpr int DIGITS = 1;  // of x
    static constexpr bool HAS_OFFSETS = OFFSETS, HALF_SCALES = false;
    static constexpr int64_t HEAD = HALVES * (OFFSETS ? 2 : 1), RECORD = HEAD + Bits::BYTES;
    static int64_t panel_bytes(int64_t blocks) { return blocks * RECORD; }
    static const uint8_t* codes(const uint8_t* panel, int64_t b) {
        return panel + b * RECORD + HEAD;
    }
    static Floats scale(const uint8_t* panel, int64_t b, int) {
        return from_halves(panel + b * RECORD);
    }
    static Floats offset(const uint8_t* panel, int64_t b) {
        return from_halves(panel + b * RECORD + HALVES);
    }
};
template <class Codes, int ZERO_CODE, bool OFFSETS>
struct Nested {
    using Bits = Codes;
    static constexpr int ZERO = ZERO_CODE;
    static constexpr int DIGITS = 1;
    static constexpr bool HAS_OFFSETS = OFFSETS, HALF_SCALES = !OFFSETS;
    static constexpr int64_t FIRST = HALVES * (OFFSETS ? 2 : 1), HEAD = 2 * LANES;
    static constexpr int64_t RECORD = HEAD + Bits::BYTES, GROUP = FIRST + SUPER * RECORD;
    static int64_t panel_bytes(int64_t blocks) { return blocks / SUPER * GROUP; }
    static const uint8_t* group(const uint8_t* panel, int64_t b) {
        return panel + b / SUPER * GROUP;
    }
    static const uint8_t* record(const uint8_t* panel, int64_t b) {
        return group(panel, b) + FIRST + b % SUPER * RECORD;
    }
    static const uint8_t* codes(const uint8_t* panel, int64_t b) { return record(panel, b) + HEAD; }
    static Floats scale(const uint8_t* panel, int64_t b, int half) {
        const uint8_t* own = record(panel, b) + half * LANES;
        const Floats of_all = from_halves(group(panel, b));
        if constexpr (HALF_SCALES) return of_all * load(reinterpret_cast<const int8_t*>(own));
        return of_all * bytes(own);
    }
    static Floats offset(const uint8_t* panel, int64_t b) {
        return -(from_halves(group(panel, b) + HALVES) * bytes(record(panel, b) + LANES));
    }
    static Floats bytes(const uint8_t* from) {
        UnsignedBytes own;
        std::memcpy(&own, from, sizeof(own));
        return converted<Floats>(same_bits<Words>(widen(own)));
    }
};
// int8 codes, one scale an output before all of them.
struct OneScale {
    using Bits = EightBits;
    static constexpr int ZERO = UNSIGNED_CODES ? 128 : 0;
    static constexpr int DIGITS = 2;
    static constexpr bool HAS_OFFSETS = false, HALF_SCALES = false;
    static constexpr int64_t HEAD = LANES * sizeof(float);
    static int64_t panel_bytes(int64_t blocks) { return HEAD + blocks * Bits::BYTES; }
    static const uint8_t* codes(const uint8_t* panel, int64_t b) {
        return panel + HEAD + b * Bits::BYTES;
    }
    static Floats scale(const uint8_t* panel, int64_t, int) {
        return load(reinterpret_cast<const float*>(panel));
    }
    static Floats offset(const uint8_t*, int64_t) { return Floats{}; }
};

template <class Visit>
inline auto of_format(int format, Visit visit) {
    constexpr int WHOLE = UNSIGNED_CODES ? 128 : 0;
    switch (format) {
        case Q4_0: return visit(Plain<FourBits, 8, false>());
        case Q4_1: return visit(Plain<FourBits, 0, true>());
        case Q5_0: return visit(Plain<FiveBits, 16, false>());
        case Q5_1: return visit(Plain<FiveBits, 0, true>());
        case Q8_0: return visit(Plain<EightBits, WHOLE, false>());
        case Q4_K: return visit(Nested<FourBits, 0, true>());
        case Q5_K: return visit(Nested<FiveBits, 0, true>());
        case Q6_K: return visit(Nested<SixBits, 32, false>());
        default: return visit(OneScale());
    }
}

// --- x -------------------------------------------------------------------------------------------

// Rows of x as codes. `DIGITS` 1: int8 with a scale for each block, as GGUF's Q8_0 has them. 2: two
// digits of 8 bits, which lose 2^-16 of a block's largest number.
struct CodedRows {
    uint8_t* memory;
    int64_t depth, digits;

    int64_t blocks() const { return depth / BLOCK; }
    int64_t stride() const { return (depth * digits + blocks() * 20 + 63) / 64 * 64; }
    uint8_t* row(int64_t r) const { return memory + r * stride(); }
    int8_t* codes(int64_t r) const { return reinterpret_cast<int8_t*>(row(r)); }
    float* scales(int64_t r) const { return reinterpret_cast<float*>(row(r) + depth * digits); }
    float* scaled_sums(int64_t r) const { return scales(r) + blocks(); }
    int32_t* sums(int64_t r) const { return reinterpret_cast<int32_t*>(scaled_sums(r) + blocks()); }
    int32_t* half_sums(int64_t r) const { return sums(r) + blocks(); }  // two a block
};

inline void code_row(const float* from, const CodedRows& to, int64_t r) {
    const float most_whole = to.digits == 1 ? 127.0f : 127.0f * 256 + 127;
    int8_t* codes = to.codes(r);
    float *scales = to.scales(r), *scaled = to.scaled_sums(r);
    int32_t *sums = to.sums(r), *half_sums = to.half_sums(r);
    for (int64_t b = 0; b < to.blocks(); ++b) {
        const Floats x[2] = {load(from + b * BLOCK), load(from + b * BLOCK + LANES)};
        Floats size[2];
        for (int h = 0; h < 2; ++h) {
            size[h] = same_bits<Floats>(same_bits<Words>(x[h]) & 0x7fffffff);
        }
        // What is not finite makes the whole block so.
        const float most = largest(pick(size[0] > size[1], size[0], size[1]));
        const float scale = std::fmax(most, 1e-30f) * (1.0f / most_whole) +
                            0.0f * sum(size[0] + size[1]);
        const float inverse = 1.0f / scale;
        int32_t total = 0;
        for (int h = 0; h < 2; ++h) {
            const Words whole = rounded(x[h] * inverse);
            int8_t* at = codes + b * BLOCK + h * LANES;
            if (to.digits == 1) {
                const Bytes first = narrowed(whole);
                std::memcpy(at, &first, sizeof(first));
            } else {
                const Words high = (whole + 128) >> 8;
                const Bytes first = narrowed(high), second = narrowed(whole - (high << 8));
                std::memcpy(at, &first, sizeof(first));
                std::memcpy(at + to.depth, &second, sizeof(second));
            }
            half_sums[2 * b + h] = static_cast<int32_t>(sum(converted<Floats>(whole)));
            total += half_sums[2 * b + h];
        }
        scales[b] = scale;
        sums[b] = total;
        scaled[b] = scale * static_cast<float>(total);
    }
}

// --- a panel times rows ----------------------------------------------------------------------------

template <class F, int R, int DIGITS, int Q>
inline void four_quads(const uint8_t* codes, const int8_t* const* x, int64_t low_digits,
                       Sums (*sums)[R][DIGITS]) {
    if constexpr (Q < 4) {
        constexpr bool EIGHT = F::Bits::EIGHT;
        constexpr int SECOND = F::HALF_SCALES ? 1 : 0;
        CodeBytes low, high;
        F::Bits::template quads<Q>(codes, low, high);
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
            for (int d = 0; d < DIGITS; ++d) {
                const int8_t* own = x[r] + d * low_digits + 4 * Q;
                dot<EIGHT>(sums[0][r][d], low, own);
                dot<EIGHT>(sums[SECOND][r][d], high, own + LANES);
            }
        }
        four_quads<F, R, DIGITS, Q + 1>(codes, x, low_digits, sums);
    }
}

// Sixteen outputs of R rows of x from `row` on; `ahead`: bytes that are asked for before they are due.
template <class F, int R, int DIGITS>
inline void panel_times(const uint8_t* panel, const CodedRows& x, int64_t row, int64_t ahead,
                        Floats* results) {
    const int8_t* codes[R];
    const float *scales[R], *scaled[R];
    const int32_t* sums_of[R];
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
        codes[r] = x.codes(row + r);
        scales[r] = x.scales(row + r);
        scaled[r] = x.scaled_sums(row + r);
        sums_of[r] = F::HALF_SCALES ? x.half_sums(row + r) : x.sums(row + r);
        results[r] = Floats{};
    }
    constexpr int HALF = F::HALF_SCALES ? 2 : 1;
    for (int64_t b = 0; b < x.blocks(); ++b) {
        const uint8_t* from = F::codes(panel, b);
        if (ahead) {
#pragma GCC unroll 8
            for (int64_t line = 0; line < F::Bits::BYTES; line += 64) {
                __builtin_prefetch(from + line + ahead);
            }
        }
        Sums sums[HALF][R][DIGITS];
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
            for (int half = 0; half < HALF; ++half) {
                sums[half][r][0] = begin(DIGITS == 1 ? -F::ZERO * sums_of[r][HALF * b + half] : 0);
                if constexpr (DIGITS == 2) {
                    sums[half][r][1] = begin(-F::ZERO * sums_of[r][HALF * b + half]);
                }
            }
        }
        const int8_t* at[R];
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) at[r] = codes[r] + b * BLOCK;
        four_quads<F, R, DIGITS, 0>(from, at, x.depth, sums);
#pragma GCC unroll 2
        for (int half = 0; half < HALF; ++half) {
            const Floats scale = F::scale(panel, b, half);
#pragma GCC unroll 12
            for (int r = 0; r < R; ++r) {
                Sums& all = sums[half][r][0];
                if constexpr (DIGITS == 2) all = with_digit(all, sums[half][r][1]);
                results[r] += as_floats(all) * (scale * scales[r][b]);
            }
        }
        if constexpr (F::HAS_OFFSETS) {
            const Floats offset = F::offset(panel, b);
#pragma GCC unroll 12
            for (int r = 0; r < R; ++r) results[r] += offset * scaled[r][b];
        }
    }
}

// As many rows as `count` says, which is at most MOST_ROWS.
template <class F, int DIGITS>
inline void panel_rows(const uint8_t* panel, const CodedRows& x, int64_t row, int64_t count,
                       int64_t ahead, Floats* results) {
    constexpr int MOST = DIGITS == 2 || F::HALF_SCALES ? MOST_ROWS / 2 : MOST_ROWS;
    while (count > 0) {
        int64_t done = 1;
        if (count >= MOST) {
            done = MOST;
            panel_times<F, MOST, DIGITS>(panel, x, row, ahead, results);
        } else if (MOST > 8 && count >= 8) {
            done = 8;
            panel_times<F, MOST < 8 ? MOST : 8, DIGITS>(panel, x, row, ahead, results);
        } else if (MOST > 4 && count >= 4) {
            done = 4;
            panel_times<F, MOST < 4 ? MOST : 4, DIGITS>(panel, x, row, ahead, results);
        } else if (count >= 2) {
            done = 2;
            panel_times<F, 2, DIGITS>(panel, x, row, ahead, results);
        } else {
            panel_times<F, 1, DIGITS>(panel, x, row, ahead, results);
        }
        row += done, count -= done, results += done;
    }
}

// --- matrices ------------------------------------------------------------------------------------

// Rows of a matrix that are of one type; sixteen at a time divide all but the last part.
struct Part {
    const uint8_t* panels;
    int64_t outputs, panel_bytes, format;
};

// As cpu.py lays it out.
struct Matrix {
    Part parts[4];
    int64_t num_parts, depth, outputs;
    const float* bias;  // or null

    int64_t digits() const { return parts[0].format == ROW_8 ? 2 : 1; }
    int64_t num_panels() const { return (outputs + LANES - 1) / LANES; }

    void multiply(int64_t panel, const CodedRows& x, int64_t row, int64_t count, bool cold,
                  Floats* results) const {
        const int64_t number = panel;
        const Part* part = parts;
        while (panel * LANES >= part->outputs) {
            panel -= part->outputs / LANES;
            ++part;
        }
        const uint8_t* from = part->panels + panel * part->panel_bytes;
        const int64_t ahead = cold ? 2048 : 0;
        of_format(static_cast<int>(part->format), [&](auto format) {
            using F = decltype(format);
            panel_rows<F, F::DIGITS>(from, x, row, count, ahead, results);
        });
        if (bias == nullptr) return;
        const int64_t column = number * LANES;
        const Floats added = load(bias + column, lanes_left(outputs, column));
        for (int64_t r = 0; r < count; ++r) results[r] += added;
    }
};

}  // namespace ridgeline
