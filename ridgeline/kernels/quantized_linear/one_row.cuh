// One row of x times codes in CUDA C++, bound by the memory that holds the codes. Part of cuda.cu,
// inside its namespace.
//
// A warp takes ROWS weight rows at a time, all of their depth. A lane copies every 32nd piece of 16
// bytes into a ring of its own in shared memory, STAGES of each row on their way, those of the next
// rows too, and reads back what it copied itself: once x is staged nobody waits for another, and
// rows are shared out warp by warp, so that all end together. (A ring of registers was tried: a
// warp has six counters of loads, and with more than that on their way it waits for the newest.)
// Whether a ring of 4 or of 8 stages is the faster one depends on the shape (H200).
// x waits in shared memory in the order the codes unpack. With int8 and int4 it is whole numbers of
// 16 bits, its largest 32767: a piece's products and sums (dp2a) are then exact, and its own
// rounding is finer than bf16's of the largest. With fp8 it is fp32.
// int4 is bound by instructions as much as by memory, so that these are few: places are counted on
// from step to step, and sums are finished by all lanes at once, a lane for each of their outputs.

// x is loaded and staged by eights: neighbours of a warp have those of a piece, each of them two
// times four numbers that lie side by side. A step's pieces lie together: `kUnits` times 16 bytes
// of each, and what the whole numbers of each add up to (int4).
template <int KIND>
struct Line {
  static constexpr bool kWhole = KIND != kFp8Weights;  // x in whole numbers
  static constexpr unsigned kPiece = Form<KIND>::kPiece;
  static constexpr unsigned kUnits = kPiece * (kWhole ? 2 : 4) / 16;
  static constexpr unsigned kSumsAt = kUnits * 512;
  static constexpr unsigned kStep = kSumsAt + (KIND == kInt4 ? 128 : 0);  // bytes of staged x
  static constexpr unsigned kApart = KIND == kInt4 ? 8 : 4;  // from the first four to the others

  __host__ __device__ static int steps(const Job& job) {
    return int((unsigned(job.depth) / kPiece + 31) / 32);
  }
  __device__ static unsigned first(unsigned eight) {
    return KIND == kInt4 ? eight / 2 * 16 + eight % 2 * 4 : eight * 8;
  }
};

// A piece's products with x, added to `sum`.
template <int KIND>
__device__ inline int add_whole(const uint4& raw, const uint32_t* x, int sum) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
  int sixteenths = 0;  // the upper codes of int4's bytes are taken where they are
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (KIND == kInt4) {
      uint32_t even = words[i] & 0x0f0f0f0fu, odd = words[i] & 0xf0f0f0f0u;
      sum = dot_low(x[4 * i], even, sum);
      sum = dot_high(x[4 * i + 1], even, sum);
      sixteenths = dot_low(x[4 * i + 2], odd, sixteenths);
      sixteenths = dot_high(x[4 * i + 3], odd, sixteenths);
    } else {
      uint32_t codes = KIND == kInt8Words ? words[i] ^ 0x80808080u : words[i];
      sum = __dp2a_lo(int(x[2 * i]), int(codes), sum);
      sum = __dp2a_hi(int(x[2 * i + 1]), int(codes), sum);
    }
  }
  return sum + (sixteenths >> 4);
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

__device__ inline uint2 load_8(const void* from) {
  return __ldg(static_cast<const uint2*>(from));
}

// Two numbers that lie side by side.
template <bool HALF>
__device__ inline float low_of(uint32_t pair) {
  return HALF ? from_half_bits(uint16_t(pair)) : __uint_as_float(pair << 16);
}
template <bool HALF>
__device__ inline float high_of(uint32_t pair) {
  return HALF ? from_half_bits(uint16_t(pair >> 16)) : __uint_as_float(pair & 0xffff0000u);
}

template <bool HALF>
__device__ inline void unpack_eight(const uint4& eight, float (&values)[8]) {
  const uint32_t pairs[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
  for (int i = 0; i < 4; ++i)
    values[2 * i] = low_of<HALF>(pairs[i]), values[2 * i + 1] = high_of<HALF>(pairs[i]);
}

// What a thread has of x for the whole start, from its first eight on: a second load of them would
// be a second wait. The gain is there before the kernel that writes x has ended.
constexpr int kHeld = 4;
template <int KIND>
struct HeldX {
  uint4 x[kHeld], gain[kHeld];

  __device__ static unsigned eight(int i) { return i * blockDim.x + threadIdx.x; }

  __device__ static uint4 load_gain(const Job& job, int i) {
    unsigned from = Line<KIND>::first(eight(i));
    if (!job.gain || from >= job.depth) return make_uint4(0, 0, 0, 0);
    const uint16_t* gains = static_cast<const uint16_t*>(job.gain) + from;
    uint2 one = load_8(gains), other = load_8(gains + Line<KIND>::kApart);
    return make_uint4(one.x, one.y, other.x, other.y);
  }

  __device__ static uint4 load_x(const Job& job, int i) {
    unsigned from = Line<KIND>::first(eight(i));
    if (from >= job.depth) return make_uint4(0, 0, 0, 0);
    const uint16_t* numbers = static_cast<const uint16_t*>(job.x) + from;
    uint2 one = load_8(numbers), other = load_8(numbers + Line<KIND>::kApart);
    return make_uint4(one.x, one.y, other.x, other.y);
  }

  // Whether any thread has an i-th eight: the same for all.
  __device__ static bool any(const Job& job, int i) { return i * blockDim.x * 8 < job.depth; }

  __device__ void load_gains(const Job& job) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) gain[i] = load_gain(job, i);
  }
  __device__ void load_x(const Job& job) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) x[i] = load_x(job, i);
  }
};

// x times the norm's gain, rounded as the other kernels have it.
template <bool HALF>
__device__ inline uint4 gained(const Job& job, const uint4& x, const uint4& gain) {
  if (!job.gain) return x;
  if (job.offset == 0.f)
    return make_uint4(multiply_pair<HALF>(x.x, gain.x), multiply_pair<HALF>(x.y, gain.y),
                      multiply_pair<HALF>(x.z, gain.z), multiply_pair<HALF>(x.w, gain.w));
  float values[8], gains[8];
  unpack_eight<HALF>(x, values);
  unpack_eight<HALF>(gain, gains);
  uint32_t pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t low = to_bits(values[2 * i] * (gains[2 * i] + job.offset), HALF);
    uint32_t high = to_bits(values[2 * i + 1] * (gains[2 * i + 1] + job.offset), HALF);
    pairs[i] = low | high << 16;
  }
  return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// The row's sum of squares, if there is a norm, and the bits of its largest magnitude with the gain
// (of 16 bits, in the upper half; NaN is the largest, so that it is not lost). What is held gets
// the gain.
template <int KIND, bool HALF>
__device__ inline void measure_x(const Job& job, HeldX<KIND>& held, float* scratch, float& squares,
                                 uint32_t& largest) {
  squares = 0, largest = 0;
  auto measure = [&](const uint4& x, const uint4& with_gain) {
    if (job.gain) {
      float values[8];
      unpack_eight<HALF>(x, values);
#pragma unroll
      for (int i = 0; i < 8; ++i) squares += values[i] * values[i];
    }
    const uint32_t pairs[4] = {with_gain.x, with_gain.y, with_gain.z, with_gain.w};
#pragma unroll
    for (int i = 0; i < 4; ++i)
      largest = max(largest, max(pairs[i] << 16 & 0x7fff0000u, pairs[i] & 0x7fff0000u));
  };
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    if (!held.any(job, i)) break;
    uint4 x = held.x[i];
    held.x[i] = gained<HALF>(job, x, held.gain[i]);
    measure(x, held.x[i]);
  }
  for (int i = kHeld; held.any(job, i); ++i) {
    uint4 x = held.load_x(job, i);
    measure(x, gained<HALF>(job, x, held.load_gain(job, i)));
  }
  unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_warps = blockDim.x / 32;
  auto reduce = [&] {
    largest = __reduce_max_sync(~0u, largest);
    if (job.gain)
      for (int distance = 16; distance; distance /= 2)
        squares += __shfl_xor_sync(~0u, squares, distance);
  };
  reduce();
  if (lane == 0) scratch[warp] = squares, scratch[32 + warp] = __uint_as_float(largest);
  __syncthreads();
  squares = lane < num_warps ? scratch[lane] : 0.f;
  largest = lane < num_warps ? __float_as_uint(scratch[32 + lane]) : 0;
  reduce();
}

// An eight to where `add_whole` and `add_fp8` take it from; whole numbers are x * scale. The sums
// are those that the codes' zero points are multiplied by; where all of these are 8, their products.
template <int KIND, bool HALF, bool ZEROS>
__device__ inline void stage_eight(const uint4& x, float scale, unsigned eight, uint8_t* staged) {
  using L = Line<KIND>;
  constexpr unsigned kOfPiece = L::kPiece / 8;
  unsigned piece = eight / kOfPiece, own = eight % kOfPiece;
  uint8_t* step = staged + piece / 32 * L::kStep;
  uint32_t* words = reinterpret_cast<uint32_t*>(step + piece % 32 * 16);
  float values[8];
  unpack_eight<HALF>(x, values);
  if constexpr (!L::kWhole) {
    float4* units = reinterpret_cast<float4*>(words + own * 256);
    units[0] = make_float4(values[0], values[1], values[2], values[3]);
    units[32] = make_float4(values[4], values[5], values[6], values[7]);
  } else {
    constexpr float kMagic = 12582912.f;  // 1.5 * 2^23: a number added to it is rounded to its bits
    uint32_t whole[8], sum = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      whole[i] = __float_as_uint(fmaf(values[i], scale, kMagic));
      sum += whole[i];
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (KIND == kInt8Rows)
        words[own * 128 + i] = __byte_perm(whole[2 * i], whole[2 * i + 1], 0x5410);
      else if constexpr (KIND == kInt8Words)
        words[i / 2 * 128 + i % 2 * 2 + own] = __byte_perm(whole[i], whole[4 + i], 0x5410);
      else
        words[i * 128 + own % 2 * 2 + own / 2] = __byte_perm(whole[i], whole[4 + i], 0x5410);
    }
    if constexpr (KIND == kInt4) {
      sum -= 8 * __float_as_uint(kMagic);
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      int* sums = reinterpret_cast<int*>(step + L::kSumsAt);
      if (own == 0) sums[piece % 32] = int(sum) * (ZEROS ? -1 : -8);
    }
  }
}

// x to shared memory, zeros past the depth. Returns what a sum of products is multiplied by. The
// caller synchronises.
template <int KIND, bool HALF, bool ZEROS>
__device__ float stage_line(const Job& job, HeldX<KIND>& held, uint8_t* staged, float* scratch) {
  using L = Line<KIND>;
  float squares = 0, factor = 1.f, scale = 1.f;
  uint32_t bits = 0;
  if (L::kWhole || job.gain) measure_x<KIND, HALF>(job, held, scratch, squares, bits);
  if (L::kWhole) {
    float largest = high_of<HALF>(bits);
    bool finite = largest < __uint_as_float(0x7f800000u);
    factor = finite ? largest * (1.f / 32767.f) : __uint_as_float(0x7fc00000u);
    scale = finite && bits ? __fdividef(32767.f, largest) : 0.f;
  }
  if (job.gain) factor *= rsqrtf(__fdividef(squares, float(job.depth)) + job.eps);
  unsigned num_eights = L::steps(job) * 4 * L::kPiece;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    if (i * blockDim.x >= num_eights) break;
    if (held.eight(i) < num_eights)  // whole warps have one, or none
      stage_eight<KIND, HALF, ZEROS>(held.x[i], scale, held.eight(i), staged);
  }
  for (int i = kHeld; held.eight(i) < num_eights; ++i) {
    uint4 x = gained<HALF>(job, held.load_x(job, i), held.load_gain(job, i));
    stage_eight<KIND, HALF, ZEROS>(x, scale, held.eight(i), staged);
  }
  return factor;
}

// What a warp copies next: a step of each of its rows, then of the next rows. Where there is
// nothing left, zeros.
template <int ROWS>
struct Ahead {
  const uint8_t* from[ROWS];  // this lane's piece
  int left[ROWS];             // pieces from this lane's first on; none past the last row
  int piece = 0, output;      // where in the row, less the lane

  __device__ Ahead(const Job& job, int output, int num_pieces) : output(output) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      int row = output + (job.gated ? r / 2 + r % 2 * job.outputs : r);
      from[r] = static_cast<const uint8_t*>(job.weight) + row * job.weight_stride;
      from[r] += threadIdx.x % 32 * 16;
    }
    aim(job, num_pieces);
  }

  __device__ void aim(const Job& job, int num_pieces) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      bool inside = output + (job.gated ? r / 2 : r) < job.outputs;
      left[r] = inside ? num_pieces - int(threadIdx.x % 32) : 0;
    }
  }

  // To `ring`; the next rows are `stride` outputs behind, and `jump` bytes from the end of these.
  __device__ void copy(const Job& job, uint32_t ring, int num_pieces, int stride, long long jump) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      copy_16(ring + r * 512, from[r], piece < left[r]);
      from[r] += 512;
    }
    piece += 32;
    if (piece >= num_pieces) {
      piece = 0, output += stride;
#pragma unroll
      for (int r = 0; r < ROWS; ++r) from[r] += jump;
      aim(job, num_pieces);
    }
  }
};

// Sums over a warp, several at once: lanes share out the rows, then all of them get each sum.
template <int ROWS>
__device__ inline void add_up(float (&total)[ROWS]) {
  static_assert(ROWS == 2 || ROWS == 4, "two halves of a warp, or four quarters");
  bool upper = threadIdx.x % 32 >= 16, odd = threadIdx.x % 16 >= 8;
  // Values, not places: a choice between places of an array would put it into memory.
  auto halved = [](bool second, float one, float other, int distance) {
    return (second ? other : one) + __shfl_xor_sync(~0u, second ? one : other, distance);
  };
  float sum = halved(upper, total[0], total[ROWS / 2], 16);
  if constexpr (ROWS == 4) sum = halved(odd, sum, halved(upper, total[1], total[3], 16), 8);
  else sum += __shfl_xor_sync(~0u, sum, 8);
  for (int distance = 4; distance; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
#pragma unroll
  for (int r = 0; r < ROWS; ++r) total[r] = __shfl_sync(~0u, sum, r * (32 / ROWS));
}

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

template <int KIND, int ROWS, int STAGES, bool ZEROS>
__global__ void __launch_bounds__(512, 1) one_row_kernel(const Job job, int half, int) {
  using L = Line<KIND>;
  constexpr uint32_t kStage = ROWS * 512, kRing = STAGES * kStage;  // bytes of a warp
  __shared__ float scratch[64];
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_warps = blockDim.x / 32;
  int num_pieces = unsigned(job.depth) / L::kPiece, steps = L::steps(job);
  uint8_t* ring = block_memory() + warp * kRing + lane * 16;
  uint8_t* staged = block_memory() + num_warps * kRing;
  // Outputs that a warp makes at once, and all of them in a round.
  int shift = (ROWS == 4) + !job.gated, at_once = 1 << shift;
  int stride = gridDim.x * num_warps << shift, output = (blockIdx.x * num_warps + warp) << shift;
  const Groups scales(job, num_warps, at_once, gridDim.x, 2);
  const Groups zeros(job, num_warps, at_once, gridDim.x, 1);
  uint8_t* scales_at = staged + steps * L::kStep;
  uint8_t* zeros_at = scales_at + scales.bytes();
  long long jump = stride * job.weight_stride - steps * 512;
  Ahead<ROWS> ahead(job, output, num_pieces);
  uint32_t ring_address = shared_address(ring);
#pragma unroll
  for (int s = 0; s < STAGES; ++s) {
    ahead.copy(job, ring_address + s * kStage, num_pieces, stride, jump);
    if (KIND == kInt4 && s == 0) {  // the scales come with the first step
      scales.copy(job, job.scale, shared_address(scales_at));
      if (ZEROS) zeros.copy(job, job.zero, shared_address(zeros_at));
    }
    close_group();
  }
  HeldX<KIND> held;
  held.load_gains(job);
  wait_for_previous_kernel();
  held.load_x(job);
  float factor = half ? stage_line<KIND, true, ZEROS>(job, held, staged, scratch)
                      : stage_line<KIND, false, ZEROS>(job, held, staged, scratch);
  if (KIND == kInt4) wait_pending<STAGES - 1>();  // for scales that other lanes copied
  __syncthreads();
  // Pieces of a group: 2^group_shift. Lanes past the last piece take the last group.
  int group_shift = KIND == kInt4 ? job.group_shift - 5 : 0, last = (num_pieces - 1) >> group_shift;
  int scale_at[ROWS], zero_at[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    int side = job.gated ? r % 2 : 0, column = (warp << shift) + (job.gated ? r / 2 : r);
    scale_at[r] = scales.place(0, side) + column * 2;
    zero_at[r] = zeros.place(0, side) + column;
  }
  uint32_t slot = 0;
  while (output < job.outputs) {
    int own = output + (lane >> shift) * stride + lane % at_once;  // this lane's to finish
    bool finishes = own < job.outputs;
    Finish by_output;
    FinishRow by_row;
    if (finishes) by_output.load(job, job.gated, own), by_row.load(job, 0, own);
    by_row.scale = 1.f;  // x has none, and groups have their own: no registers for them
    if (KIND == kInt4) by_output.scale[0] = by_output.scale[1] = 1.f;
    float gate = 0, up = 0;
    for (int first = 0; first < 32 && output < job.outputs; first += at_once, output += stride) {
      float total[ROWS] = {};
      const uint8_t* x_at = staged + lane * 16;
      const uint8_t* sum_at = staged + L::kSumsAt + lane * 4;
      int piece = lane;
      for (int step = 0; step < steps; ++step) {
        uint32_t x[4 * L::kUnits];
#pragma unroll
        for (int u = 0; u < int(L::kUnits); ++u) {
          uint4 v = *reinterpret_cast<const uint4*>(x_at + u * 512);
          x[4 * u] = v.x, x[4 * u + 1] = v.y, x[4 * u + 2] = v.z, x[4 * u + 3] = v.w;
        }
        int sum_of_x = KIND == kInt4 ? *reinterpret_cast<const int*>(sum_at) : 0;
        int group = min(piece >> group_shift, last);
        x_at += L::kStep, sum_at += L::kStep, piece += 32;
        wait_pending<STAGES - 1>();
        uint4 raw[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
          raw[r] = *reinterpret_cast<const uint4*>(ring + slot + r * 512);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
          if constexpr (KIND == kFp8Weights) {
            total[r] = add_fp8(raw[r], x, total[r]);
          } else if constexpr (KIND == kInt4) {
            uint16_t scale =
                *reinterpret_cast<const uint16_t*>(scales_at + scale_at[r] + group * scales.pitch);
            int less = sum_of_x;
            if (ZEROS) less *= zeros_at[zero_at[r] + group * zeros.pitch];
            total[r] += from_bits(scale, half) * float(add_whole<KIND>(raw[r], x, less));
          } else {
            total[r] += float(add_whole<KIND>(raw[r], x, 0));
          }
        }
        ahead.copy(job, ring_address + slot, num_pieces, stride, jump);  // over what was just read
        close_group();
        slot = slot + kStage == kRing ? 0 : slot + kStage;
      }
      add_up(total);
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        bool mine = lane == first + (job.gated ? r / 2 : r);
        if (mine) (job.gated && r % 2 ? up : gate) = total[r];
        if constexpr (KIND == kInt4)
          scale_at[r] += scales.place(1, 0), zero_at[r] += zeros.place(1, 0);
      }
    }
    if (finishes) finish(job, job.gated, by_output, by_row, gate * factor, up * factor, 0, own);
  }
  wait_pending<0>();
}
