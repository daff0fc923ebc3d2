// Few rows of x times a weight of codes: int8, int4 groups, fp8. The kernels are in few_rows.cuh
// (1 to 64 rows) and one_row.cuh (one row of x in 16 bits).

#include "../few_rows.cuh"

namespace {

#ifdef RIDGELINE_MMA

#include "one_row.cuh"

struct RowCut {
  int lines, warps, stages, blocks;
  bool dependent;
  cudaStream_t stream;
};

template <int KIND, int ROWS, int STAGES, bool ZEROS>
cudaError_t start_one_row(const Job& job, bool half, const RowCut& cut) {
  int at_once = job.gated ? ROWS / 2 : ROWS;
  int needed = ceil_div(job.outputs, cut.warps * at_once);
  int blocks = needed < cut.blocks ? needed : cut.blocks;
  int bytes = Line<KIND>::steps(job) * int(Line<KIND>::kStep) + cut.warps * STAGES * ROWS * 512;
  if (KIND == kInt4) bytes += Groups(job, cut.warps, at_once, blocks, 2).bytes();
  if (ZEROS) bytes += Groups(job, cut.warps, at_once, blocks, 1).bytes();
  return start(one_row_kernel<KIND, ROWS, STAGES, ZEROS>, job, half, 0, blocks, 32 * cut.warps, 0,
               bytes, cut.dependent, cut.stream);
}

template <int KIND, int ROWS, int STAGES>
cudaError_t choose_zeros(const Job& job, bool half, const RowCut& cut) {
  if constexpr (KIND == kInt4) {
    if (job.zero) return start_one_row<KIND, ROWS, STAGES, true>(job, half, cut);
  }
  return start_one_row<KIND, ROWS, STAGES, false>(job, half, cut);
}

template <int KIND, int ROWS>
cudaError_t choose_stages(const Job& job, bool half, const RowCut& cut) {
  if (cut.stages == 4) return choose_zeros<KIND, ROWS, 4>(job, half, cut);
  if (cut.stages == 8) return choose_zeros<KIND, ROWS, 8>(job, half, cut);
  return cudaErrorInvalidValue;
}

template <int KIND>
cudaError_t choose_one_row(const Job& job, bool half, const RowCut& cut) {
  if (cut.lines == 2) return choose_stages<KIND, 2>(job, half, cut);
  if (cut.lines == 4) return choose_stages<KIND, 4>(job, half, cut);
  return cudaErrorInvalidValue;
}
#endif  // RIDGELINE_MMA

}  // namespace

// `half`: x (and the scales of int4 groups) are fp16, else bf16. The numbers from `tiles` to `blocks`
// are few_rows.cuh's Cut. Returns a cudaError_t.
extern "C" __attribute__((visibility("default"))) int ridgeline_few_rows(
    const RidgelineJob* job, int kind, int half, int tiles, int warps, int stages, int splits,
    int teams, int blocks, int dependent, void* stream) {
  Cut cut = {tiles, warps,  stages,         splits,
             teams, blocks, dependent != 0, static_cast<cudaStream_t>(stream)};
  switch (kind) {
    case kInt8Words: return start_product<kInt8Words>(*job, cut, half);
    case kInt8Rows: return start_product<kInt8Rows>(*job, cut, half);
    case kInt4: return start_product<kInt4>(*job, cut, half);
    case kFp8: return start_product<kFp8>(*job, cut, half);
    case kInt8Codes: return start_product<kInt8Codes>(*job, cut, half);
  }
  return int(cudaErrorInvalidValue);
}

// One row of x and codes: `lines` weight rows a warp at a time (2 or 4), `warps` a block, at most so
// many `blocks`; `stages`, 4 or 8, are the steps of weights on their way.
extern "C" __attribute__((visibility("default"))) int ridgeline_one_row(
    const RidgelineJob* job, int kind, int half, int lines, int warps, int stages, int blocks,
    int dependent, void* stream_pointer) {
  cudaStream_t stream = static_cast<cudaStream_t>(stream_pointer);
#ifdef RIDGELINE_MMA
  RowCut cut = {lines, warps, stages, blocks, dependent != 0, stream};
#define RIDGELINE_ONE_ROW(KIND) \
  case KIND: \
    return choose_one_row<KIND>(*job, half, cut);
  switch (kind) {
    RIDGELINE_ONE_ROW(kInt8Words)
    RIDGELINE_ONE_ROW(kInt8Rows)
    RIDGELINE_ONE_ROW(kInt4)
    RIDGELINE_ONE_ROW(kFp8Weights)
  }
#else
  switch (kind) {
    case kInt8Words: return start_portable<kInt8Words>(*job, half, stream);
    case kInt8Rows: return start_portable<kInt8Rows>(*job, half, stream);
    case kInt4: return start_portable<kInt4>(*job, half, stream);
    case kFp8Weights: return start_portable<kFp8Weights>(*job, half, stream);
  }
#endif
  return int(cudaErrorInvalidValue);
}
