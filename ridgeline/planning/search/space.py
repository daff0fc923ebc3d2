"""All layouts and settings that a model can be trained with on a pool: what no rule forbids.

Sums are shared out as layouts share them (parallel/layout.py): `tensor` inside a node's fast links,
`pipeline` over nodes, the rest of the GPUs cut weights (`shard`) or copy them (`replicate`).

    for core in cores(model, pool, WantedRun(sequence=4096, batch=1024)): core.splits()
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from ridgeline.errors import UsageError
from ridgeline.models import ModelConfig
from ridgeline.models.training_cost import LEVELS
from ridgeline.parallel.bubbles import fits_pipeline
from ridgeline.parallel.degrees import can_share
from ridgeline.parallel.layout import Layout, Schedule
from ridgeline.planning.clusters.cluster import GpuPool
from ridgeline.planning.training.setup import TrainSetup, Units

MICRO = (1, 2, 4, 8, 16)  # sequences of a pass
MOST_PASS_TOKENS = 65_536
LONG_SEQUENCE = 16_384  # tokens, from which on a sequence may be cut over ranks
SCHEDULES: tuple[tuple[Schedule, int], ...] = (
    ("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zero-bubble", 2),
)  # fmt: skip
RecomputationLevel = Literal["none", "elementwise", "attention", "blocks"]


@dataclass(frozen=True)
class WantedRun:
    """What a plan is for, and what of it the user has decided."""

    sequence: int
    batch: int  # sequences of a step
    units: Units = "bf16"
    micro: int | None = None
    recomputation: RecomputationLevel | None = None
    layout: Layout | None = None


@dataclass(frozen=True)
class Core:
    """Settings that fix what a rank computes; how weights are cut over copies is left open."""

    setup: TrainSetup  # with all copies in `replicate`
    copies: int

    @property
    def shards(self) -> list[int]:
        """Over how many of the copies weights are cut: powers of two, and all."""
        size = self.copies
        shards = {1, size} | {2**n for n in range(size.bit_length()) if size % 2**n == 0}
        return sorted(shards, reverse=True)

    def splits(self) -> Iterator[TrainSetup]:
        return (self.split(shard) for shard in self.shards)

    def split(self, shard: int) -> TrainSetup:
        layout = replace(self.setup.layout, shard=shard, replicate=self.copies // shard)
        return replace(self.setup, layout=layout)


def cores(model: ModelConfig, num_gpus: int, pool: GpuPool, wanted: WantedRun) -> Iterator[Core]:
    levels = (wanted.recomputation,) if wanted.recomputation else LEVELS
    micros = (wanted.micro,) if wanted.micro else MICRO
    for layout, copies in _layouts(model, num_gpus, pool, wanted):
        if wanted.batch % copies:
            continue
        own = wanted.batch // copies
        for micro in micros:
            tokens = micro * wanted.sequence // layout.context
            if own % micro or (tokens > MOST_PASS_TOKENS and micro > 1):
                continue
            if layout.pipeline > 1 and not fits_pipeline(layout, own // micro):
                continue
            for level in levels:
                setup = TrainSetup(
                    model, replace(layout, replicate=copies), wanted.sequence, wanted.batch, micro,
                    level, wanted.units, device=pool.kind,  # type: ignore[arg-type]
                )  # fmt: skip
                yield Core(setup, copies)


def _layouts(
    model: ModelConfig, num_gpus: int, pool: GpuPool, wanted: WantedRun
) -> Iterator[tuple[Layout, int]]:
    """Without copies, and how many there are."""
    for tensor in (n for n in (1, 2, 4, 8, 16) if n <= pool.domain and can_share(model, n)):
        for context in _contexts(wanted.sequence, tensor):
            rest = num_gpus // (tensor * context)
            if num_gpus % (tensor * context):
                continue
            for pipeline in _pipelines(model, rest):
                copies = rest // pipeline
                for schedule, stages in SCHEDULES if pipeline > 1 else SCHEDULES[:1]:
                    if pipeline * stages > model.num_layers:
                        continue
                    base = Layout(tensor=tensor, context=context, pipeline=pipeline,
                                  schedule=schedule, stages=stages)  # fmt: skip
                    for expert in _experts(model, copies * context):
                        ranks = replace(base, replicate=copies, expert=expert)
                        yield ranks, copies


def _contexts(sequence: int, tensor: int) -> Iterator[int]:
    yield 1
    for context in (2, 4, 8, 16):
        if sequence >= LONG_SEQUENCE and sequence % (2 * context * tensor) == 0:
            yield context


def _pipelines(model: ModelConfig, rest: int) -> Iterator[int]:
    return (n for n in range(1, min(rest, model.num_layers, 64) + 1) if rest % n == 0)


def _experts(model: ModelConfig, ranks: int) -> Iterator[int]:
    yield 1
    counts = {layer.experts.num_experts for layer in model.layers if layer.experts is not None}
    if counts:
        for expert in (2, 4, 8, 16, 32, 64, 128):
            if ranks % expert == 0 and all(count % expert == 0 for count in counts):
                yield expert


def check_batch(batch: int, num_gpus: int) -> None:
    """That there is a sequence for some layout at all."""
    if batch < 1:
        raise UsageError(f"--batch is {batch}; give at least 1 sequence")
    if num_gpus > batch * 64 * 16:
        raise UsageError(
            f"a batch of {batch} sequences is too small for {num_gpus:,} GPUs; raise --batch"
        )
