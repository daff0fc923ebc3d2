"""Which part of each weight a rank holds, and how it gets there: from a checkpoint, tensor by
tensor, each rank keeping its part, or from a whole model.

Fused weights are shared piece by piece: of qkv a rank has some query heads, the KV heads that these
read, and no others; of gate-up the same columns of both. A vocabulary that cannot be shared evenly
is filled up with zeros.

    load_split_weights(model, checkpoint, description, group)
    cut_weights(model, whole_model, group)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.models import ModelConfig, Transformer
from ridgeline.models.checkpoint import Checkpoint
from ridgeline.models.families import Description
from ridgeline.models.families.names import Index
from ridgeline.models.weights import stream_weights
from ridgeline.parallel.group import Group
from ridgeline.progress import Progress


class Shard(NamedTuple):
    """A rank's part of a weight: these ranges along one of its dims, one behind the other."""

    dim: int
    ranges: tuple[range, ...]


@cache
def whole_shapes(config: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    """Of every parameter of a model on one device."""
    with torch.device("meta"):
        model = Transformer(config)
    return MappingProxyType({name: tuple(each.shape) for name, each in model.named_parameters()})


def shard_of(name: str, config: ModelConfig, rank: int, size: int) -> Shard | None:
    """What a rank has of a parameter; None: all of it. `config` is the whole model's."""
    match = re.fullmatch(
        r"layers\.(\d+)\.(attn|mlp)\.(qkv|out|gate_up|down)(\.weight|\.bias)?", name
    )
    if name in ("embed.weight", "head.weight"):
        entries = -(-config.vocab_size // size)
        last = min((rank + 1) * entries, config.vocab_size)
        return Shard(0, (range(rank * entries, last),))
    if match is None or (match[3] in ("out", "down") and match[4] == ".bias"):
        return None
    if match[3] == "qkv":
        return Shard(0, tuple(_head_ranges(config, rank, size)))
    if match[3] == "out":
        return Shard(1, (_share(0, config.q_size, rank, size),))
    experts = config.layers[int(match[1])].experts
    num_columns = experts.mlp_size if experts else config.mlp_size
    stacked = 1 if experts else 0  # experts lie one behind the other, along a dim of their own
    gate = _share(0, num_columns, rank, size)
    if match[3] == "down":
        return Shard(1 + stacked, (gate,))
    return Shard(stacked, (gate, _share(num_columns, num_columns, rank, size)))


def _head_ranges(config: ModelConfig, rank: int, size: int) -> Iterator[range]:
    """Rows of qkv. KV heads of which there are fewer than ranks are on several of them."""
    yield _share(0, config.q_size, rank, size)
    num_kv = max(1, config.num_kv_heads // size)
    first = rank * config.num_kv_heads // size
    for start in (config.q_size, config.q_size + config.kv_size):
        begin = start + first * config.head_dim
        yield range(begin, begin + num_kv * config.head_dim)


def _share(start: int, count: int, rank: int, size: int) -> range:
    part = count // size
    return range(start + rank * part, start + (rank + 1) * part)


def write_part(target: Tensor, shard: Shard | None, tensor: Tensor, index: Index = ()) -> None:
    """Copy into a rank's parameter what it holds of `tensor`, which is the part `index` of the
    whole one.
    """
    dim = 0 if shard is None else shard.dim
    if index and isinstance(index[0], int):  # one of several that lie one behind the other
        target, index, dim = target[index[0]], index[1:], dim - 1
    if shard is None:
        target[index].copy_(tensor)
        return
    assert all(part == slice(None) for i, part in enumerate(index) if i != dim), index
    where = index[dim] if dim < len(index) else slice(None)
    assert isinstance(where, slice), "an integer comes first"
    first, offset = where.start or 0, 0
    for wanted in shard.ranges:
        begin = max(wanted.start, first)
        count = min(wanted.stop, first + tensor.shape[dim]) - begin
        if count > 0:
            source = tensor.narrow(dim, begin - first, count)
            target.narrow(dim, offset + begin - wanted.start, count).copy_(source)
        offset += len(wanted)


@torch.no_grad()
def load_split_weights(
    model: Transformer,
    checkpoint: Checkpoint,
    description: Description,
    group: Group,
    progress: Progress | None = None,
) -> None:
    """Fill a model from `split_model`. Each tensor is mapped, cut and let go of."""
    parameters = _ready(model)
    with torch.device("meta"):
        whole = Transformer(description.config)
    for part, tensor in stream_weights(whole, checkpoint, description, progress):
        if part.parameter in parameters:
            shard = shard_of(part.parameter, description.config, group.rank, group.size)
            write_part(parameters[part.parameter], shard, tensor, part.index)
        del tensor  # or the shard it views stays mapped with the next one


@torch.no_grad()
def cut_weights(
    model: Transformer,
    config: ModelConfig,
    group: Group,
    whole: Callable[[str], Tensor],
) -> None:
    """Fill a model from `split_model` with parts of parameters that are there as a whole."""
    parameters = _ready(model)
    with torch.device("meta"):
        names = dict(Transformer(config).named_parameters())
    for name in names:
        tensor = whole(name)  # asked for on every rank: it may be sent
        if name in parameters:
            shard = shard_of(name, config, group.rank, group.size)
            write_part(parameters[name], shard, tensor)


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


def _ready(model: Transformer) -> dict[str, torch.nn.Parameter]:
    """The parameters by name; what fills up the vocabulary is zero."""
    model.embed.weight.zero_()
    model.head.weight.zero_()
    return dict(model.named_parameters())
