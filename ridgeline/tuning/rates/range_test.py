"""A range test: a short run whose learning rate rises geometrically from step to step, with several
seeds; each begins with the same weights where a model is given, and sees other data.

    outcome = range_test(config, RangeOptions(1e-6, 1.0, steps=100, seeds=3), device="cpu")
    outcome.verdict.suggested
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ridgeline.errors import UsageError
from ridgeline.progress import Progress
from ridgeline.training.config import RunLength, TrainConfig
from ridgeline.tuning.rates.verdict import RateVerdict, verdict_of
from ridgeline.tuning.short_run import ShortRun, plan_short

GIVEN_UP = 2.0  # times the first loss: what comes behind says nothing


@dataclass(frozen=True)
class RangeOptions:
    low: float = 1e-6
    high: float = 1.0
    steps: int = 100
    seeds: int = 3

    def __post_init__(self) -> None:
        if not (0 < self.low < self.high < math.inf):
            raise UsageError(
                f"--range is {self.low:g}..{self.high:g}; give two rates above zero, the smaller "
                "one first"
            )
        if self.steps < 10:
            raise UsageError(f"--range-steps is {self.steps}; give at least 10")
        if self.seeds < 2:
            raise UsageError(f"--seeds is {self.seeds}, which gives no interval; give at least 2")

    @property
    def rates(self) -> list[float]:
        ratio = self.high / self.low
        return [self.low * ratio ** (step / (self.steps - 1)) for step in range(self.steps)]


@dataclass(frozen=True)
class RangeOutcome:
    rates: tuple[float, ...]
    losses: tuple[tuple[float, ...], ...]  # of each seed's steps, up to where it diverged
    verdict: RateVerdict


def range_test(
    config: TrainConfig,
    options: RangeOptions,
    *,
    device: str = "auto",
    progress: Progress | None = None,
) -> RangeOutcome:
    plan = plan_short(
        replace(config, end=RunLength(steps=options.steps)), device=device, progress=progress
    )
    rates, runs = options.rates, []
    for seed in range(options.seeds):
        losses: list[float] = []
        with ShortRun(plan, config.seed + seed) as run:
            for number, rate in enumerate(rates):
                if progress is not None:
                    progress("range test", seed * len(rates) + number, options.seeds * len(rates))
                losses.append(run.step(rate))
                if not losses[-1] < GIVEN_UP * losses[0]:
                    break
        runs.append(tuple(losses))
    return RangeOutcome(tuple(rates), tuple(runs), verdict_of(rates, runs))
