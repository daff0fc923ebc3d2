# %% [markdown]
# # ROCm and HIP: what differs, what compiles, what to measure
#
# AMD's data-center GPUs run the same PyTorch and the same Triton. What differs is below: the width
# of a wave, the size of its scratch memory, the names of the libraries, and which tiles are good.
# This lesson compiles for an MI300X on any machine. **No line of it was run on AMD hardware**: the
# project's kernels compile for gfx942 and gfx950 in the tests, and are not run there.
#
# %% [picture]
from ridgeline.learn.pictures import LessonPicture

picture = LessonPicture(250, "The same ideas under two names")
rows = (
    ("SM, 132 (H200)", "CU, 304 (MI300X)"),
    ("warp, 32 threads", "wavefront, 64 threads"),
    ("shared memory, 228 KB", "LDS, 64 KB"),
    ("tensor core: wgmma, mma", "matrix core: MFMA"),
    ("cuBLAS, cuDNN, NCCL", "rocBLAS/hipBLASLt, MIOpen, RCCL"),
    ("Nsight, ncu", "rocprofv3, rocprof-compute"),
)
for at, (left, right) in enumerate(rows):
    picture.box(40, 20 + at * 37, 290, 30, left, "a")
    picture.box(390, 20 + at * 37, 290, 30, right, "b")
    picture.arrow(332, 35 + at * 37, 388, 35 + at * 37)

# %% [markdown]
# ## The tables that matter
#
# | | H200 | MI300X |
# |---|---|---|
# | memory | 141 GB, 4.8 TB/s | 192 GB, 5.3 TB/s |
# | bf16, dense | 989 TFLOP/s | 1,307 TFLOP/s |
# | ridge by datasheet | 206 FLOP/B | 247 FLOP/B |
# | threads that run in step | 32 | 64 |
# | shared memory a program may use | 227 KB | 64 KB |
# | cache behind it | L2, 50 MB | L2 of 4 MB a die, 256 MB Infinity Cache |
#
# Datasheets, all of it: `ridgeline hardware --list` names the documents. Shares of datasheets that
# are reached in practice differ between vendors and libraries, so measure: `ridgeline hardware`.
#
# ## What follows for a kernel
#
# - Nothing may assume 32: reductions by shuffles, masks of lanes, `num_warps` (4 warps are 128
#   threads on NVIDIA and 256 on AMD).
# - Tiles that use 128 KB of shared memory do not fit. A bf16 product's stage of BM×BK and BK×BN
#   with 128, 128, 64 is 32 KB: two stages fill the LDS.
# - fp8 on gfx942 is the *fnuz* kind (bias 8 instead of 7, no −0): its codes mean other numbers.
#   gfx950 has the usual one.
#
# %%
from ridgeline.learn.session import Session

here = Session("rocm")

# %%
import torch

stage = (128 * 64 + 64 * 128) * 2
here.figure("stage", stage, "B", "one stage of a 128×128×64 tile in bf16")
here.figure("stages", (64 << 10) // stage, "1", "stages that an LDS of 64 KB holds")
code = torch.tensor([0x40], dtype=torch.uint8)
usual, fnuz = code.view(torch.float8_e4m3fn), code.view(torch.float8_e4m3fnuz)
here.figure("fp8_usual", float(usual.float()), "1", "byte 0x40 as e4m3 (NVIDIA, gfx950)")
here.figure("fp8_fnuz", float(fnuz.float()), "1", "byte 0x40 as e4m3 fnuz (gfx942)")

# %% [markdown]
# ## Compile it here
#
# Triton's wheel holds the compiler for both vendors. The kernel below is the matrix product of
# lesson 6 without masks; count the matrix instructions in the assembly of each.
#
# %%
import triton
import triton.language as tl

from ridgeline.learn.elsewhere import HOPPER, MI300, compiled_instructions


@triton.jit
def tile_kernel(a_ptr, b_ptr, c_ptr, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rows, columns, inner = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, K, BK):
        a = tl.load(a_ptr + rows[:, None] * K + (start + inner)[None, :])
        b = tl.load(b_ptr + (start + inner)[:, None] * BN + columns[None, :])
        total = tl.dot(a, b, total)
    tl.store(c_ptr + rows[:, None] * BN + columns[None, :], total.to(tl.bfloat16))


TYPES = {"a_ptr": "*bf16", "b_ptr": "*bf16", "c_ptr": "*bf16", "K": "i32"}
TILES = {"BM": 128, "BN": 128, "BK": 64}
h200 = compiled_instructions(
    __file__, "tile_kernel", TYPES, TILES, ("wgmma.mma_async",), HOPPER, num_warps=4
)
mi300 = compiled_instructions(
    __file__, "tile_kernel", TYPES, TILES, ("v_mfma", "ds_read", "s_barrier"), MI300,
    num_warps=4, num_stages=2,
)  # fmt: skip
here.figure("wgmma", h200["wgmma.mma_async"], "1", "wgmma in the kernel for an H200")
here.figure("mfma", mi300["v_mfma"], "1", "v_mfma in the kernel for an MI300X")
here.figure("ds_read", mi300["ds_read"], "1", "… reads from LDS")
here.missing(
    "an AMD GPU", "the rates; on one, run `ridgeline hardware` and `ridgeline bench kernels`"
)


# %% [markdown]
# Every op of the project is compiled that way for gfx942 and gfx950 in the tests, which refuse
# spilled registers and too much LDS: `ridgeline kernels compile --op rms_norm --target
# sm_90,gfx942`.
#
# ## CUDA C++ to HIP
#
# `hipify-perl` renames: cudaMalloc → hipMalloc, `<<<>>>` stays, cuBLAS → hipBLAS, NCCL keeps its
# names (RCCL has the same interface). torch does it for extensions: `load_inline` on ROCm hipifies
# by itself. What does not translate: inline PTX, `wgmma`/TMA, warp intrinsics with 32-bit masks.
# Here CUDA C++ is an optional path behind an op; on AMD the Triton kernel serves.
#
# ## Measure this first
#
# 1. `ridgeline hardware`: copy, matrix rates, launch cost: which share of the datasheet is there?
# 2. `ridgeline kernels check`: every op against its reference on the device.
# 3. `ridgeline bench kernels --save results`: shares of the measured limits; tiles chosen for
#    NVIDIA will not be the best: `ridgeline kernels tune` chooses anew.
# 4. `rocprofv3 --kernel-trace --stats -- ridgeline bench engine demo`: times by kernel.
#
# ## Take along
#
# - Same source, other tiles: tune on the device, never carry numbers over.
# - 64 threads a wavefront, 64 KB of LDS, fnuz fp8 on gfx942.
# - "Compiles" is not "is fast", and neither is "is right": check against references there.
# - Peers to compare with are the vendor's own: hipBLASLt, AITER, vLLM's ROCm build.
#
# ## In the tree
#
# - `ridgeline/kernels/targets.py`: what each chip has; `ridgeline/kernels/compile.py`: compiling.
# - `ridgeline/hardware/specs.py`: datasheets; `ridgeline/hardware/detection.py`: what is here.
# - `tests/cpu/test_compile.py`: every op for every target.
#
# ## Exercise
#
# Occupancy on CDNA3: a SIMD has 512 vector registers for each lane, handed out in pieces of 8, and
# holds at most 8 wavefronts. A workgroup of `waves` wavefronts is spread over 4 SIMDs of a CU and
# uses `lds` of the CU's 65,536 bytes. How many wavefronts a SIMD can be resident, at most, given
# registers and LDS? (Workgroups are whole; waves is a multiple of 4; lds may be 0.)
#
# %% [exercise]
def waves_per_simd(registers: int, lds: int, waves: int) -> int:
    # your code
    by_registers = min(8, 512 // (-(-registers // 8) * 8))
    groups = by_registers * 4 // waves
    if lds:
        groups = min(groups, 65536 // lds)
    return groups * waves // 4
    # end of your code


# %% [check]
from collections.abc import Callable, Iterator

from ridgeline.learn.trials import AnswerTrial


def trials(answer: Callable[..., int]) -> Iterator[AnswerTrial]:
    yield AnswerTrial.of(answer, 64, 0, 4, want=8, hint="512 / 64 = 8, and 8 is the most")
    yield AnswerTrial.of(answer, 65, 0, 4, want=7, hint="65 registers take 72: 512 // 72")
    yield AnswerTrial.of(
        answer, 128, 32768, 4, want=2, hint="two groups' LDS fit, one wave a SIMD each"
    )
    yield AnswerTrial.of(answer, 128, 0, 8, want=4, hint="16 waves: two groups of 8")
    yield AnswerTrial.of(answer, 256, 0, 16, want=0, hint="16 waves do not fit where 8 do")
