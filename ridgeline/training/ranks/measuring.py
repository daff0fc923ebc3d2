"""A step of several ranks, with how long it waits for each of its collectives.

with timed_collectives(trainer) as clock:
    trainer.step(batches, lr)
rows = over_ranks(crew.from_all(clock.timed()))
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from ridgeline.parallel.exposed import CollectiveClock, Range
from ridgeline.training.ranks.rank_trainer import RankTrainer


@contextmanager
def timed_collectives(
    trainer: RankTrainer, ranged: Range = lambda name: nullcontext()
) -> Iterator[CollectiveClock]:
    """`ranged` makes ranges around what is waited for, where the step is traced."""
    clock, pipeline = CollectiveClock(trainer.mesh, ranged), trainer.pipeline
    if pipeline is not None:
        pipeline.clock = clock
    try:
        with clock:
            yield clock
    finally:
        if pipeline is not None:
            pipeline.clock = None
