// Few rows of x (1 to 64) times a large weight in CUDA C++: plain 16-bit, int8, int4 groups, fp8.
// Shared by skinny_linear/cuda.cu (plain weights) and quantized_linear/cuda.cu (codes), which each
// export the kinds of weights they are for.
//
// The weight streams into a ring of shared memory that each warp has for itself, in runs of 128 or
// 256 bytes a row (cp.async: whole lines, no registers; the bulk engine was tried and takes about
// 16 cycles a run, too long for runs this short), and meets x in the matrix units (m16n8k16, or k32
// for codes): 16 weight rows are the M side, 8 rows of x the N side. The order of the depth in a
// product is free as long as both sides agree: a lane takes whole 16-byte pieces of a weight row,
// as they lie, and the matching piece of x: no weight moves between lanes, and no warp waits for
// another's. Codes become numbers without conversions: under a fixed exponent a code's bits read as
// 128 + code (bf16) or 1024 + code (fp16). One exact subtraction leaves code less zero; the sums
// of long int4 groups are corrected instead, once a group.
//
// few_rows_kernel (1 to 4 rows): the warps of a block share the depth of the same outputs; x, its
// norm's gain applied, waits in shared memory in the order it is multiplied in.
// many_rows_kernel (5 to 64, Hopper and later): each warp has its own outputs, x streams through
// shared memory once a block, and a cluster of blocks shares the depth.
// portable_kernel: plain arithmetic, for ROCm (through hipify) and to check the others against.
//
// Letters: q = lane % 4 and r = lane / 4 place a lane in the units' tiles.

#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#if !defined(USE_ROCM) && !defined(RIDGELINE_PORTABLE)
#define RIDGELINE_MMA 1
#ifndef RIDGELINE_HINT
#define RIDGELINE_HINT ".L2::256B"
#endif
#include <cooperative_groups.h>
#include <cuda_bf16.h>

#include <type_traits>
#endif

// The launcher's arguments; skinny_linear/cuda.py has the same list.
struct RidgelineJob {
  const void* x;
  const void* weight;
  const void* scale;      // fp32 [] or [O] or [O/128, D/128]; int4: x's dtype, [G, O]
  const uint8_t* zero;    // int4: [G, O], or null: 8 for all
  const float* x_scale;   // codes: [] or [M] or [M, D/128]
  const void* bias;       // in the output's dtype, as the residual and the gain
  const void* residual;
  const void* gain;
  void* out;
  long long x_stride;       // elements
  long long weight_stride;  // bytes
  long long residual_stride;
  int rows, outputs, depth;
  int group_shift;  // int4: groups of 2^group_shift
  int gated, activation, scale_kind, x_scale_kind, out_half;
  float eps, offset;
};

namespace {

using Job = RidgelineJob;

// How the work is cut. Few rows: `tiles` of 16 weight rows and `warps` a team, `teams` a block, at
// most so many `blocks`. Many: `warps` a block, the depth in `splits` (1 to 8; 0 means few).
// `stages`, 2 to 4, are the steps of weights on their way.
struct Cut {
  int tiles, warps, stages, splits, teams, blocks;
  bool dependent;
  cudaStream_t stream;
};

// The names are in skinny_linear/cuda_space.py. kFp8Weights: codes with x in 16 bits, one row alone.
enum Kind { kPlain, kInt8Words, kInt8Rows, kInt4, kFp8, kInt8Codes, kFp8Weights };
enum Grouped { kWhole, kSums, kWeights };  // where scales of groups go: on sums or on weights
enum ScaleKind { kNone, kTensor, kRow, kGroup };
enum Activation { kNoActivation, kSilu, kGelu, kGeluTanh };

template <int KIND>
struct Form {
  static constexpr bool kCodes = KIND == kFp8 || KIND == kInt8Codes;
  // Weights in 16 bytes.
  static constexpr int kPiece = KIND == kPlain ? 8 : KIND == kInt4 ? 32 : 16;
  static constexpr int kXBytes = kCodes ? 16 : 2 * kPiece;  // of the matching piece of x
  static constexpr int kUnits = kXBytes / 16;
  static constexpr int kHalves = KIND == kInt4 ? 2 : 1;  // a piece is unpacked in so many goes
  static constexpr int kRegs = kXBytes / 4 / kHalves;    // registers of a go, ready to multiply
};

__host__ __device__ inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

__device__ inline float from_half_bits(uint16_t bits) {
  __half h;
  memcpy(&h, &bits, 2);
  return __half2float(h);
}

__device__ inline float from_bits(uint16_t bits, bool half) {
  return half ? from_half_bits(bits) : __uint_as_float(uint32_t(bits) << 16);
}

__device__ inline uint16_t to_bits(float value, bool half) {
  if (half) {
    __half h = __float2half_rn(value);
    uint16_t bits;
    memcpy(&bits, &h, 2);
    return bits;
  }
  uint32_t bits = __float_as_uint(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;  // rounding must not make NaN infinite
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

__device__ inline float activate(float gate, int activation) {
  if (activation == kSilu) return gate / (1.f + __expf(-gate));
  if (activation == kGelu) return 0.5f * gate * (1.f + erff(gate * 0.70710678f));
  float u = gate * (1.5957691216f + 0.0713548163f * gate * gate);  // (1 + tanh) / 2 as a sigmoid
  return gate / (1.f + __expf(-u));
}

// Everything that happens to a sum on its way out. What it takes is loaded apart from the sums, and
// ahead of them where a kernel can: a load of the last moment is a microsecond of waiting.
struct Finish {
  float scale[2], bias[2];  // of the gate's and the up's weight row

  __device__ void load(const Job& job, bool gated, int output) {
    const float* scales = static_cast<const float*>(job.scale);
    const uint16_t* biases = static_cast<const uint16_t*>(job.bias);
    for (int up = 0; up <= int(gated); ++up) {
      int row = output + up * job.outputs;
      scale[up] = 1.f, bias[up] = 0.f;
      if (job.scale_kind == kTensor || job.scale_kind == kRow)
        scale[up] = __ldg(scales + (job.scale_kind == kRow ? row : 0));
      if (biases) bias[up] = from_bits(__ldg(biases + row), job.out_half);
    }
  }
};

struct FinishRow {
  float scale, residual;

  __device__ void load(const Job& job, int row, int output) {
    const uint16_t* residuals = static_cast<const uint16_t*>(job.residual);
    scale = 1.f, residual = 0.f;
    if (job.x_scale_kind == kTensor || job.x_scale_kind == kRow)
      scale = __ldg(job.x_scale + (job.x_scale_kind == kRow ? row : 0));
    if (residuals)
      residual = from_bits(__ldg(residuals + row * job.residual_stride + output), job.out_half);
  }
};

__device__ inline void finish(const Job& job, bool gated, const Finish& by_output,
                              const FinishRow& by_row, float gate, float up, int row, int output) {
  float y = gate * by_row.scale * by_output.scale[0] + by_output.bias[0];
  if (gated) {
    up = up * by_row.scale * by_output.scale[1] + by_output.bias[1];
    y = activate(y, job.activation) * up;
  }
  y += by_row.residual;
  static_cast<uint16_t*>(job.out)[(long long)row * job.outputs + output] = to_bits(y, job.out_half);
}

// ------------------------------------------------------------------------------------- portable

__device__ __forceinline__ float fp8_value(uint8_t code) {  // e4m3fn by its definition
  int exponent = (code >> 3) & 15, mantissa = code & 7;
  if ((code & 0x7f) == 0x7f) return __uint_as_float(0x7fc00000);
  float value = exponent ? ldexpf(1.f + mantissa / 8.f, exponent - 7) : ldexpf(mantissa / 8.f, -6);
  return code & 0x80 ? -value : value;
}

// The weight, unscaled but less its zero, and its scale where a group has one.
template <int KIND>
__device__ float weight_at(const Job& job, int row, int k, bool half, float* scale) {
  const uint8_t* bytes = static_cast<const uint8_t*>(job.weight) + row * job.weight_stride;
  *scale = 1.f;
  if (KIND == kPlain) return from_bits(reinterpret_cast<const uint16_t*>(bytes)[k], half);
  if (KIND == kInt8Rows || KIND == kInt8Codes) return float(int8_t(bytes[k]));
  if (KIND == kFp8Weights) return fp8_value(bytes[k]);
  if (KIND == kFp8) {
    const float* scales = static_cast<const float*>(job.scale);
    if (job.scale_kind == kGroup) *scale = scales[row / 128 * ceil_div(job.depth, 128) + k / 128];
    return fp8_value(bytes[k]);
  }
  const uint32_t* words = reinterpret_cast<const uint32_t*>(bytes);
  if (KIND == kInt8Words) {  // element 4j + i of a piece of 16 is byte j of word i
    uint32_t word = words[k / 16 * 4 + k % 4];
    return float((word >> (8 * (k % 16 / 4))) & 255) - 128.f;
  }
  uint32_t word = words[k / 32 * 4 + k % 4];
  long long place = (long long)(k >> job.group_shift) * job.outputs * (job.gated ? 2 : 1) + row;
  *scale = from_bits(static_cast<const uint16_t*>(job.scale)[place], half);
  float zero = job.zero ? float(job.zero[place]) : 8.f;
  return float((word >> (4 * (k % 32 / 4))) & 15) - zero;
}

template <int KIND>
__device__ float x_at(const Job& job, int row, int k, bool half) {
  long long place = row * job.x_stride + k;
  if (KIND == kInt8Codes) return float(static_cast<const int8_t*>(job.x)[place]);
  if (KIND == kFp8) {
    float value = fp8_value(static_cast<const uint8_t*>(job.x)[place]);
    if (job.x_scale_kind == kGroup) value *= job.x_scale[row * ceil_div(job.depth, 128) + k / 128];
    return value;
  }
  float value = from_bits(static_cast<const uint16_t*>(job.x)[place], half);
  if (!job.gain) return value;
  value *= from_bits(static_cast<const uint16_t*>(job.gain)[k], half) + job.offset;
  return from_bits(to_bits(value, half), half);  // the matrix units would take it so
}

// 32 threads for one output of one row.
template <int KIND>
__global__ void portable_kernel(Job job, bool half) {
  int lane = threadIdx.x % 32, row = blockIdx.y;
  int output = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (output >= job.outputs) return;
  float gate = 0, up = 0, squares = 0, scale;
  for (int k = lane; k < job.depth; k += 32) {
    float x = x_at<KIND>(job, row, k, half);
    float weight = weight_at<KIND>(job, output, k, half, &scale);
    gate += x * weight * scale;
    if (job.gated) {
      weight = weight_at<KIND>(job, output + job.outputs, k, half, &scale);
      up += x * weight * scale;
    }
    if (job.gain) {
      float raw = from_bits(static_cast<const uint16_t*>(job.x)[row * job.x_stride + k], half);
      squares += raw * raw;
    }
  }
  for (int distance = 16; distance; distance /= 2) {
#ifdef USE_ROCM
    gate += __shfl_xor(gate, distance, 32);
    up += __shfl_xor(up, distance, 32);
    squares += __shfl_xor(squares, distance, 32);
#else
    gate += __shfl_xor_sync(~0u, gate, distance, 32);
    up += __shfl_xor_sync(~0u, up, distance, 32);
    squares += __shfl_xor_sync(~0u, squares, distance, 32);
#endif
  }
  float inverse_rms = job.gain ? rsqrtf(squares / job.depth + job.eps) : 1.f;
  if (lane) return;
  Finish by_output;
  FinishRow by_row;
  by_output.load(job, job.gated, output);
  by_row.load(job, row, output);
  finish(job, job.gated, by_output, by_row, gate * inverse_rms, up * inverse_rms, row, output);
}

#ifdef RIDGELINE_MMA
// --------------------------------------------------------------------------------- instructions
// tests/cuda_on_cpu.h has stand-ins for this section.

#ifndef RIDGELINE_ON_CPU

__device__ inline uint8_t* block_memory() {
  extern __shared__ __align__(128) uint8_t shared[];
  return shared;
}

// x - y and x * y of two numbers at once.
template <bool HALF>
__device__ inline uint32_t subtract_pair(uint32_t x, uint32_t y) {
  using Pair = std::conditional_t<HALF, __half2, __nv_bfloat162>;
  Pair d = __hsub2(*reinterpret_cast<Pair*>(&x), *reinterpret_cast<Pair*>(&y));
  return *reinterpret_cast<uint32_t*>(&d);
}

template <bool HALF>
__device__ inline uint32_t multiply_pair(uint32_t x, uint32_t y) {
  using Pair = std::conditional_t<HALF, __half2, __nv_bfloat162>;
  Pair d = __hmul2(*reinterpret_cast<Pair*>(&x), *reinterpret_cast<Pair*>(&y));
  return *reinterpret_cast<uint32_t*>(&d);
}

// (word & mask) | magic in one instruction; the compiler does not always see it through constants.
__device__ inline uint32_t and_or(uint32_t word, uint32_t mask, uint32_t magic) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(word), "r"(mask), "r"(magic));
  return d;
}

__device__ inline uint32_t andnot_or(uint32_t word, uint32_t mask, uint32_t magic) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xae;" : "=r"(d) : "r"(word), "r"(mask), "r"(magic));
  return d;
}

#define RIDGELINE_TILES "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
#define RIDGELINE_FACTORS "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1)
#define RIDGELINE_SUMS(kind) "+" kind(c[0]), "+" kind(c[1]), "+" kind(c[2]), "+" kind(c[3])

template <bool HALF>
__device__ inline void mma_16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                              uint32_t b0, uint32_t b1) {
  if constexpr (HALF)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 " RIDGELINE_TILES
        : RIDGELINE_SUMS("f") : RIDGELINE_FACTORS);
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 " RIDGELINE_TILES
        : RIDGELINE_SUMS("f") : RIDGELINE_FACTORS);
}

__device__ inline void mma_int8(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 " RIDGELINE_TILES
      : RIDGELINE_SUMS("r") : RIDGELINE_FACTORS);
}

__device__ inline void mma_e4m3(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 890
  asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 " RIDGELINE_TILES
      : RIDGELINE_SUMS("f") : RIDGELINE_FACTORS);
#endif
}

// Four fp8 codes as two pairs of fp16.
__device__ inline void convert_e4m3(uint32_t codes, uint32_t& low, uint32_t& high) {
#if __CUDA_ARCH__ >= 890
  asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h; }"
      : "=r"(low), "=r"(high) : "r"(codes));
#endif
}

__device__ inline uint32_t shared_address(const void* pointer) {
  return uint32_t(__cvta_generic_to_shared(pointer));
}

// To shared memory, on its way from here on; zeros where not `inside`.
__device__ inline void copy_16(uint32_t to, const void* from, bool inside) {
  asm volatile("cp.async.cg.shared.global" RIDGELINE_HINT " [%0], [%1], 16, %2;" ::"r"(to),
               "l"(from), "r"(inside ? 16 : 0)
               : "memory");
}

__device__ inline void copy_4(uint32_t to, const void* from, bool inside) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from),
               "r"(inside ? 4 : 0)
               : "memory");
}

__device__ inline void close_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until at most `pending` (0 to 3) of this thread's groups of copies are under way. Predicated: as
// branches they would become a jump through a table.
__device__ inline void wait_groups(int pending) {
  asm volatile(
      "{ .reg .pred p0, p1, p2;\n"
      "setp.lt.s32 p0, %0, 1; setp.lt.s32 p1, %0, 2; setp.lt.s32 p2, %0, 3;\n"
      "cp.async.wait_group 3; @p2 cp.async.wait_group 2;\n"
      "@p1 cp.async.wait_group 1; @p0 cp.async.wait_group 0; }" ::"r"(pending)
      : "memory");
}

template <int PENDING>
__device__ inline void wait_pending() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

__device__ inline void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Two numbers of 16 bits times the lower or the upper two of four bytes, which have no sign.
__device__ inline int dot_low(uint32_t x, uint32_t codes, int sum) {
  int d;
  asm("dp2a.lo.s32.u32 %0, %1, %2, %3;" : "=r"(d) : "r"(x), "r"(codes), "r"(sum));
  return d;
}

__device__ inline int dot_high(uint32_t x, uint32_t codes, int sum) {
  int d;
  asm("dp2a.hi.s32.u32 %0, %1, %2, %3;" : "=r"(d) : "r"(x), "r"(codes), "r"(sum));
  return d;
}

__device__ inline void wait_for_team(int team, int num_threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(1 + team), "r"(num_threads) : "memory");
}

#endif  // RIDGELINE_ON_CPU

// --------------------------------------------------------------------------------- matrix units

struct Bf16 {
  static constexpr bool kHalf = false;
  static constexpr uint32_t kMagic = 0x43004300;  // 128.0 twice; a code in the low bits adds to it
  static constexpr float kMagicValue = 128.f;
  static constexpr uint32_t kOne = 0x3f803f80;  // 1.0 twice
};
struct Fp16 {
  static constexpr bool kHalf = true;
  static constexpr uint32_t kMagic = 0x64006400;  // 1024.0 twice
  static constexpr float kMagicValue = 1024.f;
  static constexpr uint32_t kOne = 0x3c003c00;
};

// Two bytes, in the low half of each 16 bits (the rest is ignored): signed, or with 128 added.
template <class T, bool SIGNED>
__device__ inline uint32_t two_int8(uint32_t word) {
  if constexpr (T::kHalf) {
    if (SIGNED) word ^= 0x00800080;
    return subtract_pair<T::kHalf>(and_or(word, 0x00ff00ff, T::kMagic), 0x64806480);
  } else {
    // bf16 has 7 bits below the exponent: the lower 7 of the code as 128 + low, and what the top
    // one is worth as 128 or 256.
    uint32_t low = and_or(word, 0x007f007f, T::kMagic);
    uint32_t top = SIGNED ? and_or(word, 0x00800080, T::kMagic)
                          : andnot_or(word, 0x00800080, T::kMagic);
    return subtract_pair<T::kHalf>(low, top);
  }
}

// A piece of a weight row, or its half HALF, ready to multiply. `zero` and `scale` are pairs, of
// int4 alone: in short groups they are applied here, and round the weight; else the codes stay as
// they are, kMagic's number above them, and it and the zero are taken out of the group's sum.
template <int KIND, class T, int GROUPED, int HALF>
__device__ inline void unpack(const uint4& raw, uint32_t zero, uint32_t scale,
                              uint32_t (&a)[Form<KIND>::kRegs]) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (KIND == kPlain || Form<KIND>::kCodes) {
      a[i] = words[i];
    } else if constexpr (KIND == kInt8Words) {
      a[i] = two_int8<T, false>(words[i]);
      a[4 + i] = two_int8<T, false>(words[i] >> 8);
    } else if constexpr (KIND == kInt8Rows) {
      a[2 * i] = two_int8<T, true>(words[i]);
      a[2 * i + 1] = two_int8<T, true>(words[i] >> 8);
    } else {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        uint32_t moved = words[i] >> (4 * (2 * HALF + j));
        a[4 * j + i] = and_or(moved, 0x000f000f, T::kMagic);
        if constexpr (GROUPED == kWeights) {
          uint32_t less = subtract_pair<T::kHalf>(a[4 * j + i], zero);
          a[4 * j + i] = multiply_pair<T::kHalf>(less, scale);
        }
      }
    }
  }
}

// x's values in the order of `unpack`: which two elements share a register depends on the packing.
// `load(i)` gives the i-th 16 bytes of the piece; a half of int4 needs those at HALF and HALF + 2.
template <int KIND, int HALF, class Load>
__device__ inline void arrange(Load load, uint32_t (&b)[Form<KIND>::kRegs]) {
  constexpr int kRegs = Form<KIND>::kRegs;
  uint32_t x[kRegs];
#pragma unroll
  for (int i = 0; i < kRegs / 4; ++i) {
    uint4 v = load(Form<KIND>::kHalves * i + HALF);
    x[4 * i] = v.x, x[4 * i + 1] = v.y, x[4 * i + 2] = v.z, x[4 * i + 3] = v.w;
  }
#pragma unroll
  for (int e = 0; e < kRegs; ++e) {
    uint32_t order = e % 2 ? 0x7632 : 0x5410;  // upper or lower halves
    if constexpr (KIND == kInt8Words || KIND == kInt4)
      b[e] = __byte_perm(x[e / 2], x[e / 2 + kRegs / 2], order);
    else if constexpr (KIND == kInt8Rows)
      b[e] = __byte_perm(x[e / 2 * 2], x[e / 2 * 2 + 1], order);
    else
      b[e] = x[e];
  }
}

template <int VALUE>
struct Constant {
  static constexpr int value = VALUE;
};

template <int KIND>
struct Sum {
  using type = float;
};
template <>
struct Sum<kInt8Codes> {
  using type = int;
};

// 16 weight rows times 8 rows of x: 16 deep, or 32 for codes.
template <int KIND, class T>
__device__ inline void mma(typename Sum<KIND>::type (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                           uint32_t a3, uint32_t b0, uint32_t b1) {
  if constexpr (KIND == kInt8Codes) mma_int8(c, a0, a1, a2, a3, b0, b1);
  else if constexpr (KIND == kFp8) mma_e4m3(c, a0, a1, a2, a3, b0, b1);
  else mma_16<T::kHalf>(c, a0, a1, a2, a3, b0, b1);
}

// The first weight row of a warp's tile. The last tile of a weight that does not divide is moved
// back and makes some outputs a second time, the same. A gated warp has gate tiles at even and up
// tiles at odd places.
__device__ inline int tile_row(const Job& job, int first_output, int tile) {
  int output = min(first_output + 16 * (job.gated ? tile / 2 : tile), job.outputs - 16);
  return job.gated && tile % 2 ? output + job.outputs : output;
}

// A lane's value that shall stay in a register: the compiler does not see through a shuffle, and
// would else compute such offsets again in the innermost loops.
__device__ inline uint32_t keep(uint32_t value) {
  return __shfl_sync(~0u, value, threadIdx.x % 32);
}

// A warp's weights on their way: `stages` steps of RUN bytes of MT x 16 rows, and their groups'
// scales and zero points. A lane's two lines in the units' tiles are the neighbouring rows 2r and
// 2r + 1, so that it reads the scales of both at once. Rows n and n + 2 lie as a pair, 64 bytes
// between their lines: the eight lanes that read together (two r, four q) meet different banks.
template <int KIND, int GROUPED, int MT, int RUN>
struct Ring {
  static constexpr int kPieces = RUN / 64;  // of a lane in a step
  static constexpr int kDepth = kPieces * 4 * Form<KIND>::kPiece;
  static constexpr int kPair = 2 * RUN + 64;
  static constexpr int kWeights = MT * 8 * kPair;
  static constexpr bool kHasGroups = KIND == kInt4;
  static constexpr int kGroupBytes = 48;  // 16 scales, 16 zero points
  static constexpr int kUnits = RUN / 16, kRows = 32 / kUnits;  // rows a warp copies at once
  static constexpr int kParts = 3, kGroupsAtOnce = 32 / (kParts * MT);

  const uint8_t* base;
  int stage_bytes, group_bytes;
  // What a lane needs for its copies, found once: where from and where to. Sizes have 32 bits and
  // no sign: an address is then one multiplication with addition.
  const uint8_t *from, *group_from;
  uint32_t to, group_to, line;  // line: of a stage, where this lane reads
  int group_tile, group_index, group_size;

  // Groups whose scales go on sums have 128 weights: a constant saves much arithmetic.
  __host__ __device__ static int group_shift(const Job& job) {
    return GROUPED == kSums ? 7 : job.group_shift;
  }
  __host__ __device__ static int group_bytes_of(const Job& job) {
    return kHasGroups ? (kDepth >> group_shift(job)) * kGroupBytes : 0;
  }
  __host__ __device__ static int bytes(const Job& job) {
    return kWeights + MT * group_bytes_of(job);
  }
  __device__ static constexpr int place(int row) {
    return ((row >> 2) * 2 + (row & 1)) * kPair + (row >> 1 & 1) * (RUN + 64);
  }

  __device__ static uint64_t at(uint32_t row, uint32_t pitch) { return (uint64_t)row * pitch; }

  __device__ Ring(const Job& job, uint8_t* memory, int warp, int stages)
      : stage_bytes(bytes(job)), group_bytes(group_bytes_of(job)) {
    int lane = threadIdx.x % 32, unit = lane % kUnits * 16;
    base = memory + keep(warp * stages * stage_bytes);
    line = keep(place(2 * (lane / 4)) + lane % 4 * 16);
    from = static_cast<const uint8_t*>(job.weight) + at(lane / kUnits, job.weight_stride) + unit;
    to = keep(shared_address(base) + place(lane / kUnits) + unit);
    if constexpr (kHasGroups) {  // a lane copies 16 bytes: half the scales of a tile, or its zeros
      int part = lane % kParts;
      bool zeros = part == 2;
      group_tile = lane / kParts % MT, group_index = lane / kParts / MT;
      group_size = zeros ? 1 : 2;
      group_from = zeros ? job.zero : static_cast<const uint8_t*>(job.scale) + part * 16;
      if (group_index >= kGroupsAtOnce || (zeros && !job.zero)) group_index = 1 << 20;  // nothing
      group_to = keep(shared_address(base) + kWeights + group_tile * group_bytes + part * 16);
    }
  }

  // Start the copies of a step to a stage, which lies `at_stage` bytes from the first; the caller
  // closes the group. Past the end of a row come zeros: what
  // was left there could be NaN, and NaN times no weight is NaN.
  __device__ void issue(const Job& job, int first_output, int step, uint32_t at_stage) const {
    bool inside = step * RUN + int(threadIdx.x) % kUnits * 16 < job.depth / Form<KIND>::kPiece * 16;
    uint32_t room = to + at_stage, pitch = job.weight_stride;
#pragma unroll
    for (int t = 0; t < MT; ++t) {
      const uint8_t* row = from + at(tile_row(job, first_output, t), pitch);
      if (inside) row += uint32_t(step * RUN);
#pragma unroll
      for (int i = 0; i < 16; i += kRows)
        copy_16(room + t * 8 * kPair + place(i), row + at(i, pitch), inside);
    }
    if constexpr (kHasGroups) {
      int groups = kDepth >> group_shift(job), num_groups = job.depth >> group_shift(job);
      const uint8_t* column = group_from + at(tile_row(job, first_output, group_tile), group_size);
      uint32_t group_pitch = job.outputs * (MT > 1 && job.gated ? 2 : 1) * group_size;
#pragma unroll 1  // short groups need up to 4 rounds
      for (int i = group_index; i < groups; i += GROUPED == kSums ? groups : kGroupsAtOnce) {
        int group = step * groups + i;
        bool there = group < num_groups;
        copy_16(group_to + at_stage + i * kGroupBytes,
                column + at(there ? group : 0, group_pitch), there);
      }
    }
  }
};

// One lane's piece of a tile's two lines, with the bits of its group's scales and its zero points.
struct Piece {
  uint4 raw[2];
  uint32_t scales;
  uint16_t zeros;

  __device__ uint32_t zero(int h) const { return zeros >> (8 * h) & 255; }
  template <class T>
  __device__ float scale(int h) const {
    if (T::kHalf) return from_half_bits(uint16_t(scales >> (16 * h)));
    return __uint_as_float(h ? scales & 0xffff0000u : scales << 16);
  }
};

template <int KIND, int GROUPED, int MT, int RUN>
__device__ inline Piece fetch_weights(const Job& job, const Ring<KIND, GROUPED, MT, RUN>& ring,
                                      const uint8_t* room, int tile, int p) {
  using Weights = Ring<KIND, GROUPED, MT, RUN>;
  int lane = threadIdx.x % 32, q = lane % 4, r = lane / 4;
  const uint8_t* line = room + ring.line + tile * 8 * Weights::kPair + p * 64;
  Piece piece;
#pragma unroll
  for (int h = 0; h < 2; ++h)
    piece.raw[h] = *reinterpret_cast<const uint4*>(line + h * Weights::kPair);
  if constexpr (KIND == kInt4) {
    int index = (p * 4 + (GROUPED == kSums ? 0 : q)) * 32 >> Weights::group_shift(job);
    const uint8_t* group = room + Weights::kWeights + tile * ring.group_bytes;
    group += index * Weights::kGroupBytes;
    piece.scales = reinterpret_cast<const uint32_t*>(group)[r];
    piece.zeros = job.zero ? reinterpret_cast<const uint16_t*>(group + 32)[r] : 0x0808;
  }
  return piece;
}

template <int KIND, class T, int GROUPED, int HALF>
__device__ inline void unpack_piece(const Piece& piece, uint32_t (&a)[2][Form<KIND>::kRegs]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    uint32_t zero = 0, scale = 0;
    if constexpr (KIND == kInt4 && GROUPED == kWeights) {
      zero = piece.zero(h) * 0x00010001u | T::kMagic;
      scale = __byte_perm(piece.scales, 0, h ? 0x3232 : 0x1010);
    }
    unpack<KIND, T, GROUPED, HALF>(piece.raw[h], zero, scale, a[h]);
  }
}

// What a group's sum of int4 adds to the total: `ones` is the group's sum of x.
template <class T>
__device__ inline float group_sum(const Piece& piece, int h, float sum, float ones) {
  float zero = T::kMagicValue + float(piece.zero(h));
  return piece.scale<T>(h) * (sum - zero * ones);
}

// ------------------------------------------------------------------------------- 1 to 4 rows

template <class T>
__device__ inline uint32_t gained(uint32_t x, uint32_t gain, float offset, float& squares) {
  float low = from_bits(x & 0xffff, T::kHalf), high = from_bits(x >> 16, T::kHalf);
  squares += low * low + high * high;
  low *= from_bits(gain & 0xffff, T::kHalf) + offset;
  high *= from_bits(gain >> 16, T::kHalf) + offset;
  return to_bits(low, T::kHalf) | uint32_t(to_bits(high, T::kHalf)) << 16;
}

template <class T, int COUNT>
__device__ inline float two_sums(const uint32_t (&pairs)[COUNT]) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < COUNT; ++i)
    sum += from_bits(pairs[i] & 0xffff, T::kHalf) + from_bits(pairs[i] >> 16, T::kHalf);
  return sum;
}

// What four lanes (q) read together lies together: of every 4 pieces the first 16 bytes, then the
// second, … Rows are a half of the banks apart, and so are the zeros of lanes without a row.
template <int KIND>
struct Staged {
  static constexpr int kUnits = Form<KIND>::kUnits;
  __host__ __device__ static int pitch(int padded) { return padded * kUnits + 4; }
  __host__ __device__ static constexpr int zeros(int pieces) { return pieces * kUnits * 4 + 8; }
  __device__ static int place(int piece, int unit) {
    return (piece / 4 * kUnits + unit) * 4 + piece % 4;
  }
};

// The sum of a group of 128 of x, times what kMagic and a zero point of 8 add to every code, is
// where the group's product with int4 starts from, instead of 0. Four of a group for two rows, in
// the order of a lane's sums.
template <class T>
constexpr float kStart = -(T::kMagicValue + 8.f);

// x times the norm's gain, in the order it is multiplied in, zeros past the depth. `starts` is for
// int4: [groups][rows in pairs][4]. `inverse_rms` is each row's, where there is a norm. The caller
// synchronises.
template <int KIND, class T>
__device__ void stage_x(const Job& job, uint4* staged, int padded, float* starts,
                        float* inverse_rms, float* scratch) {
  constexpr int kUnits = Form<KIND>::kUnits, kRegs = Form<KIND>::kRegs;
  constexpr int kXSize = Form<KIND>::kCodes ? 1 : 2;
  bool normed = !Form<KIND>::kCodes && job.gain;
  int pieces = job.depth / Form<KIND>::kPiece;
  for (int row = 0; row < job.rows; ++row) {
    const uint8_t* x_row = static_cast<const uint8_t*>(job.x) + row * job.x_stride * kXSize;
    float squares = 0;
    for (int piece = threadIdx.x; piece < padded; piece += blockDim.x) {
      auto load = [&](int i) {
        if (piece >= pieces) return make_uint4(0, 0, 0, 0);
        uint4 v = __ldg(reinterpret_cast<const uint4*>(x_row) + piece * kUnits + i);
        if (!normed) return v;
        uint4 g = __ldg(static_cast<const uint4*>(job.gain) + piece * kUnits + i);
        auto both = [&](uint32_t x, uint32_t gain) {
          return gained<T>(x, gain, job.offset, squares);
        };
        return make_uint4(both(v.x, g.x), both(v.y, g.y), both(v.z, g.z), both(v.w, g.w));
      };
      auto store = [&](const uint32_t(&b)[kRegs], int half) {
#pragma unroll
        for (int i = 0; i < kRegs; i += 4)
          staged[row * Staged<KIND>::pitch(padded) +
                 Staged<KIND>::place(piece, (half * kRegs + i) / 4)] =
              make_uint4(b[i], b[i + 1], b[i + 2], b[i + 3]);
      };
      uint32_t b[kRegs];
      arrange<KIND, 0>(load, b);
      store(b, 0);
      if constexpr (KIND == kInt4) {  // four neighbouring threads have 128 of x
        float sum = two_sums<T>(b);
        arrange<KIND, 1>(load, b);
        store(b, 1);
        sum += two_sums<T>(b);
        uint32_t four = 0xfu << (threadIdx.x % 32 / 4 * 4);
        sum += __shfl_xor_sync(four, sum, 1);
        sum += __shfl_xor_sync(four, sum, 2);
        float* pair = starts + (piece / 4 * 2 + row / 2) * 4 + row % 2;
        if (piece % 4 == 0) pair[0] = pair[2] = kStart<T> * sum;
      }
    }
    if (!normed) continue;
    for (int distance = 16; distance; distance /= 2)
      squares += __shfl_xor_sync(~0u, squares, distance);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = squares;
    __syncthreads();
    if (threadIdx.x == 0) {
      float sum = 0;
      for (int warp = 0; warp < blockDim.x / 32; ++warp) sum += scratch[warp];
      inverse_rms[row] = rsqrtf(sum / job.depth + job.eps);
    }
    __syncthreads();
  }
}

#ifndef RIDGELINE_RUN
#define RIDGELINE_RUN 256
#endif
constexpr int kFewRun = RIDGELINE_RUN, kFewRows = 4;

// The sums of one step for a warp's MT tiles. `x` and `starts` are where this lane reads, its own
// row or zeros; what is added to `total` are whole groups where scales of groups go on sums.
template <int KIND, class T, int GROUPED, int MT>
struct FewStep {
  using Weights = Ring<KIND, GROUPED, MT, kFewRun>;
  using Acc = typename Sum<KIND>::type;
  static constexpr int kRegs = Form<KIND>::kRegs, kUnits = Form<KIND>::kUnits;
  static constexpr bool kStarts = KIND == kInt4 && GROUPED == kSums;
  static constexpr int kChains = kStarts ? 1 : 2;  // sums that products alternate between
  // Pieces whose loads and products overlap; more would spill.
  static constexpr bool kShort = KIND == kInt4 || (GROUPED == kSums && MT == 2);
  static constexpr int kUnroll = GROUPED == kWeights ? 3 - MT : kShort ? 2 : 4;

  // Half of a piece.
  template <int HALF>
  __device__ static void multiply(const Piece (&now)[MT], const uint4* x,
                                  Acc (&into)[MT][kChains][4]) {
    uint32_t b[kRegs];
#pragma unroll
    for (int i = 0; i < kRegs; i += 4) {
      uint4 v = x[(HALF * kRegs + i) / 4 * 4];
      b[i] = v.x, b[i + 1] = v.y, b[i + 2] = v.z, b[i + 3] = v.w;
    }
    uint32_t a[MT][2][kRegs];
#pragma unroll
    for (int t = 0; t < MT; ++t) unpack_piece<KIND, T, GROUPED, HALF>(now[t], a[t]);
#pragma unroll
    for (int j = 0; j < kRegs; j += 2)
#pragma unroll
      for (int t = 0; t < MT; ++t)
        mma<KIND, T>(into[t][j / 2 % kChains], a[t][0][j], a[t][1][j], a[t][0][j + 1],
                     a[t][1][j + 1], b[j], b[j + 1]);
  }

  __device__ static void multiply_piece(const Piece (&now)[MT], const uint4* x,
                                        Acc (&into)[MT][kChains][4]) {
    multiply<0>(now, x, into);
    if constexpr (Form<KIND>::kHalves == 2) multiply<1>(now, x, into);
  }

  __device__ static void add(const Job& job, const Weights& ring, const uint8_t* room,
                             const uint4* x, const float4* starts, int first, int step,
                             Acc (&total)[MT][kChains][4]) {
#pragma unroll kUnroll
    for (int p = 0; p < Weights::kPieces; ++p) {
      Piece now[MT];
#pragma unroll
      for (int t = 0; t < MT; ++t) now[t] = fetch_weights(job, ring, room, t, p);
      if constexpr (GROUPED != kSums) {
        multiply_piece(now, x + p * kUnits * 4, total);
      } else {
        Acc parts[MT][kChains][4] = {};
        if constexpr (kStarts) {
          float4 start = starts[p * 2];
#pragma unroll
          for (int t = 0; t < MT; ++t)
            parts[t][0][0] = start.x, parts[t][0][1] = start.y, parts[t][0][2] = start.z,
            parts[t][0][3] = start.w;
        }
        multiply_piece(now, x + p * kUnits * 4, parts);
#pragma unroll
        for (int t = 0; t < MT; ++t)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            if constexpr (kStarts) {
              total[t][0][i] += now[t].template scale<T>(i / 2) * parts[t][0][i];
            } else {
              int piece = step * Weights::kPieces + p;
              float scale = block_scale(job, tile_row(job, first, t), piece, i);
              total[t][0][i] += scale * (parts[t][0][i] + parts[t][1][i]);
            }
          }
      }
    }
    if constexpr (kStarts)
      if (job.zero) add_zeros(job, ring, room, starts, total);
  }

  // The sums start from a zero point of 8: what other zero points add to that.
  __device__ static void add_zeros(const Job& job, const Weights& ring, const uint8_t* room,
                                   const float4* starts, Acc (&total)[MT][kChains][4]) {
#pragma unroll
    for (int p = 0; p < Weights::kPieces; ++p) {
      float4 start = starts[p * 2];
#pragma unroll
      for (int t = 0; t < MT; ++t) {
        Piece piece = fetch_weights(job, ring, room, t, p);  // the weights are not read again
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float zero = (8.f - float(piece.zero(h))) * (1.f / kStart<T>);
          float more = piece.template scale<T>(h) * zero;
          total[t][0][2 * h] += more * start.x;
          total[t][0][2 * h + 1] += more * start.y;
        }
      }
    }
  }

  // fp8 in 128-blocks: the scales of the weight's and of x's, for a lane's sum i.
  __device__ static float block_scale(const Job& job, int first_row, int piece, int i) {
    int lane = threadIdx.x % 32, q = lane % 4, r = lane / 4, blocks = ceil_div(job.depth, 128);
    int block = min((piece * 4 + q) * Form<KIND>::kPiece / 128, blocks - 1);
    int x_row = min(2 * q + i % 2, job.rows - 1), weight_row = first_row + 2 * r + i / 2;
    const float* scales = static_cast<const float*>(job.scale);
    return __ldg(scales + weight_row / 128 * blocks + block) *
           __ldg(job.x_scale + x_row * blocks + block);
  }
};

// A team of warps shares a tile's depth and makes tile after tile, the copies of the next one under
// way while one is finished; the teams of a block share x.
template <int KIND, class T, int GROUPED, int MT>
__global__ void __launch_bounds__(512, 1) few_rows_kernel(const Job job, int stages,
                                                          int team_warps) {
  using Step = FewStep<KIND, T, GROUPED, MT>;
  using Weights = typename Step::Weights;
  constexpr int kUnits = Form<KIND>::kUnits, kPieces = Weights::kPieces;
  constexpr int kZeros = Staged<KIND>::zeros(kPieces);
  const bool gated = MT > 1 && job.gated;  // a gate and its up are tiles of one warp
  uint8_t* shared = block_memory();
  __shared__ float inverse_rms[kFewRows], scratch[32];
  int lane = threadIdx.x % 32, q = lane % 4, r = lane / 4;
  int num_warps = blockDim.x / 32, teams = num_warps / team_warps;
  int team = threadIdx.x / 32 / team_warps, warp = threadIdx.x / 32 % team_warps;
  int tile_outputs = gated ? 8 * MT : 16 * MT;
  int first_tile = (blockIdx.x * teams + team) * tile_outputs;
  int stride = gridDim.x * teams * tile_outputs;  // from one tile of this team to the next
  int num_steps = ceil_div(job.depth, Weights::kDepth), padded = num_steps * kPieces * 4;
  Weights ring(job, shared, threadIdx.x / 32, stages);
  float* sums = reinterpret_cast<float*>(shared + num_warps * stages * ring.stage_bytes);
  uint4* zeros = reinterpret_cast<uint4*>(sums + 2 * num_warps * kFewRows * 16 * MT);
  uint4* staged = zeros + kZeros;
  float* starts = reinterpret_cast<float*>(staged + job.rows * Staged<KIND>::pitch(padded));
  int next_output = first_tile, next_step = warp;
  auto issue_next = [&](uint32_t at_stage) {
    if (next_output < job.outputs && next_step < num_steps) {
      ring.issue(job, next_output, next_step, at_stage);
      next_step += team_warps;
      if (next_step >= num_steps) next_step = warp, next_output += stride;
    }
    close_group();  // an empty one too: the wait counts them
  };
  for (int s = 0; s < stages; ++s) issue_next(s * ring.stage_bytes);
  wait_for_previous_kernel();
  for (int i = threadIdx.x; i < kZeros; i += blockDim.x) zeros[i] = make_uint4(0, 0, 0, 0);
  stage_x<KIND, T>(job, staged, padded, starts, inverse_rms, scratch);
  __syncthreads();
  // Lanes without a row of x read zeros, always the same. The sums of q = 2 and 3 belong to no row:
  // what they start from does not matter.
  bool has_row = r < job.rows;
  int x_offset = has_row ? kZeros + r * Staged<KIND>::pitch(padded) + q : 4;
  const uint8_t* x = reinterpret_cast<const uint8_t*>(zeros) + keep(x_offset * 16);
  uint32_t x_step = keep(has_row ? kPieces * 4 * kUnits * 16 : 0);  // bytes
  const float4* lane_starts = reinterpret_cast<const float4*>(starts) + keep(q % 2);
  float* lane_sums = sums + keep((threadIdx.x / 32 * kFewRows + 2 * q) * (16 * MT) + 2 * r);
  // One output of one row is this thread's to finish.
  int thread = warp * 32 + lane;
  int row = thread / tile_outputs, o = thread % tile_outputs;
  bool finishes = row < job.rows;
  int line = gated ? o / 16 * 32 + o % 16 : o;
  bool normed = !Form<KIND>::kCodes && job.gain;
  uint32_t at_stage = 0, at_end = stages * ring.stage_bytes;
  int buffer = 0;
  for (int first = first_tile; first < job.outputs; first += stride) {
    int output = min(first + o / 16 * 16, job.outputs - 16) + o % 16;
    Finish by_output;
    FinishRow by_row;
    if (finishes) {  // most warps do not
      by_output.load(job, gated, output);
      by_row.load(job, row, output);
    }
    typename Step::Acc total[MT][Step::kChains][4] = {};
    for (int step = warp; step < num_steps; step += team_warps) {
      wait_groups(stages - 1);
      __syncwarp();  // the other lanes' copies are there too
      Step::add(job, ring, ring.base + at_stage, reinterpret_cast<const uint4*>(x + step * x_step),
                lane_starts + step * kPieces * 2, first, step, total);
      __syncwarp();  // all have read the stage
      issue_next(at_stage);
      at_stage += ring.stage_bytes;
      if (at_stage == at_end) at_stage = 0;
    }
    // The warps' sums, added always in the same order. The buffer after next is free: all warps
    // have passed the barrier of the tile before.
    int at_buffer = buffer * num_warps * kFewRows * 16 * MT;
    buffer ^= 1;
#pragma unroll
    for (int column = 0; column < 2; ++column)
      if (2 * q + column < job.rows) {
        float* place = lane_sums + at_buffer + column * (16 * MT);
#pragma unroll
        for (int t = 0; t < MT; ++t) {
          float pair[2];
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            auto sum = total[t][0][2 * h + column];
            if (Step::kChains == 2) sum += total[t][Step::kChains - 1][2 * h + column];
            pair[h] = float(sum);
          }
          *reinterpret_cast<float2*>(place + t * 16) = make_float2(pair[0], pair[1]);
        }
      }
    wait_for_team(team, 32 * team_warps);
    if (!finishes) continue;
    float gate = 0, up = 0, norm = normed ? inverse_rms[row] : 1.f;
    const float* theirs = sums + at_buffer + line;
    theirs += (team * team_warps * kFewRows + row) * (16 * MT);
#pragma unroll 4
    for (int w = 0; w < team_warps; ++w, theirs += kFewRows * 16 * MT) {
      gate += theirs[0];
      if (gated) up += theirs[16];
    }
    finish(job, gated, by_output, by_row, gate * norm, up * norm, row, output);
  }
}

// ------------------------------------------------------------------------------- 5 to 64 rows

// x's tile of a step in shared memory. A unit is 16 bytes; rows lie apart, and units are swapped in
// the longest ones, so that the eight lanes that read together meet different banks.
template <int KIND>
struct Tile {
  static constexpr int kUnits = Form<KIND>::kUnits;
  static constexpr int kLine = 8 * kUnits;  // of a row: 2 pieces, 4 lanes
  static constexpr int kPitch = kLine + (kUnits == 4 ? 2 : kUnits == 2 ? 1 : 4);
  __device__ static int place(int row, int unit) {
    return row * kPitch + (kUnits == 4 ? unit ^ (unit >> 3 & 1) : unit);
  }
};

constexpr int kManyRun = 128, kManyTiles = 2;

template <int KIND, int NT>
__device__ inline void copy_tile(const Job& job, uint4* tile, int step) {
  constexpr int kLine = Tile<KIND>::kLine, kXSize = Form<KIND>::kCodes ? 1 : 2;
  const uint8_t* x = static_cast<const uint8_t*>(job.x);
#pragma unroll 4
  for (int i = threadIdx.x; i < 8 * NT * kLine; i += blockDim.x) {
    int row = i / kLine, unit = i % kLine;
    long long byte = ((long long)step * kLine + unit) * 16;
    bool inside = row < job.rows && byte < (long long)job.depth * kXSize;
    copy_16(shared_address(tile + Tile<KIND>::place(row, unit)),
            inside ? x + row * job.x_stride * kXSize + byte : x, inside);
  }
}

template <int KIND, class T, int GROUPED, int NT>
__global__ void __launch_bounds__(256, 1) many_rows_kernel(const Job job, int stages,
                                                           int num_warps) {
#if __CUDA_ARCH__ >= 900
  using Weights = Ring<KIND, GROUPED, kManyTiles, kManyRun>;
  constexpr int kRegs = Form<KIND>::kRegs, MT = kManyTiles, kGroup = NT < 4 ? NT : 4;
  constexpr int kUnroll = NT == 8 || KIND == kInt4 ? 1 : 2;  // more would spill
  constexpr int kTile = 8 * NT * Tile<KIND>::kPitch;  // units
  using Acc = typename Sum<KIND>::type;
  uint8_t* shared = block_memory();
  uint4* tiles = reinterpret_cast<uint4*>(shared);
  namespace cg = cooperative_groups;
  cg::cluster_group cluster = cg::this_cluster();
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, q = lane % 4, r = lane / 4;
  int split = cluster.block_rank(), num_splits = cluster.num_blocks();
  int block_rows = 16 * num_warps * MT;  // of the weight
  int block_outputs = job.gated ? block_rows / 2 : block_rows;
  int block_output = blockIdx.x / num_splits * block_outputs;
  int first_output = block_output + warp * (job.gated ? 8 * MT : 16 * MT);
  Weights ring(job, shared + stages * kTile * 16, warp, stages);
  int num_steps = ceil_div(job.depth, Weights::kDepth), share = ceil_div(num_steps, num_splits);
  int begin = min(split * share, num_steps), end = min(begin + share, num_steps);
  for (int s = 0; s < stages - 1; ++s)
    if (begin + s < end) ring.issue(job, first_output, begin + s, s * ring.stage_bytes);
  wait_for_previous_kernel();
  for (int s = 0; s < stages - 1; ++s) {
    if (begin + s < end) copy_tile<KIND, NT>(job, tiles + s * kTile, begin + s);
    close_group();
  }
  Acc total[MT][NT][4] = {};
  int stage = 0;
  for (int step = begin; step < end; ++step) {
    wait_groups(stages - 2);
    __syncthreads();  // the step is there for all, and the one before is no longer read
    int ahead = stage == 0 ? stages - 1 : stage - 1;
    if (step + stages - 1 < end) {
      ring.issue(job, first_output, step + stages - 1, ahead * ring.stage_bytes);
      copy_tile<KIND, NT>(job, tiles + ahead * kTile, step + stages - 1);
    }
    close_group();  // an empty one too: the wait counts them
    const uint4* tile = tiles + stage * kTile;
    const uint8_t* room = ring.base + stage * ring.stage_bytes;
#pragma unroll kUnroll
    for (int p = 0; p < Weights::kPieces; ++p) {
      Piece now[MT];
#pragma unroll
      for (int t = 0; t < MT; ++t) now[t] = fetch_weights(job, ring, room, t, p);
      Acc parts[MT][NT][4] = {}, ones[NT][4] = {};
      auto multiply = [&](Acc(&into)[MT][NT][4], auto half) {
        constexpr int kHalf = decltype(half)::value;
        uint32_t a[MT][2][kRegs];
#pragma unroll
        for (int t = 0; t < MT; ++t) unpack_piece<KIND, T, GROUPED, kHalf>(now[t], a[t]);
#pragma unroll
        for (int first = 0; first < NT; first += kGroup) {
          uint32_t b[kGroup][kRegs];
#pragma unroll
          for (int n = 0; n < kGroup; ++n) {
            int row = 8 * (first + n) + r, unit = (p * 4 + q) * Form<KIND>::kUnits;
            auto load = [&](int i) { return tile[Tile<KIND>::place(row, unit + i)]; };
            arrange<KIND, kHalf>(load, b[n]);
          }
          // Neighbouring products have different sums: none waits for the one before.
#pragma unroll
          for (int j = 0; j < kRegs; j += 2)
#pragma unroll
            for (int n = 0; n < kGroup; ++n) {
#pragma unroll
              for (int t = 0; t < MT; ++t)
                mma<KIND, T>(into[t][first + n], a[t][0][j], a[t][1][j], a[t][0][j + 1],
                             a[t][1][j + 1], b[n][j], b[n][j + 1]);
              if constexpr (GROUPED == kSums)
                mma<KIND, T>(ones[first + n], T::kOne, T::kOne, T::kOne, T::kOne, b[n][j],
                             b[n][j + 1]);
            }
        }
      };
      auto multiply_all = [&](Acc(&into)[MT][NT][4]) {
        multiply(into, Constant<0>{});
        if constexpr (Form<KIND>::kHalves == 2) multiply(into, Constant<1>{});
      };
      if constexpr (GROUPED != kSums) {
        multiply_all(total);
      } else {
        multiply_all(parts);
#pragma unroll
        for (int t = 0; t < MT; ++t)
#pragma unroll
          for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
              total[t][n][i] += group_sum<T>(now[t], i / 2, parts[t][n][i], ones[n][i]);
      }
    }
    stage = stage + 1 == stages ? 0 : stage + 1;
  }
  wait_groups(0);
  __syncthreads();
  int pitch = block_rows + 4;
  float* sums = reinterpret_cast<float*>(shared);  // [row of x][weight row of the block]
#pragma unroll
  for (int t = 0; t < MT; ++t)
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int line = (warp * MT + t) * 16 + 2 * r + i / 2;
        sums[(8 * n + 2 * q + i % 2) * pitch + line] = float(total[t][n][i]);
      }
  // Each thread finishes one output, in the rows that fall to its block of the cluster.
  int o = threadIdx.x % block_outputs, line = job.gated ? o / 16 * 32 + o % 16 : o;
  int output = min(block_output + o / 16 * 16, job.outputs - 16) + o % 16;
  Finish by_output;
  by_output.load(job, job.gated, output);
  cluster.sync();
  // A gated block has two threads an output.
  int stride = num_splits * (blockDim.x / block_outputs);
  int first_row = split + num_splits * (threadIdx.x / block_outputs);
  constexpr int kBatch = 4;
  for (int base = first_row; base < job.rows; base += kBatch * stride) {
    float gate[kBatch] = {}, up[kBatch] = {};
    for (int other = 0; other < num_splits; ++other) {  // always in the same order
      const float* theirs = cluster.map_shared_rank(sums, other) + line;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        int row = min(base + i * stride, job.rows - 1);
        gate[i] += theirs[row * pitch];
        if (job.gated) up[i] += theirs[row * pitch + 16];
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      int row = base + i * stride;
      FinishRow by_row;
      by_row.load(job, min(row, job.rows - 1), output);
      if (row < job.rows)
        finish(job, job.gated, by_output, by_row, gate[i], up[i], row, output);
    }
  }
  cluster.sync();  // nobody leaves while others still read its shared memory
#endif
}

// ------------------------------------------------------------------------------------ launching

using Kernel = void (*)(Job, int, int);

cudaError_t start(Kernel kernel, const Job& job, int stages, int warps, int blocks, int threads,
                  int cluster, int shared_bytes, bool dependent, cudaStream_t stream) {
  if (shared_bytes > 47 * 1024) {  // a kernel may have a little of its own, too
    cudaError_t error =
        cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                             cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (error != cudaSuccess) return cudaGetLastError();
  }
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  if (dependent) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs].val.clusterDim.x = cluster;
    attributes[config.numAttrs].val.clusterDim.y = 1;
    attributes[config.numAttrs++].val.clusterDim.z = 1;
  }
  cudaError_t error = cudaLaunchKernelEx(&config, kernel, job, stages, warps);
  if (error != cudaSuccess) cudaGetLastError();  // reported once, to the caller
  return error;
}

template <int KIND, class T, int GROUPED, int MT>
cudaError_t start_few(const Job& job, const Cut& cut) {
  using Weights = Ring<KIND, GROUPED, MT, kFewRun>;
  int tiles = ceil_div(job.outputs * (job.gated ? 2 : 1), 16 * MT);
  int padded = ceil_div(job.depth, Weights::kDepth) * Weights::kPieces * 4;
  int warps = cut.warps * cut.teams;
  int units = Staged<KIND>::zeros(Weights::kPieces) + job.rows * Staged<KIND>::pitch(padded);
  if (KIND == kInt4) units += padded / 4 * 2;  // where sums start
  int sums = 2 * warps * kFewRows * MT * 16 * 4;
  int bytes = warps * cut.stages * Weights::bytes(job) + sums + units * 16;
  Kernel kernel = few_rows_kernel<KIND, T, GROUPED, MT>;
  int blocks = ceil_div(tiles, cut.teams) < cut.blocks ? ceil_div(tiles, cut.teams) : cut.blocks;
  return start(kernel, job, cut.stages, cut.warps, blocks, 32 * warps, 0, bytes, cut.dependent,
               cut.stream);
}

template <int KIND, class T, int GROUPED>
cudaError_t choose_few(const Job& job, const Cut& cut) {
  if (cut.tiles == 1 && !job.gated) return start_few<KIND, T, GROUPED, 1>(job, cut);
  return start_few<KIND, T, GROUPED, 2>(job, cut);
}

template <int KIND, class T, int GROUPED, int NT>
cudaError_t start_many(const Job& job, const Cut& cut) {
  int block_rows = 16 * cut.warps * kManyTiles;
  int blocks = ceil_div(job.outputs * (job.gated ? 2 : 1), block_rows) * cut.splits;
  using Weights = Ring<KIND, GROUPED, kManyTiles, kManyRun>;
  int stage = 8 * NT * Tile<KIND>::kPitch * 16 + cut.warps * Weights::bytes(job);
  int sums = (block_rows + 4) * 8 * NT * 4;
  Kernel kernel = many_rows_kernel<KIND, T, GROUPED, NT>;
  return start(kernel, job, cut.stages, cut.warps, blocks, 32 * cut.warps, cut.splits,
               cut.stages * stage > sums ? cut.stages * stage : sums, cut.dependent, cut.stream);
}

template <int KIND, class T, int GROUPED>
cudaError_t choose_many(const Job& job, const Cut& cut) {
  if constexpr (GROUPED != kSums) {
    if (job.rows > 32) return start_many<KIND, T, GROUPED, 8>(job, cut);
  }
  if (job.rows > 16) return start_many<KIND, T, GROUPED, 4>(job, cut);
  if (job.rows > 8) return start_many<KIND, T, GROUPED, 2>(job, cut);
  return start_many<KIND, T, GROUPED, 1>(job, cut);
}

template <int KIND, class T>
cudaError_t choose(const Job& job, const Cut& cut) {
  if (cut.splits) {
    if constexpr (KIND == kInt4) {  // a group's sums of more than 32 rows do not fit in registers
      if (job.group_shift == 7 && job.rows <= 32) return choose_many<KIND, T, kSums>(job, cut);
      return choose_many<KIND, T, kWeights>(job, cut);
    } else {
      return choose_many<KIND, T, kWhole>(job, cut);
    }
  }
  if constexpr (KIND == kInt4) {
    if (job.group_shift != 7) return choose_few<KIND, T, kWeights>(job, cut);
    return choose_few<KIND, T, kSums>(job, cut);
  } else if constexpr (KIND == kFp8) {
    if (job.scale_kind == kGroup) return choose_few<KIND, T, kSums>(job, cut);
    return choose_few<KIND, T, kWhole>(job, cut);
  } else {
    return choose_few<KIND, T, kWhole>(job, cut);
  }
}

#endif  // RIDGELINE_MMA

template <int KIND>
cudaError_t start_portable(const Job& job, bool half, cudaStream_t stream) {
  dim3 grid(ceil_div(job.outputs, 4), job.rows);
#ifdef RIDGELINE_ON_CPU
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(128);
  return cudaLaunchKernelEx(&config, portable_kernel<KIND>, job, half);
#else
  portable_kernel<KIND><<<grid, 128, 0, stream>>>(job, half);
  return cudaGetLastError();
#endif
}

// What an op's cuda.cu calls for each kind of weights it is for.
template <int KIND>
cudaError_t start_product(const Job& job, const Cut& cut, bool half) {
#ifdef RIDGELINE_MMA
  if constexpr (!Form<KIND>::kCodes) {
    if (half) return choose<KIND, Fp16>(job, cut);
  }
  return choose<KIND, Bf16>(job, cut);
#else
  return start_portable<KIND>(job, half, cut.stream);
#endif
}

}  // namespace
