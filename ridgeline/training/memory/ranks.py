"""What the ranks of a layout hold, for the memory plan: the heaviest rank decides.

    for share in rank_shares(model, config): share.model, share.num_held

Parameters are counted exactly, by holdings.py: of each kind of layer once, since plans of hundreds
of layouts are compared. With `sequence` the residual stream is shared by tokens, and what goes into
a product is whole on each rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import NamedTuple

from ridgeline.models import LayerConfig, ModelConfig
from ridgeline.parallel.bubbles import fits_pipeline, in_flight
from ridgeline.parallel.degrees import rank_config
from ridgeline.parallel.holdings import LAYER, Holdings
from ridgeline.parallel.layout import Layout
from ridgeline.parallel.shards import whole_shapes
from ridgeline.training.config import TrainConfig


@dataclass(frozen=True)
class RankShare:
    """Of one rank of each stage."""

    model: ModelConfig  # its layers, with its part of each matrix
    num_held: int  # parameters that it keeps
    num_gathered: int  # that are whole on it for a pass, beside those it keeps
    num_under_way: int  # whose gradients are summed, or shared out, at once
    passes_in_flight: int  # whose activations it holds at once
    stream_share: int  # ranks that share the residual stream by tokens
    sums_always: bool  # gradients are sums in fp32 even of a single pass
    has_table: bool
    has_head: bool


def rank_shares(
    model: ModelConfig, config: TrainConfig, devices: Collection[int] | None = None
) -> Iterator[RankShare]:
    """`devices`: of these along the pipeline alone."""
    layout = config.layout
    assert config.batch.micro is not None, "choices"
    num_passes = config.own_sequences // config.batch.micro
    stages = Holdings(model, layout).stages
    root = _root_counts(_with_layers(model, model.layers[0]), layout)
    for rank in pipeline_ranks(layout):
        device = layout.coordinates(rank).pipeline
        if devices is not None and device not in devices:
            continue
        indices = [i for stage in layout.stages_of(rank) for i in stages[stage]]
        layers = tuple(model.layers[i] for i in indices)
        blocks = [_layer_counts(_with_layers(model, layer), layout) for layer in layers]
        is_first, is_last = device == 0, layout.num_stages - 1 in layout.stages_of(rank)
        own_root = root.on(is_first, is_last)
        own = replace(rank_config(model, layout.tensor), layers=layers)
        largest = max(block.whole for block in blocks)
        gathered, under_way = 2 * largest, max(own_root.whole, largest)
        if layout.pipeline > 1:  # whose stages, and sums of gradients, stay whole over all passes
            gathered = sum(block.whole for block in blocks)
            under_way = own_root.whole + gathered if layout.shard > 1 else under_way
        is_cut = layout.shard > 1  # else nothing is gathered, and sums are where gradients are
        yield RankShare(
            own,
            own_root.held + sum(block.held for block in blocks),
            own_root.whole + gathered if is_cut else 0,
            under_way if is_cut else 0,
            passes_held(layout, num_passes, device),
            layout.tensor if layout.sequence else 1,
            not is_cut and layout.size_of("gradient") > 1,
            is_first,
            is_last,
        )


@lru_cache(maxsize=4096)
def passes_held(layout: Layout, num_passes: int, device: int) -> int:
    """As many through all of a device's layers as it keeps through its stages, rounded up. More
    than a few rounds of micro-batches keep no more.
    """
    if layout.pipeline == 1:
        return 1
    rounds = 4 * layout.pipeline + num_passes % layout.pipeline
    few = min(num_passes, rounds if layout.schedule != "gpipe" else num_passes)
    if not fits_pipeline(layout, few):
        few = num_passes
    return -(-in_flight(layout, few, device) // layout.stages)


class _Counts(NamedTuple):
    """Parameters of a layer, or of what is outside of layers, on the first rank of a stage."""

    held: int
    whole: int  # those that are gathered, as they are put together for a pass

    def __add__(self, other: _Counts) -> _Counts:  # type: ignore[override]
        return _Counts(self.held + other.held, self.whole + other.whole)


class _RootCounts(NamedTuple):
    embedding: _Counts
    head: _Counts  # and the last norm
    is_tied: bool

    def on(self, is_first: bool, is_last: bool) -> _Counts:
        counts = _Counts(0, 0)
        if is_first or (is_last and self.is_tied):
            counts += self.embedding
        return counts + self.head if is_last else counts


def _with_layers(model: ModelConfig, layer: LayerConfig) -> ModelConfig:
    """Parameters do not depend on ropes and windows."""
    return replace(model, layers=(replace(layer, rope=None, window=None),))


@lru_cache(maxsize=4096)
def _layer_counts(model: ModelConfig, layout: Layout) -> _Counts:
    return _counted(model, layout, [name for name in _shapes(model) if LAYER.match(name)])


@lru_cache(maxsize=4096)
def _root_counts(model: ModelConfig, layout: Layout) -> _RootCounts:
    tables = [name for name in _shapes(model) if name == "embed.weight"]
    others = [n for n in _shapes(model) if not LAYER.match(n) and n != "embed.weight"]
    return _RootCounts(
        _counted(model, layout, tables), _counted(model, layout, others), model.tied_embeddings
    )


@lru_cache(maxsize=256)
def _shapes(model: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    return whole_shapes(model)


def _counted(model: ModelConfig, layout: Layout, names: Sequence[str]) -> _Counts:
    """On the first rank, of a layout whose pipeline is one device: stages only say where a
    parameter is.
    """
    flat = replace(layout, pipeline=1, stages=1, schedule="1f1b")
    uncut = replace(flat, shard=1, expert=1)
    held = whole = 0
    for name in names:
        part = Holdings(model, flat).of(name, _shapes(model)[name], 0)
        assert part is not None, name
        held += prod(part.local_shape)
        if not part.is_expert:
            alone = Holdings(model, uncut).of(name, _shapes(model)[name], 0)
            assert alone is not None, name
            whole += prod(alone.local_shape)
    return _Counts(held, whole)


def pipeline_ranks(layout: Layout) -> Iterator[int]:
    """The first rank of each stage."""
    for number in range(layout.pipeline):
        yield number * (layout.size // layout.pipeline)
