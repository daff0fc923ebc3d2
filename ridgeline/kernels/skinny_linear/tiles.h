// Products with bf16 weights on a CPU with AMX tiles (Intel since Sapphire Rapids): norm, bias,
// activation and residual folded in, each rounded where rms_norm and skinny_linear's reference do.
//
// A tile product multiplies sixteen rows of one matrix, as they lie in memory, with sixteen columns
// of another whose pairs of rows are interleaved. The weight is the one taken as it lies, so it is
// read once, in order, and needs no packed copy; x, which is small, is normed and interleaved first.
// What comes out is transposed, sixteen by sixteen, on its way to the result.
#pragma once

#include "../few_rows.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#define RIDGELINE_TILES 1

namespace ridgeline::tiles {

constexpr int64_t DEPTH = 32;         // bf16 numbers in a row of a tile; its result is SIDE by SIDE
constexpr int64_t TILE = SIDE * DEPTH;
constexpr int64_t INTERLEAVED_ALONE = 32;  // rows: each thread does it itself, sooner than waiting

struct Product : Linear<Bf16> {
    const Bf16* weight;  // [O, D]
};

struct alignas(64) TileConfig {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

static Bf16* tile_room(int64_t count) {
    return reinterpret_cast<Bf16*>(room((count + 1) / 2));
}

// x's rows, normed, as tiles: [block of 16 rows][block of 32 columns][16 pairs][16 rows][2].
static void interleave_row(const Product& of, int64_t row, Bf16* packed) {
    const int64_t num_depths = of.depth / DEPTH;
    Bf16* to = packed + row / SIDE * num_depths * TILE + row % SIDE * 2;
    if (row >= of.rows) {
        for (int64_t i = 0; i < of.depth; i += 2) std::memset(to + i * SIDE, 0, 4);
        return;
    }
    const Bf16* from = of.x + row * of.x_stride;
    const float scale = of.norm ? inverse_rms(from, of.depth, of.eps) : 1.0f;
    for (int64_t i = 0; i < of.depth; i += LANES) {
        Bf16 lanes[LANES];
        if (of.norm) {
            store(lanes, load(from + i) * scale * (load(of.norm + i) + of.offset));
        } else {
            std::memcpy(lanes, from + i, sizeof(lanes));
        }
        for (int64_t j = 0; j < LANES; j += 2) std::memcpy(to + (i + j) * SIDE, lanes + j, 4);
    }
}

static inline void transpose(__m512* rows) {
    __m512 a[16], b[16];
    for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
        a[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        for (int j = 0; j < 2; ++j) {
            const __m512d low = _mm512_castps_pd(a[i + j]), high = _mm512_castps_pd(a[i + j + 2]);
            b[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
            b[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
        }
    }
    for (int i = 0; i < 4; ++i) {
        a[i] = _mm512_shuffle_f32x4(b[i], b[i + 4], 0x88);
        a[i + 4] = _mm512_shuffle_f32x4(b[i], b[i + 4], 0xdd);
        a[i + 8] = _mm512_shuffle_f32x4(b[i + 8], b[i + 12], 0x88);
        a[i + 12] = _mm512_shuffle_f32x4(b[i + 8], b[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; ++i) {
        rows[i] = _mm512_shuffle_f32x4(a[i], a[i + 8], 0x88);
        rows[i + 8] = _mm512_shuffle_f32x4(a[i], a[i + 8], 0xdd);
        rows[i + 4] = _mm512_shuffle_f32x4(a[i + 4], a[i + 12], 0x88);
        rows[i + 12] = _mm512_shuffle_f32x4(a[i + 4], a[i + 12], 0xdd);
    }
}

// Sixteen columns from `column` on of sixteen rows from `row` on: what was summed for them, as it
// lies in tiles ([column][row]), finished and written.
static void finish(const Product& of, float* sums, float* ups, int64_t row, int64_t column) {
    const int64_t count = std::min(SIDE, of.rows - row);
    __m512 own[16], up[16];
    std::memcpy(own, sums, sizeof(own));
    transpose(own);
    if (ups) {
        std::memcpy(up, ups, sizeof(up));
        transpose(up);
    }
    for (int64_t i = 0; i < count; ++i) {
        Floats lanes = same_bits<Floats>(own[i]);
        if (of.bias) lanes += load(of.bias + column);
        if (ups) {
            Floats second = same_bits<Floats>(up[i]);
            if (of.bias) second += load(of.bias + of.columns + column);
            lanes = activate(lanes, of.activation) * second;
        }
        if (of.residual) lanes += load(of.residual + (row + i) * of.residual_stride + column);
        const __m256bh rounded = _mm512_cvtneps_pbh(same_bits<__m512>(lanes));
        std::memcpy(of.out + (row + i) * of.columns + column, &rounded, sizeof(rounded));
    }
}

// Two blocks of sixteen weight rows with all of x. The two are neighbours, or a gate and its up.
static void two_blocks(const Product& of, const Bf16* packed, int64_t column, const Bf16* ahead) {
    const int64_t num_depths = of.depth / DEPTH, stride = of.depth * 2;
    const Bf16* first = of.weight + column * of.depth;
    const Bf16* second = first + (of.activation ? of.columns : SIDE) * of.depth;
    const bool both = of.activation || column + SIDE < of.columns;
    if (!both) second = first;
    alignas(64) float sums[4][SIDE * SIDE];
    for (int64_t row = 0; row < of.rows; row += 2 * SIDE) {
        const Bf16* x = packed + row * of.depth;
        const bool two = row + SIDE < of.rows;
        _tile_zero(0);
        _tile_zero(1);
        if (two) {
            _tile_zero(2);
            _tile_zero(3);
        }
        for (int64_t i = 0; i < num_depths; ++i) {
            _tile_loadd(4, first + i * DEPTH, stride);
            _tile_loadd(6, x + i * TILE, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(5, second + i * DEPTH, stride);
            _tile_dpbf16ps(1, 5, 6);
            if (two) {
                _tile_loadd(7, x + (num_depths + i) * TILE, 64);
                _tile_dpbf16ps(2, 4, 7);
                _tile_dpbf16ps(3, 5, 7);
            }
            if (row == 0 && ahead) {  // the next blocks, a part at each step
                const char* next = reinterpret_cast<const char*>(ahead + i * TILE);
                const char* other = next + (reinterpret_cast<const char*>(second) -
                                            reinterpret_cast<const char*>(first));
                for (int64_t line = 0; line < SIDE; ++line) {
                    _mm_prefetch(next + line * 64, _MM_HINT_T0);
                    _mm_prefetch(other + line * 64, _MM_HINT_T0);
                }
            }
        }
        for (int half = 0; half < (two ? 2 : 1); ++half) {
            if (half == 0) {
                _tile_stored(0, sums[0], 64);
                _tile_stored(1, sums[1], 64);
            } else {
                _tile_stored(2, sums[0], 64);
                _tile_stored(3, sums[1], 64);
            }
            const int64_t from = row + half * SIDE;
            finish(of, sums[0], of.activation ? sums[1] : nullptr, from, column);
            if (!of.activation && both) finish(of, sums[1], nullptr, from, column + SIDE);
        }
    }
}

// Whether tiles may be used: the system gives them to a process that asks.
static bool are_given() {
    constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

static void multiply(const Product& of, int threads) {
    const int64_t num_rows = (of.rows + SIDE - 1) / SIDE * SIDE;
    const int64_t step = of.activation ? SIDE : 2 * SIDE;
    const int64_t num_items = (of.columns + step - 1) / step;
    const int64_t at_once = std::max<int64_t>(1, num_items / (threads * 8));
    const bool alone = num_rows <= INTERLEAVED_ALONE;
    Bf16* shared = alone ? nullptr : tile_room(num_rows * of.depth);
#pragma omp parallel num_threads(threads)
    {
        Bf16* packed = alone ? tile_room(num_rows * of.depth) : shared;
        if (alone) {
            for (int64_t row = 0; row < num_rows; ++row) interleave_row(of, row, packed);
        } else {
#pragma omp for schedule(static)
            for (int64_t row = 0; row < num_rows; ++row) interleave_row(of, row, packed);
        }
        const TileConfig config;
        _tile_loadconfig(&config);
#pragma omp for schedule(dynamic, at_once) nowait
        for (int64_t item = 0; item < num_items; ++item) {
            const bool more = (item + 1) % at_once && (item + 2) * step <= of.columns;
            const Bf16* ahead = more ? of.weight + (item + 1) * step * of.depth : nullptr;
            two_blocks(of, packed, item * step, ahead);
        }
        _tile_release();
    }
}

}  // namespace ridgeline::tiles

#endif
