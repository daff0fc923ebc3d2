// Products of few rows of x with a weight that is read once, in order: what they share, whatever the
// weight's numbers are. x becomes fp32, normed, and what is made of it is the caller's; sixteen
// outputs are finished together, with bias, activation and residual.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <memory>

#include "host.h"

namespace ridgeline {

constexpr int64_t SIDE = LANES;  // outputs that are finished together
constexpr int64_t FEW_ROWS = 4;  // each thread prepares them for itself: sooner than waiting
constexpr int64_t AHEAD = 4096;  // bytes that are asked for before they are needed

template <class T>
struct Linear {
    const T* x;
    int64_t x_stride;
    const T* bias;  // or null
    const T* residual;
    int64_t residual_stride;
    const T* norm;
    float eps, offset;
    int activation;  // with one, the weight has twice as many rows as the result has columns
    T* out;
    int64_t rows, depth, columns;

    int64_t padded() const { return (depth + LANES - 1) / LANES * LANES; }  // in whole vectors
};

struct Freed {
    void operator()(float* memory) const { std::free(memory); }
};

// Memory of a thread's own, kept for the next product; `USE` tells apart what is held at once.
template <int USE = 0>
static float* room(int64_t count) {
    static thread_local std::unique_ptr<float, Freed> memory;
    static thread_local int64_t held = 0;
    if (held < count) {
        const int64_t bytes = (count * sizeof(float) + 63) / 64 * 64;
        memory.reset(static_cast<float*>(std::aligned_alloc(64, bytes)));
        held = count;
    }
    return memory.get();
}

// A row of x, normed, and filled up with zeros.
template <class T>
static void norm_row(const Linear<T>& of, int64_t row, float* to) {
    const T* from = of.x + row * of.x_stride;
    const float scale = of.norm ? inverse_rms(from, of.depth, of.eps) : 1.0f;
    for (int64_t i = 0; i < of.depth; i += LANES) {
        const int count = lanes_left(of.depth, i);
        Floats lanes = load(from + i, count);
        if (of.norm) lanes = lanes * scale * (load(of.norm + i, count) + of.offset);
        store(to + i, lanes);
    }
}

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

// `prepare(row, memory)` for each row, in memory of `floats` numbers that all threads see or each
// has for itself; then `block(memory, column)` for every sixteen columns.
template <class T, class Prepare, class Block>
static void in_blocks(const Linear<T>& of, int threads, int64_t floats, Prepare prepare,
                      Block block) {
    const int64_t num_items = (of.columns + SIDE - 1) / SIDE;
    const int64_t at_once = std::max<int64_t>(1, num_items / (threads * 8));
    const bool alone = of.rows <= FEW_ROWS;
    float* shared = alone ? nullptr : room(floats);
#pragma omp parallel num_threads(threads)
    {
        float* memory = alone ? room(floats) : shared;
        if (alone) {
            for (int64_t row = 0; row < of.rows; ++row) prepare(row, memory);
        } else {
#pragma omp for schedule(static)
            for (int64_t row = 0; row < of.rows; ++row) prepare(row, memory);
        }
#pragma omp for schedule(dynamic, at_once) nowait
        for (int64_t item = 0; item < num_items; ++item) block(memory, item * SIDE);
    }
}

}  // namespace ridgeline
