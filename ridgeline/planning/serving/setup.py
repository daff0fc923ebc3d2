"""One replica as it would be started: the recipe with nothing left open, the pages that the
engine's own memory plan leaves it, and what its steps take.

    setup = engine_setup(config, recipe, pool.hardware())
    setup.memory.num_pages, setup.times.seconds(1, 1, [500], 0)
    fleet.start(setup)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ridgeline.data.workload import Workload
from ridgeline.engine.local.local_backend import scheduler_config
from ridgeline.engine.memory.plan import MemoryPlan, plan_memory
from ridgeline.engine.scheduling.scheduler import SchedulerConfig
from ridgeline.errors import UsageError
from ridgeline.hardware import Hardware
from ridgeline.models import ModelConfig
from ridgeline.parallel.degrees import check_degree
from ridgeline.planning.serving.step_times import GroupedTimes, PredictedTimes, Tuning
from ridgeline.profiling.predicting.gains import kv_bytes
from ridgeline.profiling.predicting.run_state import RunState
from ridgeline.profiling.predicting.step_model import planned_bytes_per_weight
from ridgeline.recipe import Recipe, edited_at_once, with_auto

# A datasheet's 141 GB are 139.8 GiB to the driver (H200), 80 are 79.2 (A100, H100), 180 are 178.4
# (B200); and what a process's context takes (0.6 GB on the H200, 2026-11-17).
GIB_OF_GB, CONTEXT_BYTES = 0.99, 600_000_000


@dataclass(frozen=True)
class EngineSetup:
    """What one replica is, and how it is simulated."""

    config: ModelConfig
    recipe: Recipe  # nothing left to "auto"
    hardware: Hardware
    memory: MemoryPlan
    scheduler: SchedulerConfig
    times: PredictedTimes

    @property
    def num_gpus(self) -> int:
        return self.recipe.parallel.num_ranks

    @property
    def kv_bytes_per_token(self) -> float:
        """On one of its GPUs."""
        return self.memory.page_bytes / self.recipe.kv.page_size


def engine_setup(
    config: ModelConfig,
    recipe: Recipe,
    hardware: Hardware,
    tuning: Tuning | None = None,
    free_bytes: int | None = None,
    times: PredictedTimes | None = None,
) -> EngineSetup:
    """OutOfMemoryError with a remedy where the model does not fit, UsageError where it cannot be
    spread so. `times` are those of another setup that differs in its limits alone.
    """
    check_degree(config, recipe.parallel.tensor, recipe.parallel.expert)
    filled = with_auto(recipe, config, torch.bfloat16, hardware.device)
    memory = plan_memory(config, filled, free_bytes or usual_free_bytes(hardware))
    scheduler = scheduler_config([config], filled, memory.num_pages)
    known = times or PredictedTimes.of(run_state(config, filled, hardware), tuning)
    return EngineSetup(config, filled, hardware, memory, scheduler, known)


def grouped(setup: EngineSetup, size: int) -> EngineSetup:
    """The same for a workload of one request where there are so many alike: each of its requests
    stands for them, so that a run of thousands costs what one of hundreds does.
    """
    scheduler = setup.scheduler
    fewer = replace(
        scheduler,
        num_pages=max(1, scheduler.num_pages // size),
        token_budget=max(1, scheduler.token_budget // size),
        max_batch=max(1, scheduler.max_batch // size),
    )
    return replace(setup, scheduler=fewer, times=GroupedTimes(setup.times, size))


def run_state(config: ModelConfig, filled: Recipe, hardware: Hardware) -> RunState:
    """What the model of a step looks at."""
    weight, kv = planned_bytes_per_weight(config, filled), kv_bytes(config, filled)
    return RunState(config, filled, "engine", hardware, weight, kv)


def usual_free_bytes(hardware: Hardware) -> int:
    """Of a device that nothing else runs on. Where its memory is known by the datasheet alone, what
    drivers usually say of that.
    """
    total = hardware.memory_bytes
    if hardware.device_type != "cpu" and not hardware.driver:
        total = int(total * GIB_OF_GB * 2**30 / 1e9)
    return total - (CONTEXT_BYTES if hardware.device_type != "cpu" else 0)


def for_workload(recipe: Recipe, config: ModelConfig, workload: Workload) -> Recipe:
    """The recipe with a context that the workload's longest request needs, as a power of two."""
    longest = max(request.num_tokens for request in workload.requests)
    if longest > config.max_context:
        raise UsageError(
            f"workload {workload.name} has a request of {longest} tokens; the model reaches "
            f"{config.max_context}; leave it out, or plan for another model"
        )
    context = min(config.max_context, max(1024, 1 << (longest - 1).bit_length()))
    return edited_at_once(recipe, {"limits.max_context": context})
