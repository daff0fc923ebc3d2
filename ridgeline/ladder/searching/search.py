"""The climb itself: which change is tried next, what is kept and what is dropped. Measuring is
a `Bench`'s (bench_processes.py), so that decisions can be tested in milliseconds; what a rung
promises is outlook.py's, and one rung's measurement trial.py's.

It begins with the engine's defaults, and with all that is predicted to help, together
(first_guess.py): the faster of the two is the best so far, and at every moment from then on the
best so far is an answer. Single changes follow, and the guess without each of its parts.

Greedy: the rung with the largest predicted gain comes first (by the chance that its answers are
inside the quality bound, where there is one), and what is kept changes what the others are measured
against. Where a rung that is kept later may turn a near miss, that one is tried once more from
there; so is one that did not apply and now does. What is predicted to be slower, at the best end of
its interval, is not measured. With a budget, rungs of which nothing is expected, or that are not
among as many as there is time for, are put off and tried at the end if time is left. What is not
measured stays as it is.

    search = ClimbSearch(facts, bench, Budget(600.0), options, starts=[defaults], guess=guess)
    progress = search.run()
    progress.best, progress.outcomes
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

from ridgeline.ladder.measuring.observation import Observation
from ridgeline.ladder.measuring.process import WorkerError
from ridgeline.ladder.outcome import RungOutcome, RungStatus, Speedup, outcome_from
from ridgeline.ladder.reporting.words import busy_words, state_words, with_remarks
from ridgeline.ladder.rungs import ClimbFacts, Offer, Rung
from ridgeline.ladder.searching.bench import Bench
from ridgeline.ladder.searching.budget import Budget, RungTimes, plain_loop_s
from ridgeline.ladder.searching.finished import Finished
from ridgeline.ladder.searching.news import ClimbNews
from ridgeline.ladder.searching.outlook import Outlook, Predict
from ridgeline.ladder.searching.progress import ClimbProgress, Options
from ridgeline.ladder.searching.together import (
    GUESS,
    Guess,
    Together,
    as_one,
    with_same_codes,
    without_each,
)
from ridgeline.ladder.searching.trial import Trial
from ridgeline.ladder.state import ClimbState, applied, baseline, digest
from ridgeline.profiling.predicting.gains import predict
from ridgeline.recipe import dotted_values

MORE_ROUNDS = (3, 7)  # beyond the least: when an undecided rung is looked at again
WORTH = 1.01  # an interval that ends below is not worth more rounds, and less is not worth its time
FEWEST_ROUNDS, CLEARLY_SLOWER = 3, 0.98
AS_LONG_AS_OPENING = 3.0  # times what the first state took: the end of a climb
JUDGING = 3.0  # times what the engine takes for as many prompt tokens: the first judging
TRIED_FIRST = "it was tried before all else"


class ClimbSearch:
    def __init__(
        self,
        facts: ClimbFacts,
        bench: Bench,
        budget: Budget,
        options: Options | None = None,
        finished: Finished | None = None,
        news: ClimbNews | None = None,
        predictor: Predict = predict,
        *,
        starts: Sequence[ClimbState] | None = None,
        guess: Guess | None = None,
        end_s: Callable[[ClimbProgress], float] | None = None,
        look_first: bool = True,
    ) -> None:
        """`starts`: where it begins, and smaller ones for where that does not fit; otherwise the
        plain loop. `guess` names what is tried before all else, from what was observed there.
        `end_s` says what comes after the search, once the start has run. Unless `look_first`, the
        guess is tried before the start's steps are looked at, which takes seconds.
        """
        self.facts, self.bench, self.budget = facts, bench, budget
        self.options = options or Options()
        self.finished = finished or Finished(None)
        self.news, self.predictor = news, predictor
        self._starts = start_states(facts.hardware.device) if starts is None else starts
        self._guess, self._end_s = guess, end_s
        self._look_first, self._is_looked_at = guess is None or look_first, False  # at the start
        self._stages = self.options.stages
        self._reached: ClimbProgress | None = None
        self._times = RungTimes()
        self._kept_s = 0.0  # for the end
        self._latest: dict[str, RungOutcome] = {}
        self._put_off: list[Rung] = []
        self._trying: Rung | None = None
        self._tried_first: str | None = None  # a rung that was the whole guess, and not kept
        self._done = 0

    def run(self) -> ClimbProgress:
        progress = self._begin()
        try:
            self._climb()
        except KeyboardInterrupt:
            progress.is_stopped = True
            progress.notes.append("stopped by Ctrl-C; what was measured until then is here")
        self._tell("writing what was found")
        for rung in self._left():
            why = "the climb was stopped" if progress.is_stopped else "the budget was spent"
            self._add(rung, "not reached", why, self.outlook.offer(rung))
        busy = busy_words(progress.outcomes)
        progress.notes += [] if busy is None else [busy]
        return progress

    def _begin(self) -> ClimbProgress:
        began = self.budget.used_s
        self._tell(f"measuring where it begins: {state_words(self._starts[0])}")
        self._reached = progress = self.start()
        progress.opening_s = self.budget.used_s - began
        # In the end two are loaded as this one was, and run in turns.
        opening_s = AS_LONG_AS_OPENING * progress.opening_s
        self._kept_s = opening_s if self._end_s is None else self._end_s(progress)
        self.budget.keep_for_the_end(self._kept_s)
        if self._look_first:
            self._look_at_start()
        self.outlook = Outlook(self.facts, self.options, self.predictor, progress, self._latest)
        self.trial = Trial(
            self.facts, self.options, self.bench, self.budget, progress, self._enough, self._times
        )
        return progress

    def _look_at_start(self) -> None:
        """What its steps are made of, from which gains are predicted; once."""
        now = self._now
        if self._is_looked_at:
            return
        if not now.start_observation.phases:
            observation = self.bench.look(now.start)
            if now.best == now.start:
                now.observation = observation
            now.start_observation = observation
            self.finished.put(self._start_key(now.start), observation.to_json())
        self._is_looked_at = True
        self._times.first_judging_s = self._first_judging_s(now.start_observation)

    def _start_key(self, state: ClimbState) -> str:
        return digest([self.facts.setting, "seen", state.key])

    def _first_judging_s(self, observation: Observation) -> float:
        """The original runs by its plain kernels, and then the change: by how fast prompts are."""
        prompts = [phase for phase in observation.phases if phase.phase == "prefill"]
        per_token_s = sum(phase.step_s / phase.work.tokens for phase in prompts[:1])
        return JUDGING * self.facts.judged_tokens * per_token_s

    def start(self) -> ClimbProgress:
        """The first of the starts that fits."""
        problem = None
        for number, state in enumerate(self._starts):
            try:
                observation = self._observed(state)
            except WorkerError as error:
                if error.kind != "memory":
                    raise
                problem = problem or str(error)
                continue
            progress = ClimbProgress(state, observation, state, observation)
            if number:
                progress.notes.append(
                    f"{state_words(self._starts[0])} does not fit ({problem}); it starts from "
                    f"{state_words(state)}"
                )
            if not observation.is_deterministic:
                progress.notes.append(
                    "the model is not deterministic: the same prompt gave other logits; measured "
                    "differences hold that noise too"
                )
            return progress
        raise WorkerError("memory", f"nothing of it fits here: {problem}")

    def _observed(self, state: ClimbState) -> Observation:
        entry = self.finished.get(self._start_key(state))
        return self.bench.open(state) if entry is None else Observation.from_json(entry)

    def _climb(self) -> None:
        if self._guess is not None:
            self._try_together(self._guess(self._now.start, self._now.observation))
            # There is an answer: from now on the plain loop has its part too.
            plain_s = plain_loop_s(self.budget, self._now.opening_s)
            self.budget.keep_for_the_end(self._kept_s + plain_s)
        for stage in self._stages:
            before = self._now.best
            self._climb_stage([*stage, *self._come_back()])
            if self._now.best != before:
                self._look_again()
        while rungs := [rung for rung in self._put_off if self._has_time(rung)]:
            rung, before = max(rungs, key=self.outlook.promise), self._now.best
            self._put_off.remove(rung)
            self._try(rung)
            if self._now.best != before:
                self._look_again()

    def _try_together(self, together: Together) -> None:
        """All that is predicted to help; if it does, each part is also tried without."""
        parts = together.parts
        if self.options.quality and self._times.first_judging_s > self.budget.left_s:
            parts = [(rung, own) for rung, own in parts if not rung.changes_answers]
        if not parts:
            self._now.first_answer_s = self.budget.used_s
            self._look_at_start()
            return
        before = dotted_values(self._now.observation.filled)
        together = together._replace(parts=parts)
        self._try(as_one(together))
        self._look_at_start()
        if self._latest[GUESS].status != "kept":
            self._tried_first = parts[0][0].name if len(parts) == 1 else None
            return
        same = with_same_codes(together, before)
        if same is not None:
            slower = self.outlook.slower_words(same)
            if slower is None:
                self._try(same)
            else:
                self._add(same, "not applicable", slower, self.outlook.offer(same))
        self._stages = (*self._stages, without_each(together, before))

    def _come_back(self) -> list[Rung]:
        """What was put off and promises enough by now: the less a step takes, the more of it is
        overhead.
        """
        result = [rung for rung in self._put_off if self.outlook.promise(rung) >= WORTH]
        self._put_off = [rung for rung in self._put_off if rung not in result]
        return result

    def _climb_stage(self, remaining: list[Rung]) -> None:
        while remaining:
            open_rungs = [rung for rung in remaining if isinstance(self.outlook.offer(rung), Offer)]
            if not open_rungs:
                break
            rung = max(open_rungs, key=self.outlook.promise)  # of equals the first
            remaining.remove(rung)
            slower = self.outlook.slower_words(rung)
            if rung.name == self._tried_first:
                self._tried_first = None  # once: behind another change it may be worth it
                self._add(rung, "not applicable", TRIED_FIRST, self.outlook.offer(rung))
            elif slower is not None:
                self._add(rung, "not applicable", slower, self.outlook.offer(rung))
            elif rung.is_essential or self._is_worth(rung):
                self._try(rung)
            else:
                self._put_off.append(rung)
        for rung in remaining:
            reason = self.outlook.offer(rung)
            assert isinstance(reason, str), "all that could be tried was"
            self._add(rung, "not applicable", reason)

    def _look_again(self) -> None:
        """Rungs of earlier stages for which what was kept last may change the answer."""
        rungs = {rung.name: rung for stage in self._stages for rung in stage}
        for outcome in list(self._latest.values()):
            if outcome.name not in rungs:
                continue  # what was tried together is not tried again
            rung = rungs[outcome.name]
            applies = (
                isinstance(self.outlook.offer(rung), Offer)
                and self.outlook.slower_words(rung) is None
            )
            if not applies or not self._has_time(rung):
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

    def _kept_before(self, outcome: RungOutcome) -> set[str]:
        position = self._now.outcomes.index(outcome)
        return {o.name for o in self._now.outcomes[:position] if o.status == "kept"}

    @property
    def _now(self) -> ClimbProgress:
        assert self._reached is not None, "`start` comes first"
        return self._reached

    def _left(self) -> list[Rung]:
        """Rungs nothing is said of yet."""
        rungs = [rung for stage in self._stages for rung in stage]
        return [rung for rung in rungs if rung.name not in self._latest]

    def _fits(self, rung: Rung) -> int | None:
        """How many like it there is time for; None: any number."""
        return self.budget.fits(self._times.expected(rung.changes_answers and self.options.quality))

    def _has_time(self, rung: Rung) -> bool:
        return self._fits(rung) != 0

    def _is_worth(self, rung: Rung) -> bool:
        """Whether something is expected of it, and fewer rungs promise more than there is time
        for.
        """
        fits = self._fits(rung)
        if fits is None or (fits > 1 and rung.leads):  # the last place is for what promises most
            return True
        promise = self.outlook.promise(rung)
        return self._num_better(promise) < fits and promise >= WORTH

    def _num_better(self, promise: float) -> int:
        """Rungs that promise more, of those nothing is said of yet."""
        others = [other for other in self._left() if isinstance(self.outlook.offer(other), Offer)]
        return sum(self.outlook.promise(rung) > promise for rung in others if rung != self._trying)

    def _enough(self, speedup: Speedup) -> bool:
        count, least = len(speedup.before), self.options.rounds
        if count < least:  # enough to see that it is slower; what is kept has them all
            return count >= FEWEST_ROUNDS and speedup.high < CLEARLY_SLOWER
        looks = (least, *(least + more for more in MORE_ROUNDS))
        if count >= looks[-1] or self.budget.is_spent:
            return True
        decided = speedup.low > 1.0 or speedup.high < WORTH
        if not decided and self.budget.seconds is not None and count in looks:
            # Time is better spent on what promises more than this can still turn out to give.
            decided = self._num_better(speedup.high) > 0
        return decided and count in looks

    def _try(self, rung: Rung, again: bool = False) -> None:
        offer = self.outlook.offer(rung)
        if not isinstance(offer, Offer):
            self._add(rung, "not applicable", offer)
            return
        self._tell(rung.title)
        self._trying = rung
        now, began = self._now, self.budget.used_s
        before, candidate = now.best, applied(now.best, offer.edit)
        predicted = self.outlook.predicted(offer) if self._is_looked_at else None
        key = digest(
            [self.facts.setting, now.best.key, candidate.key, self.options.rounds, rung.name]
        )
        title = rung.title + (", tried again" if again else "")
        entry = self.finished.get(key)
        if entry is not None:
            self._replay(entry)
            return
        outcome, state = self.trial.run(rung, offer, candidate)
        seconds = self.budget.used_s - began
        outcome = replace(outcome, title=title, predicted=predicted, seconds=seconds)
        self._times.took(seconds, was_judged=outcome.quality is not None)
        if outcome.status == "kept":  # the answer, should Ctrl-C come before it is looked at
            now.best, now.observation = state, self.bench.observed(state)
        self._append(outcome)
        if now.first_answer_s is None:
            now.first_answer_s = self.budget.used_s
        if not self._is_looked_at:
            self._look_at_start()
            predicted = self.outlook.predicted_from(before, now.start_observation, offer)
            outcome = replace(outcome, predicted=predicted)
        saved = {"outcome": asdict(outcome), "state": None, "seen": None}
        if outcome.status == "kept":
            now.observation = self.bench.keep(state)
            outcome = replace(outcome, reason=with_remarks(outcome.reason, now.observation))
            saved |= {"outcome": asdict(outcome), "state": state.to_json()}
            saved |= {"seen": now.observation.to_json()}
        now.outcomes[-1] = self._latest[outcome.name] = outcome
        now.measured.append(outcome)
        if outcome.status != "failed":
            self.finished.put(key, saved)

    def _replay(self, entry: dict[str, object]) -> None:
        """As it was measured in an earlier run."""
        outcome = outcome_from(entry["outcome"])  # type: ignore[arg-type]
        self._append(outcome)
        if outcome.status == "kept":
            self._now.best = ClimbState.from_json(entry["state"])  # type: ignore[arg-type]
            self._now.observation = Observation.from_json(entry["seen"])  # type: ignore[arg-type]

    def _add(
        self, rung: Rung, status: RungStatus, reason: str, offer: Offer | str | None = None
    ) -> None:
        edit = offer.edit if isinstance(offer, Offer) else {}
        predicted = self.outlook.predicted(offer) if isinstance(offer, Offer) else None
        if isinstance(offer, str):
            status, reason = "not applicable", offer
        self._append(
            RungOutcome(
                name=rung.name,
                area=rung.area,
                title=rung.title,
                edit=edit,
                status=status,
                reason=reason,
                predicted=predicted,
            )
        )

    def _append(self, outcome: RungOutcome) -> None:
        self._now.outcomes.append(outcome)
        self._latest[outcome.name] = outcome

    def _tell(self, doing: str) -> None:
        """What is measured next, and what there is by now."""
        if self.news is None:
            return
        num_done, num_all = len(self._latest), sum(map(len, self._stages))
        if self._reached is not None:
            self.news.reached(self._reached, num_done, num_all)
        self.news(doing, num_done, num_all)


def start_states(device: str) -> Sequence[ClimbState]:
    """The plain loop, and where that does not fit smaller and smaller ones."""
    plain, half = baseline(device), baseline(device, "bf16")
    engine = applied(half, {"loop": "engine", "kernels": "fused"})
    smaller = [applied(engine, {"scheme": name}) for name in ("int8", "int4-g128")]
    return [plain, half, engine, *smaller]
