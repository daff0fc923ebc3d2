# %% [markdown]
# # Arithmetic intensity and the roofline
#
# Work needs bytes and operations. A machine has a ceiling for each. Divide one by the other and you
# know which of the two will stop you, before you write any code.
#
# - **Arithmetic intensity**: operations done for each byte moved, FLOP/B.
# - **Ridge**: the machine's operations for each byte, FLOP/s over B/s. Below it memory is the
#   limit, above it arithmetic is.
# - **Limit**: the least time anything can take: max(bytes / bandwidth, FLOP / rate).
#
# %% [picture]
from ridgeline.learn.pictures import LessonPicture, LogPlot

picture = LessonPicture(300, "A roofline: a slope of bandwidth, a flat of the matrix rate, dots")
plot = LogPlot(
    picture, (80, 40, 690, 240), (0.1, 4000), (2e11, 2e15), ("FLOP for each byte", "FLOP/s")
)
bandwidth, rate = 4.27e12, 801e12
plot.curve([(0.1, 0.1 * bandwidth), (rate / bandwidth, rate), (4000, rate)])
plot.ticks(
    [(x, f"{x:g}") for x in (0.1, 1, 10, 100, 1000)],
    [(1e12, "1 T"), (1e13, "10 T"), (1e14, "100 T"), (1e15, "1 P")],
)
plot.dot(0.25, 0.25 * bandwidth * 0.9, "softmax", "b")
plot.dot(1.0, bandwidth * 0.92, "decode, 1 request, bf16", "b")
plot.dot(32, 32 * bandwidth * 0.7, "decode, 32 requests", "c")
plot.dot(1500, rate * 0.85, "prefill", "a")
picture.text(*plot.place(rate / bandwidth, rate * 1.5), "ridge: 188", "mid soft")

# %% [markdown]
# ## Count first
#
# Take y = W x with W of N×K in 2 bytes each and a batch of B vectors:
#
# | | |
# |---|---|
# | operations | 2 · N · K · B |
# | bytes | 2 · (N·K + K·B + N·B), and N·K outweighs the rest while B is small |
# | intensity | 2·N·K·B / (2·N·K) = **B** FLOP/B |
#
# In 16 bits the intensity of a linear layer is simply its batch. On an H200 (ridge 188) a layer is
# bound by memory below some 190 rows: up to there more rows cost nothing. That is why servers
# batch, why prefill is fast per token, and why one request gets a hundredth of the arithmetic.
#
# %%
from ridgeline.learn.session import Session

here = Session("roofline")

# %%
import torch

bandwidth = here.ceiling("read_bandwidth")
rate = here.ceiling("matrix_bf16" if here.is_gpu else "matrix_fp32")
element = 2 if here.is_gpu else 4  # bytes: a CPU multiplies best in fp32
dtype = torch.bfloat16 if here.is_gpu else torch.float32
here.figure("bandwidth", bandwidth, "B/s", "memory, read")
here.figure("rate", rate, "FLOP/s", "matrix products")
here.figure("ridge", rate / bandwidth, "1", "ridge, FLOP/B")

# %% [markdown]
# ## Then measure
#
# One weight, more and more rows. The prediction is the limit; what is measured can only be slower.
#
# %%
n = 16384 if here.is_gpu else 4096
weight = torch.randn(n, n, device=here.device).to(dtype)
for rows in (1, 16, 256):
    x = torch.randn(n, rows, device=here.device).to(dtype)
    work, moved = 2 * n * n * rows, element * (n * n + 2 * n * rows)
    limit_s = max(work / rate, moved / bandwidth)
    taken_s = here.seconds(lambda x=x: weight @ x)
    bound = "memory" if moved / bandwidth > work / rate else "arithmetic"
    here.figure(f"time_{rows}", taken_s, "s", f"{n}² weight × {rows} rows ({bound} is the limit)")
    here.figure(f"share_{rows}", limit_s / taken_s, "1", "… share of the limit reached")


# %% [markdown]
# Where memory is the limit, 16 rows could take hardly longer than one: the weight is read once
# either way. A share well below 1 says that neither ceiling is the reason: overhead, poor tiles, or
# a library without a good kernel for that shape (torch's products of 16 rows on a CPU are such a
# case, and `ridgeline/kernels/skinny_linear/` is the answer to it).
#
# %% [markdown]
# ## Take along
#
# - Bytes over bandwidth, operations over rate; the larger is the limit, and the ratio to it is the
#   only honest share.
# - A linear layer's intensity in 16 bits is its number of rows; in 4 bits it is four times that.
# - Elementwise work (norms, activations, softmax, adding) has an intensity below 1 everywhere: only
#   fewer bytes make it faster.
# - Below the ridge extra arithmetic is free: that is what quantization, recomputation and
#   speculation live on.
#
# ## In the tree
#
# - `ridgeline/kernels/cost.py`: the bytes and operations of every op.
# - `ridgeline/models/cost.py`: those of a model's step.
# - `ridgeline/profiling/roofline.py`: verdicts; `ridgeline profile demo` draws yours.
#
# ## Exercise
#
# From FLOPs, bytes and the two ceilings: which side bounds it, and what is the limit in seconds?
# On the ridge itself say "memory".
#
# %% [exercise]
def roofline(flops: float, moved: float, rate: float, bandwidth: float) -> tuple[str, float]:
    """("memory" or "compute", the least seconds it can take)."""
    # your code
    compute_s, memory_s = flops / rate, moved / bandwidth
    return ("compute", compute_s) if compute_s > memory_s else ("memory", memory_s)
    # end of your code


# %% [check]
from collections.abc import Callable, Iterator

from ridgeline.learn.trials import AnswerTrial


def trials(answer: Callable[..., tuple[str, float]]) -> Iterator[AnswerTrial]:
    yield AnswerTrial.of(answer, 1e9, 1e9, 1e14, 1e12, want=("memory", 1e-3))
    yield AnswerTrial.of(answer, 1e12, 1e9, 1e14, 1e12, want=("compute", 1e-2))
    yield AnswerTrial.of(answer, 1e11, 1e9, 1e14, 1e12, want=("memory", 1e-3), hint="on the ridge")
    yield AnswerTrial.of(answer, 0.0, 8e9, 1e14, 4e12, want=("memory", 2e-3), hint="a copy")
