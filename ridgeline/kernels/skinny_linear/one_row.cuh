// One row of x times codes in CUDA C++, bound by the memory that holds the codes. Part of cuda.cu.
//
// A warp takes ROWS weight rows at a time, all of their depth. A lane copies every 32nd piece of 16
// bytes into a ring of its own in shared memory, STAGES of each row on their way, those of the next
// rows too, and reads back what it copied itself: once x is staged nobody waits for another, and
// rows are shared out warp by warp, so that all end together. (A ring of registers was tried: a
// warp has six counters of loads, and with more than that on their way it waits for the newest.)
// Rings of 4 stages are the faster ones for int4, of 8 for the others (H200).
// x waits in shared memory in the order the codes unpack. With int8 and int4 it is whole numbers of
// 16 bits, its largest 32767: a piece's products and sums (dp2a) are then exact, and its own
// rounding is finer than bf16's of the largest. With fp8 it is fp32.

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

// Eight numbers of x and of the norm's gain, as they lie.
struct Eight {
  uint4 x, gain;
};

// What a thread has of x for the whole start, from its first eight numbers on: a second load of
// them would be a second wait. The gain is there before the kernel that writes x has ended.
constexpr int kHeld = 4;
struct HeldX {
  Eight eight[kHeld];

  __device__ static int first(int i) { return (i * blockDim.x + threadIdx.x) * 8; }
  __device__ static uint4 load(const Job& job, const void* from, int i) {
    if (!from || first(i) >= job.depth) return make_uint4(0, 0, 0, 0);
    return __ldg(reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(from) + first(i)));
  }
  __device__ void load_gains(const Job& job) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) eight[i].gain = load(job, job.gain, i);
  }
  __device__ void load_x(const Job& job) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) eight[i].x = load(job, job.x, i);
  }

  // `take(first, eight)` for every eight numbers of this thread, as far as `end`.
  template <class Take>
  __device__ void each(const Job& job, int end, Take take) const {
#pragma unroll
    for (int i = 0; i < kHeld; ++i)
      if (first(i) < end) take(first(i), eight[i]);
    for (int i = kHeld; first(i) < end; ++i)
      take(first(i), Eight{load(job, job.x, i), load(job, job.gain, i)});
  }
};

// x times the norm's gain, rounded as the other kernels have it; `raw` gets x itself.
__device__ inline void gain_x(const Job& job, bool half, const Eight& eight, float (&raw)[8],
                              float (&values)[8]) {
  const uint32_t xs[4] = {eight.x.x, eight.x.y, eight.x.z, eight.x.w};
  const uint32_t gains[4] = {eight.gain.x, eight.gain.y, eight.gain.z, eight.gain.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    raw[i] = from_bits(uint16_t(xs[i / 2] >> 16 * (i % 2)), half);
    float gain = from_bits(uint16_t(gains[i / 2] >> 16 * (i % 2)), half) + job.offset;
    values[i] = job.gain ? from_bits(to_bits(raw[i] * gain, half), half) : raw[i];
  }
}

// The row's sum of squares and, as bits, its largest magnitude: of bits NaN is the largest, so that
// it is not lost.
__device__ inline void measure_x(const Job& job, bool half, const HeldX& held, float* scratch,
                                 float& squares, uint32_t& largest) {
  squares = 0, largest = 0;
  held.each(job, job.depth, [&](int, const Eight& eight) {
    float raw[8], values[8];
    gain_x(job, half, eight, raw, values);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      squares += raw[i] * raw[i];
      largest = max(largest, __float_as_uint(values[i]) & 0x7fffffffu);
    }
  });
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
__device__ float stage_line(const Job& job, bool half, const HeldX& held, uint4* staged, int* sums,
                            int padded, float* scratch) {
  using L = Line<KIND>;
  float squares = 0, factor = 1.f, scale = 1.f;
  uint32_t bits = 0;
  if (L::kWhole || job.gain) measure_x(job, half, held, scratch, squares, bits);
  if (L::kWhole) {
    float largest = __uint_as_float(bits);
    bool finite = bits < 0x7f800000u;
    factor = finite ? largest * (1.f / 32767.f) : __uint_as_float(0x7fc00000);
    scale = finite && bits ? 32767.f / largest : 0.f;
  }
  if (job.gain) factor *= rsqrtf(squares / job.depth + job.eps);
  // Eight numbers a thread at a time; the threads of a piece are neighbours in a warp.
  held.each(job, padded * L::kPiece, [&](int first, const Eight& eight) {
    float raw[8], values[8];
    gain_x(job, half, eight, raw, values);
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
  });
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

// The scales of int4 groups, and their zero points, that a block needs: all of them, from the start
// on. Rows that lie side by side are copied together; a warp by itself would fetch a sector of 32
// bytes for every scale (which took as long as the weights).
struct Groups {
  int rows, rounds, sides, pitch;  // rows of a round and side; bytes from a group to the next
  int num_groups, size;            // bytes of an element

  __host__ __device__ Groups(const Job& job, int warps, int rows_at_once, int blocks, int size)
      : rows(warps * rows_at_once), rounds(ceil_div(job.outputs, rows * blocks)),
        sides(job.gated ? 2 : 1), pitch(rows * size + 4),
        num_groups(job.depth >> job.group_shift), size(size) {}
  __host__ __device__ int bytes() const { return (rounds * sides * num_groups * pitch + 15) & ~15; }

  __host__ __device__ int place(int round, int side) const {
    return (round * sides + side) * num_groups * pitch;
  }

  // Four bytes a lane; a warp takes whole groups, of `at_once` rounds and sides together.
  __device__ void copy(const Job& job, const void* column, uint32_t to) const {
    int units = rows * size / 4, at_once = 32 / units, weight_rows = job.outputs * sides;
    int lane = threadIdx.x % 32, unit = lane % units, first = blockIdx.x * rows + unit * 4 / size;
    if (lane >= at_once * units) return;
    for (int group = threadIdx.x / 32; group < num_groups; group += blockDim.x / 32)
      for (int i = lane / units; i < rounds * sides; i += at_once) {
        int round = job.gated ? i / 2 : i, side = job.gated ? i % 2 : 0;
        int row = first + round * gridDim.x * rows;
        bool inside = row < job.outputs;
        long long element = (long long)group * weight_rows + side * job.outputs + row;
        copy_4(to + place(round, side) + group * pitch + unit * 4,
               inside ? static_cast<const uint8_t*>(column) + element * size : column, inside);
      }
  }
};

template <int KIND, int ROWS, int STAGES>
__global__ void __launch_bounds__(512, 1) one_row_kernel(const Job job, int half, int) {
  using L = Line<KIND>;
  constexpr int kStage = ROWS * 512, kRing = STAGES * kStage;  // bytes of a warp
  __shared__ float scratch[64];
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_warps = blockDim.x / 32;
  int num_pieces = job.depth / L::kPiece, steps = ceil_div(num_pieces, 32), padded = steps * 32;
  uint8_t* ring = block_memory() + warp * kRing + lane * 16;
  uint4* staged = reinterpret_cast<uint4*>(block_memory() + num_warps * kRing);
  int* sums = reinterpret_cast<int*>(staged + padded * L::kUnits);
  int outputs_at_once = job.gated ? ROWS / 2 : ROWS;
  const Groups scales(job, num_warps, outputs_at_once, gridDim.x, 2);
  const Groups zeros(job, num_warps, outputs_at_once, gridDim.x, 1);
  uint8_t* scales_at = reinterpret_cast<uint8_t*>(sums + padded);
  uint8_t* zeros_at = scales_at + scales.bytes();
  int stride = gridDim.x * num_warps * outputs_at_once;
  int output = (blockIdx.x * num_warps + warp) * outputs_at_once;
  // What is copied next, and where to.
  Lines<ROWS> ahead;
  int next_output = output, next_step = 0;
  uint32_t ring_address = shared_address(ring), next_slot = 0;
  ahead.aim(job, next_output);
  auto copy_next = [&](bool close = true) {
    bool inside = next_output < job.outputs && next_step * 32 + lane < num_pieces;
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
      copy_16(ring_address + next_slot + r * 512,
              inside ? ahead.begin[r] + next_step * 512 : job.weight, inside);
    if (close) close_group();
    next_slot = next_slot + kStage == kRing ? 0 : next_slot + kStage;
    if (++next_step == steps) {
      next_step = 0, next_output += stride;
      ahead.aim(job, next_output);
    }
  };
  if constexpr (KIND == kInt4) {  // the scales come with the first step
    copy_next(false);
    scales.copy(job, job.scale, shared_address(scales_at));
    if (job.zero) zeros.copy(job, job.zero, shared_address(zeros_at));
    close_group();
  }
#pragma unroll
  for (int s = KIND == kInt4; s < STAGES; ++s) copy_next();
  HeldX held;
  held.load_gains(job);
  wait_for_previous_kernel();
  held.load_x(job);
  float factor = stage_line<KIND>(job, half, held, staged, sums, padded, scratch);
  if (KIND == kInt4) wait_pending<STAGES - 1>();  // for scales that other lanes copied
  __syncthreads();
  uint32_t slot = 0;
  for (int round = 0; output < job.outputs; output += stride, ++round) {
    int mine = min(output + lane, job.outputs - 1);  // this lane's to finish, where it has one
    bool finishes = lane < outputs_at_once;
    Finish by_output;
    FinishRow by_row;
    if (finishes) by_output.load(job, job.gated, mine), by_row.load(job, 0, mine);
    const uint8_t *scale_from[ROWS], *zero_from[ROWS];  // in the first group, of int4
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      int side = job.gated ? r % 2 : 0, column = warp * outputs_at_once + (job.gated ? r / 2 : r);
      scale_from[r] = scales_at + scales.place(round, side) + column * 2;
      zero_from[r] = zeros_at + zeros.place(round, side) + column;
    }
    float total[ROWS] = {};
    for (int step = 0; step < steps; ++step) {
      uint32_t x[4 * L::kUnits];
#pragma unroll
      for (int u = 0; u < L::kUnits; ++u) {
        uint4 v = staged[u * padded + step * 32 + lane];
        x[4 * u] = v.x, x[4 * u + 1] = v.y, x[4 * u + 2] = v.z, x[4 * u + 3] = v.w;
      }
      int sum_of_x = KIND == kInt4 ? sums[step * 32 + lane] : 0;
      int group = min(step * 32 + lane, num_pieces - 1) * 32 >> job.group_shift;
      wait_pending<STAGES - 1>();
      uint4 raw[ROWS];
#pragma unroll
      for (int r = 0; r < ROWS; ++r)
        raw[r] = *reinterpret_cast<const uint4*>(ring + slot + r * 512);
      slot = slot + kStage == kRing ? 0 : slot + kStage;
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        if constexpr (KIND == kFp8Weights) {
          total[r] = add_fp8(raw[r], x, total[r]);
        } else if constexpr (KIND == kInt4) {
          uint16_t scale =
              *reinterpret_cast<const uint16_t*>(scale_from[r] + group * scales.pitch);
          int zero = job.zero ? zero_from[r][group * zeros.pitch] : 8;
          total[r] += from_bits(scale, half) *
                      float(add_whole<KIND>(raw[r], x, 0) - zero * sum_of_x);
        } else {
          total[r] += float(add_whole<KIND>(raw[r], x, 0));
        }
      }
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
