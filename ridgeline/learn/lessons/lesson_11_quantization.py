# %% [markdown]
# # Quantization, and how its quality is judged
#
# Generating a token reads every weight. Store weights in 4 bits and the reading takes a quarter of
# the time; the arithmetic is free below the ridge. So the question is never "is it faster" alone
# but "is it faster *and still the same model*".
#
# %% [picture]
from ridgeline.learn.pictures import LessonPicture

picture = LessonPicture(
    230, "A row of weights in groups, each with a scale; two 4-bit codes a byte"
)
picture.text(
    30, 34, "one row of a weight, groups of 4 (really 32 to 128), a scale for each", "bold"
)
for at, (scale, looks) in enumerate((("0.013", "aaab"), ("0.002", "aaaa"))):
    picture.cells(30 + at * 330, 48, 60, ["0.05", "-0.01", "0.03", "0.09"] if at == 0 else
                  ["0.01", "-0.002", "0.004", "0.012"], list(looks))  # fmt: skip
    picture.text(30 + at * 330, 128, f"scale = largest / 7 = {scale}", "soft")
picture.cells(30, 146, 60, ["4", "-1", "2", "7"], ["c"] * 4)
picture.cells(360, 146, 60, ["6", "-1", "2", "7"], ["c"] * 4)
picture.text(30, 222, "codes in 4 bits, two a byte; w is about code · scale", "soft")

# %% [markdown]
# ## Round to nearest
#
# Symmetric: scale = largest |w| / 7 for codes from −7 to 7, code = round(w / scale). Where the
# scale is shared decides everything: one outlier makes the step large for all that share it.
#
# %%
from ridgeline.learn.session import Session

here = Session("quantization")

# %%
import math

import torch
from torch import Tensor

torch.manual_seed(0)
OUT, IN = 192, 256
weight = torch.randn(OUT, IN) * 0.02
weight[:, 7] *= 20  # a column of outliers, as real layers have


def rounded(w: Tensor, bits: int, group: int) -> Tensor:
    """To the nearest code and back, a scale for each group of a row."""
    most = 2 ** (bits - 1) - 1
    parts = w.reshape(w.shape[0], -1, group)
    scale = parts.abs().amax(-1, keepdim=True) / most
    return ((parts / scale).round().clamp(-most, most) * scale).reshape_as(w)


def decibels(own: Tensor, exact: Tensor) -> float:
    """Signal over error: 20 dB is 10% error, 40 dB is 1%."""
    return float(20 * torch.log10(exact.norm() / (own - exact).norm()))


for name, bits, group in (
    ("int8_row", 8, IN),
    ("int4_row", 4, IN),
    ("int4_g64", 4, 64),
    ("int4_g32", 4, 32),
):
    here.figure(
        name, decibels(rounded(weight, bits, group), weight), "1", f"{name}: dB of the weight"
    )

# %% [markdown]
# A scale of 16 bits for each group of 64 costs 16/64 = 0.25 bits a weight: int4 with groups of 64
# is 4.25 bits, groups of 32 are 4.5.
#
# ## What counts is the output
#
# Inputs are not alike: some channels are large, and channels go together. Errors in the weight of a
# large channel hurt more. Two methods use that; both look at inputs of real text (*calibration*).
#
# - **GPTQ** rounds one column after the other and lets the columns not yet rounded make up for the
#   error, by H = XᵀX, the layer's curvature.
# - **AWQ** multiplies important columns by s > 1 before rounding and divides x by s: their relative
#   error gets smaller, and the rest hardly notices.
# - **SmoothQuant** is for rounding *activations* to int8 too: it moves their outliers into the
#   weight, channel by channel, with s = max|x|^α / max|w|^(1−α).
#
# %%
mixing = torch.randn(IN, IN) / math.sqrt(IN)
x = torch.randn(2000, IN) @ (torch.eye(IN) + mixing) * torch.logspace(-1, 1, IN)[torch.randperm(IN)]
exact = x @ weight.T
GROUP, BITS = 64, 4


def gptq(w: Tensor, x: Tensor) -> Tensor:
    """Column by column; each one's error is taken over by those to its right."""
    hessian = (x.T @ x).double()
    hessian += 0.01 * hessian.diagonal().mean() * torch.eye(IN, dtype=torch.float64)
    upper = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)
    left, out = w.double().clone(), torch.zeros_like(w, dtype=torch.float64)
    most = 2 ** (BITS - 1) - 1
    for column in range(IN):
        if column % GROUP == 0:
            scale = left[:, column : column + GROUP].abs().amax(1) / most
        code = (left[:, column] / scale).round().clamp(-most, most)
        out[:, column] = code * scale
        error = (left[:, column] - out[:, column]) / upper[column, column]
        left[:, column + 1 :] -= error[:, None] * upper[column, None, column + 1 :]
    return out.float()


def awq(w: Tensor, x: Tensor) -> Tensor:
    """The best of several exponents, by the output's error."""
    size = x.abs().mean(0)
    tries = []
    for step in range(9):
        s = (size / size.mean()).pow(step / 8).clamp(1e-2)
        tries.append(rounded(w * s, BITS, GROUP) / s)
    return max(tries, key=lambda each: decibels(x @ each.T, exact))


nearest = rounded(weight, BITS, GROUP)
for name, words, own in (
    ("rtn", "round to nearest", nearest),
    ("awq", "AWQ", awq(weight, x)),
    ("gptq", "GPTQ", gptq(weight, x)),
):
    here.figure(
        f"{name}_out", decibels(x @ own.T, exact), "1", f"dB of the output, {words}, int4 g64"
    )

# %% [markdown]
# These inputs are made up: channels differ a hundredfold in size, which is AWQ's case, and are
# mixed, which is GPTQ's. On real layers the order changes from one to the next and the gains are
# smaller: judge by what the model says. **QAT** goes further: it trains with the rounding in the
# forward pass, and the gradient passes through `round` as if it were not there.
#
# ## Packing, and reading it back
#
# Two codes a byte. A kernel loads bytes, splits them into codes in registers, multiplies by the
# scale and by x: memory sees 4 bits, the tensor cores see bf16.
#
# %%
from ridgeline.formats.packing import pack_int4, unpack_int4

codes = torch.randint(0, 16, (8, 64))
packed = pack_int4(codes)
assert torch.equal(unpack_int4(packed).long(), codes)
here.figure("packed", packed.nbytes / codes.numel() * 8, "1", "bits a code, packed")
bandwidth = here.ceiling("read_bandwidth")
for bits in (16, 8, 4.25):
    name = str(bits).replace(".", "_")
    here.figure(
        f"rate_{name}", bandwidth / (8.03e9 * bits / 8), "1",
        f"tokens/s, at most, of 8.03B weights in {bits} bits",
    )  # fmt: skip

# %% [markdown]
# ## Judging it
#
# The best single measure is the *KL divergence* between the original's and the new model's
# next-token distributions, averaged over text: it sees every change, while a benchmark of 1,000
# questions has an error of ±1.5% by counting alone. Perplexity goes with it; tasks confirm. All
# with confidence intervals. Here is what a change of logits does to both:
#
# %%
logits = torch.randn(500, 1000) * 2
changed = logits + 0.1 * torch.randn_like(logits)
log_p, log_q = logits.log_softmax(-1), changed.log_softmax(-1)
kl = (log_p.exp() * (log_p - log_q)).sum(-1)
same = (logits.argmax(-1) == changed.argmax(-1)).float().mean()
here.figure("kl", float(kl.mean()), "1", "mean KL (nats) of logits off by 0.1")
here.figure("same_top", float(same), "1", "share of positions with the same best token")

# %% [markdown]
# KL grows with the square of the error: off by 0.1, KL is about 0.1²/2 = 0.005.
#
# ## Take along
#
# - Weights in int8: nearly free. In int4: groups, a method that looks at inputs, and a check.
# - Bits per weight include the scales.
# - Quality is measured on outputs, against the original, with an interval: KL first.
# - "4 bits broke it": try groups of 32, GPTQ or AWQ, 8 bits for the layers that matter most, the
#   head in 8 bits.
# - 1-bit weights and the like are *trained* that way; no method here turns a trained model into one
#   that still works. They are out of reach for post-training quantization.
#
# ## In the tree
#
# - `ridgeline/quantization/methods/`: RTN, GPTQ, AWQ, SmoothQuant as they are used.
# - `ridgeline/formats/packing.py`: codes in bytes.
# - `ridgeline/kernels/quantized_linear/`: products with packed weights.
# - `ridgeline/quality/`: KL and perplexity with intervals; `ridgeline quantize` refuses what is out
#   of its bound.
#
# ## Exercise
#
# Quantize a vector asymmetrically to `bits`: codes from 0 to 2^bits − 1, scale = (max − min) /
# (2^bits − 1), zero = min. Return the values after the round trip. A constant vector comes back as
# it is.
#
# %% [exercise]
from torch import Tensor


def asymmetric(x: Tensor, bits: int) -> Tensor:
    # your code
    low, high = x.min(), x.max()
    if high == low:
        return x.clone()
    scale = (high - low) / (2**bits - 1)
    return ((x - low) / scale).round() * scale + low
    # end of your code


# %% [check]
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ridgeline.learn.trials import AnswerTrial


def trials(answer: Callable[..., Tensor]) -> Iterator[AnswerTrial]:
    ends = torch.tensor([0.0, 3.0])
    yield AnswerTrial.of(answer, ends, 2, want=ends, hint="min and max are codes themselves")
    yield AnswerTrial.of(
        answer, torch.tensor([0.0, 1.4, 3.0]), 2, want=torch.tensor([0.0, 1.0, 3.0]), hint="step 1"
    )
    yield AnswerTrial.of(
        answer, torch.tensor([5.0, 5.6, 6.0]), 1, want=torch.tensor([5.0, 6.0, 6.0]), hint="zero: 5"
    )
    same = torch.full((3,), 2.5)
    yield AnswerTrial.of(answer, same, 4, want=same, hint="max - min is 0: nothing to divide by")
