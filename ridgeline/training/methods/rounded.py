"""Weights that a step computes with in rounded form while the weights themselves are learned:
quantization-aware training, recovery of codes, recovery after pruning.

The gradient of the rounded weight is that of the weight itself (straight through); a weight that is
pruned stays zero and learns nothing. Grids are found anew for each step, as round-to-nearest finds
them, so that `ridgeline quantize --method rtn` makes of the result exactly the model that was
trained; or they are given, and their scales are learned with the weights: the gradient of a scale
follows from that of the rounded weight, once a step.

    rounded = RoundedWeights({"layers.0.attn.qkv.weight": Rounding(weight_OD, scheme)})
    rounded.values(weight_OD)

Letters: O outputs, D depth, G groups of the depth.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.errors import UnsupportedError, UsageError
from ridgeline.formats.scaling import SMALLEST_AMAX
from ridgeline.models import Transformer
from ridgeline.quantization.linear import quantizable
from ridgeline.quantization.methods.sparsity import Sparsity
from ridgeline.quantization.scheme import (
    Codes,
    Grid,
    Scheme,
    decode,
    encode,
    find_grid,
    in_parts,
    spread,
)

SCALE = ".scale"  # behind a weight's name: that of its learned scales


@dataclass(frozen=True)
class Rounding:
    """How one weight is rounded."""

    weight_OD: nn.Parameter
    scheme: Scheme | None = None  # None: it is only pruned
    scale: nn.Parameter | None = None  # learned; None: found from the weight
    zero: Tensor | None = None  # of given grids
    kept_OD: Tensor | None = None  # where weights are not pruned; None: everywhere

    def grid(self) -> Grid:
        assert self.scheme is not None, "what is only pruned has no grid"
        if self.scale is None:
            return find_grid(self.weight_OD, self.scheme)
        return Grid(self.scale.detach().float().clamp(min=SMALLEST_AMAX), self.zero)

    @torch.no_grad()
    def codes(self) -> Codes:
        assert self.scheme is not None, "what is only pruned has no codes"
        return encode(self._pruned(self.weight_OD.detach()), self.grid(), self.scheme)

    @torch.no_grad()
    def value(self) -> Tensor:
        """What is computed with, in the weight's dtype."""
        if self.scheme is None:
            return self._pruned(self.weight_OD.detach())
        return decode(self.codes(), self.scheme).to(self.weight_OD.dtype)

    def _pruned(self, weight_OD: Tensor) -> Tensor:
        return weight_OD if self.kept_OD is None else weight_OD * self.kept_OD

    @torch.no_grad()
    def scale_gradient(self, gradient_OD: Tensor) -> Tensor:
        """From that of the rounded weight. Inside of the range a scale moves a weight by what
        rounding added to it; a weight beyond the range follows its end.
        """
        assert self.scheme is not None
        grid = self.grid()
        weight = self.weight_OD.detach().float()
        wide = spread(grid.scale, weight.shape)
        places = decode(self.codes(), self.scheme) / wide
        exact = weight / wide
        inside = (exact - places).abs() <= 0.5
        slope = torch.where(inside, places - exact, places)
        return in_parts(gradient_OD.float() * slope, self.scheme).sum((1, 3))


class RoundedWeights:
    """Rounded forms by weight, kept until the optimizer has changed what they come from."""

    def __init__(self, roundings: Mapping[str, Rounding]) -> None:
        self.roundings = dict(roundings)
        self._by_weight = {id(each.weight_OD): each for each in self.roundings.values()}
        self._values: dict[int, Tensor] = {}

    def values(self, weight_OD: Tensor) -> Tensor:
        """The rounded form, or the weight itself where it has none."""
        key = id(weight_OD)
        rounding = self._by_weight.get(key)
        if rounding is None:
            return weight_OD
        if key not in self._values:
            self._values[key] = rounding.value()
        return self._values[key]

    def forget(self) -> None:
        self._values.clear()

    def scales(self) -> dict[str, nn.Parameter]:
        """Those that are learned."""
        return {
            name + SCALE: each.scale
            for name, each in self.roundings.items()
            if each.scale is not None
        }

    @torch.no_grad()
    def finish(self, gradients: dict[str, Tensor]) -> None:
        """Complete a step's gradients, **in place**: scales get theirs, pruned weights none."""
        for name, rounding in self.roundings.items():
            gradient = gradients.get(name)
            if gradient is None:
                continue
            if rounding.kept_OD is not None:
                gradient.mul_(rounding.kept_OD)
            if rounding.scale is not None:
                gradients[name + SCALE] = rounding.scale_gradient(gradient)


class GatheredRoundings(RoundedWeights):
    """Of a model of which a rank has a part, and the whole of a weight only while a pass runs: it
    is rounded anew for each product.
    """

    def __init__(self, linears: Mapping[str, Any], scheme: Scheme) -> None:
        super().__init__({})
        self._linears, self._scheme = dict(linears), scheme
        self._names: dict[int, str] = {}

    def values(self, weight_OD: Tensor) -> Tensor:
        name = self._names.get(id(weight_OD))
        if name is None or self._linears[name].weight is not weight_OD:
            self._names = {id(each.weight): name for name, each in self._linears.items()}
            name = self._names.get(id(weight_OD))
        if name is None:
            return weight_OD
        whole: Any = weight_OD
        return Rounding(whole, self._scheme).value()


def gathered_roundings(model: Transformer, scheme: Scheme) -> RoundedWeights:
    """As `found_roundings` has it, for a model that is cut over ranks."""
    check_dense(model)
    linears = {
        name: linear
        for name, linear in quantizable(model).items()
        if scheme.fits(*linear.weight.shape)
    }
    check_fits(linears, scheme)
    return GatheredRoundings(linears, scheme)


def check_dense(model: Transformer) -> None:
    if any(layer.experts for layer in model.config.layers):
        raise UnsupportedError("--qat and --sparsity do not train mixtures of experts yet")


def check_fits(rounded: Collection[Any], scheme: Scheme) -> None:
    if not rounded:
        raise UsageError(f"--qat {scheme.name} fits none of the model's matrices; try int8")


def found_roundings(
    model: Transformer, scheme: Scheme | None, sparsity: Sparsity | None
) -> RoundedWeights:
    """For all projections of layers that the scheme fits, with grids that follow the weights. With
    a sparsity the zeros that are there stay; a model that is less sparse is refused.
    """
    check_dense(model)
    roundings: dict[str, Rounding] = {}
    for name, linear in quantizable(model).items():
        weight_OD: Any = linear.weight
        fits = scheme is not None and scheme.fits(*weight_OD.shape)
        kept = None if sparsity is None else kept_weights(f"{name}.weight", weight_OD, sparsity)
        if fits or kept is not None:
            rounding = Rounding(weight_OD, scheme if fits else None, kept_OD=kept)
            roundings[f"{name}.weight"] = rounding
    if scheme is not None:
        check_fits([each for each in roundings.values() if each.scheme], scheme)
    return RoundedWeights(roundings)


def kept_weights(name: str, weight_OD: Tensor, sparsity: Sparsity) -> Tensor:
    """True where a weight is not zero, in a matrix that is as sparse as promised."""
    kept_OD = weight_OD.detach() != 0
    expected = ~sparsity.mask(weight_OD.detach().abs())
    if bool((kept_OD & ~expected).any()):
        share = 1 - kept_OD.float().mean().item()
        raise UsageError(
            f"sparsity is {sparsity.name}, and {name} has {share:.0%} zeros; prune the model "
            f"first: ridgeline quantize --method sparsegpt --sparsity {sparsity.name}"
        )
    return kept_OD
