"""The climb of a training step, the answer first.

1. `train`'s own config for this machine and the one that is predicted to be fastest are measured
   against each other before anything else; the better is the answer so far, and lies in the folder.
2. Single changes around it, the largest predicted gain first. One that alters what is learned is
   kept only if its loss stays inside the bound over paired seeds (losses.py). What was not measured
   stays as it is: nothing is switched off because time ran out.
3. The answer against the defaults once more; where it is slower, the defaults are left.

A change that fails or runs out of memory is recorded, and the climb goes on. Ctrl-C keeps the
answer so far. The ladder from the plain loop is explaining.py's.

    climber = TrainClimber(job, bench, budget, on_answer=save)
    climber.climb()
    climber.best, climber.outcomes, climber.total
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

from ridgeline.errors import RidgelineError
from ridgeline.ladder.measuring.rounds import MIN_ROUNDS, chained
from ridgeline.ladder.outcome import PairedLosses, RungOutcome, RungStatus, Speedup
from ridgeline.ladder.reporting.words import slower_words
from ridgeline.ladder.searching.budget import Budget
from ridgeline.ladder.training.forms import TrainForm
from ridgeline.ladder.training.losses import LEAST_STEPS, NUM_SEEDS, USUAL_STEPS, paired_losses
from ridgeline.ladder.training.order import TrainClimbJob
from ridgeline.ladder.training.predicted import predicted_gain
from ridgeline.ladder.training.rungs import RUNGS, TrainOffer, TrainRung, combinations
from ridgeline.ladder.training.telling.news import TrainNews
from ridgeline.ladder.training.telling.words import (
    changed_fields,
    changes_words,
    in_words,
    one_line,
)
from ridgeline.ladder.training.timing.bench import TrainBench
from ridgeline.ladder.training.timing.comparing import ComparedSteps, Comparing
from ridgeline.profiling.predicting.prediction import Area, Prediction
from ridgeline.training.config import TrainConfig
from ridgeline.training.stepping.precision import PRECISIONS

STOPPED = "stopped by Ctrl-C: what was done is kept"
FAILURES = (RidgelineError, RuntimeError, ValueError, MemoryError, AssertionError)
LOSS_CHANCE = 0.5  # that a change of what is learned is kept
TOGETHER: Area = "batch and memory"


class TrainClimber:
    def __init__(
        self,
        job: TrainClimbJob,
        bench: TrainBench,
        budget: Budget,
        news: TrainNews,
        on_answer: Callable[[TrainConfig], None],
    ) -> None:
        self.job, self.bench, self.budget, self._news = job, bench, budget, news
        order = job.order
        num_tokens = order.config.batch_tokens
        self.comparing = Comparing(bench, budget, num_tokens, order.rounds, order.round_s)
        self._on_answer = on_answer
        self.defaults = self.best = job.context.defaults
        self.outcomes: list[RungOutcome] = []
        self.notes: list[str] = []
        self.total: Speedup | None = None  # of the best over the defaults
        self.first_answer_s: float | None = None
        self.is_stopped = False
        self._num_steps = 0  # that the total was multiplied from; 0: it was timed itself
        self._tried: set[TrainConfig] = {self.best}
        self._reference: dict[tuple[int, int], list[float]] = {}  # losses, by seed and steps

    def climb(self) -> None:
        try:
            self._answer_first()
            self._search()
            self._confirm()
        except KeyboardInterrupt:
            self.is_stopped = True
            self.notes.append(STOPPED)
        self._rest()

    def _answer_first(self) -> None:
        """The defaults, and beside them what is predicted to be fastest of all that alters
        nothing.
        """
        self._on_answer(self.defaults)
        self._news.show("the defaults, and the first answer")
        guess, predicted = self._guess()
        if guess == self.defaults:
            self.comparing.look(TrainForm(self.defaults))
            self.notes.append(
                "the defaults are what is predicted to be fastest"
                if predicted is not None
                else "nothing predicts steps of this machine: the climb begins at the defaults"
            )
        else:
            words = changes_words(self.defaults, guess)
            offer = TrainOffer("first-guess", f"all together: {words}", guess, "predicted best")
            self._try(offer, TOGETHER, predicted)
        self.first_answer_s = self.budget.used_s

    def _guess(self) -> tuple[TrainConfig, Prediction | None]:
        seconds = self.job.step_s
        known = {config: seconds(config) for config in combinations(self.job.context)}
        timed = {config: value for config, value in known.items() if value is not None}
        base = timed.get(self.defaults)
        if base is None:
            return self.defaults, None
        best = min(timed, key=lambda config: timed[config])
        if timed[best] >= base:
            return self.defaults, Prediction(1.0, 1.0, 1.0, "nothing is predicted to be faster")
        return best, self._predicted(best, TOGETHER)

    def _search(self) -> None:
        """The largest predicted gain first; what nothing is predicted of in the ladder's order."""
        while (choice := self._next()) is not None:
            rung, offer = choice
            self._tried.add(offer.config)
            predicted = self._predicted(offer.config, rung.area)
            if predicted is not None and predicted.high < 1.0:
                text = f"predicted to be slower: {predicted.speedup:.2f}×, {predicted.why}"
                self._add(offer, rung.area, "dropped", text, predicted=predicted)
            elif not self._has_time(TrainForm(offer.config)):
                self._add(offer, rung.area, "not reached", self._no_time(), predicted=predicted)
            else:
                self._try(offer, rung.area, predicted)

    def _next(self) -> tuple[TrainRung, TrainOffer] | None:
        offers = []
        for rung in RUNGS:
            offer = rung.offer(self.job.context, self.best)
            if isinstance(offer, TrainOffer) and offer.config not in self._tried:
                offers.append((rung, offer))
        if not offers:
            return None
        return max(offers, key=lambda each: self._promise(each[1].config, each[0].area))

    def _promise(self, config: TrainConfig, area: Area) -> float:
        """Half of the gain, where losses decide whether there is any."""
        predicted = self._predicted(config, area)
        if predicted is None:
            return 1.0
        alters = PRECISIONS[config.precision] != PRECISIONS[self.best.precision]
        return predicted.speedup ** (LOSS_CHANCE if alters else 1.0)

    def _try(self, offer: TrainOffer, area: Area, predicted: Prediction | None) -> None:
        began = time.monotonic()
        self._news.show(offer.title)
        self._tried.add(offer.config)
        try:
            outcome = self._measured(offer, area)
        except FAILURES as error:
            outcome = self._outcome(offer, area, "failed", one_line(error))
        seconds = time.monotonic() - began
        self.outcomes.append(replace(outcome, predicted=predicted, seconds=seconds))

    def _measured(self, offer: TrainOffer, area: Area) -> RungOutcome:
        compared = self.comparing.compare(TrainForm(self.best), TrainForm(offer.config))
        speedup, losses = compared.speedup, None
        if len(speedup.after) < MIN_ROUNDS and speedup.high >= 1.0:
            reason = f"{self._no_time()}; {len(speedup.after)} rounds gave {in_words(speedup)}"
            return self._outcome(offer, area, "not reached", reason, achieved=speedup)
        if not compared.is_kept():
            reason = f"{slower_words(speedup)}; {offer.why}"
            return self._outcome(offer, area, "dropped", reason, achieved=speedup)
        if offer.alters:
            losses = self._losses(offer.config, compared)
            if losses is None:
                return self._outcome(
                    offer, area, "not reached", self._no_losses(), achieved=speedup
                )
            problem = losses.problem
        else:
            problem = self.comparing.difference(TrainForm(self.best), TrainForm(offer.config))
        if problem is not None:
            reason = f"{in_words(speedup)}, but {problem}"
            return self._outcome(offer, area, "dropped", reason, achieved=speedup, losses=losses)
        outcome = self._outcome(
            offer, area, "kept", f"faster: {in_words(speedup)}; {offer.why}", achieved=speedup,
            losses=losses,
        )  # fmt: skip
        self._take(offer.config, speedup)
        return outcome

    def _losses(self, config: TrainConfig, compared: ComparedSteps) -> PairedLosses | None:
        """None where there is no time for them."""
        each_s = compared.before_s + compared.after_s
        num_steps = USUAL_STEPS
        if math.isfinite(self.budget.left_s):
            num_steps = min(USUAL_STEPS, int(self.budget.left_s / (NUM_SEEDS * each_s)))
        if num_steps < LEAST_STEPS:
            return None
        runs: tuple[list[list[float]], list[list[float]]] = ([], [])
        for seed in range(1, NUM_SEEDS + 1):
            self._news.show(f"losses over paired seeds, {seed} of {NUM_SEEDS}")
            runs[0].append(self._reference_losses(seed, num_steps))
            runs[1].append(self.bench.losses(config, seed, num_steps))
        bound = self.job.order.max_loss_increase
        over_defaults = compared.speedup.value * (1.0 if self.total is None else self.total.value)
        return paired_losses(*runs, bound=bound, speedup=over_defaults)

    def _reference_losses(self, seed: int, num_steps: int) -> list[float]:
        """As the defaults learn: what the best changes besides alters nothing."""
        key = seed, num_steps
        if key not in self._reference:
            self._reference[key] = self.bench.losses(self.defaults, seed, num_steps)
        return self._reference[key]

    def _no_losses(self) -> str:
        count = f"{NUM_SEEDS} × {LEAST_STEPS}"
        return f"faster, but no time is left for the losses of {count} steps with it and without it"

    def _take(self, config: TrainConfig, step: Speedup) -> None:
        self.total = step if self.total is None else chained(self.total, step)
        self._num_steps += 1
        self.best = config
        self._news.best(self.total, self._rate(step))
        self._on_answer(config)

    def _rate(self, step: Speedup) -> float:
        return sorted(step.after)[len(step.after) // 2]

    def _confirm(self) -> None:
        """Before it is told: never below the defaults."""
        pair = TrainForm(self.defaults), TrainForm(self.best)
        if self.best == self.defaults:
            return
        if self._num_steps == 1 and self.total is not None and len(self.total.after) >= MIN_ROUNDS:
            return  # it was measured against the defaults themselves
        if self.comparing.expected_s(*pair) > self.budget.rest_s:
            self.notes.append("the whole was not timed again: its speed is that of its steps")
            return
        self._news.show("the answer, against the defaults")
        self.total, self._num_steps = self.comparing.compare(*pair, firm=True).speedup, 0
        if self.total.value < 1.0:
            self._leave_defaults(self.total)

    def _leave_defaults(self, total: Speedup) -> None:
        text = f"in the last rounds all together came to {in_words(total)} of the defaults"
        self.notes.append(f"{text}, which are left instead")
        self.outcomes = [
            replace(each, status="dropped", reason=f"{each.reason}; {text}")
            if each.status == "kept"
            else each
            for each in self.outcomes
        ]
        self.best, self.total = self.defaults, None
        self._on_answer(self.best)

    def _rest(self) -> None:
        """One outcome for each rung that nothing was said of yet."""
        names = {outcome.name for outcome in self.outcomes}
        for rung in RUNGS:
            offer = rung.offer(self.job.context, self.best)
            if isinstance(offer, str):
                offered = TrainOffer(rung.name, rung.title, self.best, "")
                if not any(each.title == rung.title for each in self.outcomes):
                    self._add(offered, rung.area, "not applicable", offer)
            elif offer.name not in names and offer.config not in self._tried:
                predicted = self._predicted(offer.config, rung.area)
                why = STOPPED if self.is_stopped else self._no_time()
                self._add(offer, rung.area, "not reached", why, predicted=predicted)

    def _has_time(self, form: TrainForm) -> bool:
        return self.comparing.expected_s(TrainForm(self.best), form) <= self.budget.left_s

    def _no_time(self) -> str:
        step_s = self.comparing.step_s(TrainForm(self.best))
        known = "" if step_s is None else f"; a step takes {step_s:.3g} s"
        return f"the budget of {self.budget.seconds or 0:g} s is spent{known}"

    def _predicted(self, config: TrainConfig, area: Area) -> Prediction | None:
        job = self.job
        return predicted_gain(job.step_s, self.best, config, area, job.hardware.name)

    def _add(
        self, offer: TrainOffer, area: Area, status: RungStatus, reason: str,
        predicted: Prediction | None = None,
    ) -> None:  # fmt: skip
        outcome = self._outcome(offer, area, status, reason)
        self.outcomes.append(replace(outcome, predicted=predicted))

    def _outcome(
        self, offer: TrainOffer, area: Area, status: RungStatus, reason: str,
        achieved: Speedup | None = None, losses: PairedLosses | None = None,
    ) -> RungOutcome:  # fmt: skip
        edit = changed_fields(self.best, offer.config)
        return RungOutcome(
            offer.name, area, offer.title, edit, status, reason, achieved=achieved, losses=losses
        )
