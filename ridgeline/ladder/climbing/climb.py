"""`optimize` for models of our families: from the naive fp32 loop up the ladder, on the user's
workload, keeping what is faster beyond noise and inside the quality bound; then the folder with
checkpoint, recipe, records and report.

    climb = climb_model(ClimbOrder("demo", out=Path("out"), budget_s=240.0))
    print(climb)
"""

from __future__ import annotations

import shutil
from pathlib import Path

from ridgeline.ladder.climbing.bench_processes import CURVE_S, ROUND_S, Processes
from ridgeline.ladder.climbing.budget import Budget
from ridgeline.ladder.climbing.finished import Finished
from ridgeline.ladder.climbing.order import ClimbJob, ClimbOrder, prepared
from ridgeline.ladder.climbing.progress import ClimbProgress, Options
from ridgeline.ladder.climbing.search import ClimbSearch
from ridgeline.ladder.climbing.writing import (
    LastComparison,
    climb_of,
    outcomes_to_remember,
    write_folder,
)
from ridgeline.ladder.measuring.process import WorkerError
from ridgeline.ladder.measuring.rounds import MIN_ROUNDS
from ridgeline.ladder.outcome import CurvePoint
from ridgeline.ladder.reporting.folder import Folder, saved_recipe
from ridgeline.ladder.reporting.result import Climb
from ridgeline.ladder.state import ClimbState
from ridgeline.profiling.predicting.accuracy import remember
from ridgeline.progress import Progress

LONGEST_ROUND_S = 7.0  # of the last comparison
LAST_LOOKS_S = 2 * CURVE_S + 20.0  # curves, and loading both sides


def climb_model(order: ClimbOrder, progress: Progress | None = None) -> Climb:
    folder = Folder(order.out)
    folder.prepare(order.resume)
    budget = Budget(order.budget_s)
    job = prepared(order, progress)
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
        search = ClimbSearch(
            job.facts,
            bench,
            budget,
            Options(order.rounds, order.quality),
            Finished(folder.work / "finished.json"),
            progress,
        )
        climb = search.run()
        return finish(job, climb, bench, folder, budget, progress)


def finish(
    job: ClimbJob,
    result: ClimbProgress,
    bench: Processes,
    folder: Folder,
    budget: Budget,
    progress: Progress | None,
) -> Climb:
    """The folder, and the last measurements, of the very files that lie there."""
    saved = save_best(job, result, bench, folder)
    last = LastComparison()
    try:
        if not result.is_stopped:
            if progress is not None:
                progress("before and after, in turns", 0, 1)
            bench.round_s = last_round_s(budget)
            last = measure_last(result, saved, bench)
    except KeyboardInterrupt:
        result.is_stopped = True
        result.notes.append("stopped by Ctrl-C before the last comparison")
    except WorkerError as error:
        result.notes.append(f"the last comparison failed: {error}")
    climb = climb_of(job, result, saved, last, budget, folder)
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


def last_round_s(budget: Budget) -> float:
    """Rounds of the last comparison are as long as the budget lets them be: the nearer to the whole
    workload, the more its figures say.
    """
    rounds = 2 * (MIN_ROUNDS + 1)  # both sides; the first shows how long they are
    return min(LONGEST_ROUND_S, max(ROUND_S, (budget.rest_s - LAST_LOOKS_S) / rounds))


def measure_last(progress: ClimbProgress, saved: ClimbState, bench: Processes) -> LastComparison:
    """Before and after in the same rounds. The plain loop runs from the original."""
    if saved.loop == "naive":
        return LastComparison(
            before=progress.start_observation.figures, after=progress.observation.figures
        )
    bench.let_go()
    total = bench.compare(progress.start, saved, lambda speedup: len(speedup.before) >= MIN_ROUNDS)
    before, after = bench.figures(progress.start), bench.figures(saved)
    notes = []
    for state, name in ((progress.start, "before"), (saved, "after")):
        words = bench.part_words(state)
        if words is not None:
            notes.append(f"rounds of {name} ran {words}")
    after_observation = bench.look(saved)
    curves: list[tuple[CurvePoint, ...]] = []
    for state, name in ((progress.start, "before"), (saved, "after")):
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
