"""Steps of several ranks, with how long they wait for each of their collectives.

waits = waits_of(trainer, crew, lambda: trainer.step(batches, lr))      # every rank calls it
waits["collectives"], waits["exposed_s"], waits["measured_step_s"]
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from ridgeline.parallel.exposed import CollectiveClock, Range, over_ranks
from ridgeline.training.ranks.crew import Crew
from ridgeline.training.ranks.rank_trainer import MeshTrainer


@contextmanager
def timed_collectives(
    trainer: MeshTrainer, ranged: Range = lambda name: nullcontext()
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


def waits_of(
    trainer: MeshTrainer, crew: Crew, run: Callable[[], object], num_steps: int = 1
) -> dict[str, Any]:
    """Of a step, in the mean over ranks; `run` does so many, and returns when they are done."""
    began = time.perf_counter()
    with timed_collectives(trainer) as clock:
        run()
    own = clock.timed(num_steps), (time.perf_counter() - began) / num_steps
    ranks = crew.from_all(own)
    rows = over_ranks([timed for timed, _ in ranks])
    return {
        "collectives": rows,
        "exposed_s": sum(row["exposed_s"] or 0.0 for row in rows),
        "measured_step_s": max(seconds for _, seconds in ranks),
    }
