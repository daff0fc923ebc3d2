// Products of few rows with 4-bit groups, int8 or fp8 weights on a CPU: the codes are read once, in
// order, become fp32 lanes in registers and are multiplied there; x in bf16 meets 4-bit ones, and in
// bf16 or fp32 8-bit ones, in integers, where the processor can (digits.h). Norm, activation and
// residual are folded in; where a scheme has 8-bit inputs, x is rounded to its codes first.
//
// 4-bit codes lie as formats/packing.py says: byte 4i + j of a piece of 32 holds elements 8j + i and
// 8j + i + 4. x, which is small, is laid out the same way once, so no code has to move.
#include <type_traits>

#include "../few_rows.h"
#include "digits.h"

using namespace ridgeline;

constexpr int64_t PIECE = 32;  // 4-bit codes in 16 bytes
constexpr int ROWS_AT_ONCE = WHOLE_REGISTERS ? 4 : 2;  // whose sums stay in registers
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

// x is rounded to these codes, with a scale for each `group` columns.
struct InputCodes {
    int kind;
    int64_t group;
};

inline float read(const float* from) { return *from; }
inline float read(const Fp16* from) { return static_cast<float>(*from); }
inline float read(const Bf16* from) {
    return same_bits<float>(static_cast<uint32_t>(from->bits) << 16);
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
static void prepare_row(const Linear<T>& of, const InputCodes& codes, int64_t row, bool packed,
                        float* to) {
    norm_row(of, row, to);
    if (codes.kind) round_inputs(to, of.depth, codes.group, codes.kind);
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

// Sixteen columns from `column` on, of R rows from `row` on.
template <int R, class T, class W, class S>
static void block(const Linear<T>& of, const W* weight, const Scales<S>& scales, const float* x,
                  int64_t row, int64_t column) {
    alignas(64) float own[R][SIDE], up[R][SIDE];
    float sums[R][2];
    const int count = lanes_left(of.columns, column);
    const float* rows = x + row * of.padded();
    for (int i = 0; i < count; i += of.activation ? 1 : 2) {
        const int64_t other = i + 1 < count ? column + i + 1 : column + i;
        const int64_t outputs[2] = {column + i, of.activation ? of.columns + column + i : other};
        if constexpr (std::is_same_v<W, Int4>) {
            two_of_int4<R>(weight, scales, outputs, rows, of.depth, of.padded(), sums);
        } else {
            two_outputs<R>(weight, scales, outputs, rows, of.depth, of.padded(), sums);
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

// `run<R>(row)` for all rows, as many at a time as there are sums for.
template <int MOST, class Run>
static void by_rows(int64_t rows, Run run) {
    int64_t row = 0;
    for (; row + MOST <= rows; row += MOST) run(std::integral_constant<int, MOST>(), row);
    if (MOST > 2 && row + 2 <= rows) {
        run(std::integral_constant<int, 2>(), row);
        row += 2;
    }
    if (row < rows) run(std::integral_constant<int, 1>(), row);
}

#ifdef RIDGELINE_DIGITS
// Rows of digits that a row of x in T becomes: bf16 has 8 bits, fp32 24.
template <class T>
constexpr int PARTS = std::is_same_v<T, float> ? 2 : 1;

// Rows of digits: `size` chunks each, then what their groups add up to, `groups` numbers each.
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

// `packed`: in the order of 4-bit codes.
template <class T>
static void prepare_digits(const Linear<T>& of, const InputCodes& codes, int64_t row, bool packed,
                           int64_t group, const DigitRows& to) {
    float* floats = room<1>(of.padded());
    prepare_row(of, codes, row, packed, floats);
    for (int64_t own = row * PARTS<T>; own < (row + 1) * PARTS<T>; ++own) {
        find_digits(floats, of.depth, group, to.chunks + own * to.size, to.sums + own * to.groups);
    }
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
        __builtin_prefetch(scales.values + at + SIDE);  // a group's scales lie far from the last's
        const Floats scale = load(scales.values + at, count);
        store(table + group * LANES, R > 1 ? scale : scale * x.scale(row, group * PIECES));
        Floats scaled = scale * 8.0f;
        if (scales.zeros) {
            UnsignedBytes zeros = {};
            std::memcpy(&zeros, scales.zeros + at, count);
            scaled = scale * converted<Floats>(same_bits<Words>(widen(zeros)));
        }
        for (int r = 0; r < R; ++r) taken[r] += scaled * x.sums[(row + r) * x.groups + group];
    }
    std::memset(table + groups * LANES, 0, CHUNK_PIECES * LANES * sizeof(float));
    DigitSums totals[R * LANES] = {};
    const Digits* rows = x.chunks + row * x.size;
    constexpr int AT_ONCE = WHOLE_REGISTERS || R == 2 ? 2 : 1;
    int i = 0;
    for (; i + AT_ONCE <= count; i += AT_ONCE) {
        digit_sums<R, AT_ONCE, PIECES>(bytes_of(weight, first + i, depth), table + i, rows, x.size,
                                       depth, AHEAD, totals + i);
    }
    for (; i < count; ++i) {
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

#ifdef RIDGELINE_INT8_DIGITS
// Sixteen outputs whose codes have one scale each, or share one.
template <int R, class T>
static void digit_block(const Linear<T>& of, const int8_t* weight, const Scales<float>& scales,
                        const DigitRows& x, int64_t row, int64_t column) {
    constexpr int ROWS = R * PARTS<T>;  // of digits
    const int64_t first_row = row * PARTS<T>;
    const int count = lanes_left(of.columns, column);
    auto products = [&](int64_t first, Floats* results) {
        DigitSums totals[ROWS * LANES] = {};
        for (int i = 0; i < count; ++i) {
            const int8_t* codes = weight + (first + i) * of.depth;
            int8_sums<ROWS>(codes, x.chunks + first_row * x.size, x.size, of.depth, AHEAD, totals + i);
        }
        const float* values = scales.values + scales.first(first);
        const Floats scale = scales.output_stride ? load(values, count) : fill(*values);
        for (int r = 0; r < R; ++r) results[r] = Floats{};
        for (int r = 0; r < ROWS; ++r) {
            float above = 0.0f;
            for (int64_t g = 0; g < x.groups; ++g) above += x.sums[(first_row + r) * x.groups + g];
            results[r / PARTS<T>] += (added_up(totals + r * LANES) - CODES_ABOVE * above) * scale;
        }
    };
    Floats own[R], up[R] = {};
    products(column, own);
    if (of.activation) products(of.columns + column, up);
    for (int r = 0; r < R; ++r) finish(of, own[r], up[r], row + r, column, count);
}
#endif

template <class T, class W, class S>
static void multiply_digits(const Linear<T>& of, const InputCodes& codes, const W* weight,
                            const Scales<S>& scales, int threads) {
    constexpr bool packed = std::is_same_v<W, Int4>;
    const int64_t group = packed ? scales.group : CHUNK;  // of x that has a scale
    const int64_t size = num_chunks(of.depth), groups = (of.depth + group - 1) / group;
    const int64_t rows = of.rows * PARTS<T>;
    auto digits = [&](float* memory) {
        Digits* chunks = reinterpret_cast<Digits*>(memory);
        return DigitRows{chunks, reinterpret_cast<float*>(chunks + rows * size), size, groups};
    };
    auto prepare = [&](int64_t row, float* memory) {
        prepare_digits(of, codes, row, packed, group, digits(memory));
    };
    auto block = [&](float* memory, int64_t column) {
        by_rows<4 / PARTS<T>>(of.rows, [&](auto count, int64_t row) {
            digit_block<count()>(of, weight, scales, digits(memory), row, column);
        });
    };
    in_blocks(of, threads, DigitRows::floats(rows, size, groups), prepare, block);
}
#endif

template <class T, class W, class S>
static void multiply(const Linear<T>& of, const InputCodes& codes, const W* weight,
                     const Scales<S>& scales, int threads) {
    constexpr bool packed = std::is_same_v<W, Int4>;
#ifdef RIDGELINE_DIGITS
    if constexpr (packed && std::is_same_v<T, Bf16>) {  // fp16 has more bits, fp32 far more
        return multiply_digits(of, codes, weight, scales, threads);
    }
#endif
#ifdef RIDGELINE_INT8_DIGITS
    if constexpr (std::is_same_v<W, int8_t> && !std::is_same_v<T, Fp16>) {
        if (scales.group >= of.depth) return multiply_digits(of, codes, weight, scales, threads);
    }
#endif
    auto prepare = [&](int64_t row, float* x) {
        prepare_row(of, codes, row, packed, x + row * of.padded());
    };
    auto columns = [&](float* x, int64_t column) {
        by_rows<ROWS_AT_ONCE>(of.rows, [&](auto count, int64_t row) {
            block<count()>(of, weight, scales, x, row, column);
        });
    };
    in_blocks(of, threads, of.rows * of.padded(), prepare, columns);
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
    return {static_cast<const T*>(x), x_stride, static_cast<const T*>(fixed.bias),
            static_cast<const T*>(residual), residual_stride, static_cast<const T*>(fixed.norm),
            fixed.eps, fixed.offset, fixed.activation, static_cast<T*>(out), rows, fixed.depth,
            columns};
}

// Scales of 4-bit groups are of x's type, others fp32.
#define EXPORT(name, T, W, S)                                                                     \
    extern "C" void ridgeline_quantized_linear_##name(                                            \
        const void* fixed, const void* x, int64_t x_stride, const void* residual,                 \
        int64_t residual_stride, void* out, int64_t rows, int threads) {                          \
        const Fixed& is = *static_cast<const Fixed*>(fixed);                                      \
        multiply(linear<T>(is, x, x_stride, residual, residual_stride, out, rows),                \
                 InputCodes{is.inputs, is.input_group}, static_cast<const W*>(is.weight),         \
                 is.scales<S>(), threads);                                                        \
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
