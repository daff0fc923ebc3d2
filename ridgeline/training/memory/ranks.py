"""What the ranks of a layout hold, for the memory plan: the heaviest rank decides.

    for share in rank_shares(model, config): share.model, share.num_held

Parameters are counted exactly, by holdings.py. Of activations the share of `tensor` is counted as
if norms and the stream were whole on each rank: a little too much with `sequence`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from ridgeline.models import ModelConfig
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
    num_under_way: int  # of the largest part whose gradients are summed and shared out at once
    passes_in_flight: int  # whose activations it holds at once


def rank_shares(model: ModelConfig, config: TrainConfig) -> Iterator[RankShare]:
    layout = config.layout
    assert config.batch.micro is not None, "choices"
    holdings, shapes = Holdings(model, layout), whole_shapes(model)
    num_passes = config.own_sequences // config.batch.micro
    for rank in pipeline_ranks(layout):
        held, whole = 0, {"": 0}
        for name, shape in shapes.items():
            part = holdings.of(name, shape, rank)
            if part is None:
                continue
            held += prod(part.local_shape)
            if not part.is_expert:
                match = LAYER.match(name)
                group = match[0] if match else ""
                cut = replace(layout, shard=1, expert=1)
                alone = Holdings(model, cut).of(name, shape, rank_without_shards(layout, rank))
                assert alone is not None, name
                whole[group] = whole.get(group, 0) + prod(alone.local_shape)
        layers = tuple(
            model.layers[i]
            for stage in layout.stages_of(rank)
            for i in (holdings.stages[stage] if layout.num_stages > 1 else range(model.num_layers))
        )
        blocks = [count for group, count in whole.items() if group]
        own = replace(rank_config(model, layout.tensor), layers=layers)
        gathered = whole[""] + 2 * max(blocks) if layout.size_of("gradient") > 1 else 0
        under_way = max([whole[""], *blocks]) if gathered else 0
        stage = layout.coordinates(rank).pipeline
        flight = num_passes if layout.schedule == "gpipe" else layout.pipeline - stage
        yield RankShare(own, held, gathered, under_way, max(1, min(num_passes, flight)))


def pipeline_ranks(layout: Layout) -> Iterator[int]:
    """The first rank of each stage."""
    for number in range(layout.pipeline):
        yield number * (layout.size // layout.pipeline)


def rank_without_shards(layout: Layout, rank: int) -> int:
    """The rank at the same place in the layout that cuts nothing by `shard` and `expert`."""
    place = layout.coordinates(rank)
    return replace(layout, shard=1, expert=1).rank_of(place._replace(shard=0))
