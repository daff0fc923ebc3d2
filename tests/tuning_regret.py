"""How far from a grid's best a search ends that may do a tenth of the grid's work: searches of many
seeds, replayed over the table of tuning_grid.py. Regret is a share of the way from the grid's best
loss to its median.

    PYTHONPATH=.:tests python -m tuning_regret grid.json --save results
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

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


def regrets(table: TableTrials, num_seeds: int) -> list[float]:
    finals = [table.loss(point, 1.0) for point in table.points]
    best, middle = min(finals), statistics.median(finals)
    result = []
    for seed in range(num_seeds):
        budget = SearchBudget(runs=SHARE * len(table.points))
        order = SearchOrder(table.space, budget, Rungs(), seed)
        loop = SearchLoop(journal_in_memory(table.space), order, table)
        loop.run()
        assert loop.best is not None
        result.append((loop.best.losses[-1] - best) / (middle - best))
        print(f"seed {seed}: {result[-1]:.4f}, {loop.best.point}", flush=True)
    return result


def by_chance(table: TableTrials, num_seeds: int) -> float:
    """The same work spent on whole runs of random points."""
    finals = [table.loss(point, 1.0) for point in table.points]
    best, middle = min(finals), statistics.median(finals)
    count = int(SHARE * len(finals))
    draws = [min(random.Random(seed).sample(finals, count)) for seed in range(num_seeds)]
    return statistics.fmean((draw - best) / (middle - best) for draw in draws)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("grid", type=Path)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()
    document = json.loads(args.grid.read_text())
    table = TableTrials(document)
    values = regrets(table, args.seeds)
    summary = {
        "what": "regret of `tune search` at 10% of a grid's work, of its best-to-median spread",
        "command": " ".join(["python -m tuning_regret", *sys.argv[1:]]),
        "date": datetime.now(UTC).date().isoformat(),
        "num_points": len(table.points),
        "seeds": args.seeds,
        "mean": round(statistics.fmean(values), 4),
        "median": round(statistics.median(values), 4),
        "worst": round(max(values), 4),
        "random_points_mean": round(by_chance(table, 1000), 4),
        "regrets": [round(value, 4) for value in values],
        "grid": document,
    }
    print({name: value for name, value in summary.items() if name not in ("grid", "regrets")})
    if args.save is not None:
        name = f"looks-tuning-regret-{summary['date']}.json"
        (args.save / name).write_text(json.dumps(summary, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
