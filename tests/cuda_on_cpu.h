// Runs the ops' CUDA C++ (cuda.cu and what it includes) on a CPU, thread for thread, so
// that indices, masks, queues and merges are tested where no GPU is. Slow; says nothing of speed.
//
// The threads of a block, or of a cluster of blocks, are fibers that take turns; barriers, shuffles
// and matrix products wait for the other fibers that take part. Copies to shared memory are done as
// late as they may be: until then their place holds NaN, and nothing may be written past its end.
// Blocks run one after another in a scrambled order, because nothing may depend on who comes last.
// A test may play the kernel before, which ends when a block waits for it (play_kernel_before);
// copies are then done as early as they may be. Stands in for the sections "instructions":
//
//   g++ -std=c++17 -DRIDGELINE_ON_CPU -include cuda_on_cpu.h -I empty_headers -x c++ cuda.cu

#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <vector>

#pragma GCC push_options
#pragma GCC optimize("O2")  // the kernels are compiled without: their templates are many

#define __host__
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
using std::max;
using std::min;

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) uint2 { uint32_t x, y; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

template <typename To, typename From>
To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
using __half = _Float16;
inline float __half2float(__half x) { return (float)x; }
inline __half __float2half_rn(float x) { return (__half)x; }
inline __half __ushort_as_half(uint16_t x) { return same_bits<__half>(x); }
inline uint16_t __half_as_ushort(__half x) { return same_bits<uint16_t>(x); }
inline float __uint_as_float(uint32_t x) { return same_bits<float>(x); }
inline uint32_t __float_as_uint(float x) { return same_bits<uint32_t>(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __expf(float x) { return expf(x); }
inline float rsqrtf(float x) { return 1 / sqrtf(x); }
template <typename T>
T __ldg(const T* pointer) { return *pointer; }
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
  const uint64_t both = (uint64_t)y << 32 | x;
  uint32_t result = 0;
  for (int i = 0; i < 4; i++)
    result |= (uint32_t)(both >> (selector >> 4 * i & 7) * 8 & 255) << 8 * i;
  return result;
}

// ---- threads ------------------------------------------------------------------------------------

[[noreturn]] inline void fail(const char* what) {
  fprintf(stderr, "%s\n", what);
  abort();
}

// Saves the registers a function must keep on this stack, and goes on with another.
extern "C" void switch_stack(void** save, void* load);
asm(".text\n.globl switch_stack\nswitch_stack:\n"
    "push %rbp; push %rbx; push %r12; push %r13; push %r14; push %r15\n"
    "mov %rsp, (%rdi); mov %rsi, %rsp\n"
    "pop %r15; pop %r14; pop %r13; pop %r12; pop %rbx; pop %rbp; ret\n");

struct Copy {
  uint32_t to;
  const void* from;
  int bytes;
  bool keep;
};
struct Barrier {
  int arrived = 0;
  long generation = 0;
};
struct Fiber {
  static constexpr size_t STACK = 1 << 16;
  void* place = nullptr;
  char* stack = (char*)aligned_alloc(64, STACK);
  bool done = false;
  std::vector<std::vector<Copy>> groups;  // of copies on their way
  std::vector<Copy> open;
};
struct Warp {
  Barrier all, parts[32];  // a part of its lanes is known by the first
  uint32_t exchange[32][6];
};
struct Block {
  Barrier all, named[16];
  unsigned num_left;
  std::vector<Warp> warps;
  unsigned char* memory;
};
struct Machine {
  static constexpr size_t GUARD = 256;  // bytes after a block's memory, which nobody may touch
  std::vector<Fiber> fibers;
  unsigned num_threads, num_left, now;  // num_threads: of a block; now: of all of a cluster
  void* home;
  std::function<void()> body;
  std::vector<Block> blocks;
  Barrier cluster;
  std::vector<unsigned char> shared;
  size_t shared_bytes;
  unsigned first_block;  // blockIdx.x of a cluster's first
  bool backwards = false;  // which way the turns go: the other way in every other block

  unsigned rank() const { return now / num_threads; }
  unsigned thread() const { return now % num_threads; }
  Block& block() { return blocks[rank()]; }
  Warp& warp() { return block().warps[thread() / 32]; }
} inline machine;
inline dim3 blockIdx, gridDim, blockDim;

// The kernel before: what it does when a block starts, and when one waits for it.
inline void (*undo_kernel_before)() = nullptr;
inline void (*finish_kernel_before)() = nullptr;
extern "C" void play_kernel_before(void (*undo)(), void (*finish)()) {
  undo_kernel_before = undo;
  finish_kernel_before = finish;
}

inline void go_to(unsigned next) {
  const unsigned from = machine.now;
  machine.now = next;
  if (next == from) return;
  switch_stack(&machine.fibers[from].place, machine.fibers[next].place);
  blockIdx.x = machine.first_block + machine.rank();
}

inline unsigned next_fiber() {
  const unsigned count = machine.num_threads * machine.blocks.size();
  unsigned next = machine.now;
  do {
    if (machine.backwards) next = next == 0 ? count - 1 : next - 1;
    else next = next + 1 == count ? 0 : next + 1;
  } while (machine.fibers[next].done);
  return next;
}

inline void wait_at(Barrier& barrier, int count) {
  const long generation = barrier.generation;
  if (++barrier.arrived == count) {
    barrier.arrived = 0;
    barrier.generation++;
    return;
  }
  for (int turns = 0; barrier.generation == generation; turns++) {
    if (turns > 1000000) fail("a barrier that not all threads reach");
    go_to(next_fiber());
  }
}

inline void run_fiber() {
  blockIdx.x = machine.first_block + machine.rank();
  machine.body();
  machine.fibers[machine.now].done = true;
  Block& block = machine.block();
  if (--block.num_left == 0) memset(block.memory, 0xff, machine.shared_bytes);  // no longer its own
  void* nowhere;
  if (--machine.num_left == 0) switch_stack(&nowhere, machine.home);
  go_to(next_fiber());
  fail("a finished thread goes on");
}

// A block, or a cluster of them that starts at `first`.
inline void run_blocks(
    dim3 first, unsigned num_blocks, unsigned num_threads, size_t shared, std::function<void()> body) {
  if (undo_kernel_before) undo_kernel_before();
  blockIdx = first;
  machine.first_block = first.x;
  machine.body = body;
  machine.num_threads = num_threads;
  machine.num_left = num_blocks * num_threads;
  machine.shared_bytes = (shared + 15) / 16 * 16;
  const size_t apart = (machine.shared_bytes + Machine::GUARD + 127) / 128 * 128;
  machine.shared.assign(num_blocks * apart + 128, 0xff);
  unsigned char* memory = (unsigned char*)(((uintptr_t)machine.shared.data() + 127) / 128 * 128);
  machine.cluster = Barrier();
  machine.blocks.assign(num_blocks, Block());
  for (unsigned i = 0; i < num_blocks; i++) {
    machine.blocks[i].warps.resize((num_threads + 31) / 32);
    machine.blocks[i].memory = memory + i * apart;
    machine.blocks[i].num_left = num_threads;
  }
  if (machine.fibers.size() < machine.num_left) machine.fibers.resize(machine.num_left);
  for (unsigned i = 0; i < machine.num_left; i++) {
    Fiber& fiber = machine.fibers[i];
    fiber.done = false;
    fiber.groups.clear();
    fiber.open.clear();
    void** top = (void**)(fiber.stack + Fiber::STACK - 64);
    *--top = nullptr;
    *--top = (void*)run_fiber;
    fiber.place = top - 6;  // six registers of no matter
  }
  machine.backwards = !machine.backwards;
  machine.now = 0;
  switch_stack(&machine.home, machine.fibers[0].place);
  for (const Block& block : machine.blocks)
    for (size_t i = 0; i < Machine::GUARD; i++)
      if (block.memory[machine.shared_bytes + i] != 0xff) fail("written past the shared memory");
}

struct Thread {
  operator unsigned() const { return machine.thread(); }
};
inline int operator%(Thread thread, int n) { return (unsigned)thread % n; }
inline int operator/(Thread thread, int n) { return (unsigned)thread / n; }
struct { Thread x; } static threadIdx;
inline unsigned lane_index() { return machine.now % 32; }
inline void __syncthreads() { wait_at(machine.block().all, machine.num_threads); }
inline void wait_for_team(int team, int num_threads) {
  wait_at(machine.block().named[1 + team], num_threads);
}
inline void sync_lanes(unsigned mask) {
  Warp& warp = machine.warp();
  if (mask == ~0u) return wait_at(warp.all, 32);
  wait_at(warp.parts[__builtin_ctz(mask)], __builtin_popcount(mask));
}
inline void __syncwarp() { sync_lanes(~0u); }
inline void __threadfence() {}
inline int atomicAdd(int* place, int x) { return (*place += x) - x; }

namespace cooperative_groups {
struct cluster_group {
  unsigned block_rank() const { return machine.rank(); }
  unsigned num_blocks() const { return machine.blocks.size(); }
  void sync() const { wait_at(machine.cluster, num_blocks() * machine.num_threads); }
  template <typename T>
  T* map_shared_rank(T* pointer, int rank) const {
    const size_t offset = (unsigned char*)pointer - machine.block().memory;
    return (T*)(machine.blocks[rank].memory + offset);
  }
};
inline cluster_group this_cluster() { return {}; }
}  // namespace cooperative_groups

// Every lane of the mask gives some words, then sees those of all.
template <typename Read>
auto exchanged(std::initializer_list<uint32_t> words, Read read, unsigned mask = ~0u) {
  auto& lanes = machine.warp().exchange;
  std::copy(words.begin(), words.end(), lanes[lane_index()]);
  sync_lanes(mask);
  const auto result = read(lanes);
  sync_lanes(mask);
  return result;
}
template <typename T>
T __shfl_sync(unsigned mask, T x, int from) {
  return exchanged({same_bits<uint32_t>(x)},
                   [&](auto& lanes) { return same_bits<T>(lanes[from % 32][0]); }, mask);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T x, int flip, int = 32) {
  return __shfl_sync(mask, x, lane_index() ^ flip);
}
inline uint32_t __reduce_max_sync(unsigned, uint32_t x) {
  return exchanged({x}, [](auto& lanes) {
    uint32_t largest = 0;
    for (auto& lane : lanes) largest = max(largest, lane[0]);
    return largest;
  });
}
inline bool __any_sync(unsigned, bool x) {
  return exchanged({x}, [](auto& lanes) {
    return std::any_of(lanes, lanes + 32, [](auto& lane) { return lane[0] != 0; });
  });
}

// ---- what cuda.cu has in PTX --------------------------------------------------------------------

inline unsigned char* block_memory() { return machine.block().memory; }
inline uint32_t __cvta_generic_to_shared(const void* x) {
  return (uint32_t)((const unsigned char*)x - block_memory());
}
inline uint32_t shared_address(const void* x) { return __cvta_generic_to_shared(x); }
template <typename T>
T from_other_block(const T* pointer) { return *pointer; }
inline float exponential2(float x) { return exp2f(x); }
inline void wait_for_kernel_before() {
  if (!finish_kernel_before) return;
  __syncthreads();  // not before every thread has done what it does before
  finish_kernel_before();
  __syncthreads();
}
inline void wait_for_previous_kernel() { wait_for_kernel_before(); }
inline void let_next_kernel_start() {}

inline float number_of(bool bf16, uint32_t pair, int high) {
  const uint16_t bits = high ? pair >> 16 : pair;
  return bf16 ? same_bits<float>((uint32_t)bits << 16) : (float)same_bits<__half>(bits);
}
inline uint32_t pack(bool bf16, float low, float high) {
  auto bits = [&](float x) -> uint32_t {
    if (!bf16) return same_bits<uint16_t>((__half)x);
    const uint32_t whole = same_bits<uint32_t>(x);
    return x != x ? 0x7fff : (whole + 0x7fff + (whole >> 16 & 1)) >> 16;
  };
  return bits(low) | bits(high) << 16;
}
template <bool HALF = true>
uint32_t subtract_pair(uint32_t x, uint32_t y) {
  return pack(!HALF, number_of(!HALF, x, 0) - number_of(!HALF, y, 0),
              number_of(!HALF, x, 1) - number_of(!HALF, y, 1));
}
template <bool HALF = true>
uint32_t multiply_pair(uint32_t x, uint32_t y) {
  return pack(!HALF, number_of(!HALF, x, 0) * number_of(!HALF, y, 0),
              number_of(!HALF, x, 1) * number_of(!HALF, y, 1));
}
inline uint32_t and_or(uint32_t x, uint32_t mask, uint32_t magic) { return (x & mask) | magic; }
inline uint32_t andnot_or(uint32_t x, uint32_t mask, uint32_t magic) { return (~x & mask) | magic; }
inline uint32_t and_xor(uint32_t x, uint32_t mask, uint32_t flip) { return (x & mask) ^ flip; }
inline float number_of_e4m3(int code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const float size = exponent ? ldexpf(8 + mantissa, exponent - 10) : ldexpf(mantissa, -9);
  return (code & 127) == 127 ? NAN : code & 128 ? -size : size;
}
inline void convert_e4m3(uint32_t x, uint32_t& low, uint32_t& high) {
  auto number = [&](int i) { return number_of_e4m3(x >> 8 * i & 255); };
  low = pack(false, number(0), number(1));
  high = pack(false, number(2), number(3));
}

template <typename Byte>
int dp2a(int x, int codes, int sum, int first) {
  for (int i = 0; i < 2; i++)
    sum += (int)(int16_t)(x >> 16 * i) * (int)(Byte)(codes >> 8 * (first + i));
  return sum;
}
inline int __dp2a_lo(int x, int codes, int sum) { return dp2a<int8_t>(x, codes, sum, 0); }
inline int __dp2a_hi(int x, int codes, int sum) { return dp2a<int8_t>(x, codes, sum, 2); }
inline int dot_low(int x, int codes, int sum) { return dp2a<uint8_t>(x, codes, sum, 0); }
inline int dot_high(int x, int codes, int sum) { return dp2a<uint8_t>(x, codes, sum, 2); }

// Products of tiles, where the PTX manual places their fragments: m16n8k16, or m16n8k32 of bytes,
// 32 bits of depth in each register either way. `read(word, i)` is the i-th of its PER numbers.
template <int PER, typename Sum, typename Read>
void multiply_tiles(Sum (&c)[4], std::initializer_list<uint32_t> factors, Read read) {
  exchanged(factors, [&](auto& lanes) {
    const int g = lane_index() / 4, t = lane_index() % 4;
    Sum a[2][8 * PER], b[2][8 * PER];
    for (int i = 0; i < 2; i++)
      for (int word = 0; word < 8; word++)
        for (int k = 0; k < PER; k++) {
          a[i][word * PER + k] = read(lanes[g * 4 + word % 4][i + word / 4 * 2], k);
          b[i][word * PER + k] = read(lanes[(2 * t + i) * 4 + word % 4][4 + word / 4], k);
        }
    for (int i = 0; i < 4; i++)
      for (int k = 0; k < 8 * PER; k++) c[i] += a[i / 2][k] * b[i % 2][k];
    return 0;
  });
}
inline void multiply(bool bf16, float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                     uint32_t b0, uint32_t b1) {
  multiply_tiles<2>(c, {a0, a1, a2, a3, b0, b1},
                    [&](uint32_t word, int i) { return number_of(bf16, word, i); });
}
template <bool HALF>
void mma_16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
            uint32_t b1) {
  multiply(!HALF, c, a0, a1, a2, a3, b0, b1);
}
inline void mma_int8(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                     uint32_t b1) {
  multiply_tiles<4>(c, {a0, a1, a2, a3, b0, b1},
                    [](uint32_t word, int i) { return (int)(int8_t)(word >> 8 * i); });
}
inline void mma_e4m3(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                     uint32_t b1) {
  multiply_tiles<4>(c, {a0, a1, a2, a3, b0, b1},
                    [](uint32_t word, int i) { return number_of_e4m3(word >> 8 * i & 255); });
}
inline uint32_t transpose(uint32_t x) {
  return exchanged({x}, [](auto& lanes) {
    const int g = lane_index() / 4, t = lane_index() % 4;
    auto at = [&](int row, int column) {
      return lanes[row * 4 + column / 2][0] >> column % 2 * 16 & 0xffff;
    };
    return at(2 * t, g) | at(2 * t + 1, g) << 16;
  });
}

inline void copy_now(const Copy& copy) {
  if (copy.keep)
    memcpy(block_memory() + copy.to, copy.from, copy.bytes);
  else
    memset(block_memory() + copy.to, 0, copy.bytes);
}
template <int BYTES>
void copy_async(uint32_t to, const void* from, bool keep) {
  if (to + BYTES > machine.shared_bytes) fail("a copy past the shared memory");
  if (to % BYTES || (keep && (uintptr_t)from % BYTES)) fail("a copy out of line");
  memset(block_memory() + to, 0xff, BYTES);
  if (finish_kernel_before)
    copy_now({to, from, BYTES, keep});
  else
    machine.fibers[machine.now].open.push_back({to, from, BYTES, keep});
}
inline void commit_copies() {
  Fiber& fiber = machine.fibers[machine.now];
  fiber.groups.push_back(std::move(fiber.open));
  fiber.open.clear();
}
inline void wait_for_groups(size_t num_left) {
  auto& groups = machine.fibers[machine.now].groups;
  for (; groups.size() > num_left; groups.erase(groups.begin()))
    for (const Copy& copy : groups.front()) copy_now(copy);
}
inline void wait_for_oldest(int stages) { wait_for_groups(stages - 1); }
inline void wait_for_copies() { wait_for_groups(0); }
inline void copy_16(uint32_t to, const void* from, bool inside) { copy_async<16>(to, from, inside); }
inline void copy_4(uint32_t to, const void* from, bool inside) { copy_async<4>(to, from, inside); }
inline void close_group() { commit_copies(); }
inline void wait_groups(int pending) { wait_for_groups(pending); }
template <int PENDING>
void wait_pending() { wait_for_groups(PENDING); }

// ---- the host's side ----------------------------------------------------------------------------

using cudaError_t = int;
using cudaStream_t = void*;
enum { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
enum { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum { cudaLaunchAttributeProgrammaticStreamSerialization, cudaLaunchAttributeClusterDimension };
struct cudaLaunchAttribute {
  int id;
  struct {
    int programmaticStreamSerializationAllowed;
    struct { unsigned x, y, z; } clusterDim;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0; }
// What kernels may have of shared memory: 48 KB unless they ask, of which 256 bytes are static.
inline std::map<const void*, size_t> asked_for;
inline cudaError_t cudaFuncSetAttribute(const void* kernel, int, int bytes) {
  asked_for[kernel] = bytes;
  return cudaSuccess;
}

inline unsigned cluster_of(const cudaLaunchConfig_t& config) {
  for (unsigned i = 0; i < config.numAttrs; i++)
    if (config.attrs[i].id == cudaLaunchAttributeClusterDimension)
      return config.attrs[i].val.clusterDim.x;
  return 1;
}

template <typename... Wanted, typename... Given>
cudaError_t cudaLaunchKernelEx(
    const cudaLaunchConfig_t* config, void (*kernel)(Wanted...), const Given&... arguments) {
  const dim3 grid = config->gridDim;
  const unsigned cluster = cluster_of(*config);
  if (grid.x % cluster || config->blockDim.x > 1024) return cudaErrorInvalidValue;
  const size_t most = std::max<size_t>(asked_for[(const void*)kernel], 48 * 1024 - 256);
  if (config->dynamicSmemBytes > most) return cudaErrorInvalidValue;
  std::vector<dim3> firsts;
  for (unsigned i = 0; i < grid.x * grid.y * grid.z; i += cluster)
    firsts.push_back(dim3(i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y));
  uint32_t state = 1;
  for (size_t i = firsts.size(); i > 1; i--) {
    state = state * 1664525 + 1013904223;
    std::swap(firsts[i - 1], firsts[state / 256 % i]);
  }
  gridDim = grid;
  blockDim = config->blockDim;
  for (const dim3& first : firsts)
    run_blocks(first, cluster, config->blockDim.x, config->dynamicSmemBytes,
               [&] { kernel(arguments...); });
  return cudaSuccess;
}

#pragma GCC pop_options
