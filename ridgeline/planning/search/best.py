"""Searches all settings for the fastest that fit: branch and bound. What a rank computes, without
what ranks send, is a bound that no way to cut weights goes below; settings are tried in its order,
and once it is above the slowest plan that is kept, the rest need not be looked at.

    search = find_best(model, pool, 2048, WantedRun(sequence=8192, batch=2048), load_fitted())
    search.plans[0].estimate.tokens_per_s, search.rejected[0].reason
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from ridgeline.errors import UnsupportedError
from ridgeline.hardware.units import human_bytes
from ridgeline.models import ModelConfig
from ridgeline.models.training_cost import LEVELS
from ridgeline.planning.clusters.cluster import GpuPool
from ridgeline.planning.memory.ledger import (
    StepLedger,
    heaviest_of,
    least_bytes,
    ledger_of,
    usable_bytes,
)
from ridgeline.planning.search.space import Core, WantedRun, cores
from ridgeline.planning.training.constants import Fitted
from ridgeline.planning.training.setup import TrainSetup
from ridgeline.planning.training.step import StepEstimate, estimate_step, least_step_s

MOST_REJECTED = 12  # that are listed, with what would fit
SLOWER = "slower than the plans shown, whatever is sent"
Key = tuple[int, int, int, int, str]


@dataclass(frozen=True)
class Plan:
    setup: TrainSetup
    estimate: StepEstimate
    ledger: StepLedger  # of all devices along the pipeline


@dataclass(frozen=True)
class RejectedSetup:
    """Settings that would have been faster than what is kept, as far as could be told."""

    setup: TrainSetup
    bound_s: float  # a step takes at least
    reason: str  # the binding constraint
    remedy: str  # the smallest change that was planned again and fits


@dataclass(frozen=True)
class SearchResult:
    plans: tuple[Plan, ...]  # the fastest first, each with another layout
    rejected: tuple[RejectedSetup, ...]
    num_settings: int  # there are
    num_estimated: int  # whose step was estimated
    reasons: Mapping[str, int]  # why settings are out, and how many are
    # All there are but for how weights are cut, by what their steps take at least.
    cores: tuple[tuple[float, Core], ...] = field(default=(), repr=False)
    # That fit, the fastest of each kind.
    fitting: tuple[tuple[StepEstimate, TrainSetup], ...] = field(default=(), repr=False)


def find_best(
    model: ModelConfig,
    pool: GpuPool,
    num_gpus: int,
    wanted: WantedRun,
    fitted: Fitted,
    keep: int = 5,
) -> SearchResult:
    """Settings in the order of their bound, until no further one can be kept."""
    return _Search(model, pool, num_gpus, wanted, fitted, keep).run()


class _Search:
    def __init__(
        self, model: ModelConfig, pool: GpuPool, num_gpus: int, wanted: WantedRun, fitted: Fitted,
        keep: int,
    ) -> None:  # fmt: skip
        self.model, self.pool, self.num_gpus = model, pool, num_gpus
        self.wanted, self.fitted, self.keep = wanted, fitted, keep
        self.free = usable_bytes(pool)
        self.best: dict[Key, tuple[StepEstimate, TrainSetup]] = {}
        self.rejected: list[RejectedSetup] = []
        self.reasons: Counter[str] = Counter()
        self.num_estimated = 0

    def run(self) -> SearchResult:
        ordered = sorted(self._bounded(), key=lambda item: item[0])
        num_settings = 0
        for bound, core in ordered:
            num_settings += len(core.shards)
            if bound >= self._limit():
                self.reasons[SLOWER] += len(core.shards)
            elif self._is_too_small(core):
                self.reasons["memory: activations"] += len(core.shards)
            else:
                self._try([s for s in core.splits() if self._is_wanted(s)], bound)
        kept = sorted(self.best.values(), key=lambda item: item[0].step_s)[: self.keep]
        plans = tuple(Plan(setup, each, ledger_of(setup)) for each, setup in kept)
        return SearchResult(
            plans, tuple(self.rejected), num_settings, self.num_estimated, dict(self.reasons),
            tuple(ordered), tuple(self.best.values()),
        )  # fmt: skip

    def _is_too_small(self, core: Core) -> bool:
        """A GPU for its activations, however weights are cut."""
        is_listed = len(self.rejected) < MOST_REJECTED
        return not is_listed and least_bytes(core.setup) > self.free

    def _bounded(self) -> Iterator[tuple[float, Core]]:
        for core in cores(self.model, self.num_gpus, self.pool, self.wanted):
            try:
                yield least_step_s(core.setup, self.pool, self.fitted), core
            except UnsupportedError:
                self.reasons[f"{self.pool.gpu.name} does not multiply so"] += 1

    def _is_wanted(self, setup: TrainSetup) -> bool:
        return self.wanted.layout in (None, setup.layout)

    def _limit(self) -> float:
        """A step that takes as long is not kept."""
        times = sorted(estimate.step_s for estimate, _ in self.best.values())
        return times[self.keep - 1] if len(times) >= self.keep else float("inf")

    def _try(self, splits: list[TrainSetup], bound: float) -> None:
        """Those that cut weights most come first: where they do not fit, others do not."""
        for index, setup in enumerate(splits):
            ledger = heaviest_of(setup)
            if ledger.peak_bytes > self.free:
                self._reject(setup, bound, ledger, len(splits) - index)
                return
            estimate = estimate_step(setup, self.pool, self.fitted)
            self.num_estimated += 1
            key = _key(setup)
            if key not in self.best or estimate.step_s < self.best[key][0].step_s:
                self.best[key] = estimate, setup

    def _reject(self, setup: TrainSetup, bound: float, ledger: StepLedger, count: int) -> None:
        largest = max(ledger.heaviest.items, key=lambda item: item.num_bytes)
        self.reasons[f"memory: {largest.name}"] += count
        same = [each for each in self.rejected if _key(each.setup) == _key(setup)]
        if len(self.rejected) < MOST_REJECTED and not same:
            reason = (
                f"device {ledger.heaviest.device} of the pipeline needs "
                f"{human_bytes(ledger.peak_bytes)} of {human_bytes(self.free)}, "
                f"{human_bytes(largest.num_bytes)} of it {largest.name}"
            )
            self.rejected.append(RejectedSetup(setup, bound, reason, remedy(setup, self.free)))


def _key(setup: TrainSetup) -> Key:
    """Plans with the same are variants of one: the fastest is kept."""
    layout = setup.layout
    return layout.tensor, layout.pipeline, layout.context, layout.expert, layout.schedule


def remedy(setup: TrainSetup, free_bytes: int) -> str:
    """The smallest change that was planned again and fits, in words."""
    for words, changed in milder(setup):
        if heaviest_of(changed).peak_bytes <= free_bytes:
            return words
    return "no single setting helps"


def milder(setup: TrainSetup) -> Iterator[tuple[str, TrainSetup]]:
    """What takes less memory on as many ranks of each axis."""
    for level in LEVELS[LEVELS.index(setup.recomputation) + 1 :]:
        yield f"recomputation {level}", replace(setup, recomputation=level)  # type: ignore[arg-type]
    micro = setup.micro // 2
    while micro:
        yield f"micro-batch {micro}", replace(setup, micro=micro)
        yield (
            f"micro-batch {micro} and recomputation blocks",
            replace(setup, micro=micro, recomputation="blocks"),
        )
        micro //= 2
    layout = setup.layout
    if layout.replicate > 1:
        size = layout.replicate * layout.shard
        cut = replace(layout, shard=size, replicate=1)
        yield f"shard={size} for replicate={layout.replicate}", replace(setup, layout=cut)
        yield (
            f"shard={size} for replicate={layout.replicate} and recomputation blocks",
            replace(setup, layout=cut, recomputation="blocks", micro=1),
        )
