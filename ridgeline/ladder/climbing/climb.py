"""`optimize` for models of our families, on the user's workload: the engine's defaults and a guess
first, then what is faster beyond noise and inside the quality bound; before and after on the whole
workload; the ladder that explains it; the folder with checkpoint, recipe, records and report.

    climb = climb_model(ClimbOrder("demo", out=Path("out"), budget_s=240.0))
    print(climb)
"""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path

from ridgeline.ladder.climbing.answer import FirstAnswer, default_states
from ridgeline.ladder.climbing.bench_processes import CURVE_S, ROUND_S, Processes
from ridgeline.ladder.climbing.budget import Budget
from ridgeline.ladder.climbing.earlier import remember_answer
from ridgeline.ladder.climbing.explaining import explained, ladder_to
from ridgeline.ladder.climbing.finished import Finished
from ridgeline.ladder.climbing.levels import LevelSearch
from ridgeline.ladder.climbing.news import ClimbNews
from ridgeline.ladder.climbing.order import ClimbJob, ClimbOrder, lengths_of, prepared
from ridgeline.ladder.climbing.part_bias import MOST, bias_words, part_bias
from ridgeline.ladder.climbing.peer import PeerMet, measured_peer
from ridgeline.ladder.climbing.progress import ClimbProgress, Options
from ridgeline.ladder.climbing.search import ClimbSearch
from ridgeline.ladder.climbing.writing import (
    LastComparison,
    climb_of,
    outcomes_to_remember,
    write_folder,
)
from ridgeline.ladder.measuring.held_rate import LevelTimes
from ridgeline.ladder.measuring.part import WorkloadPart
from ridgeline.ladder.measuring.process import WorkerError
from ridgeline.ladder.measuring.rounds import MIN_ROUNDS, speedup_of
from ridgeline.ladder.outcome import CurvePoint, PeerFigures, RungOutcome, Speedup
from ridgeline.ladder.reporting.folder import Folder, saved_recipe
from ridgeline.ladder.reporting.result import Climb
from ridgeline.ladder.rungs import MOVES
from ridgeline.ladder.state import ClimbState
from ridgeline.profiling.predicting.accuracy import remember
from ridgeline.progress import Progress

LEAST_PEER_S = 20.0  # that another server is measured, whatever the budget
LONGEST_ROUND_S = 7.0  # of the last comparison
LAST_LOOKS_S = 2 * CURVE_S + 20.0  # curves, and loading both sides


def climb_model(
    order: ClimbOrder, progress: Progress | None = None, times: LevelTimes | None = None
) -> Climb:
    """`times`: how long rates are searched and proved, where a latency bound is given."""
    folder = Folder(order.out)
    folder.prepare(order.resume)
    budget = Budget(order.budget_s)
    news = ClimbNews(progress, budget)
    try:
        job = prepared(order, news)
    except BaseException:
        folder.abandon()
        raise
    times = times or LevelTimes()
    if order.latency:
        budget.keep_for_the_end(times.usual_s)
    with Processes(
        job.subject,
        job.workload,
        order.goal,
        job.hardware,
        folder.work,
        measured=job.measured,
        bounds=order.bounds,
        latency=order.latency or None,
        trace=job.trace if order.latency else None,
    ) as bench:
        starts = default_states()
        first = FirstAnswer(job, starts[0])
        search = ClimbSearch(
            job.facts,
            bench,
            budget,
            Options(order.rounds, order.quality, (MOVES,)),
            Finished(folder.work / "finished.json"),
            news,
            starts=starts,
            guess=first.together,
        )
        climb = search.run()
        climb.notes += first.notes
        result = finish(job, climb, bench, folder, budget, news, times)
        if climb.measured and not climb.is_stopped:
            remember_answer(first.came_to(climb))
        return result


def finish(
    job: ClimbJob,
    result: ClimbProgress,
    bench: Processes,
    folder: Folder,
    budget: Budget,
    progress: Progress | None,
    times: LevelTimes,
) -> Climb:
    """The recipe that holds the latency bound, where there is one; the folder, and the last
    measurements, of the very files that lie there.
    """
    levels = None
    if job.order.latency and not result.is_stopped:
        levels = LevelSearch(job, result, bench, budget, times, progress).run()
    saved = save_best(job, result, bench, folder)
    last = LastComparison()
    try:
        if not result.is_stopped:
            if progress is not None:
                progress("before and after, in turns", 0, 1)
            last = measure_last(job, result, saved, bench, budget)
    except KeyboardInterrupt:
        result.is_stopped = True
        result.notes.append("stopped by Ctrl-C before the last comparison")
    except WorkerError as error:
        result.notes.append(f"the last comparison failed: {error}")
    peer = None
    if job.peer is not None:
        peer = peer_figures(job, job.peer, result, bench, saved, budget, times, progress)
    ladder = explain(job, result, bench, budget, progress)
    climb = climb_of(job, result, saved, last, ladder, bench.ledger, budget, folder)
    climb = replace(climb, levels=levels, peer=peer)
    write_folder(job, climb, folder, bench, saved, last)
    remember(outcomes_to_remember(result.measured, job))
    return climb


def save_best(
    job: ClimbJob, progress: ClimbProgress, bench: Processes, folder: Folder
) -> ClimbState:
    """The checkpoint and the recipe into the folder; the state that they are."""
    best, path = progress.best, job.subject.path
    if path is None:
        folder.write_json("checkpoint.json", {"shape": job.subject.shape})
        recipe = saved_recipe(progress.observation.filled, in_checkpoint=False)
        recipe.save(folder.path)
        return ClimbState(recipe, best.loop)
    in_checkpoint = best.folder is not None
    if best.folder is not None:
        folder.take(Path(best.folder), move=False)
    elif best.recipe.scheme is not None and not progress.is_stopped:
        written = folder.work / "checkpoint"
        shutil.rmtree(written, ignore_errors=True)
        bench.write_codes(best, written, progress.observation.plain_shapes)
        folder.take(written, move=True)
        in_checkpoint = True
    else:  # a climb that was stopped leaves the scheme in the recipe: it is applied when loaded
        folder.link(path)
    recipe = saved_recipe(progress.observation.filled, in_checkpoint)
    recipe.save(folder.path)
    return ClimbState(recipe, best.loop, str(folder.path.resolve()))


def peer_figures(
    job: ClimbJob,
    peer: PeerMet,
    result: ClimbProgress,
    bench: Processes,
    saved: ClimbState,
    budget: Budget,
    times: LevelTimes,
    progress: Progress | None,
) -> PeerFigures:
    """On what ours was measured on. Its figures are a comparison: a climb does not fail by them."""
    if result.is_stopped:
        return peer.without_figures("the climb was stopped before it was measured")
    if progress is not None:
        progress(f"the peer at {peer.met.endpoint.url}", 0, 1)
    bench.let_go()  # it may be on this machine
    state = saved if result.best != result.start else result.start
    workload = job.trace if job.order.latency else bench.part_of(state).of(job.workload)
    seconds = max(LEAST_PEER_S, budget.rest_s)
    try:
        with bench.ledger.timing("peer"):
            return measured_peer(peer, workload, job.order.goal, job.order.latency, seconds, times)
    except KeyboardInterrupt:
        result.is_stopped = True
        result.notes.append("stopped by Ctrl-C while the peer was measured")
        return peer.without_figures("the climb was stopped while it was measured")


def explain(
    job: ClimbJob,
    result: ClimbProgress,
    bench: Processes,
    budget: Budget,
    progress: Progress | None,
) -> list[RungOutcome]:
    """The ladder to the answer; what there is no time for is predicted."""
    steps = ladder_to(job.facts, result.observation.filled, result.best.folder)
    if progress is not None:
        progress("the ladder from the plain loop", 0, 1)
    spent = Budget(0.0) if result.is_stopped else budget
    try:
        bench.let_go()
        bench.round_s = ROUND_S
        return explained(job.facts, lengths_of(job.workload), steps, bench, spent)
    except KeyboardInterrupt:
        result.is_stopped = True
        result.notes.append("stopped by Ctrl-C while the ladder was being measured")
        return explained(job.facts, lengths_of(job.workload), steps, bench, Budget(0.0))


def measure_last(
    job: ClimbJob, progress: ClimbProgress, saved: ClimbState, bench: Processes, budget: Budget
) -> LastComparison:
    """The defaults and the answer, in rounds that take turns: of the whole workload where five fit
    into what is left; else of a part, and one run each of the whole, or of as many requests as
    there is time for, for the rates.
    """
    if progress.best == progress.start:
        return measure_defaults(job, progress, bench, budget)
    bench.let_go()
    left_s = budget.rest_s - LAST_LOOKS_S
    whole_s = sum(
        job.workload.num_output_tokens / figures.output_tokens_per_s
        for figures in (progress.start_observation.figures, progress.observation.figures)
        if figures is not None
    )
    fits = MIN_ROUNDS if left_s == math.inf else left_s / max(whole_s, 1e-6)
    rounds, notes = [list[float](), list[float]()], list[str]()
    total: Speedup | None = None
    if fits < MIN_ROUNDS:
        spare_s = left_s - whole_s if fits >= 1 else left_s / 2
        bench.round_s = min(LONGEST_ROUND_S, max(ROUND_S, spare_s / (4 * MIN_ROUNDS)))
        total = bench.compare(progress.start, saved, _has_least_rounds)
        notes.append(_rounds_note(job, progress, saved, bench))
    part = largest_part(job, progress, fits)
    if part is not None:
        num_rounds = MIN_ROUNDS if fits >= MIN_ROUNDS else 1
        rounds = list(bench.compare_part(progress.start, saved, part, num_rounds))
        notes.append(_rates_note(job, progress, part, num_rounds))
    if len(rounds[0]) >= MIN_ROUNDS:
        total = speedup_of(*rounds)
    before, after = bench.figures(progress.start), bench.figures(saved)
    after_observation = bench.look(saved)
    curves: list[tuple[CurvePoint, ...]] = []
    for state, name in ((progress.start, "the defaults"), (saved, "the answer")):
        if budget.rest_s < 2 * CURVE_S:
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
        before=before,
        after=after,
        after_observation=after_observation,
        before_curve=before_curve,
        after_curve=after_curve,
        words=tuple(notes),
    )


def measure_defaults(
    job: ClimbJob, progress: ClimbProgress, bench: Processes, budget: Budget
) -> LastComparison:
    """They are the answer: their rate on the whole workload, or on as much as there is time for."""
    state, same = progress.start, progress.observation.figures
    assert same is not None, "rounds were run"
    whole_s = job.workload.num_output_tokens / same.output_tokens_per_s
    part = largest_part(job, progress, (budget.rest_s - LAST_LOOKS_S / 2) / whole_s)
    if part is None:
        return LastComparison(before=same, after=same)
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
