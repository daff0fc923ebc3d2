// Decode attention straight from the projection, for a few sequences: norms, the rotary embedding,
// the write of the newest K and V and attention in one launch.
//
// One sequence is bound by waiting, not by memory: 1,024 tokens of Llama-3.1-8B's heads are 1 µs of
// an H200's bandwidth. So
// - a cluster of blocks serves one KV head, and they send each other their sums: no counter, no
//   second pass through L2;
// - all older tokens are on their way to shared memory before the kernel in front, which makes the
//   projection, has ended. What is left behind it: a load of q, products, a softmax, the exchange.
// Warps of the cluster take steps of 16 tokens in turn. The newest token is not read from its page:
// the warp whose step it falls into puts it beside the others in its queue.
//
// The steps themselves are ../attention/paged.cuh's. There is no portable build: clusters are
// Hopper's and later chips'.

#include "../attention/paged.cuh"

// The launcher's arguments; cuda.py has the same list.
struct RidgelineProjected {
  RidgelineDecode decode;  // q is the projection: query heads, K heads, V heads. No splits.
  const float* cos;        // [B, A]; A = 0: nothing is turned
  const float* sin;
  const uint16_t* q_norm;  // [H], or null
  const uint16_t* k_norm;
  const int* slots;  // [B]: where the newest tokens go; negative: nowhere
  int angles;
  float eps, offset;
};

namespace {

#if !PORTABLE

constexpr int MOST_QUERIES = 8;  // query heads of a group

// What turns a head, in a lane's columns: every 32nd from its own on.
template <int H>
struct Turn {
  static constexpr int COLUMNS = (H + 31) / 32;
  float cos[COLUMNS], sin[COLUMNS];

  __device__ __forceinline__ void load(const RidgelineProjected& job, int64_t sequence) {
    UNROLL for (int i = 0; i < COLUMNS; i++) {
      const int column = threadIdx.x % 32 + 32 * i, half = job.angles;
      const bool turned = column < 2 * half;
      const int64_t at = sequence * half + (column < half ? column : column - half);
      cos[i] = turned ? job.cos[at] : 1.0f;
      sin[i] = turned ? (column < half ? -job.sin[at] : job.sin[at]) : 0.0f;
    }
  }
};

// A head of the projection, as a lane has its columns, and for each the one it is turned with.
template <int H>
struct Head {
  static constexpr int COLUMNS = Turn<H>::COLUMNS;
  uint16_t own[COLUMNS], beside[COLUMNS], gain[COLUMNS], gain_beside[COLUMNS];

  __device__ __forceinline__ void load(
      const RidgelineProjected& job, const uint16_t* from, const uint16_t* gains) {
    UNROLL for (int i = 0; i < COLUMNS; i++) {
      const int column = threadIdx.x % 32 + 32 * i;
      const int other = column < job.angles ? column + job.angles : column - job.angles;
      const bool inside = column < H, turned = column < 2 * job.angles;
      own[i] = inside ? from[column] : 0;
      beside[i] = turned ? from[other] : 0;
      gain[i] = gains && inside ? gains[column] : 0;
      gain_beside[i] = gains && turned ? gains[other] : 0;
    }
  }

  // With its norm, if it has one, and turned or not; in fp32.
  __device__ __forceinline__ void finish(
      const RidgelineProjected& job, bool normed, bool turned, const Turn<H>& turn,
      float (&x)[COLUMNS]) const {
    const int is_fp16 = job.decode.q_is_fp16;
    float scale = 1.0f;
    if (normed) {
      float squares = 0.0f;
      UNROLL for (int i = 0; i < COLUMNS; i++) {
        const float number = to_float(own[i], is_fp16);
        squares += number * number;
      }
      for (int other = 16; other; other /= 2) squares += __shfl_xor_sync(~0u, squares, other);
      scale = rsqrtf(squares / H + job.eps);
    }
    UNROLL for (int i = 0; i < COLUMNS; i++) {
      float other = to_float(beside[i], is_fp16);
      x[i] = to_float(own[i], is_fp16);
      if (normed) {
        x[i] = x[i] * scale * (to_float(gain[i], is_fp16) + job.offset);
        other = other * scale * (to_float(gain_beside[i], is_fp16) + job.offset);
      }
      if (turned) x[i] = x[i] * turn.cos[i] + other * turn.sin[i];
    }
  }
};

// Shared memory behind the queues.
template <int H>
struct Exchange {
  static constexpr int PITCH = H + 8;  // numbers from a head to the next: other banks
  uint16_t heads[MOST_QUERIES + 2][PITCH];  // queries, then the newest K and V, as they are rounded
  float2 stats[MOST_QUERIES * H / 4];  // what the quads below weigh
  float4 quads[MOST_QUERIES * H / 4];  // [blocks, quads that this one finishes]
};

// The queries of this block's group, and if the newest token is its own, that one's K and V, which
// also go into their slot: a warp takes two of these rows at a time. The caller synchronises.
template <int H>
__device__ __forceinline__ void make_heads(
    const RidgelineProjected& job, const Share& s, const Turn<H>& turn, bool has_newest, int slot,
    Exchange<H>& exchange) {
  const Args& a = job.decode;
  const int lane = threadIdx.x % 32, num_warps = blockDim.x / 32, num_kv = a.num_kv_heads;
  const int num_rows = a.group + (has_newest ? 2 : 0), k_row = a.group, v_row = a.group + 1;
  const uint16_t* projection = a.q + s.sequence * a.q_stride;
  const int64_t page = slot >> a.page_shift, place = slot & ((1 << a.page_shift) - 1);
  const int64_t kept = (((page * num_kv + s.head) << a.page_shift) + place) * H;
  for (int first = threadIdx.x / 32; first < num_rows; first += 2 * num_warps) {
    Head<H> heads[2];
    UNROLL for (int i = 0; i < 2; i++) {
      const int row = first + i * num_warps;
      if (row >= num_rows) continue;
      const int head = row < k_row ? s.head * a.group + row
                                   : (a.group + row - k_row) * num_kv + s.head;
      heads[i].load(job, projection + (int64_t)head * H,
                    row < k_row ? job.q_norm : row == k_row ? job.k_norm : nullptr);
    }
    UNROLL for (int i = 0; i < 2; i++) {
      const int row = first + i * num_warps;
      if (row >= num_rows) continue;
      float x[Head<H>::COLUMNS];
      heads[i].finish(job, job.q_norm && row != v_row, job.angles && row != v_row, turn, x);
      uint16_t* to = exchange.heads[row < k_row ? row : MOST_QUERIES + row - k_row];
      uint16_t* pages =
          reinterpret_cast<uint16_t*>(const_cast<uint8_t*>(row == v_row ? a.v : a.k)) + kept;
      UNROLL for (int j = 0; j < Head<H>::COLUMNS; j++) {
        const int column = lane + 32 * j;
        if (column >= H) continue;
        to[column] = from_float(x[j], a.q_is_fp16);
        if (row >= k_row && slot >= 0) pages[column] = to[column];
      }
    }
  }
}

// The newest token into the row of a step that was left to it.
template <int KIND, int H>
__device__ __forceinline__ void place_newest(
    const Exchange<H>& exchange, unsigned char* slot, int row) {
  using L = Layout<KIND, H>;
  for (int i = threadIdx.x % 32; i < 2 * L::K_PIECES; i += 32) {
    const bool is_v = i >= L::K_PIECES;
    const int piece = is_v ? i - L::K_PIECES : i;
    const int place = is_v ? L::HALF + L::v_place(row, piece) : L::k_place(row, piece);
    *reinterpret_cast<uint4*>(slot + place) =
        *reinterpret_cast<const uint4*>(exchange.heads[MOST_QUERIES + is_v] + piece * 8);
  }
}

// The cluster's sums: each block sends every other those quads of its own that the other finishes.
template <int H>
__device__ __forceinline__ void merge_cluster(
    const Args& a, const Share& s, const unsigned char* shared, Exchange<H>& exchange) {
  const auto cluster = cooperative_groups::this_cluster();
  const int rank = cluster.block_rank(), num_blocks = cluster.num_blocks();
  const int num_quads = s.rows * (H / 4), own = (num_quads + num_blocks - 1) / num_blocks;
  for (int quad = threadIdx.x; quad < num_quads; quad += blockDim.x) {
    const int row = quad / (H / 4), column = quad % (H / 4) * 4;
    const Quad merged = merge_warps<H>(shared, blockDim.x / 32, s.rows, row, column);
    if (num_blocks == 1) {
      store_row(a, s, H, row, column, merged.sum, merged.total);
      continue;
    }
    Exchange<H>* other = cluster.map_shared_rank(&exchange, quad / own);
    other->quads[rank * own + quad % own] = merged.sum;
    other->stats[rank * own + quad % own] = make_float2(merged.largest, merged.total);
  }
  if (num_blocks == 1) return;
  cluster.sync();
  for (int i = threadIdx.x; i < own && rank * own + i < num_quads; i += blockDim.x) {
    const int quad = rank * own + i;
    float largest = NOTHING, total = 0.0f;
    for (int block = 0; block < num_blocks; block++)
      largest = fmaxf(largest, exchange.stats[block * own + i].x);
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int block = 0; block < num_blocks; block++) {
      const float2 stat = exchange.stats[block * own + i];
      const float weight = exponential2(stat.x - largest);
      add(sum, weight, exchange.quads[block * own + i]);
      total += weight * stat.y;
    }
    store_row(a, s, H, quad / (H / 4), quad % (H / 4) * 4, sum, total);
  }
}

template <int KIND, int H>
__global__ void __launch_bounds__(MAX_THREADS, 1)
    projected_attention_kernel(const RidgelineProjected job) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  using L = Layout<KIND, H>;
  const Args& a = job.decode;
  const auto cluster = cooperative_groups::this_cluster();
  const int rank = cluster.block_rank(), num_blocks = cluster.num_blocks();
  const int warp = threadIdx.x / 32, num_warps = blockDim.x / 32;
  unsigned char* shared = block_memory();
  Exchange<H>& exchange =
      *reinterpret_cast<Exchange<H>*>(shared + num_warps * a.stages * L::STAGE);
  Share s = {};
  s.head = blockIdx.x / num_blocks;
  s.rows = a.group;
  s.sequence = blockIdx.y;

  if (!a.settled) wait_for_kernel_before();
  let_next_kernel_start();  // not before: who reads early relies on it
  s.length = a.lengths[s.sequence];
  const int slot = job.slots[s.sequence];
  s.begin = a.window > 0 ? max(s.length - a.window, 0) : 0;
  const int team = num_blocks * num_warps, newest = s.length - 1;
  // Neighbouring steps lie in other blocks: few tokens are shared out too.
  Steps<KIND, H> steps(a, s, s.begin / STEP + warp * num_blocks + rank, team);
  steps.range(s.begin, s.length);
  steps.end = newest;
  unsigned char* ring = shared + warp * a.stages * L::STAGE;
  const uint32_t ring_address = (uint32_t)__cvta_generic_to_shared(ring);
  for (int i = 0; i < a.stages; i++) steps.fetch_next(ring_address + i * L::STAGE);
  Turn<H> turn;
  turn.load(job, s.sequence);
  const bool has_newest =
      s.length > 0 && (newest / STEP - s.begin / STEP) % num_blocks == rank;
  if (num_blocks > 1) cluster.sync();  // the others are there to be sent sums
  if (a.settled) wait_for_kernel_before();

  make_heads<H>(job, s, turn, has_newest, slot, exchange);
  __syncthreads();
  uint32_t q[L::K_PRODUCTS][1][2];
  float factor[1][2];
  load_q<KIND, H, 1>(exchange.heads[0], Exchange<H>::PITCH, s.rows, a.q_is_fp16, q, factor);
  UNROLL for (int i = 0; i < 2; i++)
    factor[0][i] *= a.softcap != 0.0f ? a.scale : a.scale * LOG2E;
  Sums<KIND, H, 1> sums;
  sums.clear();
  int place = 0;
  for (int step = 0; step < steps.count; step++) {
    const int token = steps.token(step);
    unsigned char* held = ring + place * L::STAGE;
    wait_for_oldest(a.stages);
    __syncwarp();  // a lane reads what others copied
    if (token + STEP > newest) {
      place_newest<KIND, H>(exchange, held, newest - token);
      __syncwarp();
    }
    attend<KIND, H, 1>(a, held, q, factor, token, s.begin, s.length, sums);
    __syncwarp();  // and all have read it
    steps.fetch_next(ring_address + place * L::STAGE);
    place = place + 1 == a.stages ? 0 : place + 1;
  }
  wait_for_copies();
  __syncthreads();  // the queues become the place of the sums
  sums.leave(shared, num_warps, s.rows);
  __syncthreads();
  merge_cluster<H>(a, s, shared, exchange);
#endif
}

template <int KIND, int H>
int start_projected(
    const RidgelineProjected& job, int batch, int num_blocks, int num_warps, int overlap,
    cudaStream_t stream) {
  static Allowed allowed = {};
  const size_t shared =
      num_warps * job.decode.stages * (size_t)Layout<KIND, H>::STAGE + sizeof(Exchange<H>);
  return launch<RidgelineProjected>(
      projected_attention_kernel<KIND, H>, job, dim3(job.decode.num_kv_heads * num_blocks, batch),
      num_warps * 32, shared, allowed, num_blocks, overlap, stream);
}

template <int KIND>
int projected_with_head_dim(
    int head_dim, const RidgelineProjected& job, int batch, int num_blocks, int num_warps,
    int overlap, cudaStream_t stream) {
  switch (head_dim) {
    case 64: return start_projected<KIND, 64>(job, batch, num_blocks, num_warps, overlap, stream);
    case 80: return start_projected<KIND, 80>(job, batch, num_blocks, num_warps, overlap, stream);
    case 96: return start_projected<KIND, 96>(job, batch, num_blocks, num_warps, overlap, stream);
    case 128: return start_projected<KIND, 128>(job, batch, num_blocks, num_warps, overlap, stream);
    case 256: return start_projected<KIND, 256>(job, batch, num_blocks, num_warps, overlap, stream);
  }
  return cudaErrorInvalidValue;
}

#endif  // !PORTABLE

}  // namespace

// `kind` is BF16 or FP16, `num_blocks` of a cluster 1, 2, 4 or 8, `num_warps` of a block 1 to 8;
// `overlap`: start while the kernel before still runs (programmatic dependent launch). Returns a
// cudaError_t.
extern "C" int ridgeline_projected_attention(
    const RidgelineProjected* job, int batch, int head_dim, int kind, int num_blocks, int num_warps,
    int overlap, void* stream) {
#if !PORTABLE
  const cudaStream_t on = (cudaStream_t)stream;
  switch (kind) {
    case BF16:
      return projected_with_head_dim<BF16>(
          head_dim, *job, batch, num_blocks, num_warps, overlap, on);
    case FP16:
      return projected_with_head_dim<FP16>(
          head_dim, *job, batch, num_blocks, num_warps, overlap, on);
  }
#endif
  return cudaErrorInvalidValue;
}

// Bytes of shared memory that a block takes beside its queues.
extern "C" int ridgeline_projected_attention_exchange_bytes(int head_dim) {
#if !PORTABLE
  switch (head_dim) {
    case 64: return sizeof(Exchange<64>);
    case 80: return sizeof(Exchange<80>);
    case 96: return sizeof(Exchange<96>);
    case 128: return sizeof(Exchange<128>);
    case 256: return sizeof(Exchange<256>);
  }
#endif
  return 0;
}
