"""A search over recipes from its order to the recipe that is left: the best of the trials once more
beside the defaults, and kept only if it is faster beyond noise.

    document = search_recipes(search, job, budget, journal, folder, progress)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ridgeline.ladder.measuring.process import WorkerError
from ridgeline.ladder.order import ClimbJob
from ridgeline.ladder.outcome import Speedup
from ridgeline.ladder.processes.bench_processes import Processes
from ridgeline.ladder.recipe_search.choices import RecipeSearch, edit_of
from ridgeline.ladder.recipe_search.trials import DEFAULTS, RecipeTrials
from ridgeline.ladder.state import applied
from ridgeline.progress import Progress
from ridgeline.tuning.pages.search_page import point_words
from ridgeline.tuning.searching.halving import TrialState
from ridgeline.tuning.searching.journal import StudyJournal
from ridgeline.tuning.searching.outcome import study_document
from ridgeline.tuning.searching.search import SearchBudget, SearchLoop, SearchOrder, check_any

WORK = "work"
MEASURE = "time as a share of the defaults'"
LAST_ROUNDS = 8  # of the answer


def search_recipes(
    search: RecipeSearch,
    job: ClimbJob,
    budget: SearchBudget,
    journal: StudyJournal,
    folder: Path,
    progress: Progress | None = None,
    on_news: Callable[[SearchLoop], None] = lambda loop: None,
) -> dict[str, Any]:
    is_stopped, last = False, None
    with Processes(
        job.subject,
        job.workload,
        search.order.goal,
        job.hardware,
        folder / WORK,
        measured=job.measured,
        bounds=search.order.bounds,
    ) as bench:
        trials = RecipeTrials(bench, bench.open(DEFAULTS), judges=search.order.quality)
        order = SearchOrder(search.space, budget, search.rungs, search.seed)
        loop = SearchLoop(journal, order, trials, on_news)
        try:
            loop.run()
            if loop.best is not None and not trials.is_default(loop.best.point):
                if progress is not None:
                    progress("the best once more beside the defaults", 0, 1)
                last = confirmed(bench, loop.best)
        except KeyboardInterrupt:
            is_stopped = True
        document = study_document(loop, MEASURE)
    if not is_stopped:
        check_any(loop.trials)
    is_kept = last is not None and last.is_beyond_noise
    if is_kept and loop.best is not None:
        applied(DEFAULTS, edit_of(loop.best.point)).recipe.save(folder)
    return document | {
        "last": None if last is None else asdict(last),
        "is_kept": is_kept,
        "answer": None if is_stopped else answer_of(loop.best, last, is_kept),
        "note": note_of(last, is_kept),
        "interrupted": is_stopped,
    }


def confirmed(bench: Processes, best: TrialState) -> Speedup | None:
    """None where it does not run any more."""
    state = applied(DEFAULTS, edit_of(best.point))
    try:
        return bench.compare(DEFAULTS, state, lambda so_far: len(so_far.before) >= LAST_ROUNDS)
    except WorkerError:
        return None


def answer_of(best: TrialState | None, last: Speedup | None, is_kept: bool) -> str:
    """What is left, in words: the best of the trials may be slower than the defaults."""
    if best is None or last is None:
        return "The defaults stay: nothing better was measured."
    words = point_words(best.point)
    if is_kept:
        return f"{words}: {last.value:.2f} times as fast as the defaults."
    return f"The defaults stay; of what was tried, {words} came closest."


def note_of(last: Speedup | None, is_kept: bool) -> str:
    """How it was seen."""
    if last is None:
        return ""
    text = f"Once more beside the defaults: {last.value:.2f}x ({last.low:.2f} to {last.high:.2f})"
    if is_kept:
        return f"{text}; kept."
    return f"{text}, no faster beyond noise: the defaults stay."
