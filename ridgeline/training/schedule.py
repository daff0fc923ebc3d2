"""The learning rate of a step: a warm-up counted in steps, then a fall over the share of the run
that is done, whether that is counted in steps, tokens or minutes.

    learning_rate(1e-4, ScheduleOptions("cosine", warmup=10, final=0.1), step=50, done=0.5)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ridgeline.training.config import RunLength, ScheduleOptions


@dataclass(frozen=True)
class Counters:
    """How far a run has come."""

    steps: int = 0
    sequences: int = 0  # consumed: with the seed, the state of the data
    tokens: int = 0  # that were learned: those with a target
    seconds: float = 0.0


def share_done(end: RunLength, counters: Counters, closing_s: float = 0.0) -> float:
    """From 0 to 1, where the steps are over: of minutes, `closing_s` before their end."""
    if end.steps is not None:
        share = counters.steps / end.steps
    elif end.tokens is not None:
        share = counters.tokens / end.tokens
    else:
        assert end.minutes is not None, "check_complete comes first"
        share = counters.seconds / max(60 * end.minutes - closing_s, 1e-9)
    return min(1.0, share)


def learning_rate(lr: float, options: ScheduleOptions, step: int, done: float) -> float:
    """Of the step that comes after `step` others, when `done` of the run lies behind."""
    assert options.warmup is not None, "choices.py"
    if step < options.warmup:
        return lr * (step + 1) / options.warmup
    if options.decay == "constant":
        return lr
    left = 1 - done if options.decay == "linear" else (1 + math.cos(math.pi * done)) / 2
    return lr * (options.final + (1 - options.final) * left)
