"""The climb itself: which rung is tried next, what is kept and what is dropped. Measuring is
somebody else's (`Bench`; bench_processes.py), so that decisions can be tested in milliseconds.

Greedy, stage by stage (rungs/): in a stage the rung with the largest predicted gain comes first (by
the chance that its answers are inside the quality bound, where there is one), and what is kept
changes what the others are measured against. Where a rung that is kept later may turn a near miss
(graphs for 16 bits, kernels tuned for codes, a batch), that one is tried once more from there; so
is one that did not apply and now does. What is predicted to be slower from where the climb is, at
the best end of its interval, is not measured there. With a budget, rungs of which nothing is
expected, or that are not among as many as there is time for, are put off: they come back with a
later stage if they promise more by then, and are tried at the end if time is left.

    search = Search(facts, bench, Budget(600.0), options)
    found = search.run()
    found.best, found.outcomes
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from ridgeline.bench.serve.bound import USUAL_SHARE, LatencyBound
from ridgeline.errors import RidgelineError, UsageError
from ridgeline.hardware import Hardware
from ridgeline.ladder.climbing.budget import Budget
from ridgeline.ladder.climbing.finished import Finished
from ridgeline.ladder.measuring.process import WorkerError
from ridgeline.ladder.measuring.rounds import MIN_ROUNDS
from ridgeline.ladder.measuring.seen import Observation
from ridgeline.ladder.outcome import Goal, Quality, RungOutcome, Speedup, TrafficPace, outcome_from
from ridgeline.ladder.reporting.words import (
    busy_words,
    faster_words,
    pace_words,
    quality_words,
    slower_words,
    state_words,
    with_remarks,
)
from ridgeline.ladder.rungs import STAGES, Offer, Rung, RungContext
from ridgeline.ladder.state import ClimbState, RecipeEdit, applied, baseline, digest
from ridgeline.models import ModelConfig
from ridgeline.profiling.predicting.gains import predict
from ridgeline.profiling.predicting.prediction import Prediction, Situation
from ridgeline.progress import Progress
from ridgeline.quality.gate import USUAL, QualityBounds
from ridgeline.quantization.scheme import parse_scheme

log = logging.getLogger(__name__)

MORE_ROUNDS = (3, 7)  # beyond the least: when an undecided rung is looked at again
WORTH = 1.01  # an interval that ends below is not worth more rounds, and less is not worth its time
CALIBRATION_S = 240.0  # that must be left to find codes on data: `demo` takes 200 s on a CPU
CALIBRATION_GAIN = 8.0  # times the bound: what is further outside stays outside
FIRST_RUNG_S = 25.0  # taken until one was measured
Enough = Callable[[Speedup], bool]
Predict = Callable[[Situation, RecipeEdit], Prediction]


class Bench(Protocol):
    """Measures. Raises WorkerError where a state cannot be run."""

    def open(self, state: ClimbState) -> Observation:
        """Load it and look at its steps; it is the best so far."""

    def compare(self, before: ClimbState, after: ClimbState, enough: Enough) -> Speedup:
        """In rounds that take turns, until it is enough; `after` stays loaded."""

    def keep(self, state: ClimbState) -> Observation:
        """`state` was compared, and is the best now; what it was held against is let go."""

    def drop(self, state: ClimbState) -> None:
        """Let it go."""

    def judge(self, state: ClimbState) -> Quality:
        """Against the unmodified model."""

    def pace(self, state: ClimbState) -> TrafficPace:
        """Under the trace's own arrival times."""

    def calibrated(self, state: ClimbState) -> ClimbState:
        """The same scheme with codes found on data, from a checkpoint of its own."""


@dataclass(frozen=True)
class ClimbFacts:
    """What does not change during a climb."""

    config: ModelConfig
    hardware: Hardware
    goal: Goal
    setting: str  # all that measurements depend on (state.py)
    concurrency: int = 1
    prefix_share: float = 0.0
    longest_prompt: int = 1
    has_text: bool = False
    has_random_weights: bool = False
    is_quantized: bool = False
    draft_model: str | None = None
    bounds: QualityBounds = USUAL
    latency: LatencyBound = field(default_factory=LatencyBound)  # none, unless it is given


@dataclass(frozen=True)
class Options:
    rounds: int = MIN_ROUNDS
    quality: bool = True
    stages: tuple[tuple[Rung, ...], ...] = STAGES

    def __post_init__(self) -> None:
        if self.rounds < MIN_ROUNDS:
            raise UsageError(f"--rounds is {self.rounds}; give at least {MIN_ROUNDS}")


@dataclass
class ClimbProgress:
    """What a climb came to, so far."""

    start: ClimbState
    start_seen: Observation
    best: ClimbState
    seen: Observation
    outcomes: list[RungOutcome] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    pace: TrafficPace | None = None  # of the best, where a latency bound is given
    is_stopped: bool = False
    measured: list[RungOutcome] = field(default_factory=list)  # in this run, not in an earlier one


class ClimbSearch:
    def __init__(
        self,
        facts: ClimbFacts,
        bench: Bench,
        budget: Budget,
        options: Options | None = None,
        finished: Finished | None = None,
        progress: Progress | None = None,
        predictor: Predict = predict,
    ) -> None:
        self.facts, self.bench, self.budget = facts, bench, budget
        self.options = options or Options()
        self.finished = finished or Finished(None)
        self.progress, self.predictor = progress, predictor
        self.found: ClimbProgress | None = None
        self._rung_s: list[float] = []  # that measured rungs took, less what is done once
        self._once_s: float | None = None  # None: nothing has been judged yet
        self._latest: dict[str, RungOutcome] = {}
        self._put_off: list[Rung] = []
        self._trying: Rung | None = None
        self._done = 0

    def run(self) -> ClimbProgress:
        found = self.found = self.start()
        try:
            self._climb()
        except KeyboardInterrupt:
            found.is_stopped = True
            found.notes.append("stopped by Ctrl-C; what was measured until then is here")
        for rung in self._left():
            why = "the climb was stopped" if found.is_stopped else "the budget was spent"
            self._add(rung, "not reached", why, self._offer(rung))
        busy = busy_words(found.outcomes)
        found.notes += [] if busy is None else [busy]
        if self.facts.latency:
            found.notes.append(self._pace_note(found))
        return found

    def _pace_note(self, found: ClimbProgress) -> str:
        if found.pace is None:
            return f"no rung was kept that keeps the latency bound ({self.facts.latency.words()})"
        said = pace_words(found.pace, self.facts.latency)
        return said if found.pace.share >= USUAL_SHARE else f"too slow for the bound: {said}"

    def start(self) -> ClimbProgress:
        """The plain loop in fp32; where that does not fit, the smallest step from it that does."""
        problem = None
        for number, state in enumerate(start_states(self.facts.hardware.device)):
            try:
                seen = self._seen_of(state)
            except WorkerError as error:
                if error.kind != "memory":
                    raise
                problem = problem or str(error)
                continue
            found = ClimbProgress(state, seen, state, seen)
            if number:
                found.notes.append(
                    f"the plain loop in fp32 does not fit ({problem}); it starts from "
                    f"{state_words(state)}"
                )
            if not seen.is_deterministic:
                found.notes.append(
                    "the model is not deterministic: the same prompt gave other logits; measured "
                    "differences hold that noise too"
                )
            return found
        raise WorkerError("memory", f"nothing of it fits here: {problem}")

    def _seen_of(self, state: ClimbState) -> Observation:
        key = digest([self.facts.setting, "seen", state.key])
        entry = self.finished.get(key)
        if entry is not None:
            return Observation.from_json(entry)
        seen = self.bench.open(state)
        self.finished.put(key, seen.to_json())
        return seen

    def _climb(self) -> None:
        for stage in self.options.stages:
            before = self._now.best
            self._climb_stage([*stage, *self._come_back()])
            if self._now.best != before:
                self._look_again()
        while self._put_off and self._has_time():
            rung, before = max(self._put_off, key=self._promise), self._now.best
            self._put_off.remove(rung)
            self._try(rung)
            if self._now.best != before:
                self._look_again()

    def _come_back(self) -> list[Rung]:
        """What was put off and promises enough by now: the less a step takes, the more of it is
        overhead.
        """
        found = [rung for rung in self._put_off if self._promise(rung) >= WORTH]
        self._put_off = [rung for rung in self._put_off if rung not in found]
        return found

    def _climb_stage(self, remaining: list[Rung]) -> None:
        while remaining:
            open_rungs = [rung for rung in remaining if isinstance(self._offer(rung), Offer)]
            if not open_rungs:
                break
            rung = max(open_rungs, key=self._promise)  # of equals the first
            remaining.remove(rung)
            slower = self._slower_words(rung)
            if slower is not None:
                self._add(rung, "not applicable", slower, self._offer(rung))
            elif rung.is_essential or self._is_worth(rung):
                self._try(rung)
            else:
                self._put_off.append(rung)
        for rung in remaining:
            reason = self._offer(rung)
            assert isinstance(reason, str), "all that could be tried was"
            self._add(rung, "not applicable", reason)

    def _look_again(self) -> None:
        """Rungs of earlier stages for which what was kept last may change the answer."""
        rungs = {rung.name: rung for stage in self.options.stages for rung in stage}
        for outcome in list(self._latest.values()):
            rung = rungs[outcome.name]
            applies = isinstance(self._offer(rung), Offer) and self._slower_words(rung) is None
            if not applies or not self._has_time():
                continue
            if outcome.status == "not applicable":
                self._now.outcomes.remove(outcome)
                del self._latest[outcome.name]
                self._try(rung)
            elif self._may_turn(rung, outcome):
                self._try(rung, again=True)

    def _may_turn(self, rung: Rung, outcome: RungOutcome) -> bool:
        """Whether it was a near miss, and something it hangs on has been kept since."""
        kept = {o.name for o in self._now.outcomes if o.status == "kept"}
        newer = kept & set(rung.again_after) - self._kept_before(outcome)
        broke = outcome.quality is not None and outcome.quality.problem is not None
        if outcome.status != "dropped" or outcome.achieved is None or broke or not newer:
            return False
        return outcome.achieved.high >= rung.near

    def _slower_words(self, rung: Rung) -> str | None:
        """Why it is not measured: even the best end of what is predicted is slower."""
        offer = self._offer(rung)
        predicted = self._predicted(offer) if isinstance(offer, Offer) else None
        if rung.is_essential or predicted is None or predicted.high >= 1.0:
            return None
        return (
            f"predicted to be slower than what is kept: {predicted.speedup:.2f}x "
            f"({predicted.low:.2f} to {predicted.high:.2f})"
        )

    def _kept_before(self, outcome: RungOutcome) -> set[str]:
        place = self._now.outcomes.index(outcome)
        return {o.name for o in self._now.outcomes[:place] if o.status == "kept"}

    @property
    def _now(self) -> ClimbProgress:
        assert self.found is not None, "`start` comes first"
        return self.found

    def _offer(self, rung: Rung) -> Offer | str:
        now, first = self._now, dict[str, Any]()
        if now.best.loop == "naive" and not rung.is_essential:
            engine = self._engine_edit()
            if engine is None:
                return "it changes how the engine runs, which could not be run"
            first = dict(engine)
        about = {name: getattr(self.facts, name) for name in SHARED}
        state = applied(now.best, first)
        filled = applied(replace(now.best, recipe=now.seen.filled), first).recipe
        offer = rung.offer(RungContext(**about, state=state, filled=filled, outcomes=self._latest))
        if isinstance(offer, str) or not first:
            return offer
        return Offer(first | dict(offer.edit), f"{offer.reason}; with the engine, {NOT_ALONE}")

    def _engine_edit(self) -> RecipeEdit | None:
        """What leads to the engine, where that alone was measured and not kept."""
        rungs = [rung for stage in self.options.stages for rung in stage if rung.is_essential]
        outcomes = [self._latest[rung.name] for rung in rungs if rung.name in self._latest]
        tried = [outcome for outcome in outcomes if outcome.achieved is not None]
        return tried[0].edit if tried else None

    def _predicted(self, offer: Offer) -> Prediction | None:
        facts, now = self.facts, self._now
        situation = now.seen.situation(
            facts.config,
            now.best.loop,
            facts.hardware,
            float(facts.concurrency),
            facts.prefix_share,
        )
        edit = {name: value for name, value in offer.edit.items() if name != "folder"}
        try:
            return self.predictor(situation, edit)
        except RidgelineError as error:
            log.info("no prediction for %s: %s", dict(edit), error)
            return None

    def _promise(self, rung: Rung) -> float:
        """The predicted speedup, less what quality may take of it."""
        offer = self._offer(rung)
        predicted = self._predicted(offer) if isinstance(offer, Offer) else None
        gain = 0.0 if predicted is None else predicted.speedup - 1.0
        judged = rung.changes_answers and self.options.quality
        return 1.0 + gain * (rung.chance if judged and gain > 0 else 1.0)

    def _left(self) -> list[Rung]:
        """Rungs nothing is said of yet."""
        rungs = [rung for stage in self.options.stages for rung in stage]
        return [rung for rung in rungs if rung.name not in self._latest]

    @property
    def _usual_s(self) -> float:
        times = self._rung_s[-4:]
        return sum(times) / len(times) if times else FIRST_RUNG_S

    def _has_time(self) -> bool:
        fits = self.budget.fits(self._usual_s)
        return fits is None or fits > 0

    def _is_worth(self, rung: Rung) -> bool:
        """Whether something is expected of it, and fewer rungs promise more than there is time
        for.
        """
        fits = self.budget.fits(self._usual_s)
        if fits is None or (fits > 1 and rung.leads):  # the last place is for what promises most
            return True
        promise = self._promise(rung)
        return self._num_better(promise) < fits and promise >= WORTH

    def _num_better(self, promise: float) -> int:
        """Rungs that promise more, of those nothing is said of yet."""
        others = [other for other in self._left() if isinstance(self._offer(other), Offer)]
        return sum(self._promise(other) > promise for other in others if other != self._trying)

    def _enough(self, speedup: Speedup) -> bool:
        count, least = len(speedup.before), self.options.rounds
        if count < least:
            return False
        looks = (least, *(least + more for more in MORE_ROUNDS))
        if count >= looks[-1] or self.budget.is_spent:
            return True
        decided = speedup.low > 1.0 or speedup.high < WORTH
        if not decided and self.budget.seconds is not None and count in looks:
            # Time is better spent on what promises more than this can still turn out to give.
            decided = self._num_better(speedup.high) > 0
        return decided and count in looks

    def _try(self, rung: Rung, again: bool = False) -> None:
        offer = self._offer(rung)
        if not isinstance(offer, Offer):
            self._add(rung, "not applicable", offer)
            return
        self._tell(rung)
        self._trying = rung
        now, began = self._now, self.budget.used_s
        candidate, predicted = applied(now.best, offer.edit), self._predicted(offer)
        key = digest(
            [self.facts.setting, now.best.key, candidate.key, self.options.rounds, rung.name]
        )
        title = rung.title + (", tried again" if again else "")
        entry = self.finished.get(key)
        if entry is not None:
            self._replay(entry)
            return
        outcome, state = self._measured(rung, offer, candidate)
        seconds = self.budget.used_s - began
        outcome = replace(outcome, title=title, predicted=predicted, seconds=seconds)
        self._rung_s.append(seconds - (self._once_s or 0.0))
        self._once_s = 0.0 if self._once_s is not None else None
        saved = {"outcome": asdict(outcome), "state": None, "seen": None}
        if outcome.status == "kept":
            now.best, now.seen = state, self.bench.keep(state)
            now.pace = outcome.pace
            outcome = replace(outcome, reason=with_remarks(outcome.reason, now.seen))
            saved |= {"outcome": asdict(outcome), "state": state.to_json()}
            saved |= {"seen": now.seen.to_json()}
        self._append(outcome)
        now.measured.append(outcome)
        if outcome.status != "failed":
            self.finished.put(key, saved)

    def _replay(self, entry: dict[str, object]) -> None:
        """As it was measured in an earlier run."""
        outcome = outcome_from(entry["outcome"])  # type: ignore[arg-type]
        self._append(outcome)
        if outcome.status == "kept":
            self._now.pace = outcome.pace
            self._now.best = ClimbState.from_json(entry["state"])  # type: ignore[arg-type]
            self._now.seen = Observation.from_json(entry["seen"])  # type: ignore[arg-type]

    def _measured(
        self, rung: Rung, offer: Offer, candidate: ClimbState
    ) -> tuple[RungOutcome, ClimbState]:
        base = RungOutcome(rung.name, rung.area, rung.title, offer.edit, "failed", offer.reason)
        try:
            achieved = self.bench.compare(self._now.best, candidate, self._enough)
            base = replace(base, achieved=achieved)
            if not achieved.is_beyond_noise:
                self.bench.drop(candidate)
                return replace(base, status="dropped", reason=slower_words(achieved)), candidate
            base = self._with_pace(base, candidate)
            if base.status == "dropped":
                self.bench.drop(candidate)
                return base, candidate
            if not (rung.changes_answers and self.options.quality):
                why = "quality was not measured" if rung.changes_answers else SAME_ARITHMETIC
                reason = f"{faster_words(achieved)}; {offer.reason}; {why}"
                return replace(base, status="kept", reason=reason), candidate
            return self._judged(base, candidate)
        except WorkerError as error:
            self.bench.drop(candidate)
            return replace(base, reason=f"{error.kind}: {error}"), candidate

    def _with_pace(self, base: RungOutcome, candidate: ClimbState) -> RungOutcome:
        """Dropped where requests that come at the trace's own times wait too long, unless those of
        the best so far do, and no fewer of them.
        """
        bound, assumed = self.facts.latency, self._now.pace
        if not bound or candidate.loop == "naive":
            return base
        pace = self.bench.pace(candidate)
        base = replace(base, pace=pace)
        least = USUAL_SHARE if assumed is None else min(USUAL_SHARE, assumed.share)
        if pace.share >= least or (assumed is None and self._now.best.loop == "naive"):
            return base
        assert base.achieved is not None, "it was compared"
        reason = f"{faster_words(base.achieved)}, but only {pace_words(pace, bound)}"
        return replace(base, status="dropped", reason=reason)

    def _judged(self, base: RungOutcome, candidate: ClimbState) -> tuple[RungOutcome, ClimbState]:
        began = self.budget.used_s
        quality = self.bench.judge(candidate)
        if self._once_s is None:  # the original was loaded and run too, which is kept for others
            self._once_s = (self.budget.used_s - began) / 2
        assert base.achieved is not None, "it was compared"
        if quality.problem is None:
            reason = f"{faster_words(base.achieved)}; {quality_words(quality)}"
            return replace(base, status="kept", quality=quality, reason=reason), candidate
        refused = replace(base, status="dropped", quality=quality)
        reason = f"{faster_words(base.achieved)}, but {quality.problem}"
        self.bench.drop(candidate)
        if not _can_calibrate(candidate):
            return replace(refused, reason=reason), candidate
        is_near = _is_near(quality, self.facts.bounds)
        if not is_near or self.budget.left_s < CALIBRATION_S:
            why = "there is no time to" if is_near else "it is too far outside to"
            return replace(refused, reason=f"{reason}; {why} find codes on data"), candidate
        return self._calibrated(refused, candidate, reason)

    def _calibrated(
        self, refused: RungOutcome, candidate: ClimbState, reason: str
    ) -> tuple[RungOutcome, ClimbState]:
        """Rounding to nearest is outside the bound: codes found on data may be inside."""
        better = self.bench.calibrated(candidate)
        quality = self.bench.judge(better)
        if quality.problem is not None:
            said = f"{reason}; with codes found on data: {quality.problem}"
            return replace(refused, quality=quality, reason=said), candidate
        achieved = self.bench.compare(self._now.best, better, self._enough)
        found = replace(refused, achieved=achieved, quality=quality)
        if not achieved.is_beyond_noise:
            self.bench.drop(better)
            return replace(found, reason=f"codes found on data: {slower_words(achieved)}"), better
        said = f"{faster_words(achieved)} with codes found on data; {quality_words(quality)}"
        return replace(found, status="kept", reason=said), better

    def _add(self, rung: Rung, status: str, reason: str, offer: Offer | str | None = None) -> None:
        edit = offer.edit if isinstance(offer, Offer) else {}
        predicted = self._predicted(offer) if isinstance(offer, Offer) else None
        if isinstance(offer, str):
            status, reason = "not applicable", offer
        about = (rung.name, rung.area, rung.title, edit, status, reason, predicted)
        self._append(RungOutcome(*about))  # type: ignore[arg-type]

    def _append(self, outcome: RungOutcome) -> None:
        self._now.outcomes.append(outcome)
        self._latest[outcome.name] = outcome

    def _tell(self, rung: Rung) -> None:
        if self.progress is not None:
            total = sum(map(len, self.options.stages))
            self.progress(rung.title, len(self._latest), total)


SHARED = (
    "config",
    "hardware",
    "goal",
    "concurrency",
    "prefix_share",
    "longest_prompt",
    "has_text",
    "has_random_weights",
    "is_quantized",
    "draft_model",
    "bounds",
)
NOT_ALONE = "which alone was not faster beyond noise"
SAME_ARITHMETIC = "the same arithmetic, so its quality was not measured"


def start_states(device: str) -> Sequence[ClimbState]:
    """The plain loop, and where that does not fit smaller and smaller ones."""
    plain, half = baseline(device), baseline(device, "bf16")
    engine = applied(half, {"loop": "engine", "kernels": "fused"})
    smaller = [applied(engine, {"scheme": name}) for name in ("int8", "int4-g128")]
    return [plain, half, engine, *smaller]


def _is_near(quality: Quality, bounds: QualityBounds) -> bool:
    """Whether codes found on data may bring it inside: they take some bits' worth of error away."""
    pairs = ((quality.mean_kl, bounds.max_kl), (quality.ppl_increase, bounds.max_ppl_increase))
    return all(allowed is None or value <= CALIBRATION_GAIN * allowed for value, allowed in pairs)


def _can_calibrate(state: ClimbState) -> bool:
    """Whether the scheme has a better method than rounding, and has it not been used yet."""
    if state.recipe.scheme is None or state.folder is not None:
        return False
    scheme = parse_scheme(state.recipe.scheme)
    return scheme.weight == "int4" or scheme.inputs != "16-bit"
