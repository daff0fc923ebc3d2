// Between projection and attention on a CPU, as reference.py defines it: q/k norm, rotary embedding,
// K and V into pages that hold values (pages of 8-bit codes are the reference's).
#pragma once

#include "../host.h"

namespace ridgeline {

constexpr int MAX_TURNED = 512;  // cpu.py asks for no more

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

// What a layer norms and turns by, and where its keys and values go.
template <class T, class Page>
struct Placing {
    const T* qkv;
    int64_t qkv_stride;
    const float *cos, *sin;  // of all tokens, or null
    int64_t num_angles;
    const int32_t* slots;
    Page *k_pages, *v_pages;
    const T *q_norm, *k_norm;  // or null
    float eps, offset;
    T* q;
    Heads heads;
};

template <class T, class Page>
static void place_token(const Placing<T, Page>& is, int64_t token) {
    const Heads& heads = is.heads;
    const int64_t size = heads.head_dim, num_kept = heads.num_heads + heads.num_kv_heads;
    float head[MAX_TURNED + LANES];
    const Turn by = {is.cos ? is.cos + token * is.num_angles : nullptr,
                     is.sin ? is.sin + token * is.num_angles : nullptr, is.num_angles};
    const int64_t slot = is.slots[token];
    const int64_t page = slot / heads.page_size, place = slot % heads.page_size;
    for (int64_t index = 0; index < num_kept + heads.num_kv_heads; ++index) {
        const bool is_q = index < heads.num_heads, is_v = index >= num_kept;
        if (!is_q && slot < 0) break;
        const T* weight = is_v ? nullptr : is_q ? is.q_norm : is.k_norm;
        read_head(is.qkv + token * is.qkv_stride + index * size, head, size, weight, is.eps,
                  is.offset);
        if (!is_v && by.cos) turn(head, by);
        if (is_q) {
            write_head(is.q + (token * heads.num_heads + index) * size, head, size);
            continue;
        }
        const int64_t kv_head = index - (is_v ? num_kept : heads.num_heads);
        const int64_t line = (page * heads.num_kv_heads + kv_head) * heads.page_size + place;
        write_head((is_v ? is.v_pages : is.k_pages) + line * size, head, size);
    }
}

}  // namespace ridgeline
