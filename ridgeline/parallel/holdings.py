"""What a rank holds of each parameter under a layout: integers alone, so that gathering,
checkpoints, the memory plan and the gradient norm agree without asking each other.

    parts = Holdings(config, layout)
    part = parts.of("layers.3.attn.qkv.weight", (768, 512), rank=1)     # None: on another stage
    part.region.dims                # which rows and columns of the whole
    part.local_shape                # as it lies on the rank: a vocabulary may be filled up
    part.segments                   # rows of it, and how many ranks have the same ones

A parameter is cut by `expert` (whole experts), by `tensor` (shards.py says where), and what is
left along its first dim by `shard`, as torch's `fully_shard` cuts it: equal chunks, the last one
shorter. Where it has fewer rows than there are ranks (the experts of a layer, often), a later dim
that they divide is cut instead, or most ranks would have nothing and the others too much.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from ridgeline.models import ModelConfig
from ridgeline.models.cost import layer_flops
from ridgeline.parallel.layout import Layout, cut_by_cost
from ridgeline.parallel.shards import shard_of

Ranges = tuple[range, ...]
# Over which ranks of `tensor` a gradient has to be added up: none; all, for each has a part of the
# sum; those that have a copy of the same KV heads.
TensorSum = Literal["none", "all", "kv"]
EXPERTS = re.compile(r"layers\.(\d+)\.mlp\.(gate_up|down)")  # stacked, without ".weight"
LAYER = re.compile(r"layers\.(\d+)\.")
TABLES = ("embed.weight", "head.weight")
KV_ROWS = re.compile(r"layers\.\d+\.attn\.qkv\.(weight|bias)")
HEAD_NORMS = re.compile(r"layers\.\d+\.attn\.(q_norm|k_norm)\.weight")
ROUTER = re.compile(r"layers\.\d+\.mlp\.router\.weight")


class Region(NamedTuple):
    """A part of a whole tensor: along each dim these ranges, one behind the other."""

    dims: tuple[Ranges, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(sum(map(len, ranges)) for ranges in self.dims)


class Segment(NamedTuple):
    """Rows of a local tensor, and how many ranks of all have the same ones."""

    rows: range
    copies: int
    is_kv: bool = False  # rows of qkv that make keys and values


@dataclass(frozen=True)
class Part:
    """What one rank holds of one parameter."""

    region: Region
    local_shape: tuple[int, ...]  # behind the region's rows lie others that fill it up
    segments: tuple[Segment, ...]
    tensor_sum: TensorSum
    is_expert: bool = False  # one of the experts that this rank alone of its expert group has
    is_tied: bool = False  # a table that the first and the last stage both have


@dataclass(frozen=True)
class Holdings:
    config: ModelConfig
    layout: Layout
    layers_of_stages: tuple[range, ...] | None = None  # None: cut by what layers cost

    def of(self, name: str, shape: Sequence[int], rank: int) -> Part | None:
        """None: the parameter is on another stage."""
        if self.stage_of(name, rank) is None:
            return None
        place, layout = self.layout.coordinates(rank), self.layout
        dims: list[Ranges] = [(range(length),) for length in shape]
        allocated = list(shape)
        is_expert = self.is_expert(name)
        if is_expert:
            share = shape[0] // layout.expert
            first = layout.index(rank, "expert") * share
            dims[0], allocated[0] = (range(first, first + share),), share
        cut = shard_of(name, self.config, place.tensor, layout.tensor)
        if layout.tensor > 1 and cut is not None:
            dims[cut.dim] = cut.ranges
            allocated[cut.dim] = sum(map(len, cut.ranges))
            if name in TABLES:
                allocated[0] = -(-shape[0] // layout.tensor)
        rows = range(allocated[0])
        if not is_expert:
            dim = shard_dim(allocated, layout.shard)
            kept = chunk(allocated[dim], place.shard, layout.shard)
            dims[dim], allocated[dim] = sliced(dims[dim], kept), len(kept)
            rows = kept if dim == 0 else rows
        return Part(
            Region(tuple(dims)),
            tuple(allocated),
            tuple(self._segments(name, rows, sum(map(len, dims[0])))),
            self._tensor_sum(name),
            is_expert,
            name == "embed.weight" and self.config.tied_embeddings and layout.pipeline > 1,
        )

    def is_expert(self, name: str) -> bool:
        """A weight of several experts, of which each rank of an expert group has some."""
        return self.layout.expert > 1 and EXPERTS.fullmatch(name) is not None

    def _segments(self, name: str, rows: range, num_rows: int) -> Iterator[Segment]:
        layout = self.layout
        data = layout.replicate * layout.context
        if self.is_expert(name):
            data = layout.size_of("gradient") // layout.expert
        if name == "embed.weight" and self.config.tied_embeddings and layout.pipeline > 1:
            data *= 2
        if not KV_ROWS.fullmatch(name):
            whole = layout.tensor > 1 and shard_of(name, self.config, 0, layout.tensor) is None
            yield Segment(range(num_rows), data * (layout.tensor if whole else 1))
            return
        q_rows = range(self.config.q_size // layout.tensor)
        own = range(rows.start, rows.start + num_rows)
        split = min(max(len(q_rows) - own.start, 0), num_rows)
        if split:
            yield Segment(range(split), data)
        if split < num_rows:
            yield Segment(range(split, num_rows), data * self.kv_copies, is_kv=True)

    @property
    def kv_copies(self) -> int:
        """Ranks of `tensor` that have the same KV heads."""
        return max(1, self.layout.tensor // self.config.num_kv_heads)

    def _tensor_sum(self, name: str) -> TensorSum:
        if self.layout.tensor == 1:
            return "none"
        if KV_ROWS.fullmatch(name):
            return "kv" if self.kv_copies > 1 else "none"
        if shard_of(name, self.config, 0, self.layout.tensor) is not None:
            return "none"
        if HEAD_NORMS.fullmatch(name) or ROUTER.fullmatch(name):
            return "all"  # each rank has its own heads, or its own columns of the experts
        return "all" if self.layout.sequence else "none"

    @property
    def stages(self) -> tuple[range, ...]:
        """Which layers each stage has."""
        if self.layers_of_stages is not None:
            return self.layers_of_stages
        return stage_layers(self.config, self.layout.num_stages)

    def stage_of(self, name: str, rank: int) -> int | None:
        """The stage of this rank that has the parameter; None: another rank's has."""
        last = self.layout.num_stages - 1
        own = self.layout.stages_of(rank)
        for stage in self.stages_with(name, last):
            if stage in own:
                return stage
        return None

    def stages_with(self, name: str, last: int) -> tuple[int, ...]:
        match = LAYER.match(name)
        if match is not None:
            layer = int(match[1])
            return (next(i for i, layers in enumerate(self.stages) if layer in layers),)
        if name == "embed.weight":
            return (0, last) if self.config.tied_embeddings else (0,)
        return (last,)


@lru_cache(maxsize=1024)
def stage_layers(config: ModelConfig, num_stages: int) -> tuple[range, ...]:
    """Cut by what the layers' products cost, the head on the last stage included."""
    if num_stages == 1:
        return (range(config.num_layers),)
    costs = [layer_flops(config, layer) for layer in config.layers]
    table = 2.0 * config.vocab_size * config.hidden_size
    costs[-1] += table  # the head; looking up embeddings costs nothing
    return tuple(cut_by_cost(costs, num_stages))


def shard_dim(shape: Sequence[int], num_ranks: int) -> int:
    """Which dim of a parameter so many ranks share."""
    if shape[0] >= num_ranks:
        return 0
    return next((dim for dim, size in enumerate(shape) if size % num_ranks == 0), 0)


def chunk(count: int, index: int, size: int) -> range:
    """The part of `count` rows that `fully_shard` gives to one of `size` ranks."""
    each = -(-count // size)
    return range(min(index * each, count), min((index + 1) * each, count))


def sliced(ranges: Ranges, rows: range) -> Ranges:
    """What lies at these rows, where the ranges lie one behind the other; rows behind them all are
    nothing.
    """
    parts, start = [], 0
    for each in ranges:
        first, last = max(rows.start - start, 0), min(rows.stop - start, len(each))
        if first < last:
            parts.append(each[first:last])
        start += len(each)
    return tuple(parts)
