"""Low-rank adapters (LoRA): projections whose own weights are frozen, plain or as codes, with two
thin matrices beside them that are learned.

A projection of the model may be several of the checkpoint's, one after the other (q, k and v): each
of them has its own pair, as in the checkpoint's names, and the first matrices of all pairs are one,
so that the input is read once.

    learned = add_adapters(model, description, LoraOptions(rank=16), seed=0)
    Trainer(model, config, learned)

Letters: T tokens, D inputs, O outputs, R rank, P pieces of a projection.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.errors import UnsupportedError, UsageError, near_matches
from ridgeline.kernels.gated_activation import gated_activation
from ridgeline.models import Transformer
from ridgeline.models.families import Description, parts
from ridgeline.models.transformer import Fusion, Linear, Projection
from ridgeline.quantization.linear import QuantizedLinear
from ridgeline.training.methods.options import LoraOptions


@dataclass(frozen=True)
class AdapterPiece:
    """One of the checkpoint's projections inside one of the model's."""

    name: str  # in the checkpoint: model.layers.0.self_attn.q_proj
    rows: slice  # of the projection's outputs

    @property
    def target(self) -> str:
        return self.name.rpartition(".")[2]


class AdaptedLinear(Projection):
    """`x @ weightᵀ + bias`, and for each piece `scale · x @ downᵀ @ upᵀ` in its rows."""

    def __init__(
        self, base: Linear | QuantizedLinear, pieces: tuple[AdapterPiece, ...], rank: int,
        scale: float,
    ) -> None:  # fmt: skip
        super().__init__()
        self.base, self.pieces, self.rank, self.scale = base, pieces, rank, scale
        device = base.weight.device
        rows = len(pieces) * rank
        self.down = nn.Parameter(torch.empty(rows, base.in_features, device=device))
        self.up = nn.ParameterList(
            nn.Parameter(torch.zeros(_size(piece, base), rank, device=device)) for piece in pieces
        )

    def pairs(self) -> Iterator[tuple[AdapterPiece, Tensor, Tensor]]:
        """Each piece with its two matrices, [R, D] and [O, R]."""
        downs = self.down.split(self.rank)
        yield from zip(self.pieces, downs, self.up, strict=True)

    def project(self, x_TD: Tensor, fusion: Fusion) -> Tensor:
        """The definition, by autograd; steps of training have their own way (frozen.py)."""
        norm, activation, residual_TO, out_TO = fusion
        assert out_TO is None, "only the head's result has memory of its own"
        x_TD = x_TD if norm is None else norm(x_TD)
        y_TO = nn.functional.linear(x_TD, base_weight(self.base, x_TD.dtype), self.base.bias)
        whole_OD = torch.zeros_like(y_TO)
        for piece, down_RD, up_OR in self.pairs():
            whole_OD[:, piece.rows] = self.scale * (x_TD @ down_RD.t() @ up_OR.t())
        y_TO = y_TO + whole_OD
        if activation is not None:
            y_TO = gated_activation(y_TO, activation)
        return y_TO if residual_TO is None else residual_TO + y_TO


def base_weight(base: Linear | QuantizedLinear, dtype: torch.dtype) -> Tensor:
    """[O, D], decoded where it is codes."""
    if isinstance(base, QuantizedLinear):
        return base.copy if base.copy is not None else base.expanded(dtype)
    return base.weight


def add_adapters(
    model: Transformer, description: Description, options: LoraOptions, seed: int
) -> dict[str, nn.Parameter]:
    """Put adapters into the model, **in place**, and freeze the rest. Returns what is learned, in
    fp32. A new adapter adds nothing: its second matrix is zero.
    """
    model.requires_grad_(False)
    draw_adapters(model, insert_adapters(model, description, options), seed)
    return learned_adapters(model)


def insert_adapters(
    model: Transformer, description: Description, options: LoraOptions
) -> list[str]:
    """**In place**: layers around the projections; their names, in the order they are drawn in."""
    assert options.rank is not None, "adapters have a rank"
    pieces = adapted_pieces(model, description, options)
    for name, own in pieces.items():
        parent_name, _, own_name = name.rpartition(".")
        parent = model.get_submodule(parent_name)
        base: Any = getattr(parent, own_name)
        setattr(parent, own_name, AdaptedLinear(base, own, options.rank, options.scale))
    return list(pieces)


@torch.no_grad()
def draw_adapters(model: Transformer, names: Sequence[str], seed: int) -> None:
    """Random first matrices, the same on every device, and zeros for the second."""
    generator = torch.Generator().manual_seed(seed)
    for name in names:
        layer: Any = model.get_submodule(name)
        bound = 1.0 / math.sqrt(layer.base.in_features)
        start = torch.empty(layer.down.shape).uniform_(-bound, bound, generator=generator)
        layer.down.copy_(start)
        for up_OR in layer.up:
            up_OR.zero_()


def learned_adapters(model: nn.Module) -> dict[str, nn.Parameter]:
    """By their names in the model, or in a part of it."""
    return {
        f"{name}.{own}": parameter
        for name, layer in adapters_of(model).items()
        for own, parameter in (("down", layer.down), *_ups(layer))
    }


def _ups(layer: AdaptedLinear) -> list[tuple[str, nn.Parameter]]:
    return [(f"up.{index}", parameter) for index, parameter in enumerate(layer.up)]


def adapters_of(model: nn.Module) -> dict[str, AdaptedLinear]:
    return {name: m for name, m in model.named_modules() if isinstance(m, AdaptedLinear)}


def adapted_pieces(
    model: Transformer, description: Description, options: LoraOptions
) -> dict[str, tuple[AdapterPiece, ...]]:
    """By the name of our projection: the checkpoint's projections in it that get adapters."""
    modules = dict(model.named_modules())
    known: dict[str, list[AdapterPiece]] = {}
    for part in parts(description.config, description.family.hf_names):
        name, _, kind = part.parameter.rpartition(".")
        is_projection = isinstance(modules.get(name), Linear | QuantizedLinear)
        if kind == "weight" and is_projection and not name.endswith(("router", "head")):
            rows = part.index[0] if part.index else slice(None)
            assert isinstance(rows, slice), part
            known.setdefault(name, []).append(AdapterPiece(part.name[: -len(".weight")], rows))
    targets = {piece.target for pieces in known.values() for piece in pieces}
    for wanted in options.target_names:
        if wanted not in targets:
            raise UsageError(
                f"lora_targets names {wanted!r}; this model has {', '.join(sorted(targets))}"
                f"{near_matches(wanted, targets)}"
            )
    names = set(options.target_names) or targets
    chosen = {
        name: tuple(piece for piece in pieces if piece.target in names)
        for name, pieces in known.items()
    }
    chosen = {name: pieces for name, pieces in chosen.items() if pieces}
    if not chosen:
        raise UnsupportedError("this model has no projections that adapters could be added to")
    return chosen


def _size(piece: AdapterPiece, base: Linear | QuantizedLinear) -> int:
    return len(range(base.out_features)[piece.rows])
