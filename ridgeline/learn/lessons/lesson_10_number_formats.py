# %% [markdown]
# # Number formats, mixed precision, loss scaling
#
# A floating-point number is ±1.f · 2^e: some bits for e (the *range*), some for f (the
# *precision*). Fewer bits are fewer bytes and faster matrix units. The craft is to know which of
# the two you are about to run out of.
#
# %% [picture]
from ridgeline.learn.pictures import LessonPicture

picture = LessonPicture(250, "Bits of fp32, bf16, fp16, fp8: sign, exponent, fraction")
formats = (("fp32", 8, 23), ("bf16", 8, 7), ("fp16", 5, 10), ("fp8 e4m3", 4, 3), ("fp8 e5m2", 5, 2))
for at, (name, exponent, fraction) in enumerate(formats):
    y = 30 + at * 38
    picture.text(100, y + 17, name, "end")
    picture.box(112, y, 16, 24, "±", "n")
    picture.box(130, y, exponent * 16, 24, f"{exponent}", "b")
    picture.box(132 + exponent * 16, y, fraction * 16, 24, f"{fraction}", "a")
picture.text(112, 236, "orange: exponent (range); blue: fraction (precision)", "soft")

# %% [markdown]
# | format | largest | smallest normal | relative rounding error, at most |
# |---|---|---|---|
# | fp32 | 3.4e38 | 1.2e-38 | 2⁻²⁴ = 6.0e-8 |
# | bf16 | 3.4e38 | 1.2e-38 | 2⁻⁸ = 0.39% |
# | fp16 | 65,504 | 6.1e-5 | 2⁻¹¹ = 0.05% |
# | fp8 e4m3 | 448 | 0.0156 | 2⁻⁴ = 6.3% |
# | fp8 e5m2 | 57,344 | 6.1e-5 | 2⁻³ = 12.5% |
#
# tf32 is no storage format: tensor cores read fp32 and drop 13 bits of the fraction (10 are left).
#
# %%
from ridgeline.learn.session import Session

here = Session("number_formats")

# %%
import torch

values = torch.rand(100_000, dtype=torch.float64) + 1.0  # from 1 to 2: one exponent
for name, dtype in (
    ("bf16", torch.bfloat16),
    ("fp16", torch.float16),
    ("fp8", torch.float8_e4m3fn),
):
    error = ((values.float().to(dtype).double() - values).abs() / values).max()
    here.figure(f"error_{name}", float(error), "1", f"largest relative error of rounding to {name}")

# %% [markdown]
# ## Why sums are kept in fp32
#
# Add 1 to a bf16 number again and again: it has 8 significant bits, so from 256 on, x + 1 rounds to
# x. A sum over 4,096 ones comes out as 256. Matrix units multiply in 16 or 8 bits and *accumulate
# in fp32* for that reason.
#
# %%
total = torch.tensor(0.0, dtype=torch.bfloat16)
for _ in range(4096):
    total = total + 1
here.figure("bf16_sum", float(total), "1", "4,096 ones added in bf16")

# %% [markdown]
# ## Mixed precision
#
# Training in bf16 keeps *master weights* in fp32. An update of Adam is about the learning rate, say
# 1e-4. Between 1/16 and 1/8 the neighbours of a bf16 number are 2⁻⁴ · 2⁻⁷ = 0.00049 apart, so a
# weight of 0.1 to which 0.0001 is added, less than half of that, does not move at all:
#
# %%
weight = torch.tensor(0.1, dtype=torch.bfloat16)
master = torch.tensor(0.1)
for _ in range(1000):
    weight = (weight.float() + 1e-4).bfloat16()
    master = master + 1e-4
here.figure("bf16_weight", float(weight), "1", "0.1 + 1,000 updates of 1e-4, weight in bf16")
here.figure("master_weight", float(master), "1", "the same with a master weight in fp32")

# %% [markdown]
# Adam with fp32 master weights takes 2 (bf16 weight) + 4 (master) + 8 (two moments) + 2 to 4
# (gradient) = 16 to 18 bytes a parameter: 8B parameters are 128 GB before a single activation.
# *Stochastic rounding* is the other way out: round up with the probability of the remainder, and
# the mean is right without a master.
#
# %%
generator = torch.Generator().manual_seed(0)
weights = torch.full((2000,), 0.1, dtype=torch.bfloat16)
for _ in range(200):
    exact = weights.float() + 1e-4
    bits = exact.view(torch.int32) + torch.randint(0, 1 << 16, (2000,), generator=generator).int()
    weights = (bits & -65536).view(torch.float32).bfloat16()
mean = float(weights.double().mean())
here.figure(
    "stochastic", mean, "1", "0.1 + 200 updates of 1e-4, bf16, rounded stochastically (mean)"
)

# %% [markdown]
# ## fp16 and loss scaling
#
# fp16 has more precision than bf16 and far less range: a gradient of 1e-8 becomes 0. So the loss is
# multiplied by a large scale, say 65,536; all gradients grow with it (the chain rule is linear) and
# are divided again, in fp32, before the update. Too large a scale overflows to inf: then the step
# is skipped and the scale halved; after 2,000 good steps it is doubled. That is
# `torch.amp.GradScaler`. bf16 needs none of it.
#
# %%
gradients = 10 ** (torch.rand(100_000, generator=generator) * 6 - 10)  # 1e-10 to 1e-4
lost = float((gradients.half() == 0).float().mean())
lost_scaled = float(((gradients * 65536).half() == 0).float().mean())
here.figure("lost", lost, "1", "share of small gradients that fp16 turns to 0")
here.figure("lost_scaled", lost_scaled, "1", "the same with the loss scaled by 65,536")

# %% [markdown]
# ## fp8
#
# With 3 bits of fraction a scale is needed for each tensor, row or block: scale = largest / 448, so
# that the largest value lands on the format's largest. e4m3 for weights and activations, e5m2 where
# range counts more (gradients). What it brings is the matrix rate:
#
# %%
n = 8192 if here.is_gpu else 512
for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
    a, b = (torch.randn(n, n, device=here.device).to(dtype) for _ in range(2))
    rate = 2 * n**3 / here.seconds(lambda a=a, b=b: a @ b)
    here.figure(f"rate_{name}", rate, "FLOP/s", f"matrix product in {name}")
if here.is_gpu:
    a, b = (torch.randn(n, n, device=here.device).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=here.device)
    try:
        taken = here.seconds(lambda: torch._scaled_mm(a, b.T, one, one, out_dtype=torch.bfloat16))
        here.figure("rate_fp8", 2 * n**3 / taken, "FLOP/s", "matrix product in fp8")
    except RuntimeError as error:
        here.missing("a GPU with fp8", f"its rate ({str(error)[:60]})")
else:
    here.missing("a GPU", "51 TFLOP/s in fp32, 801 in bf16, 1,465 in fp8 (H200)")


# %% [markdown]
# ## Take along
#
# - Range or precision: fp16 runs out of the first, bf16 of the second.
# - Multiply in few bits, add in fp32; keep master weights, or round stochastically.
# - Loss scaling is for fp16 alone; an inf means skip the step and halve the scale.
# - fp8 lives on its scales: the finer, the better, and the more they cost.
#
# ## In the tree
#
# - `ridgeline/formats/dtypes.py`, `ridgeline/formats/scaling.py`: formats, scales, rounding.
# - `ridgeline/training/stepping/precision.py`: what is kept in which precision.
# - `ridgeline/training/stepping/fp8.py`: products of a training step in fp8.
#
# ## Exercise
#
# GradScaler's rule. `overflows` says for each step whether a gradient was inf. Begin with `scale`;
# an overflow skips the step, halves the scale and starts the count again; after `interval` good
# steps in a row the scale doubles. Return the scale after the last step and the number of steps
# taken.
#
# %% [exercise]
def scaler(overflows: list[bool], scale: float, interval: int) -> tuple[float, int]:
    # your code
    good, taken = 0, 0
    for overflow in overflows:
        if overflow:
            scale, good = scale / 2, 0
            continue
        taken, good = taken + 1, good + 1
        if good == interval:
            scale, good = scale * 2, 0
    return scale, taken
    # end of your code


# %% [check]
from collections.abc import Callable, Iterator

from ridgeline.learn.trials import AnswerTrial


def trials(answer: Callable[..., tuple[float, int]]) -> Iterator[AnswerTrial]:
    yield AnswerTrial.of(answer, [False], 1024.0, 2, want=(1024.0, 1))
    yield AnswerTrial.of(answer, [False, False], 1024.0, 2, want=(2048.0, 2), hint="two good steps")
    yield AnswerTrial.of(answer, [True, False], 1024.0, 2, want=(512.0, 1), hint="skip and halve")
    yield AnswerTrial.of(
        answer,
        [False, True, False],
        1024.0,
        2,
        want=(512.0, 2),
        hint="an overflow starts the count again",
    )
    yield AnswerTrial.of(
        answer, [False] * 4, 8.0, 2, want=(32.0, 4), hint="doubling restarts it too"
    )
