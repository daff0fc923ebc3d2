// One row of x times codes in CUDA C++, bound by the memory that holds the codes. Part of cuda.cu.
//
// A warp takes ROWS weight rows at a time, all of their depth. A lane copies every 32nd piece of 16
// bytes into a ring of its own in shared memory and reads back what it copied itself: once x is
// staged nobody waits for another, and rows are shared out warp by warp, so that all end together.
// A stage of the ring is STEPS pieces of each row, asked for row by row: memory is faster the
// longer the runs are that come together (H200, gate-up in int8: runs of 256 bytes 79%, of 512 86%
// of its speed). STAGES are on their way, those of the next rows too. (A ring of registers was
// tried: a warp has six counters of loads, and with more than that on their way it waits for the
// newest.) x waits in shared memory in the order the codes unpack. With int8 and int4 it is whole
// numbers of 16 bits, its largest 32767: a piece's products and sums (dp2a) are then exact, and its
// own rounding is finer than bf16's of the largest. With fp8 it is fp32.

template <int KIND>
struct Line {
  static constexpr bool kWhole = KIND != kFp8Weights;  // x in whole numbers
  static constexpr int kPiece = Form<KIND>::kPiece;
  static constexpr int kUnits = kPiece * (kWhole ? 2 : 4) / 16;  // 16 bytes each, of staged x
  // At which place an element of a piece is staged: as `add_whole` and `add_fp8` take them.
  __device__ static int place(int element) {
    int word = element % 4, part = element / 4;
    if (KIND == kInt8Words) return 4 * word + part;
    if (KIND == kInt4) return 8 * word + part % 2 * 4 + part / 2;
    return element;
  }
};

template <int KIND>
__device__ inline int add_whole(const uint4& raw, const uint32_t* x, int sum) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (KIND == kInt4) {
      uint32_t even = words[i] & 0x0f0f0f0fu, odd = words[i] >> 4 & 0x0f0f0f0fu;
      sum = __dp2a_lo(int(x[4 * i]), int(even), sum);
      sum = __dp2a_hi(int(x[4 * i + 1]), int(even), sum);
      sum = __dp2a_lo(int(x[4 * i + 2]), int(odd), sum);
      sum = __dp2a_hi(int(x[4 * i + 3]), int(odd), sum);
    } else {
      uint32_t codes = KIND == kInt8Words ? words[i] ^ 0x80808080u : words[i];
      sum = __dp2a_lo(int(x[2 * i]), int(codes), sum);
      sum = __dp2a_hi(int(x[2 * i + 1]), int(codes), sum);
    }
  }
  return sum;
}

__device__ inline float add_fp8(const uint4& raw, const uint32_t* x, float sum) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
  float other = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t low, high;
    convert_e4m3(words[i], low, high);
    sum += from_half_bits(uint16_t(low)) * __uint_as_float(x[4 * i]);
    other += from_half_bits(uint16_t(low >> 16)) * __uint_as_float(x[4 * i + 1]);
    sum += from_half_bits(uint16_t(high)) * __uint_as_float(x[4 * i + 2]);
    other += from_half_bits(uint16_t(high >> 16)) * __uint_as_float(x[4 * i + 3]);
  }
  return sum + other;
}

// x times the norm's gain, rounded as the other kernels have it, as 8 numbers from `first` on; `raw`
// gets x itself.
__device__ inline void load_gained(const Job& job, bool half, int first, float (&raw)[8],
                                   float (&values)[8]) {
  uint4 v = __ldg(reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(job.x) + first));
  uint4 g = make_uint4(0, 0, 0, 0);
  if (job.gain)
    g = __ldg(reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(job.gain) + first));
  const uint32_t xs[4] = {v.x, v.y, v.z, v.w}, gains[4] = {g.x, g.y, g.z, g.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    raw[i] = from_bits(uint16_t(xs[i / 2] >> 16 * (i % 2)), half);
    float gain = from_bits(uint16_t(gains[i / 2] >> 16 * (i % 2)), half) + job.offset;
    values[i] = job.gain ? from_bits(to_bits(raw[i] * gain, half), half) : raw[i];
  }
}

// The row's sum of squares and, as bits, its largest magnitude: of bits NaN is the largest, so that
// it is not lost.
__device__ inline void measure_x(const Job& job, bool half, float* scratch, float& squares,
                                 uint32_t& largest) {
  squares = 0, largest = 0;
  for (int first = threadIdx.x * 8; first < job.depth; first += blockDim.x * 8) {
    float raw[8], values[8];
    load_gained(job, half, first, raw, values);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      squares += raw[i] * raw[i];
      largest = max(largest, __float_as_uint(values[i]) & 0x7fffffffu);
    }
  }
  for (int distance = 16; distance; distance /= 2) {
    squares += __shfl_xor_sync(~0u, squares, distance);
    largest = max(largest, __shfl_xor_sync(~0u, largest, distance));
  }
  int warp = threadIdx.x / 32, num_warps = blockDim.x / 32;
  if (threadIdx.x % 32 == 0) scratch[warp] = squares, scratch[32 + warp] = __uint_as_float(largest);
  __syncthreads();
  squares = 0, largest = 0;
  for (int w = 0; w < num_warps; ++w) {
    squares += scratch[w];
    largest = max(largest, __float_as_uint(scratch[32 + w]));
  }
}

// x to shared memory, zeros past the depth; `sums`, of int4: what a piece's whole numbers add up
// to. Returns what a sum of products is multiplied by. The caller synchronises.
template <int KIND>
__device__ float stage_line(const Job& job, bool half, uint4* staged, int* sums, int padded,
                            float* scratch) {
  using L = Line<KIND>;
  float squares = 0, factor = 1.f, scale = 1.f;
  uint32_t bits = 0;
  if (L::kWhole || job.gain) measure_x(job, half, scratch, squares, bits);
  if (L::kWhole) {
    float largest = __uint_as_float(bits);
    bool finite = bits < 0x7f800000u;
    factor = finite ? largest * (1.f / 32767.f) : __uint_as_float(0x7fc00000);
    scale = finite && bits ? 32767.f / largest : 0.f;
  }
  if (job.gain) factor *= rsqrtf(squares / job.depth + job.eps);
  // Eight numbers a thread at a time; the threads of a piece are neighbours in a warp.
  for (int first = threadIdx.x * 8; first < padded * L::kPiece; first += blockDim.x * 8) {
    float raw[8], values[8] = {};
    if (first < job.depth) load_gained(job, half, first, raw, values);
    int piece = first / L::kPiece;
    if constexpr (L::kWhole) {
      int16_t* shorts = reinterpret_cast<int16_t*>(staged);
      int sum = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        int place = L::place(first % L::kPiece + i), whole = int(rintf(values[i] * scale));
        shorts[(place / 8 * padded + piece) * 8 + place % 8] = int16_t(whole);
        sum += whole;
      }
      if (KIND == kInt4) {
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        if (threadIdx.x % 4 == 0) sums[piece] = sum;
      }
    } else {
      float4* units = reinterpret_cast<float4*>(staged);
      int unit = first % L::kPiece / 4;
      units[unit * padded + piece] = make_float4(values[0], values[1], values[2], values[3]);
      units[(unit + 1) * padded + piece] = make_float4(values[4], values[5], values[6], values[7]);
    }
  }
  return factor;
}

// Which weight rows a warp takes together, and where they begin.
template <int ROWS>
struct Lines {
  int row[ROWS];
  const uint8_t* begin[ROWS];  // of this lane's first piece

  // From this output on; past the end the last ones are made again, the same.
  __device__ void aim(const Job& job, int output) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      int of_row = min(output + (job.gated ? r / 2 : r), job.outputs - 1);
      row[r] = job.gated && r % 2 ? of_row + job.outputs : of_row;
      begin[r] = static_cast<const uint8_t*>(job.weight) + row[r] * job.weight_stride;
      begin[r] += threadIdx.x % 32 * 16;
    }
  }
};

// The bits of a piece's group, of int4: its scale below its zero point.
__device__ inline uint32_t group_bits(const Job& job, int piece, int row) {
  int weight_rows = job.outputs * (job.gated ? 2 : 1);
  long long place = (long long)(piece * 32 >> job.group_shift) * weight_rows + row;
  uint32_t zero = job.zero ? __ldg(job.zero + place) : 8;
  return zero << 16 | __ldg(static_cast<const uint16_t*>(job.scale) + place);
}

template <int KIND, int ROWS, int STEPS, int STAGES>
__global__ void __launch_bounds__(512, 1) one_row_kernel(const Job job, int half, int) {
  using L = Line<KIND>;
  constexpr int kStage = ROWS * STEPS * 512;  // bytes of a warp
  __shared__ float scratch[64];
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_warps = blockDim.x / 32;
  int num_pieces = job.depth / L::kPiece, steps = ceil_div(num_pieces, 32);
  int padded = ceil_div(steps, STEPS) * STEPS * 32;
  uint8_t* ring = block_memory() + warp * (STAGES * kStage) + lane * 16;
  uint4* staged = reinterpret_cast<uint4*>(block_memory() + num_warps * (STAGES * kStage));
  int* sums = reinterpret_cast<int*>(staged + padded * L::kUnits);
  int outputs_at_once = job.gated ? ROWS / 2 : ROWS;
  int stride = gridDim.x * num_warps * outputs_at_once;
  int output = (blockIdx.x * num_warps + warp) * outputs_at_once;
  // What is copied next, and where to.
  Lines<ROWS> ahead;
  int next_output = output, next_step = 0;
  uint32_t ring_address = shared_address(ring), next_slot = 0;
  ahead.aim(job, next_output);
  auto copy_next = [&] {
    const uint8_t* nothing = static_cast<const uint8_t*>(job.weight);
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
      for (int c = 0; c < STEPS; ++c) {
        int step = next_step + c;
        bool inside = next_output < job.outputs && step * 32 + lane < num_pieces;
        copy_16(ring_address + next_slot + (r * STEPS + c) * 512,
                inside ? ahead.begin[r] + step * 512 : nothing, inside);
      }
    close_group();
    next_slot = next_slot + kStage == STAGES * kStage ? 0 : next_slot + kStage;
    next_step += STEPS;
    if (next_step >= steps) {
      next_step = 0, next_output += stride;
      ahead.aim(job, next_output);
    }
  };
#pragma unroll
  for (int s = 0; s < STAGES; ++s) copy_next();
  wait_for_previous_kernel();
  float factor = stage_line<KIND>(job, half, staged, sums, padded, scratch);
  __syncthreads();
  uint32_t slot = 0;
  for (; output < job.outputs; output += stride) {
    int mine = min(output + lane, job.outputs - 1);  // this lane's to finish, where it has one
    bool finishes = lane < outputs_at_once;
    Finish by_output;
    FinishRow by_row;
    if (finishes) by_output.load(job, job.gated, mine), by_row.load(job, 0, mine);
    Lines<ROWS> now;
    now.aim(job, output);
    uint32_t group[ROWS] = {};
    auto load_groups = [&](int step) {
      int piece = min(step * 32 + lane, num_pieces - 1);
      if constexpr (KIND == kInt4)
#pragma unroll
        for (int r = 0; r < ROWS; ++r) group[r] = group_bits(job, piece, now.row[r]);
    };
    load_groups(0);
    float total[ROWS] = {};
    for (int first = 0; first < steps; first += STEPS) {
      wait_pending<STAGES - 1>();
#pragma unroll
      for (int c = 0; c < STEPS; ++c) {
        int step = first + c;
        if (STEPS > 1 && step >= steps) break;
        uint32_t x[4 * L::kUnits];
#pragma unroll
        for (int u = 0; u < L::kUnits; ++u) {
          uint4 v = staged[u * padded + step * 32 + lane];
          x[4 * u] = v.x, x[4 * u + 1] = v.y, x[4 * u + 2] = v.z, x[4 * u + 3] = v.w;
        }
        int sum_of_x = KIND == kInt4 ? sums[step * 32 + lane] : 0;
        float scale[ROWS];
        int zero[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
          scale[r] = from_bits(uint16_t(group[r]), half), zero[r] = group[r] >> 16;
        if (step + 1 < steps) load_groups(step + 1);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
          uint4 raw = *reinterpret_cast<const uint4*>(ring + slot + (r * STEPS + c) * 512);
          if constexpr (KIND == kFp8Weights) {
            total[r] = add_fp8(raw, x, total[r]);
          } else if constexpr (KIND == kInt4) {
            total[r] += scale[r] * float(add_whole<KIND>(raw, x, 0) - zero[r] * sum_of_x);
          } else {
            total[r] += float(add_whole<KIND>(raw, x, 0));
          }
        }
      }
      slot = slot + kStage == STAGES * kStage ? 0 : slot + kStage;
      copy_next();  // over what was just read
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
      for (int distance = 16; distance; distance /= 2)
        total[r] += __shfl_xor_sync(~0u, total[r], distance);
    float gate = 0, up = 0;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {  // every lane has all sums
      if (job.gated && lane == r / 2) (r % 2 ? up : gate) = total[r];
      if (!job.gated && lane == r) gate = total[r];
    }
    if (finishes && output + lane < job.outputs)
      finish(job, job.gated, by_output, by_row, gate * factor, up * factor, 0, mine);
  }
  wait_pending<0>();
}
