// Products of few rows with weights of 16 or 32 bits on a CPU: norm, bias, activation and residual
// folded in, each rounded where rms_norm and skinny_linear's reference do. In tiles where the
// processor has them and the weight is bf16 (tiles.h), else in fp32 registers: several outputs with
// several rows at once, so that what is loaded is used more than once.
#include "../few_rows.h"
#include "tiles.h"

using namespace ridgeline;

static inline Register load_register(const float* from) {
    Register lanes;
    std::memcpy(&lanes, from, sizeof(lanes));
    return lanes;
}
#ifdef __ARM_NEON
static inline Register load_register(const Bf16* from) {
    const uint16x4_t bits = vld1_u16(reinterpret_cast<const uint16_t*>(from));
    return vreinterpretq_f32_u32(vshll_n_u16(bits, 16));
}
static inline Register load_register(const Fp16* from) { return vcvt_f32_f16(vld1_f16(from)); }
#else
static inline Register load_register(const Bf16* from) {
    using Bits __attribute__((vector_size(WIDTH * sizeof(uint16_t)))) = uint16_t;
    using Wide __attribute__((vector_size(WIDTH * sizeof(uint32_t)))) = uint32_t;
    Bits bits;
    std::memcpy(&bits, from, sizeof(bits));
    return same_bits<Register>(__builtin_convertvector(bits, Wide) << 16);
}
static inline Register load_register(const Fp16* from) {
    using Some __attribute__((vector_size(WIDTH * sizeof(Fp16)))) = Fp16;
    Some some;
    std::memcpy(&some, from, sizeof(some));
    return __builtin_convertvector(some, Register);
}
#endif

// How R rows are multiplied: with so many outputs at once, each of their sums in so many parts. One
// row is a matter of memory, which gives most where it is read in order; with more, what is loaded
// has to be used more than once.
template <int R>
struct Way {
    static constexpr int OUTPUTS = R > 2 ? 4 : 1, PARTS = R == 1 ? 8 : R == 2 ? 4 : 1;
};
constexpr int64_t BYTES_AHEAD = 1024;  // asked for before they are needed

// O neighbouring outputs with R rows of x, which lie `stride` apart. Loops over sums are unrolled
// all the way: a sum whose place is not known when compiling is no register.
template <int R, int O, int PARTS>
struct Sums {
    Register own[R][O][PARTS] = {};

    template <class Load>
    inline void add(Load load, const float* x, int64_t stride, int part) {
        Register rows[R];
#pragma GCC unroll 8
        for (int row = 0; row < R; ++row) rows[row] = load_register(x + row * stride);
#pragma GCC unroll 8
        for (int output = 0; output < O; ++output) {
            const Register lanes = load(output);
#pragma GCC unroll 8
            for (int row = 0; row < R; ++row) own[row][output][part] += lanes * rows[row];
        }
    }
};

template <int R, int O, int PARTS, class W>
static inline void outputs(const W* weight, const float* x, int64_t stride, int64_t depth,
                           float* sums) {
    constexpr int STEP = PARTS * WIDTH;
    Sums<R, O, PARTS> found;
    int64_t i = 0;
    for (; i + STEP <= depth; i += STEP) {
        if (STEP * sizeof(W) >= 64 || i % (64 / sizeof(W)) == 0) {
#pragma GCC unroll 8
            for (int output = 0; output < O; ++output) {
                const W* from = weight + output * depth + i;
                __builtin_prefetch(reinterpret_cast<const char*>(from) + BYTES_AHEAD);
            }
        }
#pragma GCC unroll 8
        for (int part = 0; part < PARTS; ++part) {
            const int64_t j = i + part * WIDTH;
            auto load = [&](int output) { return load_register(weight + output * depth + j); };
            found.add(load, x + j, stride, part);
        }
    }
    for (; i < depth; i += WIDTH) {
        const int64_t count = std::min<int64_t>(WIDTH, depth - i);
        auto load = [&](int output) {
            W some[WIDTH] = {};
            std::memcpy(some, weight + output * depth + i, count * sizeof(W));
            return load_register(some);
        };
        found.add(load, x + i, stride, 0);
    }
#pragma GCC unroll 8
    for (int row = 0; row < R; ++row) {
#pragma GCC unroll 8
        for (int output = 0; output < O; ++output) {
            Register all = found.own[row][output][0];
#pragma GCC unroll 8
            for (int part = 1; part < PARTS; ++part) all += found.own[row][output][part];
            sums[row * SIDE + output] = added(all);
        }
    }
}

// Sixteen outputs, or fewer.
template <int R, class W>
static void sixteen(const W* weight, const float* x, int64_t stride, int64_t depth, int count,
                    float* sums) {
    constexpr int O = Way<R>::OUTPUTS, PARTS = Way<R>::PARTS;
    int output = 0;
    for (; output + O <= count; output += O) {
        outputs<R, O, PARTS>(weight + output * depth, x, stride, depth, sums + output);
    }
    for (; output < count; ++output) {
        outputs<R, 1, PARTS>(weight + output * depth, x, stride, depth, sums + output);
    }
}

template <int R, class T>
static void block(const Linear<T>& of, const T* weight, const float* x, int64_t row,
                  int64_t column) {
    alignas(64) float own[R][SIDE], up[R][SIDE];
    const int count = lanes_left(of.columns, column);
    const float* rows = x + row * of.padded();
    sixteen<R>(weight + column * of.depth, rows, of.padded(), of.depth, count, own[0]);
    if (of.activation) {
        const T* other = weight + (of.columns + column) * of.depth;
        sixteen<R>(other, rows, of.padded(), of.depth, count, up[0]);
    }
    for (int r = 0; r < R; ++r) {
        finish(of, load(own[r], count), load(up[r], count), row + r, column, count);
    }
}

// A normed row, rounded as rms_norm leaves it.
template <class T>
static void rounded_row(const Linear<T>& of, int64_t row, float* to) {
    norm_row(of, row, to);
    if (!of.norm || sizeof(T) == sizeof(float)) return;
    T some[LANES];
    for (int64_t i = 0; i < of.padded(); i += LANES) {
        store(some, load(to + i));
        store(to + i, load(some));
    }
}

template <class T>
static void multiply(const Linear<T>& of, const T* weight, int threads) {
    const int64_t stride = of.padded();
    auto prepare = [&](int64_t row, float* x) { rounded_row(of, row, x + row * stride); };
    auto columns = [&](float* x, int64_t column) {
        int64_t row = 0;
        for (; row + 4 <= of.rows; row += 4) block<4>(of, weight, x, row, column);
        for (; row + 2 <= of.rows; row += 2) block<2>(of, weight, x, row, column);
        if (row < of.rows) block<1>(of, weight, x, row, column);
    };
    in_blocks(of, threads, of.rows * stride, prepare, columns);
}

// Whether bf16 weights go through tiles: the system gives them to a process that asks.
extern "C" int ridgeline_skinny_linear_tiles() {
#ifdef RIDGELINE_TILES
    static const bool given = tiles::are_given();
    return given;
#else
    return 0;
#endif
}

#define EXPORT(name, T, MULTIPLY)                                                                 \
    extern "C" void ridgeline_skinny_linear_##name(                                               \
        const void* x, int64_t x_stride, const void* weight, const void* bias,                    \
        const void* residual, int64_t residual_stride, const void* norm, float eps, float offset, \
        int activation, void* out, int64_t rows, int64_t depth, int64_t columns, int threads) {   \
        const Linear<T> of = {static_cast<const T*>(x), x_stride, static_cast<const T*>(bias),    \
                              static_cast<const T*>(residual), residual_stride,                   \
                              static_cast<const T*>(norm), eps, offset, activation,               \
                              static_cast<T*>(out), rows, depth, columns};                        \
        MULTIPLY(of, static_cast<const T*>(weight), threads);                                     \
    }

#ifdef RIDGELINE_TILES
static void multiply_tiles(const Linear<Bf16>& of, const Bf16* weight, int threads) {
    tiles::multiply({of, weight}, threads);
}
EXPORT(tiles_bf16, Bf16, multiply_tiles)
#endif
EXPORT(bf16, Bf16, multiply)
EXPORT(fp16, Fp16, multiply)
EXPORT(fp32, float, multiply)
