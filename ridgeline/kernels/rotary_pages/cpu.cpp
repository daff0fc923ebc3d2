// Between projection and attention on a CPU (place.h), for each pair of dtypes.
#include "place.h"

using namespace ridgeline;

template <class T, class Page>
static void place_tokens(const Placing<T, Page>& is, int64_t num_tokens, int threads) {
    const Heads& heads = is.heads;
    const int64_t width = (heads.num_heads + heads.num_kv_heads) * heads.head_dim;
#pragma omp parallel for num_threads(threads) if (num_tokens * width > WORTH_THREADS)
    for (int64_t token = 0; token < num_tokens; ++token) place_token(is, token);
}

#define EXPORT(name, T, Page)                                                                     \
    extern "C" void ridgeline_rotary_pages_##name(                                                \
        const void* qkv, int64_t qkv_stride, const float* cos, const float* sin,                  \
        int64_t num_angles, const int32_t* slots, void* k_pages, void* v_pages,                   \
        const void* q_norm, const void* k_norm, float eps, float offset, void* q,                 \
        int64_t num_tokens, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,            \
        int64_t page_size, int threads) {                                                         \
        place_tokens(                                                                             \
            Placing<T, Page>{static_cast<const T*>(qkv), qkv_stride, cos, sin, num_angles, slots, \
                             static_cast<Page*>(k_pages), static_cast<Page*>(v_pages),            \
                             static_cast<const T*>(q_norm), static_cast<const T*>(k_norm), eps,   \
                             offset, static_cast<T*>(q),                                          \
                             Heads{num_heads, num_kv_heads, head_dim, page_size}},                \
            num_tokens, threads);                                                                 \
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
