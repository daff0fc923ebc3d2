"""The last measurements of a climb: the defaults and the answer in turns, on the whole workload
where that fits into the time, and what a part of it tells of the whole where it does not.

    last = measure_last(job, progress, saved, bench, budget)
    last.total, last.words
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ridgeline.ladder.guessing.part_bias import MOST, bias_words, part_bias
from ridgeline.ladder.measuring.observation import Observation
from ridgeline.ladder.measuring.part import WorkloadPart
from ridgeline.ladder.measuring.process import WorkerError
from ridgeline.ladder.measuring.rounds import MIN_ROUNDS, speedup_of
from ridgeline.ladder.order import ClimbJob
from ridgeline.ladder.outcome import CurvePoint, Figures, Speedup
from ridgeline.ladder.processes.bench_processes import CURVE_S, ROUND_S, Processes
from ridgeline.ladder.searching.budget import Budget, plain_loop_s
from ridgeline.ladder.searching.progress import ClimbProgress
from ridgeline.ladder.state import ClimbState

LONGEST_ROUND_S = 7.0  # of the last comparison
LOADING_S = 20.0  # both sides
LAST_LOOKS_S = 2 * CURVE_S + LOADING_S  # curves too


@dataclass(frozen=True)
class LastComparison:
    """What was measured at the end."""

    total: Speedup | None = None
    part: WorkloadPart | None = None  # that the rounds of `total` ran, on the answer's side
    before: Figures | None = None
    after: Figures | None = None
    after_observation: Observation | None = None
    before_curve: tuple[Any, ...] = ()
    after_curve: tuple[Any, ...] = ()
    words: tuple[str, ...] = ()
    is_by_model: bool = False  # rates of a part, as the model of a step has them on the whole

    @property
    def share_of_defaults(self) -> float | None:
        """The answer's speed over theirs; None where one of them was not measured."""
        if self.before is None or self.after is None:
            return None
        return self.after.output_tokens_per_s / self.before.output_tokens_per_s


def measure_last(
    job: ClimbJob, progress: ClimbProgress, saved: ClimbState, bench: Processes, budget: Budget
) -> LastComparison:
    """The defaults and the answer, in rounds that take turns: of the whole workload where five fit
    into what is left; else of a part, and one run each of the whole, or of as many requests as
    there is time for, for the rates.
    """
    if progress.best == progress.start:
        return measure_defaults(job, progress, bench, budget)
    saved = measured_state(progress, saved)
    if saved != progress.best:
        bench.let_go()
    left_s = budget.rest_s - LAST_LOOKS_S - plain_loop_s(budget, progress.opening_s)
    whole_s = whole_runs_s(job, progress, bench)
    fits = MIN_ROUNDS if left_s == math.inf else left_s / max(whole_s, 1e-6)
    if fits < 1 and budget.rest_s - LOADING_S >= whole_s:
        fits = 1.0  # before all that explains
    notes = list[str]()
    total, ran = None, None
    if fits >= 1 or saved == progress.best:  # files that were written are run at least once
        total, ran = _in_the_search(progress, bench)
    if total is not None and fits < MIN_ROUNDS:
        notes.append(_rounds_note(job, progress, progress.best, bench))
    elif fits < MIN_ROUNDS:
        spare_s = left_s - whole_s if fits >= 1 else left_s / 2
        bench.round_s = min(LONGEST_ROUND_S, max(ROUND_S, spare_s / (4 * MIN_ROUNDS)))
        total = bench.compare(progress.start, saved, _has_least_rounds)
        ran = bench.part_of(saved)
        notes.append(_rounds_note(job, progress, saved, bench))
    part = largest_part(job, progress, fits)
    if part is not None:
        num_rounds = MIN_ROUNDS if fits >= MIN_ROUNDS else 1
        rounds = bench.compare_part(progress.start, saved, part, num_rounds)
        notes.append(_rates_note(job, progress, part, num_rounds))
        if num_rounds >= MIN_ROUNDS:
            total, ran = speedup_of(*rounds), part
    elif saved == progress.best:  # which was looked at, and its time is over
        return replace(rates_by_model(job, progress, bench, notes), total=total, part=ran)
    before, after = bench.figures(progress.start), bench.figures(saved)
    has_time = budget.rest_s >= 2 * CURVE_S
    after_observation = bench.look(saved) if has_time or saved != progress.best else None
    by_model = part is None
    if by_model:
        modelled = rates_by_model(job, progress, bench, notes, saved)
        before, after, notes = modelled.before, modelled.after, list(modelled.words)
    curves: list[tuple[CurvePoint, ...]] = []
    for state, name in ((progress.start, "the defaults"), (saved, "the answer")):
        if budget.rest_s - plain_loop_s(budget, progress.opening_s) < 2 * CURVE_S:
            curves.append(())
            notes.append(f"no time for a curve over the batch of {name}")
            continue
        try:
            curves.append(bench.curve(state))
        except WorkerError as error:  # what was measured stands without it
            curves.append(())
            notes.append(f"no curve over the batch of {name}: {error}")
    before_curve, after_curve = curves
    return LastComparison(
        total=total,
        part=ran,
        before=before,
        after=after,
        after_observation=after_observation,
        before_curve=before_curve,
        after_curve=after_curve,
        words=tuple(notes),
        is_by_model=by_model,
    )


def rates_by_model(
    job: ClimbJob,
    progress: ClimbProgress,
    bench: Processes,
    notes: Sequence[str] = (),
    answer: ClimbState | None = None,
) -> LastComparison:
    """Of the whole workload, by what rounds of a part of it tell of that."""
    answer = progress.best if answer is None else answer
    parts = bench.part_of(progress.start), bench.part_of(answer)
    before = bench.figures(progress.start) or progress.start_observation.figures
    after = bench.figures(answer) or progress.observation.figures
    assert before is not None, "rounds were run"
    assert after is not None, "rounds were run"
    if all(part.is_whole(job.workload) for part in parts):
        return LastComparison(before=before, after=after, words=tuple(notes))
    biases = _biases(job, progress, parts)
    words = (
        f"the whole workload was not run: {parts[1].words(job.workload)} made "
        f"{before.output_tokens_per_s:,.0f} (the defaults) and {after.output_tokens_per_s:,.0f} "
        "(the answer) output tokens/s, and the rates told are those of the whole by the model of a "
        "step"
    )
    return LastComparison(
        before=_on_the_whole(before, biases[0]),
        after=_on_the_whole(after, biases[1]),
        words=(*notes, words),
        is_by_model=True,
    )


def _on_the_whole(figures: Figures, bias: float) -> Figures:
    """Times of shortened requests say nothing of whole ones."""
    rate = figures.output_tokens_per_s / (1.0 + bias)
    return Figures(rate, None, None, None, figures.share_of_limit, figures.weight_bytes)


def measured_state(progress: ClimbProgress, saved: ClimbState) -> ClimbState:
    """What stands for the answer in the last runs: the very files that were written; of random
    weights, and of the defaults, what is loaded already.
    """
    same = saved.folder is None or progress.best == progress.start
    return progress.best if same else saved


def _in_the_search(
    progress: ClimbProgress, bench: Processes
) -> tuple[Speedup, WorkloadPart] | tuple[None, None]:
    """The defaults and the answer in rounds that took turns, where one change led there."""
    kept = [each for each in progress.outcomes if each.status == "kept"]
    if len(kept) != 1 or kept[0] not in progress.measured or kept[0].achieved is None:
        return None, None
    return kept[0].achieved, bench.part_of(progress.best)


def end_s(job: ClimbJob, bench: Processes, progress: ClimbProgress) -> float:
    """What the end of the climb takes, as far as its beginning tells."""
    return LAST_LOOKS_S + whole_runs_s(job, progress, bench)


def whole_runs_s(job: ClimbJob, progress: ClimbProgress, bench: Processes) -> float:
    """One of the defaults and one of the answer, by how fast a part of the workload was."""
    seconds = 0.0
    for state, observation in (
        (progress.start, progress.start_observation),
        (progress.best, progress.observation),
    ):
        assert observation.figures is not None, "rounds were run"
        bias = part_bias(job.facts, state, observation.filled, job.workload, bench.part_of(state))
        rate = observation.figures.output_tokens_per_s / (1.0 + bias)
        seconds += job.workload.num_output_tokens / rate
    return seconds


def measure_defaults(
    job: ClimbJob, progress: ClimbProgress, bench: Processes, budget: Budget
) -> LastComparison:
    """They are the answer: their rate on the whole workload, or on as much as there is time for."""
    state, same = progress.start, progress.observation.figures
    whole_s = whole_runs_s(job, progress, bench) / 2
    part = largest_part(job, progress, (budget.rest_s - LAST_LOOKS_S / 2) / whole_s)
    if part is None:
        return rates_by_model(job, progress, bench)
    bench.run_part(state, part)
    same = bench.figures(state)
    words = _rates_note(job, progress, part, 1)
    return LastComparison(before=same, after=same, words=(words,))


def largest_part(job: ClimbJob, progress: ClimbProgress, fits: float) -> WorkloadPart | None:
    """The whole workload, or as many of its requests, in their full length, as there is time for;
    None where so few are not like the whole.
    """
    count = len(job.workload.requests)
    if fits >= 1:
        return WorkloadPart(count)
    part = WorkloadPart(int(fits / 2 * count))
    if part.count < 1 or max(map(abs, _biases(job, progress, (part, part)))) > MOST:
        return None
    return part


def _biases(
    job: ClimbJob, progress: ClimbProgress, parts: tuple[WorkloadPart, WorkloadPart]
) -> tuple[float, float]:
    """Of the defaults and of the answer."""
    before, after = (
        part_bias(job.facts, state, observation.filled, job.workload, part)
        for (state, observation), part in zip(
            (
                (progress.start, progress.start_observation),
                (progress.best, progress.observation),
            ),
            parts,
            strict=True,
        )
    )
    return before, after


def _rounds_note(
    job: ClimbJob, progress: ClimbProgress, saved: ClimbState, bench: Processes
) -> str:
    parts = bench.part_of(progress.start), bench.part_of(saved)
    words = [part.words(job.workload) for part in parts]
    if all(part.is_whole(job.workload) for part in parts):
        return "rounds ran the whole workload"
    ran = words[0] if words[0] == words[1] else f"{words[0]} (the answer: {words[1]})"
    return f"rounds ran {ran}; {bias_words(_biases(job, progress, parts))}"


def _rates_note(job: ClimbJob, progress: ClimbProgress, part: WorkloadPart, num_rounds: int) -> str:
    times = _times(num_rounds)
    if part.is_whole(job.workload):
        return f"rates are of the whole workload, {times} on each side"
    words = bias_words(_biases(job, progress, (part, part)))
    return f"rates are of {part.words(job.workload)}, of all lengths, {times} on each side; {words}"


def _has_least_rounds(speedup: Speedup) -> bool:
    return len(speedup.before) >= MIN_ROUNDS


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
