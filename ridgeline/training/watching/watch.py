"""Which steps are not learned: those whose numbers are no numbers, and spikes.

A step spikes when its gradient norm is above `spike_factor` times the median of the last 50 steps
that were learned, or its loss lies above their median by more than `spike_factor` times their
median distance from it (and by a tenth of it at least). The first 20 steps are not judged. A step
is judged by those up to the last but one before it, on the device, so that no step waits for
another one's numbers; what they are is part of a checkpoint, so that a resumed run judges the same.

    watch = Watch(options, state.watch)
    limits = watch.limits(number)
    watch.add(number, loss, norm)
    watch.problem(result, limits)           # "the gradient norm, 812, is above …"
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from ridgeline.data.loading.sources import Origin
from ridgeline.training.config import WatchOptions
from ridgeline.training.stepping.step import StepLimits, StepResult, not_numbers

WINDOW = 50  # learned steps that a step is compared with
LEAST = 20  # fewer say little
LEAST_RISE = 0.1  # of the loss: a model that knows its text by heart has hardly any spread
MOST_SKIPPED = 10  # in a row: then it is not a step that is wrong but the run
MOST_NAMED = 4  # documents in a line for people; metrics.jsonl has all


@dataclass(frozen=True)
class WatchState:
    """The last steps that were learned: number, loss, gradient norm."""

    steps: Sequence[Sequence[float]] = field(default_factory=list)


class Watch:
    def __init__(self, options: WatchOptions, state: WatchState) -> None:
        self._options = options
        self._steps: deque[Sequence[float]] = deque(state.steps, maxlen=WINDOW + 1)
        self.num_skipped = 0  # in a row

    @property
    def state(self) -> WatchState:
        return WatchState([list(step) for step in self._steps])

    def add(self, number: int, loss: float, norm: float) -> None:
        """A step that was learned."""
        self.num_skipped = 0
        if math.isfinite(norm):  # in fp16 a step may be left out
            self._steps.append((number, loss, norm))

    def limits(self, number: int) -> StepLimits:
        """Of the step with this number. Those up to the last but one before it count, whether more
        are known yet or not.
        """
        known = [step for step in self._steps if step[0] < number - 1][-WINDOW:]
        if self._options.spikes == "learn" or len(known) < LEAST:
            return StepLimits()
        factor = self._options.spike_factor
        middle = median(loss for _, loss, _ in known)
        spread = median(abs(loss - middle) for _, loss, _ in known)
        return StepLimits(
            loss=middle + max(factor * spread, LEAST_RISE * abs(middle)),
            norm=factor * median(norm for _, _, norm in known),
        )

    def problem(self, result: StepResult, limits: StepLimits) -> str:
        """What is wrong with a bad step."""
        if not is_number(result):
            return not_numbers(result.loss)
        if result.gradient_norm > limits.norm:
            return (
                f"the gradient norm is {result.gradient_norm:.4g}, more than "
                f"{self._options.spike_factor:g} times the median of the last steps "
                f"({limits.norm / self._options.spike_factor:.4g})"
            )
        return (
            f"the loss is {result.loss:.4g}, far above that of the last steps "
            f"(a spike begins at {limits.loss:.4g})"
        )

    def stops(self, result: StepResult) -> bool:
        """Whether such a step ends the run, by what was ordered."""
        if not is_number(result):
            return self._options.non_finite == "stop"
        return self._options.spikes == "stop"


def is_number(result: StepResult) -> bool:
    return math.isfinite(result.loss) and math.isfinite(result.gradient_norm)


def named(documents: Sequence[Origin]) -> str:
    """The first of them, for a line."""
    names = list(dict.fromkeys(map(str, documents)))
    more = f" and {len(names) - MOST_NAMED:,} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more
