// Products with GGUF's blocks as they are (panels.h), for any number of rows: x becomes 8-bit codes
// once, each thread takes panels as it gets to them, and a panel meets all rows before the next one.
// Codes of the sums are exact; they are scaled, block by block, in fp32, in the same order whatever
// else is in the batch.
#include <atomic>
#include <type_traits>

#include "../few_rows.h"
#include "pack.h"

using namespace ridgeline;

// What a product is besides its matrix; as cpu.py lays it out.
struct Product {
    const Matrix* matrix;
    const float* norm;  // of x before it, or null
    float eps, offset;
    int32_t activation;  // with one, the second half of the outputs is multiplied onto it
};

static void finish_panel(const Product& is, int64_t panel, const CodedRows& x, int64_t row,
                         int64_t count, int64_t columns, bool cold, const float* residual,
                         int64_t residual_stride, float* out) {
    Floats own[ROW_CHUNK], up[ROW_CHUNK];
    const int64_t column = panel * LANES;
    const int width = lanes_left(columns, column);
    is.matrix->multiply(panel, x, row, count, cold, own);
    if (is.activation) {
        is.matrix->multiply(panel + columns / LANES, x, row, count, cold, up);
    }
    for (int64_t r = 0; r < count; ++r) {
        Floats lanes = is.activation ? activate(own[r], is.activation) * up[r] : own[r];
        if (residual) lanes += load(residual + (row + r) * residual_stride + column, width);
        store(out + (row + r) * columns + column, lanes, width);
    }
}

extern "C" void ridgeline_block_linear_multiply(const void* product, const float* x,
                                                int64_t x_stride, const float* residual,
                                                int64_t residual_stride, float* out, int64_t rows,
                                                int threads) {
    const Product& is = *static_cast<const Product*>(product);
    const Matrix& matrix = *is.matrix;
    const int64_t columns = is.activation ? matrix.outputs / 2 : matrix.outputs;
    const int64_t panels = (columns + LANES - 1) / LANES;
    const Linear<float> of = {x, x_stride, nullptr, nullptr, 0, is.norm, is.eps, is.offset,
                              0, out, rows, matrix.depth, columns};
    CodedRows coded = {nullptr, matrix.depth, matrix.digits(), rows};
    coded.memory = reinterpret_cast<uint8_t*>(room<0>(coded.bytes() / sizeof(float)));
    const bool cold = rows <= 4;
    std::atomic<int64_t> next = 0;
    const int64_t at_once = std::max<int64_t>(1, panels / (threads * 16));
#pragma omp parallel num_threads(threads)
    {
        float* row_memory = room<1>(of.padded());
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; ++row) {
            norm_row(of, row, row_memory);
            code_row(row_memory, coded, row);
        }
        for (;;) {
            const int64_t first = next.fetch_add(at_once);
            if (first >= panels) break;
            for (int64_t panel = first; panel < std::min(panels, first + at_once); ++panel) {
                for (int64_t row = 0; row < rows; row += ROW_CHUNK) {
                    finish_panel(is, panel, coded, row, std::min(ROW_CHUNK, rows - row), columns,
                                 cold, residual, residual_stride, out);
                }
            }
        }
    }
}

extern "C" int64_t ridgeline_block_linear_panel_bytes(int format, int64_t depth) {
    return of_format(format, [&](auto f) { return decltype(f)::panel_bytes(depth / BLOCK); });
}

extern "C" int64_t ridgeline_block_linear_pack(int format, const uint8_t* file, int64_t outputs,
                                               int64_t depth, uint8_t* panels, int threads) {
    const int64_t count = (outputs + LANES - 1) / LANES;
    of_format(format, [&](auto f) {
#pragma omp parallel for num_threads(threads) schedule(dynamic)
        for (int64_t panel = 0; panel < count; ++panel) {
            pack_panel<decltype(f)>(format, file, outputs, depth, panel, panels);
        }
    });
    return 0;
}

extern "C" int64_t ridgeline_block_linear_expand(int format, const uint8_t* panels, int64_t outputs,
                                                 int64_t depth, float* out, int threads) {
    const int64_t count = (outputs + LANES - 1) / LANES;
    of_format(format, [&](auto f) {
#pragma omp parallel for num_threads(threads) schedule(dynamic)
        for (int64_t panel = 0; panel < count; ++panel) {
            expand_panel<decltype(f)>(panels, outputs, depth, panel, out);
        }
    });
    return 0;
}
