"""Two forms of a step in rounds that take turns, and what that takes of the time there is.

compared = Comparing(bench, budget, rounds=5, round_s=0.5).compare(TrainForm(a), TrainForm(b))
compared.speedup, compared.after_s
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median

from ridgeline.ladder.measuring.rounds import MIN_ROUNDS, speedup_of
from ridgeline.ladder.outcome import Speedup
from ridgeline.ladder.searching.budget import Budget
from ridgeline.ladder.training.forms import StepNumbers, TrainForm
from ridgeline.ladder.training.timing.bench import TrainBench

LEAST_ROUNDS, MORE_ROUNDS = 3, 8  # to drop what is clearly slower; where five do not tell
WORTH = 1.01  # times as fast: less is not worth a change, however sure
WARM_UP = 3.0  # rounds that loading, compiling and the first steps of a new form are taken to be
COMPILE_S = 30.0  # for torch.compile: 15 to 26 s of one core (Neoverse N1, 2026-11-18)
LONGEST_ROUND_S = 60.0  # a step that takes longer is timed by a part of it
# What the order of sums changes in a loss, and in a gradient's norm, at most: shares.
LOSS_NOISE = {"fp32": 1e-4, "tf32": 2e-3}
NORM_NOISE = {"fp32": 2e-3, "tf32": 2e-2}
USUAL_LOSS_NOISE, USUAL_NORM_NOISE = 5e-3, 5e-2


@dataclass(frozen=True)
class ComparedSteps:
    speedup: Speedup
    before_s: float  # of a step: the middle of the rounds
    after_s: float

    def is_kept(self) -> bool:
        """What is kept has rounds enough."""
        is_sure = self.speedup.is_beyond_noise and len(self.speedup.after) >= MIN_ROUNDS
        return is_sure and self.speedup.value >= WORTH


@dataclass
class Comparing:
    bench: TrainBench
    budget: Budget
    num_tokens: int  # of a step
    rounds: int = MIN_ROUNDS
    round_s: float = 0.5  # of each side, at least one step

    def __post_init__(self) -> None:
        self._step_s: dict[TrainForm, float] = {}  # as timed last

    def step_s(self, form: TrainForm) -> float | None:
        return self._step_s.get(form)

    def look(self, form: TrainForm) -> float:
        """Time it alone."""
        self._step_s[form] = self.bench.step_s(form, self.round_s)
        return self._step_s[form]

    def expected_s(self, before: TrainForm, after: TrainForm, rounds: int | None = None) -> float:
        """Of a comparison: a form that was not timed takes as long as the other, and more to load
        and to warm up.
        """
        known = [self._step_s[form] for form in (before, after) if form in self._step_s]
        round_s = max(self.round_s, *(min(each, LONGEST_ROUND_S) for each in known or [0.0]))
        new = [form for form in (before, after) if form not in self._step_s]
        compiling_s = COMPILE_S * sum(form.config.compile for form in new)
        return (2 * (rounds or self.rounds) + WARM_UP * len(new)) * round_s + compiling_s

    def compare(
        self, before: TrainForm, after: TrainForm, rounds: int | None = None, *, firm: bool = False
    ) -> ComparedSteps:
        """At least `rounds`; fewer where it is clearly slower or no time is left, more where that
        does not tell and there is time. `firm`: just as many.
        """
        least = rounds or self.rounds
        most = least if firm else max(least, MORE_ROUNDS)
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for form in (before, after):  # warm-ups count in no round
            self.bench.warm(form)
        speedup = None
        for number in range(most):
            for is_after in (False, True) if number % 2 == 0 else (True, False):
                form = after if is_after else before
                seconds[is_after].append(self.look(form))
            if number < 1:
                continue
            speedup = speedup_of(self._rates(seconds[False]), self._rates(seconds[True]))
            if self._is_decided(speedup, number + 1, least, firm):
                break
        assert speedup is not None, "there are two rounds at least"
        return ComparedSteps(speedup, median(seconds[False]), median(seconds[True]))

    def _is_decided(self, speedup: Speedup, count: int, least: int, firm: bool) -> bool:
        if firm:
            return False
        if count >= LEAST_ROUNDS and speedup.high < 1.0:
            return True
        if self.budget.rest_s <= 0.0:
            return True
        if count < least:
            return False
        is_open = speedup.low <= 1.0 < speedup.value and speedup.value >= WORTH
        return not is_open or self.budget.left_s < 0

    def _rates(self, seconds: list[float]) -> tuple[float, ...]:
        return tuple(self.num_tokens / each for each in seconds)

    def difference(self, before: TrainForm, after: TrainForm) -> str | None:
        """What the two do not compute alike of the same sequences and weights."""
        sizes = before.config.batch.micro, after.config.batch.micro
        count = math.lcm(*(size or 1 for size in sizes))
        numbers = [self.bench.numbers(form, count) for form in (before, after)]
        return difference_problem(numbers[0], numbers[1], before.config.precision)


def difference_problem(before: StepNumbers, after: StepNumbers, precision: str) -> str | None:
    if not math.isfinite(after.loss):
        return "its loss is no number"
    pairs = [("loss", before.loss, after.loss, LOSS_NOISE.get(precision, USUAL_LOSS_NOISE))]
    if before.gradient_norm is not None and after.gradient_norm is not None:
        bound = NORM_NOISE.get(precision, USUAL_NORM_NOISE)
        pairs.append(("gradient norm", before.gradient_norm, after.gradient_norm, bound))
    for name, first, last, bound in pairs:
        if abs(last - first) > bound * abs(first):
            return (
                f"it does not compute the same: {name} {last:.6g} instead of {first:.6g} of the "
                f"same batch, more than rounding changes ({bound:.1%})"
            )
    return None
