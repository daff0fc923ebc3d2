// From a file's blocks (ggml's layouts) to panels, and from panels to fp32: once, when a model is
// loaded, and for the few who want the plain weight. Codes are taken apart one by one here.
#pragma once

#include "panels.h"

namespace ridgeline {

// One block of an output: what a panel keeps of it.
struct OneBlock {
    uint8_t codes[BLOCK];
    uint8_t head[4];   // fp16 scale and offset; in the K types both scales, or scale and offset
    uint8_t outer[4];  // of the K types: fp16 scale and offset of scales
};

inline int64_t file_bytes(int format, int64_t depth) {
    switch (format) {
        case Q4_0: return depth / BLOCK * 18;
        case Q4_1: return depth / BLOCK * 20;
        case Q5_0: return depth / BLOCK * 22;
        case Q5_1: return depth / BLOCK * 24;
        case Q8_0: return depth / BLOCK * 34;
        case Q4_K: return depth / (SUPER * BLOCK) * 144;
        case Q5_K: return depth / (SUPER * BLOCK) * 176;
        case Q6_K: return depth / (SUPER * BLOCK) * 210;
        default: return depth + sizeof(float);  // codes, then the scale
    }
}

inline void nibbles(const uint8_t* from, uint8_t* codes) {
    for (int i = 0; i < LANES; ++i) {
        codes[i] = from[i] & 15;
        codes[LANES + i] = from[i] >> 4;
    }
}
inline void fifth_bits(const uint8_t* from, uint8_t* codes) {
    for (int i = 0; i < BLOCK; ++i) codes[i] |= (from[i / 8] >> (i % 8) & 1) << 4;
}
// 6-bit scale and offset of a block in Q4_K and Q5_K.
inline void nested_scale(const uint8_t* q, int64_t b, uint8_t* head) {
    if (b < 4) {
        head[0] = q[b] & 63;
        head[1] = q[b + 4] & 63;
    } else {
        head[0] = (q[b + 4] & 15) | (q[b - 4] >> 6 << 4);
        head[1] = (q[b + 4] >> 4) | (q[b] >> 6 << 4);
    }
}

// Block b of an output whose row is at `row`.
inline OneBlock read_block(int format, const uint8_t* row, int64_t b, int64_t depth) {
    OneBlock block = {};
    const int64_t s = b % SUPER;
    switch (format) {
        case Q4_0:
        case Q4_1:
        case Q5_0:
        case Q5_1: {
            const bool offset = format == Q4_1 || format == Q5_1, five = format >= Q5_0;
            const int64_t head = offset ? 4 : 2;
            const uint8_t* from = row + b * (head + (five ? 20 : 16));
            std::memcpy(block.head, from, head);
            nibbles(from + head + (five ? 4 : 0), block.codes);
            if (five) fifth_bits(from + head, block.codes);
            return block;
        }
        case Q8_0:
            std::memcpy(block.head, row + b * 34, 2);
            std::memcpy(block.codes, row + b * 34 + 2, BLOCK);
            break;
        case Q4_K:
        case Q5_K: {
            const uint8_t* from = row + b / SUPER * (format == Q4_K ? 144 : 176);
            std::memcpy(block.outer, from, 4);
            nested_scale(from + 4, s, block.head);
            const uint8_t* halves = from + (format == Q4_K ? 16 : 48) + s / 2 * BLOCK;
            for (int i = 0; i < BLOCK; ++i) {
                block.codes[i] = halves[i] >> (s % 2 * 4) & 15;
                if (format == Q5_K) block.codes[i] |= (from[16 + i] >> s & 1) << 4;
            }
            return block;
        }
        case Q6_K: {
            const uint8_t* from = row + b / SUPER * 210;
            const uint8_t* lower = from + s / 4 * 64 + s % 2 * BLOCK;
            const uint8_t* upper = from + 128 + s / 4 * BLOCK;
            for (int i = 0; i < BLOCK; ++i) {
                block.codes[i] = (lower[i] >> (s % 4 / 2 * 4) & 15) | (upper[i] >> (s % 4 * 2) & 3) << 4;
            }
            std::memcpy(block.head, from + 192 + 2 * s, 2);
            std::memcpy(block.outer, from + 208, 2);
            return block;
        }
        default:
            std::memcpy(block.codes, row + b * BLOCK, BLOCK);
            std::memcpy(block.head, row + depth, 4);
    }
    for (uint8_t& code : block.codes) code ^= UNSIGNED_CODES ? 128 : 0;
    return block;
}

// Where a code lies among its record's: a byte and, of the lower four bits, the half.
struct Place {
    int64_t byte, shift;
};
template <class Bits>
inline Place place_of(int64_t lane, int64_t column) {
    if (Bits::EIGHT) return {column / 4 * PLANE + 4 * lane + column % 4, 0};
    const int64_t in_half = column % LANES;
    return {in_half / 4 * PLANE + 4 * lane + column % 4, column / LANES * 4};
}

template <class Bits>
inline void put_code(uint8_t* codes, int64_t lane, int64_t column, uint8_t code) {
    const Place place = place_of<Bits>(lane, column);
    if (Bits::EIGHT) {
        codes[place.byte] = code;
        return;
    }
    codes[place.byte] |= (code & 15) << place.shift;
    const int64_t byte = 4 * PLANE + 4 * lane + column % 4, quad = column / 4;
    if (Bits::BYTES == 5 * PLANE) codes[byte] |= (code >> 4) << quad;
    if (Bits::BYTES == 6 * PLANE) codes[byte + quad / 4 * PLANE] |= (code >> 4) << quad % 4 * 2;
}

template <class Bits>
inline uint8_t get_code(const uint8_t* codes, int64_t lane, int64_t column) {
    const Place place = place_of<Bits>(lane, column);
    if (Bits::EIGHT) return codes[place.byte];
    uint8_t code = codes[place.byte] >> place.shift & 15;
    const int64_t byte = 4 * PLANE + 4 * lane + column % 4, quad = column / 4;
    if (Bits::BYTES == 5 * PLANE) code |= (codes[byte] >> quad & 1) << 4;
    if (Bits::BYTES == 6 * PLANE) code |= (codes[byte + quad / 4 * PLANE] >> quad % 4 * 2 & 3) << 4;
    return code;
}

template <class F>
struct HeadOf;  // writes what scales a block's codes
template <class Codes, int ZERO, bool OFFSETS>
struct HeadOf<Plain<Codes, ZERO, OFFSETS>> {
    using F = Plain<Codes, ZERO, OFFSETS>;
    static void put(uint8_t* panel, int64_t b, int64_t lane, const OneBlock& block) {
        uint8_t* to = panel + b * F::RECORD + 2 * lane;
        std::memcpy(to, block.head, 2);
        if (OFFSETS) std::memcpy(to + HALVES, block.head + 2, 2);
    }
};
template <class Codes, int ZERO, bool OFFSETS>
struct HeadOf<Nested<Codes, ZERO, OFFSETS>> {
    using F = Nested<Codes, ZERO, OFFSETS>;
    static void put(uint8_t* panel, int64_t b, int64_t lane, const OneBlock& block) {
        uint8_t* outer = panel + b / SUPER * F::GROUP + 2 * lane;
        std::memcpy(outer, block.outer, 2);
        if (OFFSETS) std::memcpy(outer + HALVES, block.outer + 2, 2);
        uint8_t* own = panel + b / SUPER * F::GROUP + F::FIRST + b % SUPER * F::RECORD + lane;
        own[0] = block.head[0];
        own[LANES] = block.head[1];
    }
};
template <>
struct HeadOf<OneScale> {
    static void put(uint8_t* panel, int64_t, int64_t lane, const OneBlock& block) {
        std::memcpy(panel + lane * sizeof(float), block.head, sizeof(float));
    }
};

// Rows at `file` to panels, which are zeros before.
template <class F>
inline void pack_panel(int format, const uint8_t* file, int64_t outputs, int64_t depth,
                       int64_t panel, uint8_t* to) {
    const int64_t row_bytes = file_bytes(format, depth);
    uint8_t* own = to + panel * F::panel_bytes(depth / BLOCK);
    for (int64_t lane = 0; lane < lanes_left(outputs, panel * LANES); ++lane) {
        const uint8_t* row = file + (panel * LANES + lane) * row_bytes;
        for (int64_t b = 0; b < depth / BLOCK; ++b) {
            const OneBlock block = read_block(format, row, b, depth);
            HeadOf<F>::put(own, b, lane, block);
            uint8_t* codes = const_cast<uint8_t*>(F::codes(own, b));
            for (int64_t i = 0; i < BLOCK; ++i) put_code<typename F::Bits>(codes, lane, i, block.codes[i]);
        }
    }
}

template <class F>
inline void expand_panel(const uint8_t* panels, int64_t outputs, int64_t depth, int64_t panel,
                         float* to) {
    const uint8_t* own = panels + panel * F::panel_bytes(depth / BLOCK);
    for (int64_t b = 0; b < depth / BLOCK; ++b) {
        const Floats scales[2] = {F::scale(own, b, 0), F::scale(own, b, F::HALF_SCALES)};
        const Floats offset = F::HAS_OFFSETS ? F::offset(own, b) : Floats{};
        for (int64_t lane = 0; lane < lanes_left(outputs, panel * LANES); ++lane) {
            float* row = to + (panel * LANES + lane) * depth + b * BLOCK;
            for (int64_t i = 0; i < BLOCK; ++i) {
                const uint8_t code = get_code<typename F::Bits>(F::codes(own, b), lane, i);
                const int whole = F::Bits::EIGHT && !UNSIGNED_CODES ? static_cast<int8_t>(code)
                                                                    : code - F::ZERO;
                row[i] = static_cast<float>(whole) * scales[i / LANES][lane] + offset[lane];
            }
        }
    }
}

}  // namespace ridgeline
