// Between projection and attention on a CPU, as reference.py defines it: q/k norm, rotary embedding,
// K and V into pages that hold values (pages of 8-bit codes are the reference's).
#include "../host.h"

using namespace ridgeline;

constexpr int MAX_HEAD_DIM = 512;  // cpu.py asks for no more

struct Turn {
    const float* cos;  // of one token, `num_angles` each; null: not turned
    const float* sin;
    int64_t num_angles;
};

struct Heads {
    int64_t num_heads, num_kv_heads, head_dim, page_size;
};

template <class T>
static void read_head(const T* from, float* head, int64_t size, const T* weight, float eps,
                      float offset) {
    const float scale = weight ? inverse_rms(from, size, eps) : 1.0f;
    for (int64_t i = 0; i < size; i += LANES) {
        const int count = lanes_left(size, i);
        Floats lanes = load(from + i, count);
        if (weight) lanes = lanes * scale * (load(weight + i, count) + offset);
        store(head + i, lanes, count);
    }
}

static void turn(float* head, const Turn& by) {
    for (int64_t i = 0; i < by.num_angles; i += LANES) {
        const int count = lanes_left(by.num_angles, i);
        const Floats cos = load(by.cos + i, count), sin = load(by.sin + i, count);
        const Floats first = load(head + i, count);
        const Floats second = load(head + by.num_angles + i, count);
        store(head + i, first * cos - second * sin, count);
        store(head + by.num_angles + i, second * cos + first * sin, count);
    }
}

template <class T>
static void write_head(T* to, const float* head, int64_t size) {
    for (int64_t i = 0; i < size; i += LANES) {
        const int count = lanes_left(size, i);
        store(to + i, load(head + i, count), count);
    }
}

template <class T, class Page>
static void place_tokens(const T* qkv, int64_t qkv_stride, const float* cos, const float* sin,
                         int64_t num_angles, const int32_t* slots, Page* k_pages, Page* v_pages,
                         const T* q_norm, const T* k_norm, float eps, float offset, T* q,
                         int64_t num_tokens, Heads heads, int threads) {
    const int64_t size = heads.head_dim, num_kept = heads.num_heads + heads.num_kv_heads;
#pragma omp parallel for num_threads(threads) if (num_tokens * num_kept * size > WORTH_THREADS)
    for (int64_t token = 0; token < num_tokens; ++token) {
        float head[MAX_HEAD_DIM + LANES];
        const Turn by = {cos ? cos + token * num_angles : nullptr,
                         sin ? sin + token * num_angles : nullptr, num_angles};
        const int64_t slot = slots[token];
        const int64_t page = slot / heads.page_size, place = slot % heads.page_size;
        for (int64_t index = 0; index < num_kept + heads.num_kv_heads; ++index) {
            const bool is_q = index < heads.num_heads, is_v = index >= num_kept;
            if (!is_q && slot < 0) break;
            const T* weight = is_v ? nullptr : is_q ? q_norm : k_norm;
            read_head(qkv + token * qkv_stride + index * size, head, size, weight, eps, offset);
            if (!is_v && by.cos) turn(head, by);
            if (is_q) {
                write_head(q + (token * heads.num_heads + index) * size, head, size);
                continue;
            }
            const int64_t kv_head = index - (is_v ? num_kept : heads.num_heads);
            const int64_t line = (page * heads.num_kv_heads + kv_head) * heads.page_size + place;
            write_head((is_v ? v_pages : k_pages) + line * size, head, size);
        }
    }
}

#define EXPORT(name, T, Page)                                                                     \
    extern "C" void ridgeline_rotary_pages_##name(                                                \
        const void* qkv, int64_t qkv_stride, const float* cos, const float* sin,                  \
        int64_t num_angles, const int32_t* slots, void* k_pages, void* v_pages,                   \
        const void* q_norm, const void* k_norm, float eps, float offset, void* q,                 \
        int64_t num_tokens, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,            \
        int64_t page_size, int threads) {                                                         \
        place_tokens(static_cast<const T*>(qkv), qkv_stride, cos, sin, num_angles, slots,         \
                     static_cast<Page*>(k_pages), static_cast<Page*>(v_pages),                    \
                     static_cast<const T*>(q_norm), static_cast<const T*>(k_norm), eps, offset,   \
                     static_cast<T*>(q), num_tokens,                                              \
                     Heads{num_heads, num_kv_heads, head_dim, page_size}, threads);               \
    }

EXPORT(bf16_bf16, Bf16, Bf16)
EXPORT(bf16_fp16, Bf16, Fp16)
EXPORT(bf16_fp32, Bf16, float)
EXPORT(fp16_bf16, Fp16, Bf16)
EXPORT(fp16_fp16, Fp16, Fp16)
EXPORT(fp16_fp32, Fp16, float)
EXPORT(fp32_bf16, float, Bf16)
EXPORT(fp32_fp16, float, Fp16)
EXPORT(fp32_fp32, float, float)
