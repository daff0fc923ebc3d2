"""Which part of each weight a rank holds, as it is or as codes (an engine's inference/filling.py
brings it there).

Fused weights are shared piece by piece: of qkv a rank has some query heads, the KV heads that these
read, and no others; of gate-up the same columns of both.

    shard = shard_of("layers.0.attn.qkv.weight", config, rank=0, size=2)
    write_part(parameter, shard, whole_weight)
    part = cut_codes(whole_codes, shard)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.models import ModelConfig, Transformer
from ridgeline.models.families.names import Index
from ridgeline.quantization.files.matrix import StoredMatrix, cut, cut_columns, join


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


def shard_of(name: str, config: ModelConfig, rank: int, size: int, expert: int = 1) -> Shard | None:
    """What a rank has of a parameter; None: all of it. `config` is the whole model's. With `expert`
    the ranks, as many, share experts whole, and not the columns of each.
    """
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
    if experts and expert > 1:
        return Shard(0, (_share(0, experts.num_experts, rank, expert),))
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
        number, index = index[0], index[1:]
        if shard is not None and dim == 0:  # and are not cut, but shared
            (own,), shard = shard.ranges, None
            if number not in own:
                return
            number -= own.start
        target, dim = target[number], dim - 1
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


def cut_codes(matrix: StoredMatrix, shard: Shard | None) -> StoredMatrix:
    """What a rank holds of a whole projection's codes: these codes, with the scales they have in
    the whole one.
    """
    if shard is None:
        return matrix
    slices = [slice(part.start, part.stop) for part in shard.ranges]
    if shard.dim == 1:
        (columns,) = slices
        return cut_columns(matrix, columns)
    part = join([cut(matrix, rows) for rows in slices])
    assert part is not None, "pieces of a matrix have one scheme"
    return part
