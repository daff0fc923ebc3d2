"""AdamW defined, in fp32 with each operation rounded on its own, so that every device gives the
same bits. It is what a CPU runs: in pieces that stay in the cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from ridgeline.kernels.adamw.state import BLOCK, AdamWState, AdamWStep, joined, split

PIECE = 256 * BLOCK  # elements, on a CPU
GPU_PIECE = 1 << 24  # where there is no cache to stay in, and each operation is a launch
FIRST_LEVELS, SECOND_LEVELS = 127, 255
# Of a block of zeros: fp32's smallest normal number. Triton 3.6 takes a smaller constant for fp64.
SMALLEST_SCALE = 2.0**-126


@dataclass(frozen=True)
class Draws:
    """Random integers from 0 to 65,535 for each element of a piece: a hash of seed, tensor and
    index, so that no state is kept and any cut of the work draws the same. Drawn only where
    something is rounded by chance, which on a CPU takes longer than the rest of the update.
    """

    seed: int
    salt: int
    start: int
    size: int
    device: torch.device

    @cached_property
    def _one(self) -> Tensor:
        base = int(mixed(torch.tensor((self.seed + self.salt * 0x9E3779B9) & 0xFFFFFFFF)))
        stop = self.start + self.size
        index = torch.arange(self.start, stop, dtype=torch.int64, device=self.device)
        return mixed((index + base) & 0xFFFFFFFF)

    @cached_property
    def weight(self) -> Tensor:
        return (self._one & 0xFFFF).to(torch.int32)

    @cached_property
    def first(self) -> Tensor:
        return (self._one >> 16).to(torch.int32)

    @cached_property
    def second(self) -> Tensor:
        two = mixed((self._one + 0x9E3779B9) & 0xFFFFFFFF)
        return (two & 0xFFFF).to(torch.int32)


def adamw_(
    states: Sequence[AdamWState], grads: Sequence[Tensor], step: AdamWStep, clip: Tensor
) -> Tensor:
    """One step of every tensor, in place. Gradients are multiplied by `clip` (fp32, no dims); where
    that is not finite nothing changes.

    Returns the count (int64) of weights whose update was not zero and which are as they were: what
    rounding threw away.
    """
    lost = torch.zeros((), dtype=torch.int64, device=clip.device)
    factor = clip.item()
    if not math.isfinite(factor):
        return lost
    numbers = step.numbers()
    floats: list[float] = numbers[:-1].view(torch.float32).tolist()
    piece = PIECE if clip.device.type == "cpu" else GPU_PIECE
    for state, grad in zip(states, grads, strict=True):
        for start in range(0, state.weight.numel(), piece):
            part = slice(start, start + piece)
            lost += update_piece(state, grad, floats, int(numbers[-1]), factor, part)
    return lost


def update_piece(
    state: AdamWState, grad: Tensor, floats: list[float], seed: int, factor: float, part: slice
) -> Tensor:
    """Numbers of a step are Python's: they are fp32 values, and torch computes with those."""
    beta1, rest1, beta2, rest2, eps, rate, kept, root = floats
    before = weight_of(state, part)
    first, second = moments_of(state, part)
    g = grad.reshape(-1)[part].float() * factor
    square = (g * g).mul_(rest2)
    first = (first * beta1).add_(g.mul_(rest1))
    second = (second * beta2).add_(square)
    divisor = root_of(second).mul_(root).add_(eps)
    update = torch.div(first, divisor, out=divisor).mul_(rate)
    after = (before * kept).sub_(update)
    draws = Draws(seed, state.salt, part.start, len(g), g.device)
    keep_moments(state, part, first, second, draws)
    stored = keep_weight(state, part, after, draws)
    return ((stored == before) & (update != 0)).sum()


def root_of(x: Tensor) -> Tensor:
    """The fp32 nearest to its root: in fp64 and then rounded it is that on every device, whereas a
    vector library's root in fp32 need not be.
    """
    return x.double().sqrt_().float()


def weight_of(state: AdamWState, part: slice) -> Tensor:
    weight = state.weight.view(-1)[part]
    if state.remainder is None:
        return weight.to(torch.float32, copy=True)  # what it was before it changes
    return joined(weight, state.remainder.view(-1)[part])


def keep_weight(state: AdamWState, part: slice, value: Tensor, draws: Draws) -> Tensor:
    """Store it, and return what is stored."""
    weight = state.weight.view(-1)[part]
    if state.remainder is not None:
        high, rest = split(value)
        weight.copy_(high)
        state.remainder.view(-1)[part] = rest
        return value
    if state.format.stochastic_weight:
        value = stochastic_bf16(value, draws.weight)
    weight.copy_(value)
    return weight.float()


def moments_of(state: AdamWState, part: slice) -> tuple[Tensor, Tensor]:
    first, second = state.first.view(-1)[part], state.second.view(-1)[part]
    if state.first_scale is None or state.second_scale is None:
        return first.float(), second.float()
    scales = slice(part.start // BLOCK, part.stop // BLOCK)
    codes = first.float()
    scale = spread(state.first_scale[scales], len(codes))
    root = second.float() * (1.0 / SECOND_LEVELS)
    share = codes * codes.abs() * (1.0 / FIRST_LEVELS**2)
    square = root * root
    return share * scale, square * square * spread(state.second_scale[scales], len(codes))


def keep_moments(
    state: AdamWState, part: slice, first: Tensor, second: Tensor, draws: Draws
) -> None:
    kept_first, kept_second = state.first.view(-1)[part], state.second.view(-1)[part]
    if state.first_scale is not None and state.second_scale is not None:
        scales = slice(part.start // BLOCK, part.stop // BLOCK)
        codes, state.first_scale[scales] = first_codes(first, chances(state, draws, "first"))
        kept_first.copy_(codes)
        codes, state.second_scale[scales] = second_codes(second, chances(state, draws, "second"))
        kept_second.copy_(codes)
        return
    if state.format.moments == "bf16" and state.format.stochastic_moments:
        first, second = stochastic_bf16(first, draws.first), stochastic_bf16(second, draws.second)
    kept_first.copy_(first)
    kept_second.copy_(second)


def chances(state: AdamWState, draws: Draws, moment: Literal["first", "second"]) -> Tensor:
    """What a code's share of the way to the next one is held against."""
    if not state.format.stochastic_moments:
        return torch.full((draws.size,), 0.5, device=draws.device)
    return (draws.first if moment == "first" else draws.second).float() * 2.0**-16


def first_codes(values: Tensor, chances: Tensor) -> tuple[Tensor, Tensor]:
    """int8 codes whose squares are shares of their block's largest magnitude: small values keep
    more of their bits than in even steps. Rounded so that the values are right in the mean.
    """
    scale = block_scale(values)
    share = values.abs() / spread(scale, len(values)) * FIRST_LEVELS**2
    low = root_of(share).floor()
    way = (share - low * low) / (2.0 * low + 1.0)
    codes = (low + (chances < way)).clamp(max=FIRST_LEVELS)
    return torch.where(values < 0, -codes, codes).nan_to_num(0.0).to(torch.int8), scale


def second_codes(values: Tensor, chances: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 codes whose fourth powers are shares of their block's largest. Never 0 for what is not:
    an update is divided by its root.
    """
    scale = block_scale(values)
    share = values / spread(scale, len(values)) * float(SECOND_LEVELS**4)
    low = root_of(root_of(share)).floor()
    here, next_root = low * low, (low + 1.0) * (low + 1.0)
    here, there = here * here, next_root * next_root
    way = (share - here) / (there - here)
    codes = (low + (chances < way)).clamp(min=1.0, max=SECOND_LEVELS)
    return torch.where(values > 0, codes, 0.0).nan_to_num(0.0).to(torch.uint8), scale


def block_scale(values: Tensor) -> Tensor:
    """The largest magnitude of each block, NaN where a value is."""
    missing = -len(values) % BLOCK
    padded = torch.nn.functional.pad(values, (0, missing))
    return padded.view(-1, BLOCK).abs().amax(-1).clamp(min=SMALLEST_SCALE)


def spread(scales: Tensor, size: int) -> Tensor:
    return scales.repeat_interleave(BLOCK)[:size]


def stochastic_bf16(values: Tensor, drawn: Tensor) -> Tensor:
    """Up or down at random, as near as each is; NaN and infinity stay."""
    bits = values.view(torch.int32)
    rounded = ((bits + drawn.to(torch.int32)) & -65536).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values)


def mixed(x: Tensor) -> Tensor:
    """A 32-bit hash (Chris Wellons' lowbias32), on int64 whose upper half is zero."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)
