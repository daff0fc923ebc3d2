"""What AdamW keeps for a tensor, in which format, and the numbers of one step.

An exact master costs two bytes a parameter: the model's bf16 weight is the fp32 master rounded to
the nearest (halves away from zero), and a 16-bit remainder is what is missing, so that both
together are the master bit for bit.

    state = new_state(weight, AdamWFormat("exact", "bf16"))
    AdamWUpdate([state]).step([grad], AdamWStep(lr=1e-4, step=1), clip)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

BLOCK = 256  # elements that share the scale of their 8-bit moments

WeightFormat = Literal["fp32", "exact", "bf16"]
MomentFormat = Literal["fp32", "bf16", "8-bit"]


@dataclass(frozen=True)
class AdamWFormat:
    # fp32: the weight is its own master. exact: bf16 with a remainder. bf16: nothing beside it.
    weight: WeightFormat = "exact"
    moments: MomentFormat = "bf16"
    stochastic_weight: bool = False  # bf16 alone: rounded up or down at random, right in the mean
    # With beta2 = 0.999 a nearest rounding to 8 bits or bf16 would leave a second moment where it
    # is, since a step moves it by less than half a unit.
    stochastic_moments: bool = True

    def __post_init__(self) -> None:
        if self.stochastic_weight and self.weight != "bf16":
            raise ValueError(f"weights in {self.weight} are not rounded; unset stochastic_weight")


@dataclass
class AdamWState:
    """Of one tensor. Everything is changed in place by a step."""

    weight: Tensor
    format: AdamWFormat
    first: Tensor  # the moments: fp32, bf16, or codes (int8 and uint8)
    second: Tensor
    remainder: Tensor | None = None  # int16
    first_scale: Tensor | None = None  # fp32, one for each block of codes
    second_scale: Tensor | None = None
    salt: int = 0  # other random numbers than other tensors have: its number among them


@dataclass(frozen=True)
class AdamWStep:
    """The numbers of one step, the same for all tensors it is called with."""

    lr: float
    step: int  # counted from 1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    seed: int = 0  # of the random roundings

    def __post_init__(self) -> None:
        for name, value in (("lr", self.lr), ("eps", self.eps), ("decay", self.weight_decay)):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} is {value}; it must be finite and not negative")
        for name, beta in (("beta1", self.beta1), ("beta2", self.beta2)):
            if not 0 <= beta < 1:
                raise ValueError(f"{name} is {beta}; it must be at least 0 and less than 1")
        if self.step < 1:
            raise ValueError(f"step is {self.step}; steps are counted from 1")

    def floats(self) -> tuple[float, ...]:
        """As the update uses them: beta1, 1 - beta1, beta2, 1 - beta2, eps, lr over the first
        bias correction, what weight decay leaves, 1 over the root of the second correction.
        """
        return (
            self.beta1,
            1 - self.beta1,
            self.beta2,
            1 - self.beta2,
            self.eps,
            self.lr / (1 - self.beta1**self.step),
            1 - self.lr * self.weight_decay,
            1 / math.sqrt(1 - self.beta2**self.step),
        )

    def numbers(self) -> Tensor:
        """For a device, which may keep them where a captured step reads them: int32, the floats by
        their bits, then the seed of this step.
        """
        floats = torch.tensor(self.floats(), dtype=torch.float32)
        mixed = (self.seed * 1_000_003 + self.step) % (1 << 31)
        return torch.cat((floats.view(torch.int32), torch.tensor([mixed], dtype=torch.int32)))


def on_device(values: Tensor, device: torch.device) -> Tensor:
    """Copied without waiting: from memory that is not pinned, CUDA waits for all that was launched
    before, which in a step is the whole backward pass.
    """
    if device.type == "cuda" and not values.is_cuda:
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


def new_state(
    weight: Tensor, format: AdamWFormat, master: Tensor | None = None, salt: int = 0
) -> AdamWState:
    """Moments of zero. `master` (fp32) is what an exact weight begins with; the weight is rounded
    from it.
    """
    expected = torch.float32 if format.weight == "fp32" else torch.bfloat16
    if weight.dtype != expected:
        raise ValueError(f"the weight is in {weight.dtype}; {format.weight} needs {expected}")
    if not weight.is_contiguous():
        raise ValueError("the weight is not contiguous")
    like = weight.detach()
    remainder = None
    if format.weight == "exact":
        remainder = torch.zeros_like(like, dtype=torch.int16)
        if master is not None:
            rounded, left = split(master)
            like.copy_(rounded)
            remainder.copy_(left)
    elif master is not None:
        like.copy_(master)
    if format.moments != "8-bit":
        dtype = torch.float32 if format.moments == "fp32" else torch.bfloat16
        first, second = (torch.zeros_like(like, dtype=dtype) for _ in range(2))
        return AdamWState(like, format, first, second, remainder, salt=salt)
    num_blocks = -(-like.numel() // BLOCK)
    scale = torch.zeros(num_blocks, dtype=torch.float32, device=like.device)
    first = torch.zeros_like(like, dtype=torch.int8)
    second = torch.zeros_like(like, dtype=torch.uint8)
    return AdamWState(like, format, first, second, remainder, scale, scale.clone(), salt)


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """An fp32 tensor as bf16, rounded to the nearest with halves away from zero, and the int16 that
    is missing. Halves to even would need 17 bits: a remainder of +2^15 and one of -2^15.
    """
    bits = master.float().view(torch.int32)
    # A NaN with all bits set would overflow into -0: one NaN stands for all.
    bits = torch.where(master.isnan(), 0x7FC00000, bits)
    high = (bits + 0x8000) >> 16
    return high.to(torch.int16).view(torch.bfloat16), (bits - (high << 16)).to(torch.int16)


def joined(weight: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 master of an exact weight."""
    high = weight.view(torch.int16).to(torch.int32) << 16
    return (high + remainder.to(torch.int32)).view(torch.float32)
