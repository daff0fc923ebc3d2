"""The coordinate check: how much a few steps change what a network computes, by its width.

Where learning rates are carried rightly from width to width, the change of every activation has the
same size at all of them. So networks of all widths take a few steps at the rates that a law gives;
the root mean square of what changed, on text that is not learned, is put into a power of the width
for each place: the embedding, the stream behind some blocks, the logits. An exponent near 0 says
that the law can be gone on with; one far above says that wider networks will break at such rates.
One below says that a place learns ever less: so does an embedding where one rate serves all
parameters and falls with the width, which costs a little and breaks nothing.

    rows = coordinate_check(config, (64, 128), lambda width: 3e-3, seeds=3)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch import Tensor, nn

from ridgeline.data.loading.loader import held_out_batches
from ridgeline.data.loading.packing import PackedBatch
from ridgeline.errors import NumericsError, UsageError
from ridgeline.models import Transformer
from ridgeline.progress import Progress
from ridgeline.training.config import TrainConfig
from ridgeline.training.documents import PackedDocuments
from ridgeline.training.prepare import PlannedRun
from ridgeline.tuning.scaling.transfer import OverSeeds, over_seeds
from ridgeline.tuning.scaling.widths import RateOf, at_width
from ridgeline.tuning.short_run import ShortRun, plan_short

STEPS = 5  # later ones hold what the data says, not how large a step is
MOST_BLOCKS = 3
NEAR = 0.25  # an exponent up to it: at a width 16 times larger, twice the size


@dataclass(frozen=True)
class Coordinate:
    """How the change at a place grows: size = c × width^exponent."""

    place: str
    exponent: OverSeeds
    sizes: tuple[float, ...]  # by width, in the mean over seeds

    @property
    def grows(self) -> bool:
        return self.exponent.value > NEAR


def coordinate_check(
    config: TrainConfig,
    widths: Sequence[int],
    rate_of: RateOf,
    *,
    seeds: int = 3,
    device: str = "auto",
    progress: Progress | None = None,
) -> list[Coordinate]:
    changes: dict[str, list[list[float]]] = {}  # by place: [width][seed]
    for number, width in enumerate(widths):
        if progress is not None:
            progress("coordinate check", number, len(widths))
        plan = plan_short(at_width(config, width), device=device, progress=progress)
        for seed in range(config.seed, config.seed + seeds):
            for place, size in changes_of(plan, rate_of(width), seed).items():
                rows = changes.setdefault(place, [[] for _ in widths])
                rows[number].append(size)
    return [_coordinate(place, widths, rows) for place, rows in changes.items()]


def _coordinate(place: str, widths: Sequence[int], sizes: Sequence[Sequence[float]]) -> Coordinate:
    logs = np.log(np.array(sizes))  # [widths, seeds]
    slopes = np.polyfit(np.log(np.array(widths)), logs, 1)[0]
    means = np.exp(logs.mean(1))
    return Coordinate(place, over_seeds(slopes.tolist()), tuple(means.tolist()))


def changes_of(plan: PlannedRun, lr: float, seed: int) -> dict[str, float]:
    """Root mean squares of what a few steps at one rate change, by place."""
    with ShortRun(plan, seed) as run:
        assert plan.data.held_out is not None, "check_sweep"
        batches = held_out_batches(plan.data.held_out, 1, run.device)
        (batch,) = islice(batches, 1)
        before = activations(run.trainer.model, batch)
        for _ in range(STEPS):
            if not math.isfinite(run.step(lr)):
                raise NumericsError(
                    f"the coordinate check diverged at a rate of {lr:.2g} within {STEPS} steps; "
                    "give a --range that ends lower"
                )
        after = activations(run.trainer.model, batch)
    return {place: _size(after[place] - before[place], place) for place in before}


def _size(change: Tensor, place: str) -> float:
    size = change.square().mean().sqrt().item()
    if not (math.isfinite(size) and size > 0):
        raise UsageError(
            f"a few steps change nothing at the {place}, or no number; give a --range that begins "
            "higher"
        )
    return size


@torch.no_grad()
def activations(model: Transformer, batch: PackedBatch) -> dict[str, Tensor]:
    """In fp32: the embedding's result, the stream behind some blocks, and the logits."""
    results: dict[str, Tensor] = {}
    with _heard(model, results):
        hidden_TD = model(batch.ids, PackedDocuments(batch.positions, batch.starts))
        results["logits"] = model.logits(hidden_TD).float()
    return results


@contextmanager
def _heard(model: Transformer, results: dict[str, Tensor]) -> Iterator[None]:
    """Results of modules, as they pass."""

    def hear(place: str, module: nn.Module) -> torch.utils.hooks.RemovableHandle:
        def note(_: nn.Module, __: object, result: Tensor) -> None:
            results[place] = result.detach().float().clone()

        return module.register_forward_hook(note)

    last = len(model.layers) - 1
    blocks = sorted({0, last // 2, last})[-MOST_BLOCKS:]
    handles = [hear("embedding", model.embed)]
    handles += [hear(f"block {index + 1}", model.layers[index]) for index in blocks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
