"""Starts the replicas of a model, each in a process that Ray has placed.

    with Engine.replicated("demo", num_replicas=2) as engine:     # otherwise as Engine("demo")
        print(engine.generate("The sky is")[0].text)

Without RAY_ADDRESS a cluster of this machine alone is started, and ends with the process.
"""

from __future__ import annotations

import os
from pathlib import Path

from ridgeline.engine.loading.saved import Beside, beside, saved_recipe
from ridgeline.engine.process.worker import EngineOrder, Setup
from ridgeline.engine.replicas.pool import Pool
from ridgeline.engine.replicas.ray_worker import Needs, RayWorker
from ridgeline.errors import HardwareError, UsageError
from ridgeline.hardware import detect
from ridgeline.models.checkpoint import resolve_model
from ridgeline.parallel.starting.ray_cluster import lacking, start_ray
from ridgeline.progress import Progress
from ridgeline.recipe import Recipe

MAX_REPLICAS = 1024


def start_replicas(
    model: str | Path,
    recipe: Recipe | None,
    *,
    num_replicas: int,
    device: str,
    num_pages: int | None,
    progress: Progress | None,
    setup: Setup | None,
) -> tuple[Pool, Beside]:
    """A pool whose replicas have begun to load the model, and what lies beside it. A model that is
    a path must be at the same place on every machine.
    """
    if not 1 <= num_replicas <= MAX_REPLICAS:
        raise UsageError(f"--replicas is {num_replicas}; give 1 to {MAX_REPLICAS}")
    if ":" in device:
        raise UsageError(f"--device is {device}; Ray chooses among GPUs: give cuda or cpu")
    path = model if isinstance(model, Path) else resolve_model(model, progress=progress)
    files = beside(path)
    needs = needs_of(recipe or saved_recipe(path) or Recipe(), device, num_replicas)
    start_ray()
    check_room(needs, num_replicas)
    name = str(model)

    def start(order: EngineOrder) -> RayWorker:
        return RayWorker(name, order, needs)

    order = EngineOrder(path, recipe, device, num_pages, setup)
    return Pool(order, [start] * num_replicas), files


def needs_of(recipe: Recipe, device: str, num_replicas: int) -> Needs:
    """A GPU for each of its ranks; on a CPU, an equal share of the cores."""
    hardware = detect(device)
    if hardware.device_type != "cpu":
        return Needs(num_cpus=1, num_gpus=recipe.parallel.num_ranks)
    return Needs(num_cpus=max(1, (os.cpu_count() or 1) // num_replicas), num_gpus=0)


def check_room(needs: Needs, num_replicas: int) -> None:
    """Refuse what the cluster cannot provide: Ray would wait for it forever."""
    wanted = {"CPU": needs.num_cpus * num_replicas, "GPU": needs.num_gpus * num_replicas}
    reason = lacking(wanted)
    if reason is not None:
        raise HardwareError(
            f"{num_replicas} replicas need {reason}; give fewer --replicas, or add machines"
        )
