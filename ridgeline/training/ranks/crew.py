"""What the ranks of a run agree on besides tensors: whose clock counts, who writes, who has what.

    crew = Crew(mesh, config)
    crew.is_first                       # writes files and shows the run
    seconds, = crew.of_first(seconds)       # the first rank's, on all
    loader = Loader(..., part=crew.part, cut=crew.cut(model_config))

Alone, every question has the asker's own answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import distributed

from ridgeline.data.loading.loader import BatchPart
from ridgeline.data.loading.packing import PackedBatch
from ridgeline.models import ModelConfig
from ridgeline.parallel.mesh import Mesh
from ridgeline.training.config import TrainConfig
from ridgeline.training.ranks.context import Cut, context_cut

dist: Any = distributed
Item = TypeVar("Item")


class Crew:
    def __init__(self, mesh: Mesh, config: TrainConfig) -> None:
        self.mesh = mesh
        self.layout = mesh.layout
        self.is_alone = mesh.control is None
        self.is_first = mesh.is_first
        self._config = config

    @property
    def part(self) -> BatchPart:
        """The sequences of each batch that this rank has."""
        size = self._config.batch.size
        return BatchPart(size, self.layout.sequences(self.mesh.rank, size))

    def cut(self, model: ModelConfig) -> Cut:
        """What this rank has of a batch's tokens."""
        length = self._config.data.sequence_length
        return context_cut(model, self.layout, self.mesh.rank, length)

    def own_passes(self, sequences: Sequence[PackedBatch], model: ModelConfig) -> list[PackedBatch]:
        """Of a whole batch, one sequence each, what this rank runs; made on the host."""
        cut = self.cut(model)
        return [cut(sequences[i]).to(self.mesh.device) for i in self.part.own]

    def of_first(self, *numbers: float) -> tuple[float, ...]:
        """The first rank's numbers, on all."""
        control = self.mesh.control
        if control is None:
            return numbers
        held = torch.tensor(numbers, dtype=torch.float64)
        return tuple(control.broadcast(held).tolist())

    def value_of_first(self, value: Any) -> Any:
        """The first rank's value, on all: small things, when a run begins."""
        control = self.mesh.control
        if control is None:
            return value
        held = [value]
        dist.broadcast_object_list(held, src=0, group=control.group)
        return held[0]

    def smallest(self, number: int) -> int:
        return self.mesh.agreed(number, "min")

    def from_all(self, value: Any) -> list[Any]:
        """Every rank's value, on all."""
        control = self.mesh.control
        if control is None:
            return [value]
        values = [None] * self.layout.size
        dist.all_gather_object(values, value, group=control.group)
        return values

    def held_out_share(self, batches: Sequence[Item]) -> tuple[list[Item], int]:
        """This rank's share of what is measured, and how many of it count: all ranks have as many,
        for they gather weights together, and the last ones of some are there to fill up.
        """
        ranks = self.layout.size_of("data")
        own = list(batches[self.layout.index(self.mesh.rank, "data") :: ranks])
        each = -(-len(batches) // ranks)
        return own + list(batches[: each - len(own)]), len(own)
