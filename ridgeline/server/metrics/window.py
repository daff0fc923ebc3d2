"""A stretch of a server's time, between samples of what the engine has done so far: how busy the
device was, what share of its ceilings the steps reached, how full pages and batch were. Pure.

    window = window_of(samples, served)
    window.decode.memory_share                  # 0.83 of what the memory can do
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ridgeline.engine.execution.work import CostBase, StepTotals, Work
from ridgeline.engine.scheduling.state import Stats
from ridgeline.models.cost import MeanStep, mean_step_cost
from ridgeline.profiling import Roof
from ridgeline.server.metrics.served import Served

FULL, NEARLY_FULL = 0.98, 0.90  # share of the pages in use; nearly is full when requests wait


class Sample(NamedTuple):
    """Where the engine stood at one time. Totals never fall: `Totalled` sees to that."""

    time: float  # seconds of any clock
    stats: Stats
    work: Work

    @property
    def page_share(self) -> float:
        return self.stats.num_pages_used / max(self.num_pages, 1)

    @property
    def num_pages(self) -> int:
        stats = self.stats
        return stats.num_pages_free + stats.num_pages_used + stats.num_pages_cached

    @property
    def num_running(self) -> int:
        return self.stats.num_prefilling + self.stats.num_decoding

    @property
    def num_waiting(self) -> int:
        return self.stats.num_waiting + self.stats.num_following

    @property
    def is_full(self) -> bool:
        return self.page_share >= (NEARLY_FULL if self.num_waiting else FULL)


@dataclass(frozen=True)
class PhaseMeans:
    """The steps of one kind, in the mean."""

    busy_s: float  # of all of them
    num_steps: float
    rows: float  # streams a step
    tokens: float  # a step
    memory_share: float | None  # of the bandwidth, while at work; None where it is not known
    matrix_share: float | None
    weight_share: float  # of the bytes moved, those of weights
    flops_per_s: float
    intensity: float  # FLOPs a byte

    @property
    def step_s(self) -> float:
        return self.busy_s / self.num_steps


@dataclass(frozen=True)
class Window:
    seconds: float
    decode: PhaseMeans | None  # None: no such step
    prefill: PhaseMeans | None
    gap_s: float  # the device was idle though there was work
    full_share: float  # of the samples, those with full pages
    page_share: float  # in the mean
    num_running: float  # in the mean
    num_waiting: float
    prompt_tokens: int
    hit_tokens: int
    num_preemptions: int
    drafted_tokens: int
    accepted_tokens: int

    @property
    def busy_s(self) -> float:
        return sum(phase.busy_s for phase in (self.decode, self.prefill) if phase is not None)

    @property
    def active_share(self) -> float:
        """Of the time, with work at hand."""
        return min(1.0, (self.busy_s + self.gap_s) / self.seconds)

    @property
    def gap_share(self) -> float:
        """Of the time with work at hand, the device idle."""
        return self.gap_s / max(self.busy_s + self.gap_s, 1e-9)


def window_of(samples: Sequence[Sample], served: Served) -> Window | None:
    """From the first sample to the last; None when no time lies between them."""
    if len(samples) < 2 or samples[-1].time <= samples[0].time:
        return None
    first, last = samples[0], samples[-1]
    later = samples[1:]
    return Window(
        seconds=last.time - first.time,
        decode=phase_of(first.work.decode, last.work.decode, served.costs, served.roof),
        prefill=phase_of(first.work.prefill, last.work.prefill, served.costs, served.roof),
        gap_s=last.work.gap_s - first.work.gap_s,
        full_share=sum(sample.is_full for sample in later) / len(later),
        page_share=sum(sample.page_share for sample in later) / len(later),
        num_running=sum(sample.num_running for sample in later) / len(later),
        num_waiting=sum(sample.num_waiting for sample in later) / len(later),
        **{name: getattr(last.stats, name) - getattr(first.stats, name) for name in COUNTED},
    )


COUNTED = ("prompt_tokens", "hit_tokens", "num_preemptions", "drafted_tokens", "accepted_tokens")


def phase_of(
    before: StepTotals, after: StepTotals, costs: CostBase | None, roof: Roof | None
) -> PhaseMeans | None:
    """None when there was no such step between the two."""
    steps = StepTotals(*(b - a for a, b in zip(before, after, strict=True)))
    if steps.num_steps <= 0 or steps.busy_s <= 0:
        return None
    rows, tokens = steps.num_rows / steps.num_steps, steps.num_tokens / steps.num_steps
    if costs is None:
        return PhaseMeans(steps.busy_s, steps.num_steps, rows, tokens, None, None, 0.0, 0.0, 0.0)
    cost = mean_step_cost(
        costs.config,
        MeanStep(
            rows=rows,
            tokens=tokens,
            logit_rows=steps.num_logits / steps.num_steps,
            pairs=steps.num_pairs / steps.num_steps,
            keys=steps.num_keys / steps.num_steps,
        ),
        weight_bytes=costs.bytes_per_weight,
        kv_bytes=costs.bytes_per_kv,
    )
    per_s = costs.ranks_a_device * steps.num_steps / steps.busy_s
    return PhaseMeans(
        steps.busy_s,
        steps.num_steps,
        rows,
        tokens,
        memory_share=None if roof is None else cost.bytes * per_s / roof.memory.value,
        matrix_share=None if roof is None else cost.flops * per_s / roof.matrix.value,
        weight_share=cost.weight_bytes / cost.bytes,
        flops_per_s=cost.flops * per_s,
        intensity=cost.flops / cost.bytes,
    )


class Totalled:
    """Makes totals of an engine that may be restarted go on from where its last process was."""

    def __init__(self) -> None:
        self._base = self._last = Sample(0.0, Stats(*[0] * len(Stats._fields)), Work())
        self._num_restarts = 0

    def sample(self, time: float, stats: Stats, work: Work, num_restarts: int) -> Sample:
        last = self._last
        if num_restarts != self._num_restarts:
            self._num_restarts = num_restarts
            self._base = Sample(
                time, _sum(self._base.stats, last.stats), _added(self._base.work, last.work)
            )
        self._last = Sample(time, stats, work)
        totals = _sum(self._base.stats, stats)
        return Sample(time, totals, _added(self._base.work, work))


GAUGES = {"num_pages_free", "num_pages_used", "num_pages_cached", "num_waiting", "num_following"}
GAUGES |= {"num_prefilling", "num_decoding"}


def _sum(base: Stats, now: Stats) -> Stats:
    """Totals added, the rest as it is now."""
    pairs = zip(Stats._fields, base, now, strict=True)
    return Stats(*(new if name in GAUGES else old + new for name, old, new in pairs))


def _added(base: Work, now: Work) -> Work:
    return Work.of([a + b for a, b in zip(base.numbers(), now.numbers(), strict=True)])
