"""Which runs go on: successive halving over shares of a run's length, in waves. Plain integers and
floats, so that it runs in microseconds and a study that was killed decides the same again.

A wave promotes the best of every rung that are due, or else begins new runs. Toward the end of the
budget nothing new is begun: the runs that are expected to end best are taken to their end.

    rungs = Rungs(keep=3, num=3)            # shares 1/9, 1/3, 1
    wave = next_wave(trials, rungs, left=4.0, expected={3: 3.12, 5: 3.2})
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ridgeline.errors import UsageError
from ridgeline.tuning.searching.space import Point

SLACK = 1e-9  # of sums of shares


@dataclass(frozen=True)
class Rungs:
    """Shares of a run's length after which it is judged: the last is 1."""

    keep: int = 3  # one of so many goes on
    num: int = 3

    def __post_init__(self) -> None:
        if self.keep < 2:
            raise UsageError(
                f"--one-in is {self.keep}: one trial of so many goes on; give at least 2"
            )
        if self.num < 1:
            raise UsageError(f"--rungs is {self.num}; give at least 1")

    @property
    def shares(self) -> tuple[float, ...]:
        return tuple(float(self.keep) ** (number + 1 - self.num) for number in range(self.num))

    def cost(self, reached: int, goal: int) -> float:
        """In whole runs, of going on from so many rungs to `goal`."""
        before = self.shares[reached - 1] if reached else 0.0
        return self.shares[goal - 1] - before


@dataclass(frozen=True)
class TrialState:
    """A run of the study, as far as it has come."""

    number: int
    point: Point
    losses: tuple[float, ...] = ()  # at the rungs it has reached
    problem: str = ""  # why it does not go on: diverged, failed
    is_diverged: bool = False

    @property
    def reached(self) -> int:
        return len(self.losses)

    @property
    def is_open(self) -> bool:
        return not self.problem


@dataclass(frozen=True)
class Wave:
    """Runs that are worked on together: new ones, and trials that go on to a rung."""

    number: int
    num_new: int
    goals: tuple[tuple[int, int], ...] = ()  # trial, rungs to reach

    def to_json(self) -> dict[str, Any]:
        return {"number": self.number, "num_new": self.num_new, "goals": list(self.goals)}


def next_wave(
    trials: Sequence[TrialState],
    rungs: Rungs,
    *,
    number: int,
    left: float,  # whole runs that the budget still has
    expected: Mapping[int, float],  # loss at the end, of open trials
    width: int,  # new runs at once
    most: int | None = None,  # trials in all
) -> Wave | None:
    """None where nothing more fits."""
    goals = _due(trials, rungs, left, expected)
    if goals:
        return Wave(number, 0, goals)
    reserve = _reserve([t.reached for t in trials if t.is_open and t.reached], rungs)
    room = width if left == math.inf else math.floor((left - reserve + SLACK) / rungs.cost(0, 1))
    if most is not None:
        room = min(room, most - len(trials))
    if min(room, width) > 0:
        return Wave(number, min(room, width))
    goals = _last(trials, rungs, left, expected)
    return Wave(number, 0, goals) if goals else None


def _due(
    trials: Sequence[TrialState], rungs: Rungs, left: float, expected: Mapping[int, float]
) -> tuple[tuple[int, int], ...]:
    """The best of each rung, of those at its top that have not gone on; the highest rung first. A
    run that can be taken to its end with what is left there must always be.
    """
    goals: list[tuple[int, int]] = []
    reached = {trial.number: trial.reached for trial in trials if trial.is_open and trial.reached}
    for rung in range(rungs.num - 1, 0, -1):
        there = [trial for trial in trials if trial.reached >= rung]
        gone = sum(trial.reached > rung for trial in there)
        waiting = [trial for trial in there if trial.is_open and trial.reached == rung]
        waiting.sort(key=lambda trial: (expected[trial.number], trial.number))
        for trial in waiting[: max(0, len(there) // rungs.keep - gone)]:
            cost = rungs.cost(rung, rung + 1)
            behind = reached | {trial.number: rung + 1}
            if cost + _reserve(list(behind.values()), rungs) <= left + SLACK:
                goals.append((trial.number, rung + 1))
                left, reached = left - cost, behind
    return tuple(goals)


def _reserve(reached: Sequence[int], rungs: Rungs) -> float:
    """What it takes to bring one of the runs to its end, which a study must not be without."""
    return rungs.cost(max(reached, default=1), rungs.num)


def _last(
    trials: Sequence[TrialState], rungs: Rungs, left: float, expected: Mapping[int, float]
) -> tuple[tuple[int, int], ...]:
    """The most promising run that can still be taken to its end: one at a time, since each result
    changes what is expected of the others.
    """
    waiting = [
        trial
        for trial in trials
        if trial.is_open
        and 0 < trial.reached < rungs.num
        and rungs.cost(trial.reached, rungs.num) <= left + SLACK
    ]
    if not waiting:
        return ()
    best = min(waiting, key=lambda trial: (expected[trial.number], trial.number))
    return ((best.number, best.reached + 1),)
