"""A model split over the ranks of a group: every matrix is shared, and so is the vocabulary.

The model stays as it is written for one device, with fewer heads, columns and entries of the
vocabulary, or with fewer experts. What reads them whole gives a part of a sum, so the sum over all
ranks follows it: the two projections back into the residual stream, the experts, and the embedding,
which each rank looks up for its own entries. The head's logits are put together again, on every
rank.

Rank 0 alone adds what must be added once, biases and the residual: there both are free, in the
epilogue of its matrix product. That, and sums without a part in a backward pass, make gradients
wrong without a word: where they are on, the model refuses to run. Letters as in
models/transformer.py.

`RowSum` and `VocabParts` come before the kind of projection that computes a rank's own part, plain
or coded, as it is or as an engine runs it (engine/loading/host_model.py, deterministic.py).

    model = split_model(config, torch.bfloat16, device, group)      # weights not yet written
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from ridgeline.errors import UnsupportedError
from ridgeline.models import ModelConfig, Transformer, build_model
from ridgeline.models.transformer import (
    ExpertMLP,
    Fusion,
    Linear,
    Projection,
    RMSNorm,
)
from ridgeline.parallel.degrees import rank_config
from ridgeline.parallel.inference.group import Group
from ridgeline.parallel.inference.stages import (
    AroundRing,
    HandedOn,
    TakenOver,
    stage_config,
    stage_layers,
)
from ridgeline.quantization.files.matrix import StoredMatrix
from ridgeline.quantization.head import HEAD, quantized_head
from ridgeline.quantization.linear import QuantizedLinear, replace_layer
from ridgeline.quantization.scheme import Scheme

Kind = TypeVar("Kind", bound=nn.Module)


def summed(group: Group, x_TD: Tensor) -> Tensor:
    """The sum over all ranks, in place."""
    refuse_gradients()
    return group.all_reduce(x_TD)


def refuse_gradients() -> None:
    if torch.is_grad_enabled():
        raise UnsupportedError(
            "a model that is split over ranks is for inference: its gradients would be wrong; "
            "run it under torch.inference_mode(), or train the whole model"
        )


class RowSum(Projection):
    """A projection of which each rank has some inputs: the sum of what they make of them."""

    group: Group

    def project(self, x_TD: Any, fusion: Fusion) -> Any:
        assert fusion.norm is None, "a norm needs all inputs"
        assert fusion.activation is None, "an activation needs the whole sum"
        if self.group.rank != 0:
            fusion = fusion._replace(residual=None)
        own_TD: Tensor = super().project(x_TD, fusion)
        return summed(self.group, own_TD)


class RowLinear(RowSum, Linear):
    pass


class QuantizedRowLinear(RowSum, QuantizedLinear):
    """The same by codes. Where inputs are rounded to 8 bits, each rank does it with scales of its
    own part: as fine as for all inputs together, or finer.
    """


class RowExperts(ExpertMLP):
    """Experts of which each rank has some columns, or of which it has some. All ranks route alike:
    the router and what it sees are the same on each, bit for bit.
    """

    group: Group

    def forward(self, x_TD: Tensor, norm: RMSNorm, residual_TD: Tensor | None = None) -> Tensor:
        own = residual_TD if self.group.rank == 0 else None
        return summed(self.group, super().forward(x_TD, norm, own))

    def own_numbers(self, experts_TA: Tensor) -> Tensor:
        """The one behind the last for all that other ranks have."""
        if not self.is_part:
            return experts_TA
        count = len(self.down)
        own_TA = experts_TA - self.group.rank * count
        return own_TA.where((own_TA >= 0) & (own_TA < count), count)


class VocabEmbedding(nn.Embedding):
    """An embedding of which each rank has some entries."""

    group: Group

    def forward(self, tokens_T: Tensor) -> Tensor:
        places_T = tokens_T - self.group.rank * len(self.weight)
        others_T = (places_T < 0) | (places_T >= len(self.weight))
        x_TD = functional.embedding(places_T.masked_fill(others_T, 0), self.weight)
        return summed(self.group, x_TD.masked_fill_(others_T.unsqueeze(1), 0.0))


class VocabParts(Projection):
    """A head of which each rank has some entries: the logits of all, on every rank."""

    group: Group
    vocab_size: int

    def project(self, x_TD: Any, fusion: Fusion) -> Tensor:
        own_TV: Tensor = super().project(x_TD, fusion._replace(out=None))
        return gathered(self.group, own_TV, self.vocab_size, fusion.out)


class VocabHead(VocabParts, Linear):
    pass


class QuantizedVocabHead(VocabParts, QuantizedLinear):
    """The same, each rank's entries as codes."""


def gathered(group: Group, own_TV: Tensor, vocab_size: int, out_TV: Tensor | None) -> Tensor:
    """All entries of a vocabulary of which each rank has as many."""
    refuse_gradients()
    parts, held = group.all_gather(own_TV), own_TV.shape[1]
    # The last ranks' may be there to fill up.
    counts = [min(max(vocab_size - rank * held, 0), held) for rank in range(len(parts))]
    return torch.cat(
        [part[:, :count] for part, count in zip(parts, counts, strict=True)], dim=1, out=out_TV
    )


def split_model(
    config: ModelConfig,
    dtype: torch.dtype,
    device: str | torch.device,
    group: Group,
    coded: Collection[str] = (),
    expert: int = 1,
) -> Transformer:
    """This rank's part, allocated and not yet written, without the weights of the projections in
    `coded`: `set_codes` brings theirs. `expert`: as many ranks share experts whole. Its config is
    that of the part, with the vocabulary of the whole, which is what goes in and comes out.
    """
    own = stage_config(config, group.num_stages, group.stage)
    model = build_model(rank_config(own, group.size, expert), dtype, "meta")
    block: Any
    for block in model.layers:
        block.attn.out = _row_linear(block.attn.out, group)
        if isinstance(block.mlp, ExpertMLP):
            block.mlp = _as(RowExperts, block.mlp, group)
        else:
            block.mlp.down = _row_linear(block.mlp.down, group)
    model.embed = _as(TakenOver if group.stage else VocabEmbedding, model.embed, group)
    model.head = _as(VocabHead, model.head, group)
    model.head.vocab_size = own.vocab_size
    if group.num_stages > 1:
        model.norm = _as(HandedOn if group.stage else AroundRing, model.norm, group)
    model.config = replace(model.config, vocab_size=own.vocab_size)
    waiting = {own_name(f"{layer}.weight", config, group) for layer in coded}
    for name, _ in list(model.named_parameters()):
        if name not in waiting:
            allocate(model, name, device)
    if own.tied_embeddings:
        model.head.weight = model.embed.weight
    return model


def own_name(name: str, config: ModelConfig, group: Group) -> str | None:
    """Of a parameter or projection of the whole model in its stage; None: it is another's."""
    if group.num_stages == 1:
        return name
    match = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
    if match is None:
        return None if group.stage else name
    layers = stage_layers(config, group.num_stages)[group.stage]
    number = int(match[1])
    return f"layers.{number - layers.start}.{match[2]}" if number in layers else None


def allocate(model: Transformer, name: str, device: str | torch.device) -> nn.Parameter:
    """Memory for a parameter that had none."""
    owner, _, own_name = name.rpartition(".")
    module = model.get_submodule(owner)
    empty = torch.empty_like(module.get_parameter(own_name), device=device)
    parameter = nn.Parameter(empty, requires_grad=False)
    setattr(module, own_name, parameter)
    return parameter


def set_codes(model: Transformer, name: str, matrix: StoredMatrix) -> None:
    """Codes for a projection of a rank's part, which has its bias already. They lie where the model
    does.
    """
    plain: Any = model.get_submodule(name)
    layer = QuantizedLinear(matrix.codes, matrix.scheme, plain.weight.dtype, plain.bias)
    if isinstance(plain, RowLinear):
        layer = _as(QuantizedRowLinear, layer, plain.group)
    replace_layer(model, name, layer)


def quantize_split_head(model: Transformer, scheme: Scheme) -> None:
    """**In the model**, whose weights are there: this rank's entries, rounded to nearest."""
    plain: Any = model.head
    head = _as(QuantizedVocabHead, quantized_head(model, scheme), plain.group)
    head.vocab_size = plain.vocab_size
    replace_layer(model, HEAD, head)


def _row_linear(linear: Linear, group: Group) -> RowLinear:
    row = _as(RowLinear, linear, group)
    if group.rank:
        row.register_parameter("bias", None)
    return row


def _as(kind: type[Kind], module: nn.Module, group: Group) -> Kind:
    """The same module, with the same parameters, as one that works in a group."""
    made: Any = kind.__new__(kind)
    nn.Module.__init__(made)
    made.__dict__.update(module.__dict__)
    made.group = group
    result: Kind = made
    return result
