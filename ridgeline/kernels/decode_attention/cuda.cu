// Decode attention over a paged KV cache in CUDA C++: one kernel, splits merged by the last block.
//
// A block serves one KV head of one sequence over one split of its tokens, for up to 16 query heads
// of the group (a chunk). How its warps go through the tokens is in ../attention/paged.cuh, beside
// what is said there about memory, matrix units, numbers and the portable build.

#include "../attention/paged.cuh"

namespace {

// The end of a block's range, once the length is known; false: nothing to do, not even zeros.
__device__ __forceinline__ bool finish_share(const Args& a, Share& s, int first) {
  s.end = min((s.begin / a.split_tokens + 1) * a.split_tokens, s.length);
  s.begin = max(s.begin, first);
  s.num_used = (s.length + a.split_tokens - 1) / a.split_tokens - first / a.split_tokens;
  return s.slot < max(s.num_used, 1);
}

// ---- the epilogue: splits merged -----------------------------------------------------------------

// Sums of the splits in their order, by the block that came last, HELD of them on their way at
// once. Where there are more threads than quads of numbers, they share the splits.
template <int H>
__device__ void merge_splits(const Args& a, const Share& s, unsigned char* shared) {
  constexpr int HELD = 8;
  const int num_threads = blockDim.x, quads = s.rows * (H / 4);
  const int parts = max(1, num_threads / quads), num_stats = s.num_used * s.row_stride;
  const int quad_stride = s.row_stride * (H / 4);
  float4* sums = reinterpret_cast<float4*>(shared);  // [parts, quads], at most one a thread
  float2* stats = reinterpret_cast<float2*>(sums + num_threads);  // [splits, rows]
  const int64_t base = s.index * a.num_splits * s.row_stride;
  const float4* partial = reinterpret_cast<const float4*>(a.partial + base * H);
  for (int i = threadIdx.x; i < num_stats; i += num_threads)
    stats[i] = from_other_block(a.stats + base + i);
  for (int start = 0; start < quads * parts; start += num_threads) {
    const int item = start + threadIdx.x, quad = item % quads, part = item / quads;
    const int row = quad / (H / 4), num_used = part < parts ? s.num_used : 0;
    float4 held[HELD];
    UNROLL for (int i = 0; i < HELD; i++)
      if (part + i * parts < num_used)
        held[i] = from_other_block(partial + (int64_t)(part + i * parts) * quad_stride + quad);
    __syncthreads();  // the stats are there
    float largest = NOTHING, total = 0.0f;
#pragma unroll 4
    for (int split = 0; split < num_used; split++)
      largest = fmaxf(largest, stats[split * s.row_stride + row].x);
#pragma unroll 4
    for (int split = 0; split < num_used; split++) {
      const float2 stat = stats[split * s.row_stride + row];
      total += stat.y * exponential2(stat.x - largest);
    }
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int split = part; split < num_used; split += HELD * parts) {
      UNROLL for (int i = 0; i < HELD; i++) {
        const int own = split + i * parts, next = own + HELD * parts;
        if (own < num_used)
          add(sum, exponential2(stats[own * s.row_stride + row].x - largest), held[i]);
        if (next < num_used)
          held[i] = from_other_block(partial + (int64_t)next * quad_stride + quad);
      }
    }
    if (parts > 1) {  // one round then: quads · parts are no more than the threads
      if (part < parts) sums[item] = sum;
      __syncthreads();
      for (int other = 1; other < parts && part == 0; other++)
        add(sum, 1.0f, sums[other * quads + quad]);
    }
    if (part == 0) store_row(a, s, H, row, quad % (H / 4) * 4, sum, total);
  }
}

// The block's sums, written: as the result where the sequence has one split, else beside the other
// splits' for the last to merge.
template <int H>
__device__ void finish_block(const Args& a, const Share& s, unsigned char* shared, int num_warps) {
  __shared__ int is_last;
  const int64_t base = (s.index * a.num_splits + s.slot) * s.row_stride;
  for (int quad = threadIdx.x; quad < s.rows * (H / 4); quad += blockDim.x) {
    const int row = quad / (H / 4), column = quad % (H / 4) * 4;
    const Quad merged = merge_warps<H>(shared, num_warps, s.rows, row, column);
    if (s.num_used <= 1) {
      store_row(a, s, H, row, column, merged.sum, merged.total);
    } else {
      *reinterpret_cast<float4*>(a.partial + (base + row) * H + column) = merged.sum;
      if (column == 0) a.stats[base + row] = make_float2(merged.largest, merged.total);
    }
  }
  if (s.num_used <= 1) return;
  __syncthreads();  // every thread has stored before one of them counts the block in
  if (threadIdx.x == 0) {
    __threadfence();
    is_last = atomicAdd(a.counters + s.index, 1) == s.num_used - 1;
    if (is_last) a.counters[s.index] = 0;  // as the next launch must find it
    __threadfence();
  }
  __syncthreads();
  if (is_last) merge_splits<H>(a, s, shared);
}

#if !PORTABLE

template <int KIND, int H, int HALVES>
__device__ __forceinline__ void sum_tokens(const Args& a, Share& s, unsigned char* shared) {
  using L = Layout<KIND, H>;
  const int num_warps = blockDim.x / 32, warp = threadIdx.x / 32;
  if (!a.settled) wait_for_kernel_before();
  int first = 0;
  if (a.window > 0) {
    s.length = a.lengths[s.sequence];
    first = max(s.length - a.window, 0);
  }
  // A block behind the window begins at the window's first token, not at its split's.
  s.begin = max((first / a.split_tokens + s.slot) * a.split_tokens, first);
  Steps<KIND, H> steps(a, s, s.begin / STEP + warp, num_warps);
  if (a.window <= 0) s.length = a.lengths[s.sequence];  // on its way with the pages
  if (!finish_share(a, s, first)) return;
  steps.range(s.begin, s.end);
  unsigned char* ring = shared + warp * a.stages * L::STAGE;
  const uint32_t ring_address = (uint32_t)__cvta_generic_to_shared(ring);

  // The newest token may be the kernel before's work; older ones need not wait for it.
  const int fetched_first = (s.begin / STEP + num_warps * a.stages) * STEP;
  bool waited = !a.settled;
  if (!waited && min(fetched_first, s.end) == s.length) {
    wait_for_kernel_before();
    waited = true;
  }
  for (int slot = 0; slot < a.stages; slot++) steps.fetch_next(ring_address + slot * L::STAGE);
  if (!waited) wait_for_kernel_before();

  uint32_t q[L::K_PRODUCTS][HALVES][2];
  float factor[HALVES][2];
  const int64_t head = (int64_t)s.head * a.group + s.first_row;
  load_q<KIND, H, HALVES>(
      a.q + s.sequence * a.q_stride + head * H, H, s.rows, a.q_is_fp16, q, factor);
  UNROLL for (int half = 0; half < HALVES; half++)
    UNROLL for (int i = 0; i < 2; i++)
      factor[half][i] *= a.softcap != 0.0f ? a.scale : a.scale * LOG2E;
  Sums<KIND, H, HALVES> sums;
  sums.clear();
  int slot = 0;
  for (int step = 0; step < steps.count; step++) {
    wait_for_oldest(a.stages);
    __syncwarp();  // a lane reads what others copied
    attend<KIND, H, HALVES>(
        a, ring + slot * L::STAGE, q, factor, steps.token(step), s.begin, s.end, sums);
    __syncwarp();  // and all have read it
    steps.fetch_next(ring_address + slot * L::STAGE);
    slot = slot + 1 == a.stages ? 0 : slot + 1;
  }
  wait_for_copies();
  __syncthreads();  // the queues become the place of the sums
  sums.leave(shared, num_warps, s.rows);
  __syncthreads();
  finish_block<H>(a, s, shared, num_warps);
}

#else  // PORTABLE

// ---- the same in plain C++ ----------------------------------------------------------------------

template <int KIND>
__device__ __forceinline__ float number(const uint8_t* row, int column) {
  if (KIND <= FP16) return to_float(reinterpret_cast<const uint16_t*>(row)[column], KIND == FP16);
  const int code = row[column];
  if (KIND == INT8) return (float)(code < 128 ? code : code - 256);
  if (KIND == E4M3 ? (code & 127) == 127 : code == 128) return NAN;
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const int bias = KIND == E4M3 ? 10 : 11;  // of a mantissa that is an integer
  const float size = exponent ? ldexpf((float)(8 + mantissa), exponent - bias)
                              : ldexpf((float)mantissa, 1 - bias);
  return code & 128 ? -size : size;
}

// A tile of tokens at a time: scores by (token, row), then weights, then sums by (row, columns).
template <int KIND, int H>
__device__ void sum_tokens(const Args& a, Share& s, unsigned char* shared) {
  constexpr int TILE = 32, ROW = Layout<KIND, H>::ROW;
  float* acc = reinterpret_cast<float*>(shared);                             // [rows, H + PAD]
  float2* stats = reinterpret_cast<float2*>(acc + s.rows * (H + PAD));       // [rows]
  float* decay = reinterpret_cast<float*>(stats + s.rows);                   // [rows]
  float* weights = decay + s.rows;                                           // [rows, TILE]
  float* q = weights + s.rows * TILE;                                        // [rows, H]
  s.length = a.lengths[s.sequence];
  const int first = a.window > 0 ? max(s.length - a.window, 0) : 0;
  s.begin = max((first / a.split_tokens + s.slot) * a.split_tokens, first);
  if (!finish_share(a, s, first)) return;

  const int tid = threadIdx.x, num_threads = blockDim.x;
  const int64_t head = (int64_t)s.head * a.group + s.first_row;
  for (int i = tid; i < s.rows * H; i += num_threads) {
    q[i] = to_float(a.q[s.sequence * a.q_stride + head * H + i], a.q_is_fp16);
    acc[i / H * (H + PAD) + i % H] = 0.0f;
  }
  for (int row = tid; row < s.rows; row += num_threads) stats[row] = make_float2(NOTHING, 0.0f);
  __syncthreads();
  auto place_of = [&](int token) {
    const int64_t page = a.table[s.sequence * a.table_stride + (token >> a.page_shift)];
    return ((page * a.num_kv_heads + s.head) << a.page_shift)
           + (token & ((1 << a.page_shift) - 1));
  };
  for (int start = s.begin; start < s.end; start += TILE) {
    const int count = min(TILE, s.end - start);
    for (int i = tid; i < s.rows * count; i += num_threads) {
      const int row = i / count;
      const int64_t place = place_of(start + i % count);
      float score = 0.0f;
      for (int column = 0; column < H; column++)
        score += q[row * H + column] * number<KIND>(a.k + place * ROW, column);
      score *= a.scale * (Layout<KIND, H>::CODES ? a.k_scale[place] : 1.0f);
      weights[row * TILE + i % count] =
          a.softcap != 0.0f ? capped(score, a.softcap) : score * LOG2E;
    }
    __syncthreads();
    for (int row = tid; row < s.rows; row += num_threads) {
      float largest = stats[row].x, total = 0.0f;
      for (int i = 0; i < count; i++) largest = fmaxf(largest, weights[row * TILE + i]);
      for (int i = 0; i < count; i++) {
        const float weight = exponential2(weights[row * TILE + i] - largest);
        weights[row * TILE + i] = weight;
        total += weight;
      }
      decay[row] = exponential2(stats[row].x - largest);
      stats[row] = make_float2(largest, stats[row].y * decay[row] + total);
    }
    __syncthreads();
    for (int i = tid; i < s.rows * H; i += num_threads) {
      const int row = i / H, column = i % H;
      float sum = acc[row * (H + PAD) + column] * decay[row];
      for (int j = 0; j < count; j++) {
        const int64_t place = place_of(start + j);
        const float scale = Layout<KIND, H>::CODES ? a.v_scale[place] : 1.0f;
        sum += weights[row * TILE + j] * scale * number<KIND>(a.v + place * ROW, column);
      }
      acc[row * (H + PAD) + column] = sum;
    }
    __syncthreads();
  }
  finish_block<H>(a, s, shared, 1);
}

#endif  // PORTABLE

// ---- the kernel and its launch ------------------------------------------------------------------

// Two blocks of eight warps an SM hide each other's beginnings where the sums leave room for them.
template <int KIND, int H, int HALVES>
__global__ void __launch_bounds__(MAX_THREADS, KIND > FP16 && H <= 128 && HALVES == 1 ? 2 : 1)
    decode_attention_kernel(const Args a) {
  unsigned char* shared = block_memory();
  constexpr int MAX_ROWS = Layout<KIND, H>::MAX_ROWS;
  const int chunks = (a.group + MAX_ROWS - 1) / MAX_ROWS;
  Share s;
  s.head = blockIdx.x / chunks;
  s.first_row = blockIdx.x % chunks * MAX_ROWS;
  s.rows = min(a.group - s.first_row, MAX_ROWS);
  s.row_stride = min(a.group, MAX_ROWS);
  s.slot = blockIdx.z;
  s.sequence = blockIdx.y;
  s.index = s.sequence * gridDim.x + blockIdx.x;
#if PORTABLE
  sum_tokens<KIND, H>(a, s, shared);
#else
  let_next_kernel_start();
  sum_tokens<KIND, H, HALVES>(a, s, shared);
#endif
}

// Shared memory of a block: the queues, then the warps' sums, then the splits' stats, in one place.
template <int KIND, int H>
size_t shared_bytes(const Args& a, int num_warps) {
  constexpr int MAX_ROWS = Layout<KIND, H>::MAX_ROWS;
  const size_t rows = a.group < MAX_ROWS ? a.group : MAX_ROWS;
  const size_t warps = PORTABLE ? 1 : num_warps;
  size_t queues = num_warps * a.stages * (size_t)Layout<KIND, H>::STAGE;
  if (PORTABLE) queues = rows * (2 * H + PAD + 32 + 3) * sizeof(float);
  const size_t sums = warps * rows * ((H + PAD) * sizeof(float) + sizeof(float2));
  const size_t splits = num_warps * 32 * sizeof(float4) + a.num_splits * rows * sizeof(float2);
  const size_t larger = queues > sums ? queues : sums;
  return larger > splits ? larger : splits;
}

template <int KIND, int H, int HALVES>
int start(const Args& a, int batch, int num_warps, int overlap, cudaStream_t stream) {
  static Allowed allowed = {};
  constexpr int MAX_ROWS = Layout<KIND, H>::MAX_ROWS;
  const int chunks = (a.group + MAX_ROWS - 1) / MAX_ROWS;
  return launch<Args>(
      decode_attention_kernel<KIND, H, HALVES>, a, dim3(a.num_kv_heads * chunks, batch, a.num_splits),
      num_warps * 32, shared_bytes<KIND, H>(a, num_warps), allowed, 1, overlap, stream);
}

template <int KIND, int H>
int with_rows(const Args& a, int batch, int num_warps, int overlap, cudaStream_t stream) {
  constexpr int HALVES = PORTABLE ? 1 : Layout<KIND, H>::MAX_ROWS / 8;
  if (a.group <= 8) return start<KIND, H, 1>(a, batch, num_warps, overlap, stream);
  return start<KIND, H, HALVES>(a, batch, num_warps, overlap, stream);
}

template <int KIND>
int with_head_dim(
    int head_dim, const Args& a, int batch, int num_warps, int overlap, cudaStream_t stream) {
  switch (head_dim) {
    case 64: return with_rows<KIND, 64>(a, batch, num_warps, overlap, stream);
    case 80: return with_rows<KIND, 80>(a, batch, num_warps, overlap, stream);
    case 96: return with_rows<KIND, 96>(a, batch, num_warps, overlap, stream);
    case 128: return with_rows<KIND, 128>(a, batch, num_warps, overlap, stream);
    case 256: return with_rows<KIND, 256>(a, batch, num_warps, overlap, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

// `kind` is of the enum Kind, `num_warps` 1 to 8; `overlap`: start while the kernel before still
// runs (programmatic dependent launch). Returns a cudaError_t.
extern "C" int ridgeline_decode_attention(
    const RidgelineDecode* job, int batch, int head_dim, int kind, int num_warps, int overlap,
    void* stream) {
  const Args& a = *job;
  const cudaStream_t on = (cudaStream_t)stream;
  switch (kind) {
    case BF16: return with_head_dim<BF16>(head_dim, a, batch, num_warps, overlap, on);
    case FP16: return with_head_dim<FP16>(head_dim, a, batch, num_warps, overlap, on);
    case E4M3: return with_head_dim<E4M3>(head_dim, a, batch, num_warps, overlap, on);
    case INT8: return with_head_dim<INT8>(head_dim, a, batch, num_warps, overlap, on);
#if PORTABLE
    case E4M3_FNUZ: return with_head_dim<E4M3_FNUZ>(head_dim, a, batch, num_warps, overlap, on);
#endif
  }
  return cudaErrorInvalidValue;
}

// Bytes of shared memory that one step on its way takes of a warp.
extern "C" int ridgeline_decode_attention_stage_bytes(int head_dim, int kind) {
  switch (kind > FP16 ? head_dim : -head_dim) {
    case 64: return Layout<INT8, 64>::STAGE;
    case 80: return Layout<INT8, 80>::STAGE;
    case 96: return Layout<INT8, 96>::STAGE;
    case 128: return Layout<INT8, 128>::STAGE;
    case 256: return Layout<INT8, 256>::STAGE;
    case -64: return Layout<BF16, 64>::STAGE;
    case -80: return Layout<BF16, 80>::STAGE;
    case -96: return Layout<BF16, 96>::STAGE;
    case -128: return Layout<BF16, 128>::STAGE;
    case -256: return Layout<BF16, 256>::STAGE;
  }
  return 0;
}
