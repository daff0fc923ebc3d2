// Attention over pages on a CPU (attend.h), for each pair of dtypes.
#include "attend.h"

using namespace ridgeline;

#define EXPORT(name, T, Kv)                                                                       \
    extern "C" void ridgeline_prefill_attention_##name(                                           \
        const void* q, void* out, const int32_t* starts, const int32_t* totals,                   \
        const int32_t* tables, int64_t table_stride, const void* k_pages, const void* v_pages,    \
        const float* k_scale, const float* v_scale, int64_t num_sequences, int64_t num_heads,     \
        int64_t num_kv_heads, int64_t head_dim, int64_t page_size, float scale, float softcap,    \
        int64_t window, int threads) {                                                            \
        const Shape shape = {num_heads, num_kv_heads, head_dim, page_size,                        \
                             num_heads / num_kv_heads, (head_dim + LANES - 1) / LANES * LANES,    \
                             scale, softcap, window};                                             \
        const Cache<Kv> cache = {static_cast<const Kv*>(k_pages), static_cast<const Kv*>(v_pages), \
                                 k_scale, v_scale};                                               \
        attend(static_cast<const T*>(q), static_cast<T*>(out), starts, totals, tables,            \
               table_stride, cache, num_sequences, shape, threads);                               \
    }

EXPORT(bf16_bf16, Bf16, Bf16)
EXPORT(fp16_fp16, Fp16, Fp16)
EXPORT(fp32_fp32, float, float)
EXPORT(fp32_bf16, float, Bf16)
EXPORT(fp32_fp16, float, Fp16)
EXPORT(bf16_int8, Bf16, int8_t)
EXPORT(fp16_int8, Fp16, int8_t)
EXPORT(fp32_int8, float, int8_t)
EXPORT(bf16_fp8_e4m3, Bf16, Fp8)
EXPORT(fp16_fp8_e4m3, Fp16, Fp8)
EXPORT(fp32_fp8_e4m3, float, Fp8)
