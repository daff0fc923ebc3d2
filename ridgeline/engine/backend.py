"""What `Engine` needs of whoever runs its steps: one protocol, kept by three.

local/local_backend.py      the main loop in this process
process/supervisor.py       a loop in a process that is started again when it dies
replicas/pool.py            several such processes, on one machine or more
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple, Protocol

from ridgeline.engine.execution.work import CostBase, Work
from ridgeline.engine.memory.plan import MemoryPlan
from ridgeline.engine.sampling.live import LiveRequest
from ridgeline.engine.scheduling.state import Ask, Stats
from ridgeline.errors import RidgelineError
from ridgeline.models import ModelConfig
from ridgeline.recipe import Recipe


class EngineProgress(NamedTuple):
    """How the engine is getting on, for whoever watches whether it does."""

    num_steps: int
    last_step_s: float  # how long the last step took, from its planning to its tokens
    idle_s: float  # since tokens last came
    work: Work = Work()  # what its steps were made of, where that is counted


class EngineFacts(NamedTuple):
    """What is known of an engine once its model is loaded."""

    config: ModelConfig
    recipe: Recipe  # with nothing left to "auto"
    memory_plan: MemoryPlan


class Backend(Protocol):
    patience_s: float  # that `advance` waits for news at most

    @property
    def has_work(self) -> bool: ...

    @property
    def progress(self) -> EngineProgress: ...

    @property
    def stats(self) -> Stats: ...

    @property
    def costs(self) -> CostBase | None:
        """What a step's work costs on its device; None where that is not known."""

    @property
    def num_replicas(self) -> int: ...

    @property
    def num_restarts(self) -> int: ...

    @property
    def is_up(self) -> bool: ...

    @property
    def broken(self) -> RidgelineError | None: ...

    def wait_until_ready(self) -> EngineFacts:
        """Until the model is loaded; an error says why it cannot be."""

    def submit(self, ask: Ask, live: LiveRequest) -> None: ...

    def cancel(self, request_id: Hashable) -> bool: ...

    def advance(self) -> None:
        """One step, or what has come from those that run elsewhere."""

    def wait(self, others: Sequence[int], seconds: float) -> None:
        """Until `advance` has something to do, or one of these file descriptors can be read."""

    def restart(self) -> None: ...

    def revive(self) -> None: ...

    def close(self) -> None: ...
