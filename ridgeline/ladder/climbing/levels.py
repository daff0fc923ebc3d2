"""Service levels: which recipe holds the highest rate of requests within a latency bound, and the
proof that it does.

The fastest recipe is not always the one that holds the bound: larger batches and steps give more
tokens a second and let each request wait. The defaults, the answer of the climb and, where tokens
come too slowly, variants of the better one with smaller steps and batches are compared by the rate
they hold; the highest one is run for a minute, and lowered until it holds.

    levels = LevelSearch(job, progress, bench, budget).run()
    levels.chosen, progress.best
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from ridgeline.bench.serve.bound import USUAL_SHARE
from ridgeline.ladder.measuring.held_rate import PROBES, FoundRate, LevelTimes, has_arrivals
from ridgeline.ladder.measuring.observation import Observation
from ridgeline.ladder.measuring.process import WorkerError
from ridgeline.ladder.order import ClimbJob
from ridgeline.ladder.outcome import HeldRate, RateProof, ServiceLevels
from ridgeline.ladder.reporting.levels import DEFAULTS
from ridgeline.ladder.rungs.batching import LEAST_BUDGET
from ridgeline.ladder.searching.budget import FINISH_SHARE, Budget
from ridgeline.ladder.searching.progress import ClimbProgress
from ridgeline.ladder.state import ClimbState, applied
from ridgeline.progress import Progress

ANSWER = "the answer"
PRECISION = 0.05  # of a search: what a variant must hold more
LOWERED = 0.9  # a rate that was not proved, for the next proof
MAX_PROOFS = 3  # of one recipe
TOO_LATE = 0.05  # share of requests with slow tokens from which on smaller steps may help
PROOF_SHARE = 0.4  # of the time that is left: a proof has no more, while rates are searched
LAST_SHARE = 0.8  # and when they are proved: answers come in after the last arrival
LEAST_PROOF_S, LEAST_SEARCH_S, LEAST_PROBE_S = 5.0, 10.0, 2.0


class LevelBench(Protocol):
    """Raises WorkerError where a state cannot be run."""

    def highest_rate(
        self, state: ClimbState, start: float | None, probe_s: float, seconds: float
    ) -> FoundRate: ...

    def prove(self, state: ClimbState, rate: float, seconds: float) -> RateProof: ...

    def look(self, state: ClimbState) -> Observation: ...


@dataclass
class LevelCandidate:
    name: str
    state: ClimbState
    observation: Observation | None  # None: it has not been looked at yet
    held: HeldRate
    result: FoundRate
    rate: float | None  # that it holds, as far as is known; None: none
    num_proofs: int = 0


@dataclass
class LevelSearch:
    job: ClimbJob
    progress: ClimbProgress
    bench: LevelBench
    budget: Budget
    times: LevelTimes = field(default_factory=LevelTimes)
    report: Progress | None = None

    def __post_init__(self) -> None:
        self.candidates: list[LevelCandidate] = []
        self.chosen: LevelCandidate | None = None

    def run(self) -> ServiceLevels:
        """The best state of the climb is the one that holds the most from then on; Ctrl-C leaves
        what is known until then.
        """
        try:
            self._search()
            self.chosen = self._best
            self._prove_best()
            self._prove_defaults()
        except KeyboardInterrupt:
            self.progress.is_stopped = True
            self.progress.notes.append("stopped by Ctrl-C while rates were measured")
            self.chosen = self.chosen or self._best
        self._adopt()
        return self._levels()

    @property
    def _left_s(self) -> float:
        """The last comparison and the report have their part."""
        if self.budget.seconds is None:
            return math.inf
        return max(0.0, self.budget.rest_s - FINISH_SHARE * self.budget.seconds)

    def _proof_s(self, share: float) -> float:
        """Of what is left: while rates are searched, and when they are proved."""
        return min(self.times.proof_s, max(LEAST_PROOF_S, share * self._left_s))

    @property
    def _searching_s(self) -> float:
        return self._left_s - self._proof_s(PROOF_SHARE)

    def _search(self) -> None:
        now = self.progress
        share = 0.8 if now.best == now.start else 0.4
        self._try(DEFAULTS, now.start, {}, now.start_observation, None, share)
        if now.best != now.start:
            start = self.candidates[0].rate if self.candidates else None
            self._try(ANSWER, now.best, {}, now.observation, start, 0.6)
        if not self.candidates:
            return
        last = self.candidates[-1]  # the answer: where it misses the bound, it is what is varied
        base = last if last.rate is None else self._best or last
        for name, edit in self._variants(base).items():
            if self._searching_s < self.times.probe_s:
                self.progress.notes.append(f"no time to see whether {name} holds a higher rate")
                continue
            best = self._best
            start = None if best is None or best.rate is None else best.rate * (1 + PRECISION)
            self._try(name, applied(base.state, edit), edit, None, start, 0.5)

    def _variants(self, base: LevelCandidate) -> dict[str, Mapping[str, Any]]:
        """Recipes that give up throughput for the time between tokens, where that is what breaks
        the bound.
        """
        assert base.observation is not None, "it was measured in rounds"
        limits = base.observation.filled.limits.filled()
        result, searched = dict[str, Mapping[str, Any]](), base.result
        is_too_slow_alone = searched.num_rates == 0
        if is_too_slow_alone or (searched.rate is not None and searched.late_tokens < TOO_LATE):
            return {}
        half = limits.token_budget // 2
        if half >= max(LEAST_BUDGET, limits.max_batch):
            result["half the token budget"] = {"limits.token_budget": half}
        batch = limits.max_batch // 2
        if searched.batch:  # no more than half of what ran at once when tokens came too slowly
            batch = min(batch, 2 ** int(math.log2(max(2.0, searched.batch))) // 2)
        if batch >= 1:
            result[f"at most {batch} requests at once"] = {"limits.max_batch": batch}
        return result

    def _try(
        self,
        name: str,
        state: ClimbState,
        edit: Mapping[str, Any],
        observation: Observation | None,
        start: float | None,
        share: float,
    ) -> None:
        self._tell(f"highest rate of {name}")
        seconds = min(self.times.search_s, max(LEAST_SEARCH_S, share * self._searching_s))
        probe_s = min(self.times.probe_s, max(LEAST_PROBE_S, seconds / PROBES))
        try:
            searched = self.bench.highest_rate(state, start, probe_s, seconds)
        except WorkerError as error:
            self.progress.notes.append(f"the highest rate of {name} is not known: {error}")
            return
        held = HeldRate(
            name, edit, searched.rate, searched.failed_rate, searched.is_sure, searched.words
        )
        self.candidates.append(
            LevelCandidate(name, state, observation, held, searched, searched.rate)
        )

    @property
    def _best(self) -> LevelCandidate | None:
        """The highest rate, as far as it is known; of equals the later, which is the faster."""
        known = [each for each in reversed(self.candidates) if each.rate is not None]
        return max(known, key=lambda each: each.rate or 0.0) if known else None

    def _prove_best(self) -> None:
        """At lower and lower rates until one holds; another recipe may be the best by then."""
        while (best := self._best) is not None and not self._is_proved(best):
            if best.held.proof is not None and self._left_s < best.held.proof.seconds:
                self.progress.notes.append("no time to prove a lower rate")
                break
            self._prove(best)
        self.chosen = self._best or self.chosen

    def _prove_defaults(self) -> None:
        """For a fair comparison, where there is time."""
        for each in self.candidates:
            while each.name == DEFAULTS and each.rate is not None and not self._is_proved(each):
                if self._left_s < self.times.proof_s:
                    return
                self._prove(each)

    def _prove(self, candidate: LevelCandidate) -> None:
        rate, seconds = candidate.rate, self._proof_s(LAST_SHARE)
        assert rate is not None, "there is a rate to prove"
        self._tell(f"{rate:.3g} requests/s for {seconds:.0f} s with {candidate.name}")
        try:
            proof = self.bench.prove(candidate.state, rate, seconds)
        except WorkerError as error:
            self.progress.notes.append(f"{candidate.name} at {rate:.3g} requests/s: {error}")
            candidate.rate = None
            return
        candidate.held = replace(candidate.held, proof=proof)
        candidate.num_proofs += 1
        if not self._is_proved(candidate):
            candidate.rate = LOWERED * rate if candidate.num_proofs < MAX_PROOFS else None
        if seconds < self.times.proof_s:
            self.progress.notes.append(
                f"the rate of {candidate.name} is shown for {proof.seconds:.0f} s only: the budget "
                f"is too short for {self.times.proof_s:.0f} s"
            )

    def _is_proved(self, candidate: LevelCandidate) -> bool:
        return self._levels().is_proved(candidate.held)

    def _adopt(self) -> None:
        """The chosen one is what the climb leaves."""
        now, best = self.progress, self.chosen
        if best is None or best.state == now.best:
            return
        try:
            observation = best.observation or self.bench.look(best.state)
        except WorkerError as error:
            now.notes.append(f"{best.name} could not be opened again: {error}")
            self.chosen = None
            return
        now.best, now.observation = best.state, observation
        now.notes.append(
            f"{best.name}: more requests/s within the latency bound than the fastest recipe, so "
            "this is what is left"
        )

    def _levels(self) -> ServiceLevels:
        order = self.job.order
        if has_arrivals(self.job.trace):
            arrivals = "as in the trace, sped up or slowed down"
        else:
            arrivals = f"at random (Poisson): workload {self.job.trace.name} has no arrival times"
        tried = tuple(each.held for each in self.candidates)
        chosen = None if self.chosen is None else self.chosen.name
        return ServiceLevels(order.latency, USUAL_SHARE, arrivals, tried, chosen)

    def _tell(self, words: str) -> None:
        if self.report is not None:
            self.report(words, 0, 1)
