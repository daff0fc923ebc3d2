# %% [markdown]
# # A matrix product, from naive to tensor cores
#
# A product of two N×N matrices does 2N³ operations on 3N² numbers: for N = 4096 in bf16, 137 GFLOP
# on 101 MB, 1,365 operations a byte. So arithmetic should bound it. A naive kernel is bound by
# memory all the same, because it fetches each number N times. Everything below is about fetching
# less often, and about the units that multiply.
#
# %% [picture]
from ridgeline.learn.pictures import LessonPicture

picture = LessonPicture(260, "A tile of C needs a band of A and a band of B, walked in steps of K")
picture.text(110, 30, "A", "mid bold")
picture.box(30, 40, 160, 160, "", "n")
picture.box(30, 90, 160, 40, "BM", "a")
picture.text(310, 30, "B", "mid bold")
picture.box(230, 40, 160, 160, "", "n")
picture.box(290, 40, 40, 160, "BN", "b")
picture.text(510, 30, "C", "mid bold")
picture.box(430, 40, 160, 160, "", "n")
picture.box(490, 90, 40, 40, "tile", "c")
picture.text(
    30, 226, "One program makes a BM×BN tile: it reads (BM + BN) numbers for 2·BM·BN operations."
)
picture.text(
    30, 246, "Tile 1: 1 op per number. Tile 128: 128 ops per number, 64 a byte in bf16.", "soft"
)

# %% [markdown]
# ## How large a tile
#
# One step along K of a BM×BN tile loads BM + BN numbers and does 2·BM·BN operations. In 2-byte
# numbers its intensity is BM·BN / (BM + BN): 1/2 for single elements, 32 for 64×64, 64 for 128×128,
# 85 for 128×256. That is still below the ridge of 188: the rest has to come from the L2, which is
# why programs that run together are ordered so that they share bands.
#
# %%
from ridgeline.learn.session import Session

here = Session("matrix_product")

# %%
for block in (1, 64, 128):
    here.figure(
        f"intensity_{block}", block * block / (2 * block), "1", f"FLOP/B of a {block}×{block} tile"
    )

# %% [markdown]
# ## In Triton
#
# A program owns a tile of C, walks along K and adds `tl.dot` of two blocks. The compiler puts the
# blocks into *shared memory* (228 KB an SM on Hopper), fetches the next ones while these are
# multiplied, and lowers `tl.dot` to tensor-core instructions.
#
# %%
import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def product_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    rows = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    columns = tl.program_id(1).to(tl.int64) * BN + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    total = tl.zeros((BM, BN), dtype=tl.float32)  # fp32: thousands of products are added
    for start in range(0, K, BK):
        depth = start + inner
        a = tl.load(
            a_ptr + rows[:, None] * K + depth[None, :],
            mask=(rows[:, None] < M) & (depth[None, :] < K),
            other=0.0,
        )
        b = tl.load(
            b_ptr + depth[:, None] * N + columns[None, :],
            mask=(depth[:, None] < K) & (columns[None, :] < N),
            other=0.0,
        )
        total = tl.dot(a, b, total)
    c = total.to(c_ptr.dtype.element_ty)
    place = c_ptr + rows[:, None] * N + columns[None, :]
    tl.store(place, c, mask=(rows[:, None] < M) & (columns[None, :] < N))


def product(a: Tensor, b: Tensor, block: tuple[int, int, int] = (128, 128, 64)) -> Tensor:
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty(M, N, device=a.device, dtype=a.dtype)
    BM, BN, BK = block
    grid = (triton.cdiv(M, BM), triton.cdiv(N, BN))
    product_kernel[grid](a, b, c, M, N, K, BM=BM, BN=BN, BK=BK, num_warps=8, num_stages=3)
    return c


a, b = torch.randn(70, 50, device=here.device), torch.randn(50, 33, device=here.device)
error = float((product(a, b, (32, 32, 32)) - a @ b).abs().max())
assert error < 0.1, error  # tf32 on a GPU; exact to 1e-5 under the interpreter
here.figure("programs", triton.cdiv(4096, 128) ** 2, "1", "programs of 128×128 for N = 4096")

# %% [markdown]
# 1,024 programs on 132 SMs: 7.76 rounds, so the last round uses three quarters of the chip. That
# loss is called *wave quantization*.
#
# %%
if here.is_gpu:
    a, b = (torch.randn(4096, 4096, device=here.device).bfloat16() for _ in range(2))
    work = 2 * 4096**3
    for name, block in (("small", (32, 32, 32)), ("large", (128, 128, 64))):
        taken = here.seconds(lambda block=block: product(a, b, block))
        here.figure(
            f"triton_{name}", work / taken, "FLOP/s", f"Triton, tiles of {block[0]}×{block[1]}"
        )
    here.figure("library", work / here.seconds(lambda: a @ b), "FLOP/s", "torch (cuBLAS)")
else:
    n = 192
    a, b = torch.randn(n, n), torch.randn(n, n)

    def by_rows() -> Tensor:
        return torch.stack([(a[row, :, None] * b).sum(0) for row in range(n)])

    here.figure("by_rows", 2 * n**3 / here.seconds(by_rows), "FLOP/s", "row by row, nothing reused")
    here.figure("library", 2 * n**3 / here.seconds(lambda: a @ b), "FLOP/s", "torch (blocked)")
    here.missing("a GPU", "tiles of 32 against 128 in Triton, CUDA C++ and cuBLAS, in FLOP/s")

# %% [markdown]
# ## What the compiler makes of it
#
# Triton compiles for a chip that is not there, so this runs anywhere: the kernel above in bf16 for
# an H100 or H200 (sm_90). Count the instructions:
#
# - `wgmma`: Hopper's tensor-core instruction, given by four warps together (a warpgroup, 128
#   threads), reading B, and A too, straight from shared memory;
# - `mma.sync`: the older one, of a single warp, from registers;
# - `fma`: a multiply-add on the ordinary units.
#
# %%
from ridgeline.learn.elsewhere import compiled_instructions

POINTERS = dict.fromkeys(("a_ptr", "b_ptr", "c_ptr"), "*bf16")
SIZES = {"M": "i32", "N": "i32", "K": "i32"}
TILES = {"BM": 128, "BN": 128, "BK": 64}
WORDS = ("wgmma.mma_async", "mma.sync", "fma.rn")
counts = compiled_instructions(__file__, "product_kernel", POINTERS | SIZES, TILES, WORDS)
for name, count in counts.items():
    here.figure(name.replace(".", "_"), count, "1", f"{name} in the sm_90 kernel, bf16")

# %% [markdown]
# Four `wgmma`, no multiply-add: the loop over K is one step of 64 here, each instruction takes 16
# of it, and the two warpgroups (8 warps) have 64 of the 128 rows each.
#
# ## In CUDA C++
#
# The same with the hierarchy in one's own hands: a *grid* of *blocks* of *threads*; a block shares
# an SM's shared memory and can wait for itself (`__syncthreads`). This one has 16×16 threads, each
# with one element of C, and tiles of 16 in shared memory: every number fetched is used 16 times.
# It uses no tensor cores, so fp32's 51 TFLOP/s is its ceiling, and its tile is too small to get
# near. `torch.utils.cpp_extension.load_inline` compiles and binds it.
#
# %%
TILED = r"""
#include <torch/extension.h>
constexpr int T = 16;
__global__ void tiled(const float* a, const float* b, float* c, int n) {
  __shared__ float left[T][T], right[T][T];                 // one copy for the block
  int row = blockIdx.y * T + threadIdx.y, column = blockIdx.x * T + threadIdx.x;
  float total = 0.f;
  for (int start = 0; start < n; start += T) {
    int x = start + threadIdx.x, y = start + threadIdx.y;
    left[threadIdx.y][threadIdx.x] = row < n && x < n ? a[row * n + x] : 0.f;
    right[threadIdx.y][threadIdx.x] = y < n && column < n ? b[y * n + column] : 0.f;
    __syncthreads();                                        // all 256 have written
    for (int k = 0; k < T; ++k) total += left[threadIdx.y][k] * right[k][threadIdx.x];
    __syncthreads();                                        // all have read: overwrite
  }
  if (row < n && column < n) c[row * n + column] = total;
}
torch::Tensor tiled_product(torch::Tensor a, torch::Tensor b) {
  int n = a.size(0);
  auto c = torch::empty_like(a);
  dim3 threads(T, T), blocks((n + T - 1) / T, (n + T - 1) / T);
  tiled<<<blocks, threads>>>(a.data_ptr<float>(), b.data_ptr<float>(), c.data_ptr<float>(), n);
  return c;
}
"""
module = None
if here.is_gpu and torch.version.hip is None:
    from torch.utils.cpp_extension import load_inline

    try:
        module = load_inline(
            "tiled_lesson",
            cpp_sources="torch::Tensor tiled_product(torch::Tensor, torch::Tensor);",
            cuda_sources=TILED,
            functions=["tiled_product"],
        )
    except (RuntimeError, OSError, ImportError) as error:  # no ninja, or no nvcc
        print(str(error)[:200])
if module is not None:
    a, b = (torch.randn(2048, 2048, device=here.device) for _ in range(2))
    assert torch.allclose(module.tiled_product(a, b), a @ b, atol=0.01)
    taken = here.seconds(lambda: module.tiled_product(a, b))
    here.figure(
        "cuda_tiled", 2 * 2048**3 / taken, "FLOP/s", "CUDA C++, tiles of 16 in shared memory"
    )
else:
    here.missing("an NVIDIA GPU with nvcc and ninja", "the CUDA C++ kernel's rate beside Triton's")


# %% [markdown]
# From here to the library's speed the steps are: 8×8 elements a thread held in registers (shared
# memory is then read 8 times less), 16-byte loads, two buffers so that the next tile is fetched
# while this one is multiplied (`cp.async`, on Hopper TMA), then `wgmma` in place of the inner loop.
#
# ## Take along
#
# - Intensity comes from tiles: BM·BN / (BM + BN) operations for each 2-byte number's byte.
# - Tensor cores are 16 times the ordinary units on an H200 in bf16; `tl.dot` gets them, or the
#   library does.
# - Accumulate in fp32 whatever the inputs are.
# - cuBLAS (rocBLAS, hipBLASLt) is hard to beat for large products. Ours win where it is weak: few
#   rows, quantized weights, something fused before or after.
#
# ## In the tree
#
# - `ridgeline/kernels/skinny_linear/`: products of few rows, in Triton, CUDA C++ and C++.
# - `ridgeline/kernels/autotune.py`: how tile sizes are chosen and kept; `ridgeline kernels tune`.
# - `ridgeline/kernels/extension.py`: our CUDA C++ compiled and loaded.
#
# ## Exercise
#
# Wave quantization: a product of M×N in tiles of BM×BN on a chip with `units` SMs, one tile an SM
# at a time. Which share of the chip is used over all rounds?
#
# %% [exercise]
def chip_share(M: int, N: int, BM: int, BN: int, units: int) -> float:
    """Tiles over the places in all rounds."""
    # your code
    tiles = -(-M // BM) * -(-N // BN)
    rounds = -(-tiles // units)
    return tiles / (rounds * units)
    # end of your code


# %% [check]
from collections.abc import Callable, Iterator

from ridgeline.learn.trials import AnswerTrial


def trials(answer: Callable[..., float]) -> Iterator[AnswerTrial]:
    yield AnswerTrial.of(answer, 256, 256, 128, 128, 4, want=1.0, hint="four tiles, four units")
    yield AnswerTrial.of(answer, 256, 256, 128, 128, 3, want=4 / 6, hint="two rounds of three")
    yield AnswerTrial.of(
        answer, 4096, 4096, 128, 128, 132, want=1024 / 1056, hint="8 rounds of 132"
    )
    yield AnswerTrial.of(answer, 257, 100, 128, 128, 1, want=1.0, hint="3 tiles; edges round up")
