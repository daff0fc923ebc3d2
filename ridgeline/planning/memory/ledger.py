"""A training step's memory for every device along the pipeline, by training's own plan
(training/memory/plan.py), and what of a GPU's memory is there for it.

    ledger = ledger_of(setup)
    ledger.peak_bytes, ledger.stages[0].items
    shortage = ledger.peak_bytes - usable_bytes(pool)
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ridgeline.hardware.memory_items import MemoryItem, total_bytes
from ridgeline.models.training_cost import KeptForm, layer_bytes
from ridgeline.planning.clusters.cluster import GpuPool
from ridgeline.planning.training.setup import TrainSetup
from ridgeline.planning.training.work import rank_model
from ridgeline.training.config import (
    BatchOptions,
    DataOptions,
    Precision,
    TrainConfig,
)
from ridgeline.training.memory.plan import itemise_stages
from ridgeline.training.memory.ranks import passes_held

# Of a GPU's memory, what its driver and a process's context keep: 80 GB cards have 79.1 GiB for
# torch, less 0.5 GiB of context (an H200's 141 GB: 139.8 GiB).
KEPT_BY_DRIVER = 0.012
CONTEXT_BYTES = 600 << 20
KEPT_BY_SYSTEM = 0.15  # of a machine's memory, by everything else on it
PRECISION: dict[str, Precision] = {"bf16": "bf16", "fp16": "fp16", "fp8": "fp8", "fp4": "fp8",
                                   "fp32": "fp32"}  # fmt: skip


@dataclass(frozen=True)
class StageMemory:
    """Of one rank of one device along the pipeline, at the moment at which it holds most."""

    device: int
    items: tuple[MemoryItem, ...]
    moment: str

    @property
    def num_bytes(self) -> int:
        return total_bytes(self.items)


@dataclass(frozen=True)
class StepLedger:
    stages: tuple[StageMemory, ...]

    @property
    def heaviest(self) -> StageMemory:
        return max(self.stages, key=lambda stage: stage.num_bytes)

    @property
    def peak_bytes(self) -> int:
        return self.heaviest.num_bytes


def train_config(setup: TrainSetup) -> TrainConfig:
    """What training would be given for it."""
    return TrainConfig(
        precision=PRECISION[setup.units],
        recomputation=setup.recomputation,
        data=DataOptions(sequence_length=setup.sequence),
        batch=BatchOptions(sequences=setup.batch, micro=setup.micro),
        layout=setup.layout,
    )


def ledger_of(setup: TrainSetup, devices: Collection[int] | None = None) -> StepLedger:
    """`devices`: of these along the pipeline alone."""
    plans = itemise_stages(setup.model, train_config(setup), setup.device, 0, devices=devices)
    numbers = sorted(devices) if devices is not None else range(len(plans))
    return StepLedger(
        tuple(
            StageMemory(number, plan.items, plan.moment)
            for number, plan in zip(numbers, plans, strict=True)
        )
    )


def heaviest_of(setup: TrainSetup) -> StepLedger:
    """Of the devices that may hold most: the first ones keep most micro-batches, the last one the
    head and the loss.
    """
    last = setup.layout.pipeline - 1
    return ledger_of(setup, {0, min(1, last), last})


def least_bytes(setup: TrainSetup) -> int:
    """Of activations alone, on the first device of a pipeline: what no way to cut weights goes
    below. Cheap, for searches.
    """
    layout, count = setup.layout, setup.model.num_layers // setup.layout.pipeline
    if not count:
        return 0
    own = rank_model(setup, setup.model.layers[0])
    form = KeptForm(
        setup.element_bytes,
        setup.recomputation,
        stream_share=layout.tensor if layout.sequence else 1,
    )
    held = passes_held(layout, setup.num_micro, 0)
    return held * count * setup.micro_tokens * layer_bytes(own, own.layers[0], form)


def usable_bytes(pool: GpuPool) -> int:
    if pool.kind == "cpu":
        return int(pool.memory_bytes * (1 - KEPT_BY_SYSTEM))
    return int(pool.memory_bytes * (1 - KEPT_BY_DRIVER)) - CONTEXT_BYTES
