// Few rows of x times a plain weight of 16 bits; the kernels are in few_rows.cuh.

#include "../few_rows.cuh"

// `half`: x and the weight are fp16, else bf16; `kind` is kPlain. The numbers from `tiles` to
// `blocks` are few_rows.cuh's Cut. Returns a cudaError_t.
extern "C" __attribute__((visibility("default"))) int ridgeline_few_rows(
    const RidgelineJob* job, int kind, int half, int tiles, int warps, int stages, int splits,
    int teams, int blocks, int dependent, void* stream) {
  Cut cut = {tiles, warps,  stages,         splits,
             teams, blocks, dependent != 0, static_cast<cudaStream_t>(stream)};
  if (kind != kPlain) return int(cudaErrorInvalidValue);
  return start_product<kPlain>(*job, cut, half);
}
