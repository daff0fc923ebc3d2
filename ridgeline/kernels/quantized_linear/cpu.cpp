// Products of few rows with 4-bit groups, int8 or fp8 weights on a CPU: the codes are read once, in
// order, become fp32 lanes in registers and are multiplied there; x in bf16 meets 4-bit ones in
// integers, where the processor can (digits.h). Norm, activation and residual are folded in; where a
// scheme has 8-bit inputs, x is rounded to its codes first.
//
// 4-bit codes lie as formats/packing.py says: byte 4i + j of a piece of 32 holds elements 8j + i and
// 8j + i + 4. x, which is small, is laid out the same way once, so no code has to move.
#include <algorithm>
#include <cstdlib>
#include <memory>
#include <type_traits>

#include "../host.h"
#include "digits.h"

using namespace ridgeline;

constexpr int64_t SIDE = LANES;    // outputs that are finished together
constexpr int64_t PIECE = 32;      // 4-bit codes in 16 bytes
constexpr int64_t FEW_ROWS = 4;    // each thread prepares them for itself: sooner than waiting
constexpr int64_t AHEAD = 4096;    // bytes that are asked for before they are needed
enum Inputs { AS_THEY_ARE = 0, INT8 = 1, FP8 = 2 };

struct Int4 {
    uint8_t bits;
};

// What a weight's scales are: `scale[output / rows * output_stride + group * group_stride]`.
template <class S>
struct Scales {
    const S* values;
    const uint8_t* zeros;  // laid out alike, or null: 8 for all
    int64_t rows, output_stride, group_stride, group;

    int64_t first(int64_t output) const { return output / rows * output_stride; }
};

template <class T>
struct Linear {
    const T* x;
    int64_t x_stride;
    const T* bias;  // or null
    const T* residual;
    int64_t residual_stride;
    const T* norm;
    float eps, offset;
    int inputs;           // what x is rounded to
    int64_t input_group;  // columns of x that share a scale
    int activation;       // with one, the weight has twice as many rows as the result has columns
    T* out;
    int64_t rows, depth, columns;
    int64_t padded;  // the depth in whole vectors
};

inline float read(const float* from) { return *from; }
inline float read(const Fp16* from) { return static_cast<float>(*from); }
inline float read(const Bf16* from) {
    return same_bits<float>(static_cast<uint32_t>(from->bits) << 16);
}

struct Freed {
    void operator()(float* memory) const { std::free(memory); }
};

// Memory of a thread's own, kept for the next product; `USE` tells apart what is held at once.
template <int USE = 0>
static float* room(int64_t count) {
    static thread_local std::unique_ptr<float, Freed> memory;
    static thread_local int64_t held = 0;
    if (held < count) {
        memory.reset(static_cast<float*>(std::aligned_alloc(64, count * sizeof(float))));
        held = count;
    }
    return memory.get();
}

// --- x -------------------------------------------------------------------------------------------

static inline Floats magnitude(Floats lanes) {
    return same_bits<Floats>(same_bits<Unsigned>(lanes) & 0x7fffffff);
}

// To the nearest e4m3 number, halves to even: eight steps between powers of two, and the smallest
// step below 2^-6.
static inline Floats nearest_fp8(Floats lanes) {
    const Floats power = same_bits<Floats>(same_bits<Unsigned>(lanes) & 0x7f800000);
    const Floats step = pick(power < fill(0x1p-6f), fill(0x1p-6f), power) * 0x1p-3f;
    const Floats shift = step * 12582912.0f;
    return (lanes + shift) - shift;
}

static inline Floats nearest_int8(Floats lanes) {
    for (int i = 0; i < LANES; ++i) lanes[i] = std::floor(lanes[i] + 0.5f);
    return lanes;
}

// What a row's codes stand for, as formats/scaling.py finds them.
static void round_inputs(float* row, int64_t size, int64_t group, int inputs) {
    const float limit = inputs == INT8 ? 127.0f : 448.0f;
    for (int64_t start = 0; start < size; start += group) {
        const int64_t end = std::min(size, start + group);
        Floats most = {};
        for (int64_t i = start; i < end; i += LANES) {
            const Floats lanes = magnitude(load(row + i, lanes_left(end, i)));
            most = pick(lanes > most, lanes, most);
        }
        const float scale = std::max(largest(most), 1e-10f) * (1.0f / limit);
        for (int64_t i = start; i < end; i += LANES) {
            const int count = lanes_left(end, i);
            Floats lanes = load(row + i, count) / scale;
            lanes = inputs == INT8 ? nearest_int8(lanes) : nearest_fp8(lanes);
            lanes = pick(lanes > fill(limit), fill(limit), lanes);
            lanes = pick(lanes < fill(-limit), fill(-limit), lanes);
            store(row + i, lanes * scale, count);
        }
    }
}

static void order_as_packed(float* row, int64_t size) {
    float piece[PIECE];
    for (int64_t start = 0; start < size; start += PIECE) {
        std::memcpy(piece, row + start, sizeof(piece));
        for (int64_t i = 0; i < 4; ++i) {
            for (int64_t j = 0; j < 4; ++j) {
                row[start + 4 * i + j] = piece[8 * j + i];
                row[start + LANES + 4 * i + j] = piece[8 * j + i + 4];
            }
        }
    }
}

template <class T>
static void prepare_row(const Linear<T>& of, int64_t row, bool packed, float* prepared) {
    float* to = prepared + row * of.padded;
    const T* from = of.x + row * of.x_stride;
    const float scale = of.norm ? inverse_rms(from, of.depth, of.eps) : 1.0f;
    for (int64_t i = 0; i < of.padded; i += LANES) {
        const int count = lanes_left(of.depth, i);
        Floats lanes = load(from + i, count);
        if (of.norm) lanes = lanes * scale * (load(of.norm + i, count) + of.offset);
        store(to + i, lanes);
    }
    if (of.inputs) round_inputs(to, of.depth, of.input_group, of.inputs);
    if (packed) order_as_packed(to, of.depth);
}

// --- weights -------------------------------------------------------------------------------------

// Sixteen of a group's values from their 4-bit codes, which may have other bits above them.
struct Values {
#if defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__)
    Floats table;  // all sixteen that there are: one instruction finds each lane's
    Values(float scale, float zero) {
        const Floats codes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        table = (codes - zero) * scale;
    }
    Floats of(Unsigned codes) const { return __builtin_shuffle(table, same_bits<Words>(codes)); }
#else
    float scale, zero;
    Values(float scale, float zero) : scale(scale), zero(zero) {}
    Floats of(Unsigned codes) const {
        return (converted<Floats>(same_bits<Words>(codes & 15)) - zero) * scale;
    }
#endif
};

inline const char* row_of(const Int4* weight, int64_t output, int64_t depth) {
    return reinterpret_cast<const char*>(weight) + output * (depth / 2);
}
template <class W>
inline const char* row_of(const W* weight, int64_t output, int64_t depth) {
    return reinterpret_cast<const char*>(weight + output * depth);
}

// Two rows of the weight with R rows of x, PIECES of codes in a group. `sums` has a column for each.
template <int R, int PIECES, bool ZEROS, class S>
static void two_of_groups(const Int4* weight, const Scales<S>& scales, const int64_t* outputs,
                          const float* x, int64_t depth, int64_t x_stride, float (*sums)[2]) {
    const char* codes[2] = {row_of(weight, outputs[0], depth), row_of(weight, outputs[1], depth)};
    int64_t places[2] = {scales.first(outputs[0]), scales.first(outputs[1])};
    Floats low[R][2] = {}, high[R][2] = {};
    for (int64_t start = 0; start < depth; start += PIECES * PIECE) {
        for (int which = 0; which < 2; ++which) {
            const int64_t place = places[which];
            const Values values(read(scales.values + place), ZEROS ? scales.zeros[place] : 8.0f);
            places[which] += scales.group_stride;
            const char* from = codes[which] + start / 2;
            __builtin_prefetch(from + AHEAD);
#pragma GCC unroll 4
            for (int piece = 0; piece < PIECES; ++piece) {
                UnsignedBytes bytes;
                std::memcpy(&bytes, from + piece * LANES, sizeof(bytes));
                const Unsigned wide = widen(bytes);
                const Floats lower = values.of(wide), upper = values.of(wide >> 4);
                for (int row = 0; row < R; ++row) {
                    const float* meets = x + row * x_stride + start + piece * PIECE;
                    low[row][which] += lower * load(meets);
                    high[row][which] += upper * load(meets + LANES);
                }
            }
        }
    }
    for (int row = 0; row < R; ++row) {
        for (int which = 0; which < 2; ++which) {
            sums[row][which] = sum(low[row][which] + high[row][which]);
        }
    }
}

template <int R, int PIECES, class S, class... More>
static void two_with_zeros(const Int4* weight, const Scales<S>& scales, More... more) {
    if (scales.zeros) return two_of_groups<R, PIECES, true>(weight, scales, more...);
    two_of_groups<R, PIECES, false>(weight, scales, more...);
}

template <int R, class S, class... More>
static void two_of_int4(const Int4* weight, const Scales<S>& scales, More... more) {
    if (scales.group == 4 * PIECE) return two_with_zeros<R, 4>(weight, scales, more...);
    if (scales.group == 2 * PIECE) return two_with_zeros<R, 2>(weight, scales, more...);
    two_with_zeros<R, 1>(weight, scales, more...);
}

template <int R, class S, class W>
static void two_outputs(const W* weight, const Scales<S>& scales, const int64_t* outputs,
                        const float* x, int64_t depth, int64_t x_stride, float (*sums)[2]) {
    const W* codes[2] = {weight + outputs[0] * depth, weight + outputs[1] * depth};
    Floats total[R][2] = {};
    int64_t places[2] = {scales.first(outputs[0]), scales.first(outputs[1])};
    for (int64_t start = 0; start < depth; start += scales.group) {
        const int64_t end = std::min(depth, start + scales.group);
        Floats even[R][2] = {}, odd[R][2] = {};
        int64_t i = start;
        for (; i + 2 * LANES <= end; i += 2 * LANES) {
            for (int which = 0; which < 2; ++which) {
                __builtin_prefetch(reinterpret_cast<const char*>(codes[which] + i) + AHEAD);
                const Floats first = load(codes[which] + i), second = load(codes[which] + i + LANES);
                for (int row = 0; row < R; ++row) {
                    even[row][which] += first * load(x + row * x_stride + i);
                    odd[row][which] += second * load(x + row * x_stride + i + LANES);
                }
            }
        }
        for (; i < end; i += LANES) {
            for (int which = 0; which < 2; ++which) {
                const Floats last = load(codes[which] + i, lanes_left(end, i));
                for (int row = 0; row < R; ++row) {
                    even[row][which] += last * load(x + row * x_stride + i);
                }
            }
        }
        for (int which = 0; which < 2; ++which) {
            const float scale = read(scales.values + places[which]);
            places[which] += scales.group_stride;
            for (int row = 0; row < R; ++row) {
                total[row][which] += (even[row][which] + odd[row][which]) * scale;
            }
        }
    }
    for (int row = 0; row < R; ++row) {
        for (int which = 0; which < 2; ++which) sums[row][which] = sum(total[row][which]);
    }
}

// --- products ------------------------------------------------------------------------------------

// What stands behind a product: `up` is its other half, where there is an activation.
template <class T>
static void finish(const Linear<T>& of, Floats lanes, Floats up, int64_t row, int64_t column,
                   int count) {
    if (of.bias) lanes += load(of.bias + column, count);
    if (of.activation) {
        if (of.bias) up += load(of.bias + of.columns + column, count);
        lanes = activate(lanes, of.activation) * up;
    }
    if (of.residual) lanes += load(of.residual + row * of.residual_stride + column, count);
    store(of.out + row * of.columns + column, lanes, count);
}

// Sixteen columns from `column` on, of R rows from `row` on.
template <int R, class T, class W, class S>
static void block(const Linear<T>& of, const W* weight, const Scales<S>& scales, const float* x,
                  int64_t row, int64_t column) {
    alignas(64) float own[R][SIDE], up[R][SIDE];
    float sums[R][2];
    const int count = lanes_left(of.columns, column);
    const float* rows = x + row * of.padded;
    for (int i = 0; i < count; i += of.activation ? 1 : 2) {
        const int64_t other = i + 1 < count ? column + i + 1 : column + i;
        const int64_t outputs[2] = {column + i, of.activation ? of.columns + column + i : other};
        if constexpr (std::is_same_v<W, Int4>) {
            two_of_int4<R>(weight, scales, outputs, rows, of.depth, of.padded, sums);
        } else {
            two_outputs<R>(weight, scales, outputs, rows, of.depth, of.padded, sums);
        }
        for (int r = 0; r < R; ++r) {
            own[r][i] = sums[r][0];
            if (of.activation) {
                up[r][i] = sums[r][1];
            } else if (i + 1 < count) {
                own[r][i + 1] = sums[r][1];
            }
        }
    }
    for (int r = 0; r < R; ++r) {
        finish(of, load(own[r], count), load(up[r], count), row + r, column, count);
    }
}

#ifdef RIDGELINE_DIGITS
// Rows of x in digits: `size` chunks each, then what their groups add up to, `groups` numbers each.
struct DigitRows {
    Digits* chunks;
    float* sums;
    int64_t size, groups;

    // Of the group that a piece belongs to.
    float scale(int64_t row, int64_t piece) const {
        return chunks[row * size + piece / CHUNK_PIECES].scale[piece % CHUNK_PIECES * 4];
    }
    static int64_t floats(int64_t rows, int64_t size, int64_t groups) {
        return rows * (size * static_cast<int64_t>(sizeof(Digits) / sizeof(float)) + groups);
    }
};

template <class T>
static void prepare_digits(const Linear<T>& of, int64_t row, int64_t group, const DigitRows& to) {
    Linear<T> alone = of;
    alone.x += row * of.x_stride;
    float* floats = room<1>(of.padded);
    prepare_row(alone, 0, true, floats);
    find_digits(floats, of.depth, group, to.chunks + row * to.size, to.sums + row * to.groups);
}

static const uint8_t* bytes_of(const Int4* weight, int64_t output, int64_t depth) {
    return reinterpret_cast<const uint8_t*>(row_of(weight, output, depth));
}

// Sixteen outputs from `first` on, of R rows from `row` on.
template <int R, int PIECES, class S>
static void sixteen(const Int4* weight, const Scales<S>& scales, const DigitRows& x, int64_t row,
                    int64_t first, int count, int64_t depth, Floats* results) {
    const int64_t groups = depth / (PIECES * PIECE);
    float* table = room<2>((groups + CHUNK_PIECES) * LANES);
    Floats taken[R] = {};  // by the zero points
    for (int64_t group = 0; group < groups; ++group) {
        const int64_t at = first + group * scales.group_stride;
        const Floats scale = load(scales.values + at, count);
        store(table + group * LANES, R > 1 ? scale : scale * x.scale(row, group * PIECES));
        UnsignedBytes zeros = UnsignedBytes{} + 8;
        if (scales.zeros) std::memcpy(&zeros, scales.zeros + at, count);
        const Floats scaled = scale * converted<Floats>(same_bits<Words>(widen(zeros)));
        for (int r = 0; r < R; ++r) taken[r] += scaled * x.sums[(row + r) * x.groups + group];
    }
    std::memset(table + groups * LANES, 0, CHUNK_PIECES * LANES * sizeof(float));
    __m512 totals[R * LANES] = {};
    const Digits* rows = x.chunks + row * x.size;
    int i = 0;
    for (; i + 2 <= count; i += 2) {
        digit_sums<R, 2, PIECES>(bytes_of(weight, first + i, depth), table + i, rows, x.size, depth,
                                 AHEAD, totals + i);
    }
    if (i < count) {
        digit_sums<R, 1, PIECES>(bytes_of(weight, first + i, depth), table + i, rows, x.size, depth,
                                 AHEAD, totals + i);
    }
    for (int r = 0; r < R; ++r) results[r] = added_up(totals + r * LANES) - taken[r];
}

template <int R, class S, class... More>
static void sixteen_of(const Int4* weight, const Scales<S>& scales, More... more) {
    if (scales.group == 4 * PIECE) return sixteen<R, 4>(weight, scales, more...);
    if (scales.group == 2 * PIECE) return sixteen<R, 2>(weight, scales, more...);
    sixteen<R, 1>(weight, scales, more...);
}

template <int R, class T, class S>
static void digit_block(const Linear<T>& of, const Int4* weight, const Scales<S>& scales,
                        const DigitRows& x, int64_t row, int64_t column) {
    const int count = lanes_left(of.columns, column);
    Floats own[R], up[R] = {};
    sixteen_of<R>(weight, scales, x, row, column, count, of.depth, own);
    if (of.activation) {
        sixteen_of<R>(weight, scales, x, row, of.columns + column, count, of.depth, up);
    }
    for (int r = 0; r < R; ++r) finish(of, own[r], up[r], row + r, column, count);
}

template <class T, class S>
static void multiply_digits(const Linear<T>& of, const Int4* weight, const Scales<S>& scales,
                            int threads) {
    const int64_t num_items = (of.columns + SIDE - 1) / SIDE;
    const int64_t at_once = std::max<int64_t>(1, num_items / (threads * 8));
    const int64_t size = num_chunks(of.depth), groups = of.depth / scales.group;
    const bool alone = of.rows <= FEW_ROWS;
    const int64_t floats = DigitRows::floats(of.rows, size, groups);
    float* shared = alone ? nullptr : room(floats);
#pragma omp parallel num_threads(threads)
    {
        float* memory = alone ? room(floats) : shared;
        Digits* chunks = reinterpret_cast<Digits*>(memory);
        const DigitRows x = {chunks, reinterpret_cast<float*>(chunks + of.rows * size), size, groups};
        if (alone) {
            for (int64_t row = 0; row < of.rows; ++row) prepare_digits(of, row, scales.group, x);
        } else {
#pragma omp for schedule(static)
            for (int64_t row = 0; row < of.rows; ++row) prepare_digits(of, row, scales.group, x);
        }
#pragma omp for schedule(dynamic, at_once) nowait
        for (int64_t item = 0; item < num_items; ++item) {
            int64_t row = 0;
            for (; row + 4 <= of.rows; row += 4) {
                digit_block<4>(of, weight, scales, x, row, item * SIDE);
            }
            if (row + 2 <= of.rows) {
                digit_block<2>(of, weight, scales, x, row, item * SIDE);
                row += 2;
            }
            if (row < of.rows) digit_block<1>(of, weight, scales, x, row, item * SIDE);
        }
    }
}
#endif

template <class T, class W, class S>
static void multiply(const Linear<T>& of, const W* weight, const Scales<S>& scales, int threads) {
    constexpr bool packed = std::is_same_v<W, Int4>;
#ifdef RIDGELINE_DIGITS
    if constexpr (packed && std::is_same_v<T, Bf16>) {  // fp16 has more bits, fp32 far more
        return multiply_digits(of, weight, scales, threads);
    }
#endif
    const int64_t num_items = (of.columns + SIDE - 1) / SIDE;
    const int64_t at_once = std::max<int64_t>(1, num_items / (threads * 8));
    const bool alone = of.rows <= FEW_ROWS;
    float* shared = alone ? nullptr : room(of.rows * of.padded);
#pragma omp parallel num_threads(threads)
    {
        float* x = alone ? room(of.rows * of.padded) : shared;
        if (alone) {
            for (int64_t row = 0; row < of.rows; ++row) prepare_row(of, row, packed, x);
        } else {
#pragma omp for schedule(static)
            for (int64_t row = 0; row < of.rows; ++row) prepare_row(of, row, packed, x);
        }
#pragma omp for schedule(dynamic, at_once) nowait
        for (int64_t item = 0; item < num_items; ++item) {
            int64_t row = 0;
            for (; row + 4 <= of.rows; row += 4) {
                block<4>(of, weight, scales, x, row, item * SIDE);
            }
            if (row + 2 <= of.rows) {
                block<2>(of, weight, scales, x, row, item * SIDE);
                row += 2;
            }
            if (row < of.rows) block<1>(of, weight, scales, x, row, item * SIDE);
        }
    }
}

// --- weights for products of many rows -----------------------------------------------------------

template <class T, class S>
static void expand_row(const Int4* weight, const Scales<S>& scales, int64_t output, int64_t depth,
                       T* out) {
    const char* codes = row_of(weight, output, depth);
    float piece[PIECE], ordered[PIECE];
    for (int64_t start = 0; start < depth; start += PIECE) {
        const int64_t at = scales.first(output) + start / scales.group * scales.group_stride;
        const Values values(read(scales.values + at), scales.zeros ? scales.zeros[at] : 8.0f);
        UnsignedBytes bytes;
        std::memcpy(&bytes, codes + start / 2, sizeof(bytes));
        const Unsigned wide = widen(bytes);
        store(piece, values.of(wide));
        store(piece + LANES, values.of(wide >> 4));
        for (int i = 0; i < 4; ++i) {
            for (int j = 0; j < 4; ++j) {
                ordered[8 * j + i] = piece[4 * i + j];
                ordered[8 * j + i + 4] = piece[LANES + 4 * i + j];
            }
        }
        store(out + start, load(ordered));
        store(out + start + LANES, load(ordered + LANES));
    }
}

template <class T, class W, class S>
static void expand_row(const W* weight, const Scales<S>& scales, int64_t output, int64_t depth,
                       T* out) {
    const W* codes = weight + output * depth;
    for (int64_t start = 0; start < depth; start += scales.group) {
        const int64_t end = std::min(depth, start + scales.group);
        const int64_t at = scales.first(output) + start / scales.group * scales.group_stride;
        const float scale = read(scales.values + at);
        for (int64_t i = start; i < end; i += LANES) {
            const int count = lanes_left(end, i);
            store(out + i, load(codes + i, count) * scale, count);
        }
    }
}

template <class T, class W, class S>
static void expand(const W* weight, const Scales<S>& scales, int64_t outputs, int64_t depth, T* out,
                   int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t output = 0; output < outputs; ++output) {
        expand_row(weight, scales, output, depth, out + output * depth);
    }
}

// What does not change from call to call, as cpu.py lays it out.
struct Fixed {
    const void *weight, *scale, *zeros, *bias, *norm;
    int64_t scale_rows, output_stride, group_stride, group, input_group, depth, outputs;
    float eps, offset;
    int inputs, activation;

    template <class S>
    Scales<S> scales() const {
        return {static_cast<const S*>(scale), static_cast<const uint8_t*>(zeros), scale_rows,
                output_stride, group_stride, group};
    }
};

template <class T>
static Linear<T> linear(const Fixed& fixed, const void* x, int64_t x_stride, const void* residual,
                        int64_t residual_stride, void* out, int64_t rows) {
    const int64_t columns = fixed.activation ? fixed.outputs / 2 : fixed.outputs;
    const int64_t padded = (fixed.depth + LANES - 1) / LANES * LANES;
    return {static_cast<const T*>(x), x_stride, static_cast<const T*>(fixed.bias),
            static_cast<const T*>(residual), residual_stride, static_cast<const T*>(fixed.norm),
            fixed.eps, fixed.offset, fixed.inputs, fixed.input_group, fixed.activation,
            static_cast<T*>(out), rows, fixed.depth, columns, padded};
}

// Scales of 4-bit groups are of x's type, others fp32.
#define EXPORT(name, T, W, S)                                                                     \
    extern "C" void ridgeline_quantized_linear_##name(                                            \
        const void* fixed, const void* x, int64_t x_stride, const void* residual,                 \
        int64_t residual_stride, void* out, int64_t rows, int threads) {                          \
        const Fixed& is = *static_cast<const Fixed*>(fixed);                                      \
        multiply(linear<T>(is, x, x_stride, residual, residual_stride, out, rows),                \
                 static_cast<const W*>(is.weight), is.scales<S>(), threads);                      \
    }                                                                                             \
    extern "C" void ridgeline_quantized_linear_expand_##name(const void* fixed, void* out,        \
                                                             int threads) {                       \
        const Fixed& is = *static_cast<const Fixed*>(fixed);                                      \
        expand(static_cast<const W*>(is.weight), is.scales<S>(), is.outputs, is.depth,            \
               static_cast<T*>(out), threads);                                                    \
    }

#define EXPORT_ALL(name, T)              \
    EXPORT(int4_##name, T, Int4, T)      \
    EXPORT(int8_##name, T, int8_t, float) \
    EXPORT(fp8_##name, T, Fp8, float)

EXPORT_ALL(bf16, Bf16)
EXPORT_ALL(fp16, Fp16)
EXPORT_ALL(fp32, float)
