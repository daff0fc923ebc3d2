"""How a rank's part of a model comes to its weights: from a checkpoint, tensor by tensor, each rank
keeping its part, or from a model that is whole. Projections may be codes: the checkpoint's own, or
weights that are rounded now. Those are found for the whole matrix, one at a time, and then cut, so
that ranks have the codes that one device would have.

A vocabulary that cannot be shared evenly is filled up with zeros.

    load_split_weights(model, checkpoint, description, group)
    load_split_codes(model, checkpoint, description, group, kept=kept)
    load_split_nearest(model, checkpoint, description, group, RoundedLayers(scheme, names))
    cut_weights(model, config, group, whole)
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.models import ModelConfig, Transformer, build_model
from ridgeline.models.checkpoint import Checkpoint
from ridgeline.models.families import Description
from ridgeline.models.families.names import Index
from ridgeline.models.weights import stored_parts, stream_weights
from ridgeline.parallel.inference.group import Group
from ridgeline.parallel.inference.tensor import allocate, own_name, set_codes
from ridgeline.parallel.shards import cut_codes, shard_of, write_part
from ridgeline.progress import Progress
from ridgeline.quantization.calibrating.work import codes_on
from ridgeline.quantization.files.fuse import Whole, model_weights
from ridgeline.quantization.files.matrix import StoredMatrix
from ridgeline.quantization.files.read import decoded
from ridgeline.quantization.filling import Filling
from ridgeline.quantization.nearest import nearest_codes
from ridgeline.quantization.scheme import Scheme

WEIGHT = ".weight"


class RoundedLayers(NamedTuple):
    """Projections whose weights become the nearest codes of a scheme."""

    scheme: Scheme
    layers: Collection[str]


class PartFilling:
    """A model from `split_model`, as its weights arrive. `config` is the whole model's."""

    def __init__(self, model: Transformer, config: ModelConfig, group: Group) -> None:
        self.model, self.config, self.group = model, config, group
        self.device = model.embed.weight.device
        model.embed.weight.zero_()  # what fills up the vocabulary
        model.head.weight.zero_()
        self.parameters = dict(model.named_parameters())
        mixtures = [layer.experts for layer in model.config.layers if layer.experts]
        self.expert = mixtures[0].num_experts // mixtures[0].num_held if mixtures else 1

    def write(self, name: str, tensor: Tensor, index: Index = ()) -> None:
        """A whole parameter, or the part `index` of it."""
        own = own_name(name, self.config, self.group)
        if own is None or own not in self.parameters:
            return  # it is another rank's
        if self.parameters[own].is_meta:  # codes were expected, and did not make a matrix
            self.parameters[own] = allocate(self.model, own, self.device)
        shard = shard_of(name, self.config, self.group.rank, self.group.size, self.expert)
        write_part(self.parameters[own], shard, tensor, index)

    def set_codes(self, layer: str, whole: StoredMatrix) -> None:
        own = own_name(layer, self.config, self.group)
        if own is None:
            return
        shard = shard_of(layer + WEIGHT, self.config, self.group.rank, self.group.size)
        part = cut_codes(whole, shard)
        set_codes(self.model, own, part._replace(codes=codes_on(part.codes, self.device)))

    def round(self, layer: str, weight_OD: Tensor, scheme: Scheme) -> None:
        """Set the nearest codes of a whole projection's weights."""
        if own_name(layer, self.config, self.group) is not None:
            self.set_codes(layer, nearest_codes(layer, weight_OD, scheme))


@torch.no_grad()
def load_split_weights(
    model: Transformer,
    checkpoint: Checkpoint,
    description: Description,
    group: Group,
    progress: Progress | None = None,
) -> None:
    """Each tensor is mapped, cut and let go of."""
    filling = PartFilling(model, description.config, group)
    whole = _whole(description.config, model)
    for part, tensor in stream_weights(whole, decoded(checkpoint), description, progress):
        filling.write(part.parameter, tensor, part.index)
        del tensor  # or the shard it views stays mapped with the next one


@torch.no_grad()
def load_split_codes(
    model: Transformer,
    checkpoint: Checkpoint,
    description: Description,
    group: Group,
    kept: Collection[str],
    progress: Progress | None = None,
) -> None:
    """With the checkpoint's own codes in the projections that `kept` names."""
    filling = PartFilling(model, description.config, group)
    whole = _whole(description.config, model)
    part_of = stored_parts(whole, decoded(checkpoint), description)
    for weights in model_weights(checkpoint, part_of, kept, progress):
        if isinstance(weights, Whole):
            filling.set_codes(weights.layer, weights.matrix)
        else:
            filling.write(weights.part.parameter, weights.tensor, weights.part.index)
        del weights


@torch.no_grad()
def load_split_nearest(
    model: Transformer,
    checkpoint: Checkpoint,
    description: Description,
    group: Group,
    rounding: RoundedLayers,
    progress: Progress | None = None,
) -> None:
    """From a checkpoint that is not quantized; one whole matrix at a time is held."""
    filling = PartFilling(model, description.config, group)
    whole = _whole(description.config, model)
    arriving = Filling(whole, description, filling.device)
    for part, tensor in stream_weights(whole, checkpoint, description, progress):
        layer = part.parameter.removesuffix(WEIGHT)
        if layer not in rounding.layers:
            filling.write(part.parameter, tensor, part.index)
        elif (weight_OD := arriving.put(part, tensor)) is not None:
            filling.round(layer, weight_OD, rounding.scheme)
            del weight_OD
        del tensor


@torch.no_grad()
def cut_weights(
    model: Transformer,
    config: ModelConfig,
    group: Group,
    whole: Callable[[str], Tensor],
    rounding: RoundedLayers | None = None,
) -> None:
    """From parameters that are there as a whole."""
    filling = PartFilling(model, config, group)
    layers = () if rounding is None else rounding.layers
    for name, _ in _whole(config, model).named_parameters():
        tensor = whole(name)  # asked for on every rank: it may be sent
        layer = name.removesuffix(WEIGHT)
        if rounding is None or layer not in layers:
            filling.write(name, tensor)
        else:
            filling.round(layer, tensor.to(filling.device), rounding.scheme)


def sent_parameters(
    whole: Transformer | None, config: ModelConfig, dtype: torch.dtype, group: Group
) -> Callable[[str], Tensor]:
    """Rank 0's parameters, one after the other, on every rank's host."""
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in Transformer(config).named_parameters()}
    held = {} if whole is None else dict(whole.named_parameters())

    def send(name: str) -> Tensor:
        tensor = held[name].cpu() if held else torch.empty(shapes[name], dtype=dtype)
        group.control.broadcast(tensor.contiguous().view(-1).view(torch.uint8))
        return tensor

    return send


def _whole(config: ModelConfig, part: Transformer) -> Transformer:
    """The shape of the whole model, without memory."""
    return build_model(config, part.embed.weight.dtype, "meta")
