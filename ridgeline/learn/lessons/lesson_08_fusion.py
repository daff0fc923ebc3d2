# %% [markdown]
# # Fusion and torch.compile
#
# Below the ridge only bytes count, and every operation that stands alone reads its inputs from
# memory and writes its output back. Fusing means doing several of them in one kernel, while the
# numbers are in registers. It saves bytes and launches, and changes no result (but for rounding).
#
# %% [picture]
from ridgeline.learn.pictures import LessonPicture

picture = LessonPicture(210, "Four kernels with memory between them, or one")
picture.text(20, 34, "one by one", "bold")
for at, name in enumerate(("x + r", "square, mean", "· rsqrt", "· weight")):
    picture.box(40 + at * 165, 50, 110, 34, name, "a")
    picture.arrow(95 + at * 165, 108, 95 + at * 165, 84)
    if at < 3:
        picture.arrow(150 + at * 165, 84, 175 + at * 165, 108)
picture.box(40, 108, 660, 20, "memory", "b")
picture.text(20, 164, "fused", "bold")
picture.box(110, 150, 330, 30, "x + r, square, mean, · rsqrt, · weight in registers", "a")
picture.text(460, 170, "2 reads, 2 writes", "soft")

# %% [markdown]
# ## Count the passes
#
# An RMS norm with the residual added: h = x + r, then h · rsqrt(mean(h²) + ε) · w. In passes over
# an activation of N numbers:
#
# | step | reads | writes |
# |---|---|---|
# | h = x + r | 2 | 1 |
# | h² | 1 | 1 |
# | mean | 1 | 0 |
# | h · rsqrt | 1 | 1 |
# | · w | 1 | 1 |
# | together, one by one | 6 | 4 |
# | fused (h is needed later, so it is written) | 2 | 2 |
#
# Ten passes against four: at best 2.5 times as fast where memory is the limit.
#
# %%
from ridgeline.learn.session import Session

here = Session("fusion")

# %%
import torch
from torch import Tensor

rows, width = (16384, 4096) if here.is_gpu else (4096, 1024)
kind = torch.bfloat16 if here.is_gpu else torch.float32
x, r = (torch.randn(rows, width, device=here.device).to(kind) for _ in range(2))
w = torch.ones(width, device=here.device, dtype=kind)


def one_by_one(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    h = x + r
    return h, h * torch.rsqrt((h * h).mean(-1, keepdim=True) + 1e-5) * w


eager_s = here.seconds(lambda: one_by_one(x, r, w))
here.figure("passes", 10 / 4, "1", "passes one by one over passes fused")
here.figure("eager", 4 * x.nbytes / eager_s, "B/s", "one by one: 4 passes' bytes over its time")

# %% [markdown]
# ## torch.compile
#
# It does three things. *Dynamo* reads the function's bytecode and collects the tensor operations
# into a graph, with *guards* on everything that it took for granted (shapes, dtypes, flags). What
# it cannot follow (`.item()`, printing, data-dependent `if`) is a *graph break*: two graphs with
# Python between them. *Inductor* fuses the graph's elementwise work and sums, and writes Triton for
# GPUs and C++ for CPUs. A call with a shape that no guard allows compiles again; after the second,
# sizes become symbols (`dynamic=True` does so at once).
#
# %%
import logging
import time

import torch._dynamo

compiled = torch.compile(one_by_one)
try:
    began = time.perf_counter()
    compiled(x, r, w)
    here.figure("compile_time", time.perf_counter() - began, "s", "compiling it (the first call)")
    assert torch.allclose(compiled(x, r, w)[1].float(), one_by_one(x, r, w)[1].float(), atol=0.05)
    fused_s = here.seconds(lambda: compiled(x, r, w))
    here.figure("compiled", 4 * x.nbytes / fused_s, "B/s", "compiled: the same bytes over its time")
    here.figure("gain", eager_s / fused_s, "1", "times as fast")
except Exception as error:
    here.missing(f"a compiler that torch.compile can use ({type(error).__name__})", "fused code")


def breaks(x: Tensor) -> Tensor:
    return x * 2 if x.sum().item() > 0 else x


logging.getLogger("torch._dynamo").setLevel(logging.ERROR)  # it would print each break
broken = torch._dynamo.explain(breaks)(torch.ones(3))
here.figure("graph_breaks", broken.graph_break_count, "1", "graph breaks that one .item() causes")

# %% [markdown]
# ## By hand
#
# Our `rms_norm` is such a kernel, written once in Triton for GPUs and in C++ for CPUs. On the
# decode path nothing is compiled by torch.compile: hand-written kernels and captured graphs start
# in seconds where a compiled model takes minutes, and stay the same from one version to the next.
# Training and modules outside our families use it (`ridgeline.optimize` tries it as one rung).
#
# %%
from ridgeline.kernels.rms_norm.reference import rms_norm

few, others = x[:64].float(), r[:64].float()
by_hand = rms_norm(few, w.float(), 1e-5, residual_TD=others)[0]
error = float((by_hand - one_by_one(few, others, w.float())[1]).abs().max())
here.figure("error", error, "1", "our kernel's definition against this lesson's")


# %% [markdown]
# ## Take along
#
# - Count passes over memory before and after: their ratio is the most that fusing can give.
# - What fuses: elementwise work, sums along a row, casts, quantizing on the way out. What does not:
#   two large matrix products, unless the middle fits on chip (attention).
# - `torch.compile` is worth its compile time for long runs of fixed shapes; look for graph breaks
#   with `torch._dynamo.explain` and for recompiles with `TORCH_LOGS=recompiles`.
# - Compare outputs after fusing: sums in another order differ in the last digits, and no more.
#
# ## In the tree
#
# - `ridgeline/kernels/rms_norm/`: norm with residual and quantization in one pass.
# - `ridgeline/kernels/gated_activation/`: SiLU times up, in one pass.
# - `ridgeline/ladder/rungs/fuse.py`: fusing as a rung of `ridgeline optimize`.
# - `docs/modules.md`: `ridgeline.optimize` for any `nn.Module`.
#
# ## Exercise
#
# A chain of elementwise operations on N numbers: each reads `inputs` activations (some of them may
# be the chain's own last result) and writes one. Given the list of `inputs` of each operation, how
# many passes over memory does running them one by one take, and how many when fused into one
# kernel? Fused, the result of one operation is read by the next from registers: each operation
# behind the first has one input less to fetch, and only the last writes.
#
# %% [exercise]
def passes(inputs: list[int]) -> tuple[int, int]:
    """(one by one, fused)"""
    # your code
    apart = sum(count + 1 for count in inputs)
    fused = inputs[0] + sum(count - 1 for count in inputs[1:]) + 1
    return apart, fused
    # end of your code


# %% [check]
from collections.abc import Callable, Iterator

from ridgeline.learn.trials import AnswerTrial


def trials(answer: Callable[..., tuple[int, int]]) -> Iterator[AnswerTrial]:
    yield AnswerTrial.of(answer, [1], want=(2, 2), hint="one operation gains nothing")
    yield AnswerTrial.of(answer, [1, 1, 1], want=(6, 2), hint="only the first read and last write")
    yield AnswerTrial.of(answer, [2, 1], want=(5, 3), hint="x + r, then a function of it")
    yield AnswerTrial.of(answer, [2, 2, 1], want=(8, 4), hint="the second brings one of its own")
