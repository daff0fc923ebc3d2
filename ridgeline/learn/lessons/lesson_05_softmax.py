# %% [markdown]
# # Softmax, and softmax in one walk
#
# Softmax of a row is exp(x − m) / Σ exp(x − m), with m the row's largest value. It wants three
# looks at the row: the largest, the sum, the quotients. Where is the row at the second look? That
# is the whole subject, and the trick that removes a look is what FlashAttention is made of.
#
# %% [picture]
from ridgeline.learn.pictures import LessonPicture

picture = LessonPicture(220, "Online softmax: a running largest value and a sum that is rescaled")
picture.text(20, 32, "one walk over the row, in blocks", "bold")
for at, (block, largest, total) in enumerate(
    (("1 3 2", "m = 3", "s = 1.50"), ("0 5 1", "m = 5", "s = 1.23"), ("4 2 0", "m = 5", "s = 1.65"))
):
    x = 40 + at * 230
    picture.box(x, 46, 170, 34, block, "a")
    picture.arrow(x + 85, 80, x + 85, 112)
    picture.box(x, 112, 170, 46, f"{largest}\n{total}", "b")
    if at:
        picture.arrow(x - 60, 135, x, 135)
picture.text(
    20, 196, "m 3 → 5: the old sum is worth 1.50 · exp(3 − 5) = 0.20 on the new scale.", "soft"
)

# %% [markdown]
# ## Why subtract the largest
#
# exp(89) overflows fp32. Subtracting any number from all of the row changes nothing in the result,
# since exp(x − c) = exp(x) / exp(c) above and below; the largest is the one that keeps every
# exponential at most 1.
#
# %%
from ridgeline.learn.session import Session

here = Session("softmax")

# %%
import torch
from torch import Tensor

row = torch.tensor([88.0, 89.0, 90.0])
naive = row.exp() / row.exp().sum()
here.figure("naive_nans", int(naive.isnan().sum()), "1", "NaNs of three values around 89, naive")
safe = (row - row.max()).exp()
here.figure("safe_sum", float((safe / safe.sum()).sum()), "1", "sum of the safe softmax")

# %% [markdown]
# ## Online
#
# Walk once, with the largest value so far, m, and the sum so far, s, on the scale of m. When a
# block brings a larger m', the old sum is worth s · exp(m − m') on the new scale:
#
#     m' = max(m, largest of the block)
#     s' = s · exp(m − m') + Σ exp(block − m')
#
# For 1 3 2 | 0 5 1 | 4 2 0: after the first block m = 3, s = e⁻² + 1 + e⁻¹ = 1.503. The second
# brings 5: s = 1.503 · e⁻² + e⁻⁵ + 1 + e⁻⁴ = 0.203 + 1.025 = 1.228. The third adds e⁻¹ + e⁻³ + e⁻⁵
# = 0.424: s = 1.653. You can check that on any calculator; here it is done by code.
#
# %%


def online(row: Tensor, block: int) -> tuple[float, float]:
    largest, total = float("-inf"), 0.0
    for start in range(0, row.numel(), block):
        part = row[start : start + block].double()
        new = max(largest, float(part.max()))
        total = total * float(torch.tensor(largest - new).exp()) + float((part - new).exp().sum())
        largest = new
    return largest, total


largest, total = online(torch.tensor([1.0, 3, 2, 0, 5, 1, 4, 2, 0]), 3)
here.figure("online_sum", total, "1", "the sum of the example, online")

# %% [markdown]
# ## In Triton, and what each look costs
#
# With 16384 × 4096 in fp32 a look at all rows is 268 MB: 61 µs of an H200. `three_pass` reads three
# times and writes once, `online` reads twice, `one_pass` keeps the row in registers and reads once:
# bytes of 4 : 3 : 2. All of them are the project's own, in `ridgeline/lessons/softmax/triton.py`.
#
# %%
from ridgeline.lessons.softmax.triton import softmax

rows, columns = (16384, 4096) if here.is_gpu else (4, 300)
x = torch.randn(rows, columns, device=here.device)
for step in ("three_pass", "online", "one_pass"):
    error = float((softmax(x, step=step) - torch.softmax(x, -1)).abs().max())
    assert error < 1e-5, (step, error)
    if here.is_gpu:
        taken = here.seconds(lambda step=step: softmax(x, step=step))
        here.figure(step, 2 * x.nbytes / taken, "B/s", f"{step}: 2 looks' bytes over its time")
if not here.is_gpu:
    wide = torch.randn(2048, 4096)
    taken = here.seconds(lambda: torch.softmax(wide, -1))
    here.figure(
        "torch", 2 * wide.nbytes / taken, "B/s", "torch.softmax: 2 looks' bytes over its time"
    )

    def by_hand() -> Tensor:
        high = wide - wide.max(-1, keepdim=True).values
        high = high.exp()
        return high / high.sum(-1, keepdim=True)

    taken = here.seconds(by_hand)
    here.figure("by_hand", 2 * wide.nbytes / taken, "B/s", "the same by five torch operations")
    here.missing("a GPU", "three_pass at 56%, online at 71%, one_pass at 96% of the limit")

# %% [markdown]
# ## Take along
#
# - Subtract the largest: the result is the same, and nothing overflows.
# - A sum relative to m is moved to m' by exp(m − m'): largest and sum then need one walk.
# - Touch memory once; registers and shared memory are where the second look belongs.
# - Compare with a plain definition, at awkward widths, before timing anything.
#
# ## In the tree
#
# - `ridgeline/lessons/softmax/triton.py`: five steps, the last two hold rows in registers.
# - `ridgeline/kernels/sampling/`: softmax when only one entry of it is wanted.
# - `ridgeline/kernels/linear_cross_entropy/`: the same sum over a vocabulary, in training.
#
# ## Exercise
#
# Two parts of a row were walked apart, each giving (m, s). Join them. It is how a row is divided
# over programs, and how attention over a long context is split.
#
# %% [exercise]
import math


def join(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
    """(largest, sum relative to it) of both parts together; an empty part is (-inf, 0.0)."""
    # your code
    largest = max(a[0], b[0])
    if largest == -math.inf:
        return largest, 0.0
    return largest, sum(total * math.exp(high - largest) for high, total in (a, b))
    # end of your code


# %% [check]
import math
from collections.abc import Callable, Iterator

from ridgeline.learn.trials import AnswerTrial


def trials(answer: Callable[..., tuple[float, float]]) -> Iterator[AnswerTrial]:
    yield AnswerTrial.of(answer, (3.0, 1.5), (3.0, 2.0), want=(3.0, 3.5), hint="the same scale")
    yield AnswerTrial.of(
        answer, (3.0, 1.5), (5.0, 1.0), want=(5.0, 1.0 + 1.5 * math.exp(-2)), hint="a moves to 5"
    )
    yield AnswerTrial.of(answer, (900.0, 1.0), (-900.0, 1.0), want=(900.0, 1.0), hint="no overflow")
    yield AnswerTrial.of(
        answer, (-math.inf, 0.0), (2.0, 4.0), want=(2.0, 4.0), hint="an empty part"
    )
    yield AnswerTrial.of(
        answer,
        (-math.inf, 0.0),
        (-math.inf, 0.0),
        want=(-math.inf, 0.0),
        hint="both empty: inf - inf is NaN",
    )
