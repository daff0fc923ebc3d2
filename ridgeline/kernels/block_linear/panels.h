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
constexpr int64_t ROW_CHUNK = 120;  // rows whose codes stay in a core's cache while panels pass
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

// Rows of x as codes, `digits` 1: int8 with a scale for each block, as GGUF's Q8_0 has them; 2: two
// digits of 8 bits, which lose 2^-16 of a block's largest number. As many rows as are multiplied at
// once lie together, block by block, so that one pointer reaches all of them: of R rows a block is
//
//   codes [digits][R][32], scales [R], scaled sums [R], sums [R], sums of halves [2][R]
struct CodedRows {
    uint8_t* memory;
    int64_t depth, digits, rows;

    int64_t blocks() const { return depth / BLOCK; }
    int64_t block_bytes() const { return BLOCK * digits + 20; }  // of one row
    int64_t bytes() const { return rows * blocks() * block_bytes(); }
    // How many lie together from `row` on, which is the first of them.
    int64_t together(int64_t row) const {
        const int64_t left = rows - row;
        if (left >= MOST_ROWS) return MOST_ROWS;
        return left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
    }
    const uint8_t* group(int64_t first) const { return memory + first * blocks() * block_bytes(); }
};

// Where row r stands: its group's memory, how many are in it, and its number there.
struct RowPlace {
    uint8_t* group;
    int64_t count, number;
};
inline RowPlace place_in(const CodedRows& rows, int64_t r) {
    int64_t first = r / MOST_ROWS * MOST_ROWS;
    while (first + rows.together(first) <= r) first += rows.together(first);
    return {const_cast<uint8_t*>(rows.group(first)), rows.together(first), r - first};
}

inline void code_row(const float* from, const CodedRows& to, int64_t r) {
    const float most_whole = to.digits == 1 ? 127.0f : 127.0f * 256 + 127;
    const auto [group, count, number] = place_in(to, r);
    uint8_t* block = group;
    for (int64_t b = 0; b < to.blocks(); ++b, block += count * to.block_bytes()) {
        const Floats x[2] = {load(from + b * BLOCK), load(from + b * BLOCK + LANES)};
        Floats size[2];
        for (int h = 0; h < 2; ++h) {
            size[h] = same_bits<Floats>(same_bits<Words>(x[h]) & 0x7fffffff);
        }
        // What is not finite makes the whole block so.
        const Floats both = size[0] + size[1];
        const float most = largest(pick(size[0] > size[1], size[0], size[1]));
        const float scale =
            std::fmax(most, 1e-30f) * (1.0f / most_whole) + 0.0f * sum(both);
        const float inverse = 1.0f / scale;
        int8_t* codes = reinterpret_cast<int8_t*>(block) + number * BLOCK;
        float* scales = reinterpret_cast<float*>(block + count * BLOCK * to.digits);
        int32_t* sums = reinterpret_cast<int32_t*>(scales + 2 * count);
        int32_t total = 0;
        for (int h = 0; h < 2; ++h) {
            const Words whole = rounded(x[h] * inverse);
            int8_t* at = codes + h * LANES;
            if (to.digits == 1) {
                const Bytes first = narrowed(whole);
                std::memcpy(at, &first, sizeof(first));
            } else {
                const Words high = (whole + 128) >> 8;
                const Bytes first = narrowed(high), second = narrowed(whole - (high << 8));
                std::memcpy(at, &first, sizeof(first));
                std::memcpy(at + count * BLOCK, &second, sizeof(second));
            }
            const int32_t of_half = added(whole);
            sums[(1 + h) * count + number] = of_half;
            total += of_half;
        }
        scales[number] = scale;
        scales[count + number] = scale * static_cast<float>(total);
        sums[number] = total;
    }
}

// --- a panel times rows ----------------------------------------------------------------------------

// Codes of columns 4q on, and of 16 + 4q on, with R rows' inputs; LOW, HIGH: which of both.
template <class F, int R, bool LOW, bool HIGH, int Q = 0>
inline void four_quads(const uint8_t* codes, const int8_t* x, Sums (&sums)[R]) {
    if constexpr (Q < 4) {
        CodeBytes low, high;
        F::Bits::template quads<Q>(codes, low, high);
        if constexpr (LOW) {
#pragma GCC unroll 12
            for (int r = 0; r < R; ++r) dot<F::Bits::EIGHT>(sums[r], low, x + r * BLOCK + 4 * Q);
        }
        if constexpr (HIGH) {
#pragma GCC unroll 12
            for (int r = 0; r < R; ++r) {
                dot<F::Bits::EIGHT>(sums[r], high, x + r * BLOCK + LANES + 4 * Q);
            }
        }
        four_quads<F, R, LOW, HIGH, Q + 1>(codes, x, sums);
    }
}

// Sixteen outputs of R rows that lie together at `x`; `ahead`: bytes asked for before they are due.
template <class F, int R>
inline void panel_times(const uint8_t* panel, const uint8_t* x, int64_t blocks, int64_t ahead,
                        Floats* results) {
    constexpr int64_t CODES = F::DIGITS * R * BLOCK;
    Floats held[R];
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) held[r] = Floats{};
    for (int64_t b = 0; b < blocks; ++b, x += CODES + 20 * R) {
        const uint8_t* from = F::codes(panel, b);
        if (R <= 4 && ahead) {
#pragma GCC unroll 8
            for (int64_t line = 0; line < F::Bits::BYTES; line += 64) {
                __builtin_prefetch(from + line + ahead);
            }
        }
        const int8_t* codes = reinterpret_cast<const int8_t*>(x);
        const float* scales = reinterpret_cast<const float*>(x + CODES);
        const int32_t* sums_of = reinterpret_cast<const int32_t*>(scales + 2 * R);
        Sums sums[R];
        auto start = [&](const int32_t* taken) {
#pragma GCC unroll 12
            for (int r = 0; r < R; ++r) sums[r] = begin(F::ZERO ? -F::ZERO * taken[r] : 0);
        };
        auto add = [&](int half) {
            const Floats scale = F::scale(panel, b, half);
#pragma GCC unroll 12
            for (int r = 0; r < R; ++r) held[r] += as_floats(sums[r]) * (scale * scales[r]);
        };
        if constexpr (F::HALF_SCALES) {
            start(sums_of + R);
            four_quads<F, R, true, false>(from, codes, sums);
            add(0);
            start(sums_of + 2 * R);
            four_quads<F, R, false, true>(from, codes, sums);
            add(1);
        } else if constexpr (F::DIGITS == 2) {
#pragma GCC unroll 12
            for (int r = 0; r < R; ++r) sums[r] = begin(0);
            four_quads<F, R, true, true>(from, codes, sums);
#pragma GCC unroll 12
            for (int r = 0; r < R; ++r) {
                sums[r] = with_digit(sums[r], begin(F::ZERO ? -F::ZERO * sums_of[r] : 0));
            }
            four_quads<F, R, true, true>(from, codes + R * BLOCK, sums);
            add(0);
        } else {
            start(sums_of);
            four_quads<F, R, true, true>(from, codes, sums);
            add(0);
        }
        if constexpr (F::HAS_OFFSETS) {
            const Floats offset = F::offset(panel, b);
#pragma GCC unroll 12
            for (int r = 0; r < R; ++r) held[r] += offset * scales[R + r];
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) results[r] = held[r];
}

// `count` rows from `row` on, where those that lie together begin and end.
template <class F>
inline void panel_rows(const uint8_t* panel, const CodedRows& x, int64_t row, int64_t count,
                       int64_t ahead, Floats* results) {
    const int64_t blocks = x.blocks();
    while (count > 0) {
        const uint8_t* group = x.group(row);
        const int64_t done = x.together(row);
        switch (done) {
            case 1: panel_times<F, 1>(panel, group, blocks, ahead, results); break;
            case 2: panel_times<F, 2>(panel, group, blocks, ahead, results); break;
            case 4: panel_times<F, 4>(panel, group, blocks, ahead, results); break;
            case 8: panel_times<F, MOST_ROWS < 8 ? 4 : 8>(panel, group, blocks, ahead, results); break;
            default: panel_times<F, MOST_ROWS>(panel, group, blocks, ahead, results);
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
            panel_rows<F>(from, x, row, count, ahead, results);
        });
        if (bias == nullptr) return;
        const int64_t column = number * LANES;
        const Floats added = load(bias + column, lanes_left(outputs, column));
        for (int64_t r = 0; r < count; ++r) results[r] += added;
    }
};

}  // namespace ridgeline
