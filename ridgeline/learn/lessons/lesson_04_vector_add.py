# %% [markdown]
# # Vector add: programs, coalescing, masks
#
# The first kernel anyone writes, in Triton. A kernel is a function that thousands of *programs* run
# at once, each knowing its number. Adding does one operation for every twelve bytes (fp32: two
# numbers read, one written), so only one thing counts: how well memory is used. [Kernels from
# zero](../kernels-from-zero.md) has all five steps from slow to fast with their times.
#
# %% [picture]
from ridgeline.learn.pictures import LessonPicture

picture = LessonPicture(250, "A warp reading neighbours in four sectors, or strided in 32")
picture.text(
    20, 30, "neighbours: 32 threads × 4 B = 128 B = 4 sectors of 32 B, all of it used", "bold"
)
for at in range(4):
    picture.cells(30 + at * 165, 44, 20, ["•"] * 8, ["a"] * 8)
picture.text(
    20, 110, "stride 8: each thread's 4 B lie in a sector of their own; 28 of 32 B are thrown away",
    "bold",
)  # fmt: skip
for at in range(4):
    picture.cells(30 + at * 165, 124, 20, ["•"] + [""] * 7, ["b"] + ["n"] * 7)
picture.text(30, 162, "… and 28 more sectors for one warp", "soft")
picture.text(
    20,
    200,
    "mask: the last program reaches past the end; there it reads and writes nothing",
    "bold",
)
picture.cells(30, 212, 20, ["•"] * 5 + ["×"] * 3, ["a"] * 5 + ["w"] * 3)

# %% [markdown]
# %%
from ridgeline.learn.session import Session

here = Session("vector_add")

# %%
import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, size, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    keep = places < size  # the last program reaches past the end
    x = tl.load(x_ptr + places, mask=keep)
    y = tl.load(y_ptr + places, mask=keep)
    tl.store(out_ptr + places, x + y, mask=keep)


def add(x: Tensor, y: Tensor, block: int = 2048) -> Tensor:
    out = torch.empty_like(x)
    add_kernel[(triton.cdiv(x.numel(), block),)](x, y, out, x.numel(), BLOCK=block)
    return out


# %% [markdown]
# `tl.arange(0, BLOCK)` is no loop but BLOCK numbers at once, spread over the program's threads.
# `.to(tl.int64)`: a 32-bit number ends at 2,147,483,647, and tensors are longer than that.
#
# First it has to be right, and at sizes that are no multiple of the block:
#
# %%
for size in (1, 63, 1000, 5000):
    x, y = torch.randn(size, device=here.device), torch.randn(size, device=here.device)
    assert torch.equal(add(x, y), x + y), size
here.figure("programs", triton.cdiv(5000, 2048), "1", "programs for 5,000 elements")

# %% [markdown]
# ## How much memory moves
#
# A warp is 32 threads that run in step. Memory comes in *sectors* of 32 bytes. Count the sectors
# that one load of a warp touches, for elements `stride` apart:
#
# %%


def sectors(stride: int, element_bytes: int = 4) -> int:
    return len({thread * stride * element_bytes // 32 for thread in range(32)})


for stride in (1, 2, 8):
    used = 32 * 4 / (32 * sectors(stride))
    here.figure(f"used_{stride}", used, "1", f"share of fetched bytes used at stride {stride}")

# %% [markdown]
# The same can be measured, on a CPU too, whose memory comes in lines of 64 bytes: sum every eighth
# or sixteenth number of a large vector, and the time hardly falls, though there is far less to add.
#
# %%
big = torch.randn((1 << 28) if here.is_gpu else (1 << 24), device=here.device)
for stride in (1, 16):
    taken = here.seconds(lambda stride=stride: big[::stride].sum())
    useful = big[::stride].numel() * 4
    here.figure(f"sum_{stride}", useful / taken, "B/s", f"useful bytes at stride {stride}")

if here.is_gpu:
    x, y = torch.randn(1 << 26, device=here.device), torch.randn(1 << 26, device=here.device)
    for block in (128, 2048):
        rate = 3 * x.nbytes / here.seconds(lambda block=block: add(x, y, block))
        here.figure(f"add_{block}", rate, "B/s", f"add, {block} elements a program")
    rate = 3 * x.nbytes / here.seconds(lambda: x + y)
    here.figure("add_torch", rate, "B/s", "torch's x + y")
else:
    here.missing("a GPU", "128 elements a program at 60% of the bandwidth, 2048 at all of it")

# %% [markdown]
# On an H200, 128 elements a program reach 59.5% of the bandwidth and 2048 all of it (101.7% of a
# copy's: two reads to one write suit the memory better). Both coalesce; the second has 16 elements
# a thread, so several loads are under way before the first is needed. Memory answers after some 600
# cycles; only requests in flight hide that.
#
# ## Take along
#
# - Neighbouring threads, neighbouring addresses: that alone is a factor of eight.
# - Every edge needs a mask; test at 1, 63, 1000.
# - Enough bytes in flight: wide loads, several a thread.
# - Compute the limit (bytes over bandwidth) before the first try; then you know when to stop.
#
# ## In the tree
#
# - `ridgeline/lessons/vector_add/triton.py`: five steps from naive to fast.
# - `ridgeline/kernels/launch.py`: how our kernels are started.
# - `docs/kernels-from-zero.md`: each step's time and why.
#
# ## Exercise
#
# Write `scaled_add(x, y, factor)`, a Triton kernel with its launcher that returns x + factor · y
# for any length, in fp32. On a machine without a GPU it runs under the interpreter.
#
# %% [exercise]
import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def scaled_add_kernel(x_ptr, y_ptr, out_ptr, factor, size, BLOCK: tl.constexpr):
    # your code
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    keep = places < size
    x = tl.load(x_ptr + places, mask=keep)
    y = tl.load(y_ptr + places, mask=keep)
    tl.store(out_ptr + places, x + factor * y, mask=keep)
    # end of your code


def scaled_add(x: Tensor, y: Tensor, factor: float) -> Tensor:
    out = torch.full_like(x, float("nan"))  # what you forget to write shows
    # your code
    scaled_add_kernel[(triton.cdiv(x.numel(), 1024),)](x, y, out, factor, x.numel(), BLOCK=1024)
    # end of your code
    return out


# %% [check]
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ridgeline.learn.trials import AnswerTrial


def trials(answer: Callable[..., Tensor]) -> Iterator[AnswerTrial]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    for size, hint in (
        (8, "x + factor · y"),
        (1024, "one whole block"),
        (1000, "less than a block: is everything masked?"),
        (5000, "several programs: does each know its place?"),
    ):
        x, y = (torch.randn(size, generator=generator).to(device) for _ in range(2))
        yield AnswerTrial.of(answer, x, y, 0.5, want=x + 0.5 * y, hint=hint)
