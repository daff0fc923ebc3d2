"""What a study came to, as one JSON-ready document: the terminal and the page are drawn from it.

document = study_document(loop, config)
document["best"]["point"], document["importance"]
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ridgeline.tuning.searching.halving import TrialState
from ridgeline.tuning.searching.search import SearchLoop
from ridgeline.tuning.searching.surrogate import Surrogate


def study_document(loop: SearchLoop, measure: str = "held-out loss") -> dict[str, Any]:
    """`measure`: what is judged by, the less the better."""
    order, trials = loop.order, loop.trials
    surrogate = Surrogate(order.space, order.rungs, trials, order.seed, keeps_all=True)
    best = loop.best
    first = next((trial for trial in trials if trial.point in order.firsts), None)
    expected = surrogate.expected()
    seconds = loop.journal.seconds()
    return {
        "measure": measure,
        "best": None if best is None else _trial(best, expected, seconds),
        "first": None if first is None else _trial(first, expected, seconds),
        "shares": list(order.rungs.shares),
        "trials": [_trial(trial, expected, seconds) for trial in trials],
        "num_whole": sum(t.is_open and t.reached == order.rungs.num for t in trials),
        "num_diverged": sum(trial.is_diverged for trial in trials),
        "num_failed": sum(not trial.is_open and not trial.is_diverged for trial in trials),
        "used_runs": loop.used_runs,
        "seconds": sum(seconds),
        "importance": surrogate.importance(),
        "responses": {
            name: [[value, loss] for value, loss in values]
            for name, values in surrogate.responses().items()
        },
        "edges": _edges(loop),
    }


def _trial(
    trial: TrialState, expected: Mapping[int, float], seconds: list[float]
) -> dict[str, Any]:
    return {
        "number": trial.number,
        "point": trial.point,
        "losses": [loss if math.isfinite(loss) else None for loss in trial.losses],
        "expected": expected.get(trial.number) if trial.is_open else None,
        "seconds": seconds[trial.number],
        "problem": trial.problem or None,
        "diverged": trial.is_diverged,
    }


def _edges(loop: SearchLoop) -> list[str]:
    """Ranges of numbers at whose end the best lies: it may lie beyond."""
    best = loop.best
    if best is None:
        return []
    result = []
    for name, choices in loop.order.space.entries:
        place = choices.place(best.point[name])
        if len(place) == 1 and not 0.05 < place[0] < 0.95 and len(choices.some(3)) > 1:
            result.append(name)
    return result
