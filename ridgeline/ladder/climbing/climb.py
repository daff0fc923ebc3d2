"""`optimize` for models of our families, on the user's workload: the engine's defaults and a guess
first, then what is faster beyond noise and inside the quality bound; before and after on the whole
workload; the ladder that explains it; the folder with checkpoint, recipe, records and report.

    climb = climb_model(ClimbOrder("demo", out=Path("out"), budget_s=240.0))
    print(climb)
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

from ridgeline.ladder.climbing.last_comparison import (
    LONGEST_ROUND_S,
    LastComparison,
    end_s,
    measure_last,
    measured_state,
    rates_by_model,
)
from ridgeline.ladder.climbing.levels import LevelSearch
from ridgeline.ladder.climbing.writing import (
    climb_of,
    outcomes_to_remember,
    write_folder,
)
from ridgeline.ladder.guessing.answer import FirstAnswer, default_states
from ridgeline.ladder.guessing.earlier import remember_answer
from ridgeline.ladder.guessing.explaining import (
    FIRST_STEP_S,
    ROUNDS,
    explained,
    has_rounds,
    ladder_to,
)
from ridgeline.ladder.measuring.held_rate import LevelTimes
from ridgeline.ladder.measuring.peer import PeerMet, measured_peer
from ridgeline.ladder.measuring.process import WorkerError
from ridgeline.ladder.order import ClimbJob, ClimbOrder, lengths_of, prepared
from ridgeline.ladder.outcome import PeerFigures, RungOutcome, Speedup
from ridgeline.ladder.processes.bench_processes import ROUND_S, Processes
from ridgeline.ladder.reporting.folder import Folder, saved_recipe
from ridgeline.ladder.reporting.result import Climb
from ridgeline.ladder.rungs import MOVES
from ridgeline.ladder.searching.budget import Budget, plain_loop_s
from ridgeline.ladder.searching.finished import Finished
from ridgeline.ladder.searching.news import ClimbNews
from ridgeline.ladder.searching.progress import ClimbProgress, Options
from ridgeline.ladder.searching.search import ClimbSearch
from ridgeline.ladder.state import ClimbState, baseline
from ridgeline.profiling.predicting.accuracy import remember
from ridgeline.progress import Progress

LEAST_PEER_S = 20.0  # that another server is measured, whatever the budget


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
        first = FirstAnswer(job)
        defaults = default_states()
        expected = first.expected(defaults[0])
        on_gpu = job.subject.device != "cpu"
        if on_gpu and not order.resume:
            states = [defaults[0], expected]
            bench.compile_ahead(states[:1] if expected == defaults[0] else states)
            if expected != defaults[0]:
                bench.load_ahead(expected)
        search = ClimbSearch(
            job.facts,
            bench,
            budget,
            Options(order.rounds, order.quality, (MOVES,)),
            Finished(folder.work / "finished.json"),
            news,
            starts=defaults,
            guess=first.together,
            end_s=partial(end_s, job, bench),
            look_first=not on_gpu,
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
    share = None if last.is_by_model else last.share_of_defaults
    if share is not None and share < 1.0 and not job.order.latency:
        leave_defaults(result, share)
        saved = save_best(job, result, bench, folder)
        last = LastComparison(before=last.before, after=last.before, words=last.words)
    if last.before is None and not job.order.latency:
        last = rates_by_model(job, result, bench)
    peer = None
    if job.peer is not None:
        peer = peer_figures(job, job.peer, result, bench, saved, budget, times, progress)
    plain = measured_plain(job, result, saved, bench, budget, progress)
    ladder = explain(job, result, bench, budget, progress)
    climb = climb_of(job, result, saved, last, ladder, bench.ledger, budget, folder)
    climb = replace(climb, levels=levels, peer=peer, plain=plain)
    write_folder(job, climb, folder, bench, saved, last)
    remember(outcomes_to_remember(result.measured, job))
    return climb


def leave_defaults(progress: ClimbProgress, share: float) -> None:
    """What was faster in rounds is slower on the workload itself: an answer is never that."""
    why = f"in the last runs it came to {share:.2f}x of the defaults, which are left instead"
    progress.notes.append(f"what was kept: {why}")
    progress.outcomes = [
        replace(each, status="dropped", reason=f"{each.reason}; {why}")
        if each.status == "kept"
        else each
        for each in progress.outcomes
    ]
    progress.best, progress.observation = progress.start, progress.start_observation


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
    state = measured_state(result, saved)
    workload = job.trace if job.order.latency else bench.part_of(state).of(job.workload)
    seconds = max(LEAST_PEER_S, budget.rest_s)
    try:
        with bench.ledger.timing("peer"):
            return measured_peer(peer, workload, job.order.goal, job.order.latency, seconds, times)
    except KeyboardInterrupt:
        result.is_stopped = True
        result.notes.append("stopped by Ctrl-C while the peer was measured")
        return peer.without_figures("the climb was stopped while it was measured")


def measured_plain(
    job: ClimbJob,
    result: ClimbProgress,
    saved: ClimbState,
    bench: Processes,
    budget: Budget,
    progress: Progress | None,
) -> Speedup | None:
    """The answer over the plain loop in a few short rounds; None where there is no time for it."""
    answer = measured_state(result, saved)
    is_kept = plain_loop_s(budget, result.opening_s) > 0
    needed_s = result.opening_s if is_kept else max(FIRST_STEP_S, 2 * result.opening_s)
    if result.is_stopped or budget.rest_s < needed_s:
        return None
    if progress is not None:
        progress("the plain loop beside the answer", 0, 1)
    # As long as there is time for, and once more to warm up: the shorter, the less attention.
    spare_s = (budget.rest_s - result.opening_s) / (2 * (ROUNDS + 1))
    bench.round_s = min(LONGEST_ROUND_S, max(ROUND_S, spare_s))
    if answer != result.start:
        bench.drop(result.start)
    try:
        return bench.compare(baseline(job.hardware.device), answer, has_rounds)
    except WorkerError as error:
        result.notes.append(f"the plain loop could not be measured: {error}")
    except KeyboardInterrupt:
        result.is_stopped = True
        result.notes.append("stopped by Ctrl-C while the plain loop was measured")
    return None


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
