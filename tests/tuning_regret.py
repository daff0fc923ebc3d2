"""How far from a grid's best a search ends that may do a tenth of the grid's work: searches of many
seeds, replayed over the table of tuning_grid.py; and Optuna's samplers with its pruners over the
same table, with the same work. Regret is a share of the way from the grid's best loss to its
median.

    PYTHONPATH=.:tests python -m tuning_regret results/looks-tuning-table-*.json --save results
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import optuna

from ridgeline.tuning.searching.halving import Rungs
from ridgeline.tuning.searching.journal import journal_in_memory
from ridgeline.tuning.searching.search import (
    JobResult,
    SearchBudget,
    SearchLoop,
    SearchOrder,
    TrialJob,
)
from ridgeline.tuning.searching.space import OneOf, Point, SearchSpace

SHARE = 0.1  # of the grid's work


class TableTrials:
    """Runs that were done before."""

    num_parallel = 1

    def __init__(self, document: dict[str, Any]) -> None:
        self.shares = document["shares"]
        self.points: list[Point] = [json.loads(key) for key in document["losses"]]
        self.losses = {
            _key(point): row
            for point, row in zip(self.points, document["losses"].values(), strict=True)
        }

    @property
    def space(self) -> SearchSpace:
        values = {name: dict.fromkeys(p[name] for p in self.points) for name in self.points[0]}
        return SearchSpace(tuple((name, OneOf(tuple(each))) for name, each in values.items()))

    def loss(self, point: Point, share: float) -> float:
        places = [index for index, own in enumerate(self.shares) if math.isclose(own, share)]
        loss = self.losses[_key(point)][places[0]]
        return math.inf if loss is None else float(loss)

    def run(self, jobs: Sequence[TrialJob]) -> Iterator[JobResult]:
        for job in jobs:
            loss = self.loss(job.point, job.share)
            is_lost = not math.isfinite(loss)
            yield JobResult(job.number, loss, 0.0, "diverged" if is_lost else "", is_lost)


def _key(point: Point) -> str:
    return json.dumps(point, sort_keys=True)


class Spread:
    """From the grid's best to its median."""

    def __init__(self, table: TableTrials) -> None:
        finals = [table.loss(point, 1.0) for point in table.points]
        self.best, self.middle = min(finals), statistics.median(finals)

    def regret(self, loss: float) -> float:
        return (loss - self.best) / (self.middle - self.best)


def own_regret(table: TableTrials, seed: int) -> float:
    order = SearchOrder(table.space, SearchBudget(SHARE * len(table.points)), Rungs(), seed)
    loop = SearchLoop(journal_in_memory(table.space), order, table)
    loop.run()
    assert loop.best is not None
    return Spread(table).regret(loop.best.losses[-1])


def by_chance(table: TableTrials, seed: int) -> float:
    """The same work spent on whole runs of random points."""
    draws = random.Random(seed).sample(table.points, int(SHARE * len(table.points)))
    return Spread(table).regret(min(table.loss(point, 1.0) for point in draws))


# Optuna

Make = Callable[[int], Any]
samplers, pruners = optuna.samplers, optuna.pruners
SAMPLERS: dict[str, Make] = {
    "TPE": lambda seed: samplers.TPESampler(seed=seed, multivariate=True),
}
if find_spec("scipy") is not None:  # which Ridgeline does not need, and its GP does
    SAMPLERS["GP"] = lambda seed: samplers.GPSampler(seed=seed)
PRUNERS: dict[str, Any] = {
    "whole runs": None,
    "successive halving": lambda: pruners.SuccessiveHalvingPruner(
        min_resource=1, reduction_factor=3
    ),
    "Hyperband": lambda: pruners.HyperbandPruner(
        min_resource=1, max_resource=9, reduction_factor=3
    ),
}
MOST_ASKED = 2000  # a point that comes again costs nothing


def optuna_regret(table: TableTrials, sampler: Make, pruner: Any, seed: int) -> float:
    study = optuna.create_study(
        study_name=str(seed),  # of which Hyperband takes its brackets
        sampler=sampler(seed),
        pruner=None if pruner is None else pruner(),
        direction="minimize",
    )
    left, shares = SHARE * len(table.points) + 1e-9, Rungs().shares
    done: dict[str, int] = {}  # rungs that a point has reached
    best = math.inf
    for _ in range(MOST_ASKED):
        trial = study.ask()
        point = suggested(trial, table.space)
        reached, is_pruned = done.get(_key(point), 0), False
        for rung, share in enumerate(shares):
            cost = Rungs().cost(rung, rung + 1) if rung >= reached else 0.0
            if cost > left:
                return Spread(table).regret(best)
            left -= cost
            done[_key(point)] = max(done.get(_key(point), 0), rung + 1)
            loss = table.loss(point, share)
            trial.report(loss if math.isfinite(loss) else 1e3, 3**rung)
            if pruner is not None and rung + 1 < len(shares) and trial.should_prune():
                is_pruned = True
                break
        if is_pruned:
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            continue
        best = min(best, loss)
        study.tell(trial, loss if math.isfinite(loss) else 1e3)
    return Spread(table).regret(best)


def suggested(trial: Any, space: SearchSpace) -> Point:
    """Numbers by their places, so that their order is known."""
    point = Point()
    for name, choices in space.entries:
        assert isinstance(choices, OneOf)
        if choices.is_ordered:
            point[name] = choices.values[trial.suggest_int(name, 0, len(choices.values) - 1)]
        else:
            point[name] = trial.suggest_categorical(name, choices.values)
    return point


def summary_of(regrets: Sequence[float]) -> dict[str, float]:
    return {
        "mean": round(statistics.fmean(regrets), 4),
        "median": round(statistics.median(regrets), 4),
        "p90": round(sorted(regrets)[math.ceil(0.9 * len(regrets)) - 1], 4),
        "worst": round(max(regrets), 4),
    }


def studied(path: Path, seeds: int, peer_seeds: int) -> dict[str, Any]:
    document = json.loads(path.read_text())
    table = TableTrials(document)
    own = [own_regret(table, seed) for seed in range(seeds)]
    methods = {"tune search": summary_of(own) | {"seeds": seeds}}
    print(path.name, "tune search", methods["tune search"], flush=True)
    chance = [by_chance(table, seed) for seed in range(1000)]
    methods["random whole runs"] = summary_of(chance) | {"seeds": 1000}
    for name, sampler in SAMPLERS.items():
        for other, pruner in PRUNERS.items():
            regrets = [optuna_regret(table, sampler, pruner, each) for each in range(peer_seeds)]
            label = f"Optuna {name}, {other}"
            methods[label] = summary_of(regrets) | {"seeds": peer_seeds}
            print(path.name, label, methods[label], flush=True)
    return {
        "num_points": len(table.points),
        "methods": methods,
        "regrets": [round(value, 4) for value in own],
        "grid": document["command"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("grids", type=Path, nargs="+")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--peer-seeds", type=int, default=20)
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    words = [Path(word).name for word in sys.argv[1:]]
    summary = {
        "what": "regret of searches at 10% of a grid's work, of its best-to-median spread",
        "command": " ".join(["python -m tuning_regret", *words]),
        "date": datetime.now(UTC).date().isoformat(),
        "optuna": optuna.__version__,
        "tables": {path.stem: studied(path, args.seeds, args.peer_seeds) for path in args.grids},
    }
    if args.save is not None:
        name = f"looks-tuning-regret-{summary['date']}.json"
        (args.save / name).write_text(json.dumps(summary, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
