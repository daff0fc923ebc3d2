// All layers of a step in one call, on weights in GGUF's blocks: norm, projection, rotary embedding,
// attention over pages and MLP of a plain decoder, as models/transformer.py has them. Activations are
// fp32 between the products and 8-bit codes in them (block_linear); what a thread has made for itself
// it does not wait for.
#include "../block_linear/panels.h"
#include "../few_rows.h"
#include "../prefill_attention/attend.h"
#include "../rotary_pages/place.h"
#include "team.h"

using namespace ridgeline;

constexpr int64_t OWN_ROWS = 2;     // up to so many, each thread makes the codes for itself
constexpr int64_t STAGES = 11;      // of a layer

struct Layer {  // as cpu.py lays it out
    const float *attn_norm, *mlp_norm, *q_norm, *k_norm;
    const Matrix *qkv, *out, *gate_up, *down;
    void *k_pages, *v_pages;
    int64_t rope, window;  // rope: which angles, or -1; window 0: none
    float scale, softcap;
};

struct Decoder {
    const Layer* layers;
    const float* norm;
    int64_t num_layers, hidden, num_heads, num_kv_heads, head_dim, page_size, mlp_size;
    float eps, offset;
    int32_t activation, kv;  // kv: 0 fp32, 1 bf16, 2 fp16
};

struct Turns {
    const float *cos, *sin;
    int64_t num_angles;
};

struct Step {
    float* x;    // [tokens, hidden]: the residual stream
    float* out;  // [tokens, hidden]: after the last norm
    const Turns* turns;
    const int32_t *slots, *starts, *totals, *tables;
    int64_t table_stride, num_sequences, num_tokens;
};

struct Plan {
    int64_t window;
    std::vector<Item> items;
    std::vector<Cut> cuts;
};

class Pass {
public:
    Pass(const Decoder& of, const Step& step, int threads)
        : of(of), step(step), team(threads, of.num_layers * STAGES + 1) {
        const int64_t tokens = step.num_tokens;
        q_size = of.num_heads * of.head_dim;
        qkv_size = q_size + 2 * of.num_kv_heads * of.head_dim;
        wide = (of.head_dim + LANES - 1) / LANES * LANES;
        for (int64_t i = 0; i < of.num_layers; ++i) add_plan(of.layers[i]);
        int64_t num_partials = 0;
        for (const Plan& plan : plans) {
            if (plan.cuts.empty()) continue;
            const Cut& last = plan.cuts.back();
            num_partials = std::max(num_partials, last.first_partial + last.count);
        }
        const int64_t group = of.num_heads / of.num_kv_heads;
        float* memory = room<2>(tokens * (qkv_size + 2 * q_size + of.mlp_size) + 64 +
                                num_partials * group * (wide + 2));
        qkv = memory;
        q = qkv + tokens * qkv_size;
        attended = q + tokens * q_size;
        inner = attended + tokens * q_size;
        partials = inner + tokens * of.mlp_size;
        const int64_t widest = std::max({of.hidden, q_size, of.mlp_size});
        coded_floats = CodedRows{nullptr, widest, 2, tokens}.bytes() / sizeof(float);
        own = tokens <= OWN_ROWS;
        shared = own ? nullptr : room<3>(coded_floats);
    }

    // Stages of all threads have the same numbers, whatever a thread has done in them.
    void run() {
        float* own_codes = own ? room<4>(coded_floats) : nullptr;
        int64_t stage = 0;
        for (int64_t i = 0; i < of.num_layers; ++i) {
            const Layer& layer = of.layers[i];
            CodedRows x = coded(stage++, own_codes, step.x, layer.attn_norm, *layer.qkv);
            product(stage++, *layer.qkv, x, 0, nullptr, qkv, qkv_size);
            if (of.kv == 0) attention<float>(layer, stage);
            if (of.kv == 1) attention<Bf16>(layer, stage);
            if (of.kv == 2) attention<Fp16>(layer, stage);
            stage += 3;
            x = coded(stage++, own_codes, attended, nullptr, *layer.out);
            product(stage++, *layer.out, x, 0, step.x, step.x, of.hidden);
            x = coded(stage++, own_codes, step.x, layer.mlp_norm, *layer.gate_up);
            product(stage++, *layer.gate_up, x, of.activation, nullptr, inner, of.mlp_size);
            x = coded(stage++, own_codes, inner, nullptr, *layer.down);
            product(stage++, *layer.down, x, 0, step.x, step.x, of.hidden);
        }
        const Linear<float> rows = normed(step.x, of.norm, of.hidden);
        team.share(stage, step.num_tokens, [&](int64_t row) {
            float* memory = room<1>(rows.padded());
            norm_row(rows, row, memory);
            std::memcpy(step.out + row * of.hidden, memory, of.hidden * sizeof(float));
        });
    }

private:
    void add_plan(const Layer& layer) {
        for (const Plan& known : plans) {
            if (known.window == layer.window) return;
        }
        plans.push_back({layer.window, {}, {}});
        plan(step.starts, step.totals, step.num_sequences, shape_of(layer), plans.back().items,
             plans.back().cuts);
    }

    Shape shape_of(const Layer& layer) const {
        return {of.num_heads, of.num_kv_heads, of.head_dim, of.page_size,
                of.num_heads / of.num_kv_heads, wide, layer.scale, layer.softcap, layer.window};
    }

    Linear<float> normed(const float* x, const float* norm, int64_t depth) const {
        return {x, depth, nullptr, nullptr, 0, norm, of.eps, of.offset, 0, nullptr, 0, depth, 0};
    }

    // Rows of x, normed, as codes: all of them by each thread for itself, or by all together.
    CodedRows coded(int64_t stage, float* own_codes, const float* x, const float* norm,
                    const Matrix& next) {
        const CodedRows rows = {reinterpret_cast<uint8_t*>(own ? own_codes : shared), next.depth,
                                next.digits(), step.num_tokens};
        const Linear<float> from = normed(x, norm, next.depth);
        auto code = [&](int64_t row) {
            float* memory = room<1>(from.padded());
            norm_row(from, row, memory);
            code_row(memory, rows, row);
        };
        if (own) {
            for (int64_t row = 0; row < step.num_tokens; ++row) code(row);
        } else {
            team.share(stage, step.num_tokens, code);
        }
        return rows;
    }

    void product(int64_t stage, const Matrix& matrix, const CodedRows& x, int activation,
                 const float* residual, float* out, int64_t columns) {
        const int64_t panels = (columns + LANES - 1) / LANES, tokens = step.num_tokens;
        const int64_t chunks = (tokens + ROW_CHUNK - 1) / ROW_CHUNK;
        const bool cold = tokens <= 4;
        team.share(stage, panels * chunks, [&](int64_t item) {
            const int64_t panel = item % panels, column = panel * LANES;
            const int64_t first = item / panels * ROW_CHUNK;
            const int64_t count = std::min(ROW_CHUNK, tokens - first);
            const int width = lanes_left(columns, column);
            Floats sums[ROW_CHUNK], up[ROW_CHUNK];
            matrix.multiply(panel, x, first, count, cold, sums);
            if (activation) matrix.multiply(panel + columns / LANES, x, first, count, cold, up);
            for (int64_t r = 0; r < count; ++r) {
                Floats lanes = activation ? activate(sums[r], activation) * up[r] : sums[r];
                const int64_t at = (first + r) * columns + column;
                if (residual) lanes += load(residual + at, width);
                store(out + at, lanes, width);
            }
        });
    }

    template <class Kv>
    void attention(const Layer& layer, int64_t stage) {
        const Turns none = {nullptr, nullptr, 0};
        const Turns& turns = layer.rope < 0 ? none : step.turns[layer.rope];
        const Placing<float, Kv> placing = {
            qkv, qkv_size, turns.cos, turns.sin, turns.num_angles, step.slots,
            static_cast<Kv*>(layer.k_pages), static_cast<Kv*>(layer.v_pages), layer.q_norm,
            layer.k_norm, of.eps, of.offset, q,
            Heads{of.num_heads, of.num_kv_heads, of.head_dim, of.page_size}};
        team.share(stage, step.num_tokens, [&](int64_t token) { place_token(placing, token); });
        const Plan& plan = *std::find_if(plans.begin(), plans.end(), [&](const Plan& known) {
            return known.window == layer.window;
        });
        const Shape shape = shape_of(layer);
        const Cache<Kv> cache = {static_cast<const Kv*>(layer.k_pages),
                                 static_cast<const Kv*>(layer.v_pages), nullptr, nullptr};
        static thread_local Scratch scratch;
        team.share(stage + 1, static_cast<int64_t>(plan.items.size()), [&](int64_t i) {
            const Item& item = plan.items[i];
            const int32_t* table = step.tables + item.sequence * step.table_stride;
            attend_item(item, shape, cache, q, table, attended, partials, scratch);
        });
        team.share(stage + 2, static_cast<int64_t>(plan.cuts.size()),
                   [&](int64_t cut) { merge_cut(plan.cuts[cut], shape); });
    }

    void merge_cut(const Cut& cut, const Shape& shape) {
        const int64_t stride = shape.width + 2;
        for (int64_t row = 0; row < shape.group; ++row) {
            const float* parts = partials + (cut.first_partial * shape.group + row) * stride;
            const int64_t head = cut.kv_head * shape.group + row;
            float* to = attended + (cut.token * shape.num_heads + head) * shape.head_dim;
            merge(parts, cut.count, shape.group * stride, shape.width, shape.head_dim, to);
        }
    }

    const Decoder& of;
    const Step& step;
    Team team;
    std::vector<Plan> plans;
    int64_t q_size, qkv_size, wide, coded_floats;
    bool own;
    float *qkv, *q, *attended, *inner, *partials, *shared;
};

extern "C" int ridgeline_decoder_pass_run(const void* decoder, const void* step, int threads) {
    Pass pass(*static_cast<const Decoder*>(decoder), *static_cast<const Step*>(step), threads);
#pragma omp parallel num_threads(threads)
    pass.run();
    return 0;
}
