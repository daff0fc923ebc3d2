// Attention of decode rows over pages by a GPU's matrix units: what decode_attention/cuda.cu and
// projected_attention/cuda.cu share. A warp's steps through the tokens, its sums, how warps' sums
// are merged, how a kernel is launched.
//
// A block serves one KV head of one sequence, over some of its tokens. Its warps take steps of 16
// tokens in turn. Pages hold 16 tokens or more and steps begin at multiples of 16, so a step lies in
// one page.
//
// Memory. A warp copies (cp.async) its steps in straight lines, eight neighbouring lanes a line of
// 128 bytes, into a queue of its own: no block-wide barrier, and as many bytes on their way as it
// holds (an H200's SM needs about 30 KB). A lane then reads the 16-byte pieces that it feeds to the
// matrix units; pieces are stored in an order that keeps those reads free of bank conflicts. (Each
// lane copying just the pieces it needs asks for the same bytes in shorter runs: L2 was busy 92% of
// the time with 59% of the bandwidth.)
//
// Matrix units (m16n8k16, fragments as the PTX manual numbers them, g = lane / 4, t = lane % 4):
//   scoresᵀ = K · qᵀ     16 rows = tokens, 8 columns = query heads. The order of the head dim is
//                        free if q has the same, so lane t's pieces are used as they lie.
//   outᵀ = Vᵀ · weightsᵀ 16 rows = head dims, in the order in which lane g's pieces have them, 8
//                        columns = query heads. The weights come out of the scores' fragment and
//                        are turned over into the operand's by movmatrix.
// A lane has the tokens g and g + 8 of the scores, and the heads 2 t and 2 t + 1 of both.
//
// Numbers. 8-bit codes are exact in fp16, and q is brought into its range by a power of two, so
// codes are multiplied in fp16 units; bf16 would leave 8 bits to the weights. A token's K scale is
// applied to its scores and its V scale to its weights, in fp32. The maximum that weights are taken
// against moves only when a score passes it by a factor of 2^6 (and the V scale they are measured
// in when one is 32 times as large), because moving it rescales every sum: weights then reach
// 2^6 · 2^9 < 65504.
//
// With RIDGELINE_PORTABLE, or through hipify for ROCm, the same sums are done in plain C++ in fp32.
// All PTX is in the section "instructions", behind that guard; tests/cuda_on_cpu.h stands in for
// that section (RIDGELINE_ON_CPU), so that all else is tested without a GPU.

#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#if defined(RIDGELINE_PORTABLE) || defined(USE_ROCM) || defined(__HIP_PLATFORM_AMD__)
#define PORTABLE 1
#ifdef __NVCC__
#pragma nv_diag_suppress 177  // constants that only the matrix units' code uses
#endif
#else
#define PORTABLE 0
#include <cooperative_groups.h>
#endif
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
#define CONVERTS_E4M3 1  // in one instruction
#else
#define CONVERTS_E4M3 0
#endif
#define UNROLL _Pragma("unroll")  // registers are indexed by constants only

// The launchers' arguments; attention/cuda.py has the same list.
struct RidgelineDecode {
  const uint16_t* q;     // [B, N, H] bf16 or fp16, rows q_stride apart
  const uint8_t* k;      // [P, K, S, H]
  const uint8_t* v;
  const float* k_scale;  // [P, K, S], codes only
  const float* v_scale;
  const int* table;      // [B, M], rows table_stride apart
  const int* lengths;    // [B]
  uint16_t* out;         // [B, N, H]
  float* partial;        // [B · K · chunks, splits, rows, H]
  float2* stats;         // [B · K · chunks, splits, rows]: maximum, sum of weights
  int* counters;         // [B · K · chunks], zero before and after
  int64_t q_stride, table_stride;
  int table_width, num_kv_heads, group, page_shift, q_is_fp16;
  int window;            // 0: none
  int split_tokens, num_splits;
  int stages;            // steps on their way for each warp: 1, 2, 3, 4 or 6
  // The kernel before wrote nothing of the lengths, the page table and the pages but each
  // sequence's newest token: all else is read before that kernel has ended.
  int settled;
  float scale, softcap;  // softcap 0: none
};

namespace {  // nothing of one build is seen by another that is loaded beside it

using Args = RidgelineDecode;
enum Kind { BF16 = 0, FP16 = 1, E4M3 = 2, INT8 = 3, E4M3_FNUZ = 4 };

constexpr int MAX_THREADS = 256;
constexpr int STEP = 16;             // tokens
constexpr int PAD = 4;               // floats after a row of sums in shared memory: other banks
constexpr float NOTHING = -1e30f;    // a maximum before the first score; finite, so that - works
constexpr float LOG2E = 1.4426950408889634f;
constexpr float LAZY = 6.0f;         // log2 of how far a weight may pass 1 before sums are rescaled
constexpr float LAZY_SCALE = 32.0f;  // how far a V scale may pass the largest before it
constexpr float UNIT = 16.0f;        // what that largest one becomes

// How a row of K and of V is cut into pieces, one a lane and round.
template <int KIND, int H>
struct Layout {
  static constexpr bool CODES = KIND > FP16;
  static constexpr int BYTES = CODES ? 1 : 2;
  static constexpr int ROW = H * BYTES;
  // Query heads a block serves: 16 sums of 256 numbers would not fit in a warp's registers.
  static constexpr int MAX_ROWS = H > 128 ? 8 : 16;
  static constexpr int K_PIECES = ROW / 16;  // of 16 bytes; piece t + 4 i is lane t's in round i
  static constexpr int K_ROUNDS = (K_PIECES + 3) / 4;
  static constexpr int K_NUMBERS = 16 / BYTES;
  static constexpr int K_PRODUCTS = K_ROUNDS * K_NUMBERS / 4;  // a product takes 4 of a lane
  static constexpr int V_BYTES = ROW == 64 ? 8 : 16;           // 8 lanes share a row
  static constexpr int V_PIECES = ROW / V_BYTES;
  static constexpr int V_ROUNDS = (V_PIECES + 7) / 8;
  static constexpr int V_NUMBERS = V_BYTES / BYTES;
  static constexpr int V_TILES = V_ROUNDS * V_NUMBERS / 2;  // a product takes 2 rows of a lane
  static constexpr int COPIES = (STEP * K_PIECES + 31) / 32;  // a lane's, of K and of V
  static constexpr int HALF = STEP * ROW;                     // bytes of K or V in a stage
  static constexpr int STAGE = 2 * HALF + (CODES ? 2 * STEP * 4 : 0);
  // Rows of 4, 8, 16, … pieces begin in the same bank: their pieces are then stored in another order
  // in each of the rows that lanes read together, which are two neighbours of K and four of V that
  // are two apart.
  static constexpr bool MIXED = K_PIECES % 4 == 0 && (K_PIECES & (K_PIECES - 1)) == 0;
  static constexpr int K_MIX = MIXED && K_PIECES > 4 ? 4 : 0, V_MIX = !MIXED ? 0 : K_MIX ? 2 : 1;

  // Where a row's piece of 16 bytes lies in the stage's K, or in its V.
  __device__ static int k_place(int row, int piece) {
    return row * ROW + (piece ^ (row & 1) * K_MIX) * 16;
  }
  __device__ static int v_place(int row, int piece) {
    return row * ROW + (piece ^ (row >> 1 & 3) * V_MIX) * 16;
  }
};

// What a block has to do.
struct Share {
  int head, first_row, rows, slot;
  int row_stride;  // rows that a split's sums have room for: those of the group's first chunk
  int64_t sequence, index;  // index: of its counter and its splits' sums
  int length, begin, end, num_used;
};

// ---- instructions -------------------------------------------------------------------------------

#ifndef RIDGELINE_ON_CPU

__device__ __forceinline__ unsigned char* block_memory() {
  extern __shared__ float4 shared[];  // whose alignment it gets
  return reinterpret_cast<unsigned char*>(shared);
}

// Another SM may have written it: not from L1.
template <typename T>
__device__ __forceinline__ T from_other_block(const T* pointer) {
#if defined(USE_ROCM) || defined(__HIP_PLATFORM_AMD__)
  return *pointer;  // a fence empties L1 there
#else
  return __ldcg(pointer);
#endif
}

#if PORTABLE

__device__ __forceinline__ float exponential2(float x) { return exp2f(x); }

#else

__device__ __forceinline__ float exponential2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ void wait_for_kernel_before() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void let_next_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void multiply(
    bool bf16, float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
    uint32_t b1) {
  if (bf16)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// An 8 x 8 matrix of 16-bit numbers turned over: lane (g, t) gives row g, columns 2 t and 2 t + 1.
__device__ __forceinline__ uint32_t transpose(uint32_t x) {
  uint32_t y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

__device__ __forceinline__ uint32_t pack(bool bf16, float low, float high) {
  uint32_t pair;
  if (bf16)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ __forceinline__ uint32_t subtract_pair(uint32_t x, uint32_t y) {
  uint32_t pair;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(x), "r"(y));
  return pair;
}

__device__ __forceinline__ uint32_t and_xor(uint32_t x, uint32_t mask, uint32_t flip) {
  uint32_t y;  // one instruction, which the compiler makes two of
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(y) : "r"(x), "r"(mask), "r"(flip));
  return y;
}

#if CONVERTS_E4M3
// Four e4m3 numbers as fp16: bytes 0 and 1, bytes 2 and 3.
__device__ __forceinline__ void convert_e4m3(uint32_t x, uint32_t& low, uint32_t& high) {
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %2;"
      "cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h;}"
      : "=r"(low), "=r"(high)
      : "r"(x));
}
#endif

__device__ __forceinline__ uint32_t multiply_pair(uint32_t x, uint32_t y) {
  uint32_t pair;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(x), "r"(y));
  return pair;
}

template <int BYTES>
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, bool keep) {
  const int size = keep ? BYTES : 0;  // what is not kept becomes zeros, and is not read
  if (BYTES == 16)  // .cg: K and V are read once, L1 would only be in the way
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(size));
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES),
                 "r"(size));
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;"); }

// Until the oldest of `stages` groups of copies is there; the number is part of the instruction.
__device__ __forceinline__ void wait_for_oldest(int stages) {
  if (stages == 2)
    asm volatile("cp.async.wait_group 1;" ::: "memory");
  else if (stages == 3)
    asm volatile("cp.async.wait_group 2;" ::: "memory");
  else if (stages == 4)
    asm volatile("cp.async.wait_group 3;" ::: "memory");
  else if (stages == 6)
    asm volatile("cp.async.wait_group 5;" ::: "memory");
  else
    asm volatile("cp.async.wait_group 0;" ::: "memory");
}

__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

#endif  // PORTABLE
#endif  // RIDGELINE_ON_CPU

__device__ __forceinline__ float to_float(uint16_t bits, int is_fp16) {
  return is_fp16 ? __half2float(__ushort_as_half(bits)) : __uint_as_float((uint32_t)bits << 16);
}

__device__ __forceinline__ uint16_t from_float(float x, int is_fp16) {
  if (is_fp16) return __half_as_ushort(__float2half_rn(x));
  const uint32_t bits = __float_as_uint(x);
  if (x != x) return (bits >> 16) | 0x40;  // rounding could turn a NaN into an infinity
  return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to nearest, ties to even
}

// A score with its cap, cap · tanh(x / cap), in base 2.
__device__ __forceinline__ float capped(float x, float softcap) {
  const float cap = softcap * LOG2E;
  return cap - __fdividef(2.0f * cap, 1.0f + exponential2(x * (2.0f * LOG2E / softcap)));
}

// ---- the sums of warps, merged -------------------------------------------------------------------

__device__ __forceinline__ void store_row(
    const Args& a, const Share& s, int num_columns, int row, int column, float4 sum, float total) {
  const float inverse = total == 0.0f ? 0.0f : 1.0f / total;  // a length of zero gives zeros
  const int64_t heads = (int64_t)a.num_kv_heads * a.group;
  const int64_t head = (int64_t)s.head * a.group + s.first_row + row;
  uint16_t* place = a.out + (s.sequence * heads + head) * num_columns + column;
  const uint32_t low = from_float(sum.x * inverse, a.q_is_fp16)
                       | (uint32_t)from_float(sum.y * inverse, a.q_is_fp16) << 16;
  const uint32_t high = from_float(sum.z * inverse, a.q_is_fp16)
                        | (uint32_t)from_float(sum.w * inverse, a.q_is_fp16) << 16;
  *reinterpret_cast<uint2*>(place) = make_uint2(low, high);
}

__device__ __forceinline__ void add(float4& sum, float weight, float4 x) {
  sum.x += weight * x.x;
  sum.y += weight * x.y;
  sum.z += weight * x.z;
  sum.w += weight * x.w;
}

// Four numbers of a row, and what they weigh.
struct Quad {
  float4 sum;
  float largest, total;
};

// Those of the block's warps (each left its sums and stats in shared memory), merged.
template <int H>
__device__ __forceinline__ Quad merge_warps(
    const unsigned char* shared, int num_warps, int rows, int row, int column) {
  const float* sums = reinterpret_cast<const float*>(shared);  // [warps, rows, H + PAD]
  const float2* stats = reinterpret_cast<const float2*>(sums + num_warps * rows * (H + PAD));
  Quad found = {make_float4(0.0f, 0.0f, 0.0f, 0.0f), NOTHING, 0.0f};
  for (int warp = 0; warp < num_warps; warp++)
    found.largest = fmaxf(found.largest, stats[warp * rows + row].x);
  for (int warp = 0; warp < num_warps; warp++) {
    const float2 stat = stats[warp * rows + row];
    const float weight = exponential2(stat.x - found.largest);
    const float* place = sums + (warp * rows + row) * (H + PAD) + column;
    add(found.sum, weight, *reinterpret_cast<const float4*>(place));
    found.total += weight * stat.y;
  }
  return found;
}

#if !PORTABLE

// ---- the matrix units ---------------------------------------------------------------------------

// Whether a pair of codes is bytes 0 and 2 (1 and 3) of a word, or bytes 0 and 1 (2 and 3).
__device__ constexpr bool apart(int kind) { return kind == INT8 || !CONVERTS_E4M3; }

__device__ __forceinline__ float half_of(bool bf16, uint32_t pair, int high) {
  if (bf16) return __uint_as_float(high ? pair & 0xffff0000u : pair << 16);
  return to_float(high ? pair >> 16 : pair & 0xffff, 1);
}

// Two int8 codes, in bits 0-7 and 16-23, as fp16 with no conversion instruction: under the exponent
// of 1024 the last bit counts one, so code + 128 is put there and 1152 taken off. Exact.
__device__ __forceinline__ uint32_t int8_pair(uint32_t x) {
  return subtract_pair(and_xor(x, 0x00ff00ffu, 0x64806480u), 0x64806480u);
}

// Two e4m3 codes, in bits 8-15 and 24-31, as fp16, on chips that do not convert them: moved to
// fp16's places their bits are 2^-8 of the value, subnormals too, so the product is exact. (A NaN
// becomes 480; no code written here is one.)
__device__ __forceinline__ uint32_t e4m3_pair(uint32_t x) {
  return multiply_pair((x >> 1 & 0x3f803f80u) | (x & 0x80008000u), 0x5c005c00u);
}

// Four codes of one token as two pairs: of bytes 0 and 2, and 1 and 3, where `apart` says so.
template <int KIND>
__device__ __forceinline__ void unpack_k(uint32_t x, uint32_t& b0, uint32_t& b1) {
  if (KIND == INT8) {
    b0 = int8_pair(x);
    b1 = int8_pair(x >> 8);
  } else {
#if CONVERTS_E4M3
    convert_e4m3(x, b0, b1);
#else
    b0 = e4m3_pair(x << 8);
    b1 = e4m3_pair(x);
#endif
  }
}

// Four codes of two tokens as four pairs (first token, second token).
template <int KIND>
__device__ __forceinline__ void unpack_v(uint32_t first, uint32_t second, uint32_t (&pairs)[4]) {
  if (KIND == E4M3 && CONVERTS_E4M3) {
    unpack_k<E4M3>(__byte_perm(first, second, 0x5140), pairs[0], pairs[1]);
    unpack_k<E4M3>(__byte_perm(first, second, 0x7362), pairs[2], pairs[3]);
  } else {
    UNROLL for (int i = 0; i < 4; i++) {
      const uint32_t two = __byte_perm(first, second, 0x4400 + i * 0x1111);
      pairs[i] = KIND == INT8 ? int8_pair(two) : e4m3_pair(two);
    }
  }
}

// Start the copies of one step, whose first token lies at row `place` of the pages.
template <int KIND, int H>
__device__ __forceinline__ void fetch(
    const Args& a, uint32_t slot, int64_t place, int token, int begin, int end) {
  using L = Layout<KIND, H>;
  const int lane = threadIdx.x % 32;
  UNROLL for (int i = 0; i < L::COPIES; i++) {
    const int number = i * 32 + lane, row = number / L::K_PIECES, piece = number % L::K_PIECES;
    if (L::COPIES * 32 > STEP * L::K_PIECES && row >= STEP) continue;
    const bool keep = token + row >= begin && token + row < end;
    const int64_t from = place * L::ROW + number * 16;
    copy_async<16>(slot + L::k_place(row, piece), a.k + from, keep);
    copy_async<16>(slot + L::HALF + L::v_place(row, piece), a.v + from, keep);
  }
  if (L::CODES) {
    const float* scales = lane < STEP ? a.k_scale : a.v_scale;
    const int key = token + lane % STEP;
    copy_async<4>(slot + 2 * L::HALF + lane * 4, scales + place + lane % STEP,
                  key >= begin && key < end);
  }
}

// q as the B operand of each product, in the order in which unpack_k has the columns of K; for
// codes in fp16, each row brought near 2^15 by a power of two. `undo` takes that back, for the
// lane's heads. `rows` lie `stride` numbers apart.
template <int KIND, int H, int HALVES>
__device__ __forceinline__ void load_q(
    const uint16_t* rows, int stride, int num_rows, int is_fp16,
    uint32_t (&q)[Layout<KIND, H>::K_PRODUCTS][HALVES][2], float (&undo)[HALVES][2]) {
  using L = Layout<KIND, H>;
  constexpr int IN_PIECE = L::K_NUMBERS / 4;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  UNROLL for (int half = 0; half < HALVES; half++) {
    const int row = g + 8 * half;
    const uint16_t* q_row = rows + row * stride;
    float largest = 0.0f;
    UNROLL for (int p = 0; p < L::K_PRODUCTS; p++) {
      const int piece = t + 4 * (p / IN_PIECE);
      const int column = piece * L::K_NUMBERS + p % IN_PIECE * 4;
      uint2 four = make_uint2(0, 0);
      if (row < num_rows && piece < L::K_PIECES)
        four = *reinterpret_cast<const uint2*>(q_row + column);
      q[p][half][0] = four.x;
      q[p][half][1] = four.y;
      UNROLL for (int i = 0; i < 4; i++) {
        const uint32_t word = q[p][half][i / 2] >> i % 2 * 16;
        largest = fmaxf(largest, fabsf(to_float(word & 0xffff, is_fp16)));
      }
    }
    undo[half][0] = undo[half][1] = 1.0f;
    if (!L::CODES) continue;
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
    const int exponent = (int)(__float_as_uint(largest) >> 23) - 127;
    const int shift = 14 - min(max(exponent, -100), 127);
    const float power = __uint_as_float((uint32_t)(127 + shift) << 23);
    const float inverse = __uint_as_float((uint32_t)(127 - shift) << 23);
    UNROLL for (int i = 0; i < 2; i++) undo[half][i] = __shfl_sync(~0u, inverse, 8 * t + 4 * i);
    UNROLL for (int p = 0; p < L::K_PRODUCTS; p++) {
      float x[4];
      UNROLL for (int i = 0; i < 4; i++) {
        const uint32_t word = q[p][half][i / 2] >> i % 2 * 16;
        x[i] = to_float(word & 0xffff, is_fp16) * power;
      }
      q[p][half][0] = pack(false, x[0], x[apart(KIND) ? 2 : 1]);
      q[p][half][1] = pack(false, x[apart(KIND) ? 1 : 2], x[3]);
    }
  }
}

// The larger over the lanes g; each lane t has other heads.
__device__ __forceinline__ float largest_of_column(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 4));
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 8));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 16));
}

// What a warp has summed, for the heads 2 t and 2 t + 1 (+ 8) of a lane; the totals are of its own
// tokens only, until the end.
template <int KIND, int H, int HALVES>
struct Sums {
  using L = Layout<KIND, H>;
  float largest[HALVES][2], total[HALVES][2];
  float acc[L::V_TILES][HALVES][4];
  float unit, inverse;  // codes: V scales are measured in this unit

  __device__ __forceinline__ void clear() {
    unit = inverse = 0.0f;
    UNROLL for (int half = 0; half < HALVES; half++) {
      UNROLL for (int i = 0; i < 2; i++) {
        largest[half][i] = NOTHING;
        total[half][i] = 0.0f;
      }
      UNROLL for (int tile = 0; tile < L::V_TILES; tile++)
        UNROLL for (int i = 0; i < 4; i++) acc[tile][half][i] = 0.0f;
    }
  }

  // Bring the sums to the maximum and the unit that hold with these scores and V scales.
  __device__ __forceinline__ void rescale(const float (&x)[HALVES][4], const float (&scales)[2]) {
    float change = 1.0f;
    if (L::CODES) {
      const float most = largest_of_column(fmaxf(scales[0], scales[1])) * (1.0f / UNIT);
      if (most > unit) {  // the same in all lanes
        inverse = 1.0f / most;
        change = unit * inverse;
        unit = most;
      }
    }
    UNROLL for (int half = 0; half < HALVES; half++) {
      float decay[2];
      UNROLL for (int i = 0; i < 2; i++) {
        const float most = largest_of_column(fmaxf(x[half][i], x[half][2 + i]));
        const float larger = fmaxf(largest[half][i], most);
        decay[i] = exponential2(largest[half][i] - larger);
        largest[half][i] = larger;
        total[half][i] *= decay[i];
        decay[i] *= change;
      }
      UNROLL for (int tile = 0; tile < L::V_TILES; tile++)
        UNROLL for (int i = 0; i < 4; i++) acc[tile][half][i] *= decay[i % 2];
    }
  }

  // Leave them in shared memory for finish_block.
  __device__ __forceinline__ void leave(unsigned char* shared, int num_warps, int rows) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    float* sums = reinterpret_cast<float*>(shared);
    float2* stats = reinterpret_cast<float2*>(sums + num_warps * rows * (H + PAD));
    const float factor = L::CODES ? unit : 1.0f;
    UNROLL for (int half = 0; half < HALVES; half++)
      UNROLL for (int i = 0; i < 2; i++) {
        float whole = total[half][i];
        UNROLL for (int other = 4; other < 32; other *= 2)
          whole += __shfl_xor_sync(~0u, whole, other);
        const int row = 8 * half + 2 * t + i;
        if (row >= rows) continue;
        if (g == 0) stats[warp * rows + row] = make_float2(largest[half][i], whole);
        float* place = sums + (warp * rows + row) * (H + PAD);
        UNROLL for (int tile = 0; tile < L::V_TILES; tile += 2) {
          const int piece = g + 8 * (tile / (L::V_NUMBERS / 2));
          const int column = piece * L::V_NUMBERS + tile % (L::V_NUMBERS / 2) * 2;
          if (piece < L::V_PIECES)
            *reinterpret_cast<float4*>(place + column) = make_float4(
                acc[tile][half][i] * factor, acc[tile][half][2 + i] * factor,
                acc[tile + 1][half][i] * factor, acc[tile + 1][half][2 + i] * factor);
        }
      }
  }
};

// K · qᵀ of one step: the tokens g and g + 8 (later two of x) and the heads of a lane.
template <int KIND, int H, int HALVES>
__device__ __forceinline__ void score(
    const unsigned char* slot, const uint32_t (&q)[Layout<KIND, H>::K_PRODUCTS][HALVES][2],
    float (&x)[HALVES][4]) {
  using L = Layout<KIND, H>;
  constexpr int IN_PIECE = L::K_NUMBERS / 4;
  float sums[2][HALVES][4] = {};  // two of each: a product need not wait for the one before
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  UNROLL for (int i = 0; i < L::K_ROUNDS; i++) {
    uint4 first = make_uint4(0, 0, 0, 0), second = first;
    if (t + 4 * i < L::K_PIECES) {
      first = *reinterpret_cast<const uint4*>(slot + L::k_place(g, t + 4 * i));
      second = *reinterpret_cast<const uint4*>(slot + L::k_place(8 + g, t + 4 * i));
    }
    const uint32_t words[2][4] = {{first.x, first.y, first.z, first.w},
                                  {second.x, second.y, second.z, second.w}};
    UNROLL for (int j = 0; j < IN_PIECE; j++) {
      const int p = i * IN_PIECE + j;
      uint32_t pairs[2][2];
      UNROLL for (int eight = 0; eight < 2; eight++) {
        pairs[eight][0] = words[eight][2 * j % 4];
        pairs[eight][1] = words[eight][(2 * j + 1) % 4];
        if (L::CODES) unpack_k<KIND>(words[eight][j], pairs[eight][0], pairs[eight][1]);
      }
      UNROLL for (int half = 0; half < HALVES; half++)
        multiply(KIND == BF16, sums[p % 2][half], pairs[0][0], pairs[1][0], pairs[0][1],
                 pairs[1][1], q[p][half][0], q[p][half][1]);
    }
  }
  UNROLL for (int half = 0; half < HALVES; half++)
    UNROLL for (int i = 0; i < 4; i++) x[half][i] = sums[0][half][i] + sums[1][half][i];
}

// Scores in base 2 into weights, as the B operand of the products with V; the totals grow by them.
template <int KIND, int H, int HALVES>
__device__ __forceinline__ void weigh(
    const float (&x)[HALVES][4], const float (&v_scales)[2], Sums<KIND, H, HALVES>& sums,
    uint32_t (&weights)[HALVES][2]) {
  constexpr bool CODES = Layout<KIND, H>::CODES;
  bool passed = false;
  UNROLL for (int half = 0; half < HALVES; half++)
    UNROLL for (int i = 0; i < 4; i++)
      passed = passed || x[half][i] > sums.largest[half][i % 2] + LAZY;
  if (CODES)
    UNROLL for (int i = 0; i < 2; i++)
      passed = passed || v_scales[i] > sums.unit * (LAZY_SCALE * UNIT);
  if (__any_sync(~0u, passed)) sums.rescale(x, v_scales);
  UNROLL for (int half = 0; half < HALVES; half++)
    UNROLL for (int eight = 0; eight < 2; eight++) {
      float w[2];
      UNROLL for (int i = 0; i < 2; i++) {
        w[i] = exponential2(x[half][2 * eight + i] - sums.largest[half][i]);
        if (CODES) sums.total[half][i] += w[i];
        if (CODES) w[i] *= v_scales[eight] * sums.inverse;
      }
      const uint32_t pair = pack(KIND == BF16, w[0], w[1]);
      // The sum over what was rounded: where one token has most of the weight, the error cancels.
      if (!CODES)
        UNROLL for (int i = 0; i < 2; i++) sums.total[half][i] += half_of(KIND == BF16, pair, i);
      weights[half][eight] = transpose(pair);
    }
}

template <int KIND, int H, int HALVES>
__device__ __forceinline__ void add_values(
    const unsigned char* slot, const uint32_t (&weights)[HALVES][2], Sums<KIND, H, HALVES>& sums) {
  using L = Layout<KIND, H>;
  constexpr int WORDS = L::V_BYTES / 4;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  UNROLL for (int i = 0; i < L::V_ROUNDS; i++) {
    uint32_t words[4][WORDS];  // of the tokens 2 t, 2 t + 1, 8 + 2 t, 9 + 2 t
    const int byte = min(g + 8 * i, L::V_PIECES - 1) * L::V_BYTES;  // past them: not stored
    UNROLL for (int which = 0; which < 4; which++) {
      const int row = 2 * t + which % 2 + which / 2 * 8;
      const unsigned char* place =
          slot + L::HALF + L::v_place(row, byte / 16) + byte % 16;
      if (WORDS == 4) {
        const uint4 piece = *reinterpret_cast<const uint4*>(place);
        words[which][0] = piece.x, words[which][1] = piece.y;
        words[which][WORDS - 2] = piece.z, words[which][WORDS - 1] = piece.w;
      } else {
        const uint2 piece = *reinterpret_cast<const uint2*>(place);
        words[which][0] = piece.x, words[which][1] = piece.y;
      }
    }
    UNROLL for (int word = 0; word < WORDS; word++) {
      constexpr int TILES = L::CODES ? 2 : 1;  // that a word's columns fill
      uint32_t early[4], late[4];              // pairs of tokens, a column each
      if (L::CODES) {
        unpack_v<KIND>(words[0][word], words[1][word], early);
        unpack_v<KIND>(words[2][word], words[3][word], late);
      } else {
        early[0] = __byte_perm(words[0][word], words[1][word], 0x5410);
        early[1] = __byte_perm(words[0][word], words[1][word], 0x7632);
        late[0] = __byte_perm(words[2][word], words[3][word], 0x5410);
        late[1] = __byte_perm(words[2][word], words[3][word], 0x7632);
      }
      UNROLL for (int j = 0; j < TILES; j++)
        UNROLL for (int half = 0; half < HALVES; half++)
          multiply(KIND == BF16, sums.acc[(i * WORDS + word) * TILES + j][half], early[2 * j],
                   early[2 * j + 1], late[2 * j], late[2 * j + 1], weights[half][0],
                   weights[half][1]);
    }
  }
}

// One step of 16 tokens, whose K, V and scales lie in `slot`. `factor` is what scores are
// multiplied by: with log2(e), or without where there is a cap.
template <int KIND, int H, int HALVES>
__device__ __forceinline__ void attend(
    const Args& a, const unsigned char* slot,
    const uint32_t (&q)[Layout<KIND, H>::K_PRODUCTS][HALVES][2], const float (&factor)[HALVES][2],
    int token, int begin, int end, Sums<KIND, H, HALVES>& sums) {
  using L = Layout<KIND, H>;
  const int g = threadIdx.x % 32 / 4;
  float x[HALVES][4];
  score<KIND, H, HALVES>(slot, q, x);
  float k_scales[2] = {1.0f, 1.0f}, v_scales[2] = {1.0f, 1.0f};
  if (L::CODES) {
    const float* scales = reinterpret_cast<const float*>(slot + 2 * L::HALF) + g;
    k_scales[0] = scales[0], k_scales[1] = scales[8];
    v_scales[0] = scales[STEP], v_scales[1] = scales[STEP + 8];
  }
  UNROLL for (int half = 0; half < HALVES; half++)
    UNROLL for (int i = 0; i < 4; i++) x[half][i] *= factor[half][i % 2] * k_scales[i / 2];
  if (a.softcap != 0.0f)
    UNROLL for (int half = 0; half < HALVES; half++)
      UNROLL for (int i = 0; i < 4; i++) x[half][i] = capped(x[half][i], a.softcap);
  if (token < begin || token + STEP > end)
    UNROLL for (int half = 0; half < HALVES; half++)
      UNROLL for (int i = 0; i < 4; i++) {
        const int key = token + g + i / 2 * 8;
        if (key < begin || key >= end) x[half][i] = -INFINITY;
      }
  uint32_t weights[HALVES][2];
  weigh<KIND, H, HALVES>(x, v_scales, sums, weights);
  add_values<KIND, H, HALVES>(slot, weights, sums);
}

// A warp's steps of 16 tokens: every `stride`-th from `first` on, and how far their copies are.
// Tokens before `begin` and from `end` on are not read.
template <int KIND, int H>
struct Steps {
  const Args& a;
  const int64_t sequence;
  const int head, first, stride;
  int begin = 0, end = 0, count = 0, fetched = 0;
  int pages, next_pages;  // lane i has that of the i-th step of 32, and of the 32 behind them

  __device__ __forceinline__ Steps(const Args& a, const Share& s, int first, int stride)
      : a(a), sequence(s.sequence), head(s.head), first(first), stride(stride) {
    pages = load_pages(0);
    next_pages = load_pages(32);
  }

  __device__ __forceinline__ int load_pages(int from) const {
    const int step = first + (from + threadIdx.x % 32) * stride;
    const int entry = step * STEP >> a.page_shift;
    return entry < a.table_width ? a.table[sequence * a.table_stride + entry] : 0;
  }

  __device__ __forceinline__ void range(int from, int to) {
    begin = from, end = to;
    const int left = max((end + STEP - 1) / STEP - first, 0);
    count = (left + stride - 1) / stride;
  }

  __device__ __forceinline__ int token(int step) const { return (first + step * stride) * STEP; }

  // The next one to `slot`; a group of copies, whether or not there is one.
  __device__ __forceinline__ void fetch_next(uint32_t slot) {
    if (fetched < count) {
      if (fetched > 0 && fetched % 32 == 0) {
        pages = next_pages;
        next_pages = load_pages(fetched + 32);
      }
      const int64_t page = __shfl_sync(~0u, pages, fetched % 32);  // int64: offsets pass 2^31
      const int64_t place = ((page * a.num_kv_heads + head) << a.page_shift)
                            + (token(fetched) & ((1 << a.page_shift) - 1));
      fetch<KIND, H>(a, slot, place, token(fetched), begin, end);
    }
    commit_copies();
    fetched++;
  }
};

#endif  // !PORTABLE

// ---- launching ----------------------------------------------------------------------------------

// What a kernel may have of a device's shared memory, where that is more than it has unasked.
using Allowed = size_t[64];

// `cluster`: blocks along x that belong together; `overlap`: start while the kernel before runs.
template <typename Arguments>
int launch(
    void (*kernel)(Arguments), const Arguments& arguments, dim3 grid, int num_threads, size_t shared,
    Allowed& allowed, int cluster, int overlap, cudaStream_t stream) {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  const void* function = reinterpret_cast<const void*>(kernel);
  if (shared > 47 * 1024 && shared > allowed[device % 64]) {  // it may have a little of its own, too
    error = cudaFuncSetAttribute(
        function, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
    if (error != cudaSuccess) return error;
    allowed[device % 64] = shared;
  }
#if PORTABLE && !defined(RIDGELINE_ON_CPU)
  void* pointers[] = {const_cast<void*>(static_cast<const void*>(&arguments))};
  return cudaLaunchKernel(function, grid, dim3(num_threads), pointers, shared, stream);
#else
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(num_threads);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = attributes;
  if (overlap) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs].val.clusterDim.x = cluster;
    attributes[config.numAttrs].val.clusterDim.y = 1;
    attributes[config.numAttrs++].val.clusterDim.z = 1;
  }
  return cudaLaunchKernelEx(&config, kernel, arguments);
#endif
}

}  // namespace
