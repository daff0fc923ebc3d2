"""Moves scales between parts of a block without changing its function.

A channel can be made s times smaller where it is written and the columns that read it s times
larger. It is written by a norm's weight (before qkv, and before gate and up or the experts and
their router), by the rows of v (before the output projection: query heads that share a value head
share its scales), or by the rows of up (before down, separately for each expert). Every family has
these: Gemma's norms store their distance from one, and post-norms, query and key norms and
Granite's factors are elsewhere.

A norm's new weight is rounded to its dtype first, and the columns take the resulting scale: a bf16
norm loses nothing.

Letters: O outputs, D depth of a matrix, C channels that have their own scales.

    for site in channel_sites(block):
        fold(calibrated, site, scale_C)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ridgeline.models.transformer import Block, ExpertMLP, RMSNorm
from ridgeline.quantization.methods.base import Calibrated
from ridgeline.quantization.scheme import Scheme, decode, encode, find_grid
from ridgeline.quantization.statistics import Statistics, round_inputs, squared_error


@dataclass(frozen=True)
class ChannelSite:
    """Where channels are written, and the matrices that read them."""

    written: Literal["attn_norm", "mlp_norm", "v", "up"]
    readers: tuple[str, ...]
    writer: str = ""  # the matrix whose rows write them; a norm otherwise
    groups: int = 1  # query heads that read one value head
    head_dim: int = 1

    def shared(self, value_D: Tensor) -> Tensor:
        """The largest value among those that share a scale: [D] to [C]."""
        heads = value_D.view(-1, self.groups, self.head_dim)
        return heads.amax(1).flatten()

    def spread(self, value_C: Tensor) -> Tensor:
        """[C] to [D]."""
        heads = value_C.view(-1, 1, self.head_dim)
        return heads.expand(-1, self.groups, -1).flatten()


def channel_sites(block: Block) -> list[ChannelSite]:
    attn, mlp = block.attn, block.mlp
    q_size, kv_size, _ = attn.sizes
    sites = [
        ChannelSite("attn_norm", ("attn.qkv.weight",)),
        ChannelSite("v", ("attn.out.weight",), "attn.qkv.weight", q_size // kv_size, attn.head_dim),
    ]
    if not isinstance(mlp, ExpertMLP):
        sites.append(ChannelSite("mlp_norm", ("mlp.gate_up.weight",)))
        return [*sites, ChannelSite("up", ("mlp.down.weight",), "mlp.gate_up.weight")]
    experts = range(mlp.gate_up.shape[0])
    sites.append(ChannelSite("mlp_norm", tuple(f"mlp.gate_up.{expert}" for expert in experts)))
    return sites + [
        ChannelSite("up", (f"mlp.down.{expert}",), f"mlp.gate_up.{expert}") for expert in experts
    ]


@torch.no_grad()
def fold(calibrated: Calibrated, site: ChannelSite, scale_C: Tensor) -> None:
    """Make the channels `scale` times smaller and their readers' columns larger, in the block, the
    weights and the statistics.
    """
    if site.writer:
        _divide_rows(calibrated, site, scale_C)
    else:
        scale_C = _divide_norm(getattr(calibrated.block, site.written), scale_C)
    scale_D = site.spread(scale_C)
    for name in site.readers:
        calibrated.weights[name] = calibrated.weights[name] * scale_D
        calibrated.statistics[name].divide(scale_D)
    mlp = calibrated.block.mlp
    if site.written == "mlp_norm" and isinstance(mlp, ExpertMLP):
        mlp.router.weight.copy_(mlp.router.weight.float() * scale_D)


def _divide_norm(norm: RMSNorm, scale_C: Tensor) -> Tensor:
    """The scale that the rounded weight gives. A channel that would round to zero is left alone."""
    gain_C = norm.weight.float() + norm.offset
    weight_C = (gain_C / scale_C - norm.offset).to(norm.weight.dtype)
    new_gain_C = weight_C.float() + norm.offset
    ratio_C = gain_C / new_gain_C
    sound_C = ratio_C.isfinite() & (ratio_C > 0)
    norm.weight.copy_(torch.where(sound_C, weight_C, norm.weight))
    return torch.where(sound_C, ratio_C, 1.0)


def _divide_rows(calibrated: Calibrated, site: ChannelSite, scale_C: Tensor) -> None:
    """The rows that write the channels are the last ones of qkv, and of gate and up."""
    rows = slice(-len(scale_C), None)
    weight_OD = calibrated.weights[site.writer].clone()
    weight_OD[rows] /= scale_C.unsqueeze(1)
    calibrated.weights[site.writer] = weight_OD
    linear = {"v": calibrated.block.attn.qkv, "up": calibrated.block.mlp.gate_up}[site.written]
    bias = getattr(linear, "bias", None)
    if bias is not None:
        bias[rows] = (bias[rows].float() / scale_C).to(bias.dtype)


def fold_best(
    calibrated: Calibrated, candidates: Callable[[Calibrated, ChannelSite], Iterable[Tensor]]
) -> None:
    """Fold, site by site, the candidate with the least output error; none where none helps."""
    for site in channel_sites(calibrated.block):
        readers = readers_to_serve(calibrated, site)
        if not readers:
            continue
        ones_C = torch.ones_like(site.shared(calibrated.statistics[readers[0]].amax_D))
        best_C, least = ones_C, _error(calibrated, site, readers, ones_C)
        for scale_C in candidates(calibrated, site):
            error = _error(calibrated, site, readers, scale_C)
            if error < least:
                best_C, least = scale_C, error
        if best_C is not ones_C:
            fold(calibrated, site, best_C)


def readers_to_serve(calibrated: Calibrated, site: ChannelSite) -> list[str]:
    """The matrices that will be rounded and have enough statistics."""
    rounded = [name for name in site.readers if calibrated.schemes[name] is not None]
    return [name for name in rounded if calibrated.is_known(name)]


def _error(calibrated: Calibrated, site: ChannelSite, readers: list[str], scale_C: Tensor) -> float:
    scale_D = site.spread(scale_C)
    total = 0.0
    for name in readers:
        scheme = calibrated.schemes[name]
        assert scheme is not None
        weight_OD, statistics = calibrated.weights[name], calibrated.statistics[name]
        total += float(scaled_error(weight_OD, statistics, scheme, scale_D))
    return total


def scaled_error(
    weight_OD: Tensor, statistics: Statistics, scheme: Scheme, scale_D: Tensor
) -> Tensor:
    """The squared output error of a matrix whose columns are rounded `scale` times larger."""
    larger_OD = weight_OD * scale_D
    decoded_OD = decode(encode(larger_OD, find_grid(larger_OD, scheme), scheme), scheme)
    if scheme.inputs == "16-bit":
        return squared_error(decoded_OD / scale_D - weight_OD, statistics.hessian_DD)
    x_SD = statistics.sample_SD
    rounded_SD = round_inputs(x_SD / scale_D, scheme)
    return (rounded_SD @ decoded_OD.t() - x_SD @ weight_OD.t()).square().sum()
