"""The search: waves of runs until the budget is spent, each noted before it begins. A wave has as
many as run at once, and a few at least.

The user's own settings come first where the space has them. What runs the trials is the caller's:
here, in processes, on Ray, or a table of results in tests.

    loop = SearchLoop(journal, order, runner)
    loop.run()
    loop.best
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ridgeline.errors import NumericsError, RequestError, UsageError
from ridgeline.progress import clock_words
from ridgeline.tuning.searching.halving import Move, Room, Rungs, TrialState
from ridgeline.tuning.searching.journal import StudyJournal
from ridgeline.tuning.searching.space import Point, SearchSpace
from ridgeline.tuning.searching.surrogate import Surrogate

TOGETHER = 3  # moves at least that are decided at once: up to so many trials at once, one study
FIRST_TRIALS = 6  # even over the space, before anything is expected of any


@dataclass(frozen=True)
class TrialJob:
    """Take a trial to its next rung."""

    number: int
    point: Point
    share: float  # of a whole run, to be reached


@dataclass(frozen=True)
class JobResult:
    number: int
    loss: float
    seconds: float
    problem: str = ""  # it cannot go on
    is_diverged: bool = False


class TrialRunner(Protocol):
    num_parallel: int  # trials that it runs at once

    def run(self, jobs: Sequence[TrialJob]) -> Iterator[JobResult]:
        """Results as they come; a job may be one that was cut off before."""


@dataclass(frozen=True)
class SearchBudget:
    """One of the two."""

    runs: float | None = None  # as much work as so many whole runs
    seconds: float | None = None
    shorter: str = "--steps for shorter runs"  # what makes a trial shorter, for advice

    def __post_init__(self) -> None:
        if (self.runs is None) == (self.seconds is None):
            raise UsageError("how long does the search go? give --budget TIME or --runs N")
        if self.runs is not None and not self.runs >= 1:
            raise UsageError(
                f"--runs is {self.runs:g}, too small for one trial; give at least 1, and 10 or "
                "more for a search"
            )


@dataclass(frozen=True)
class SearchOrder:
    space: SearchSpace
    budget: SearchBudget
    rungs: Rungs = field(default_factory=Rungs)
    seed: int = 0
    firsts: tuple[Point, ...] = ()  # tried before any other: the user's own settings


OnNews = Callable[["SearchLoop"], None]


class SearchLoop:
    def __init__(
        self,
        journal: StudyJournal,
        order: SearchOrder,
        runner: TrialRunner,
        on_news: OnNews = lambda loop: None,
    ) -> None:
        self.journal, self.order, self.runner = journal, order, runner
        self._on_news = on_news
        self.expected: dict[int, float] = {}  # losses at the end, as they are expected now

    @property
    def trials(self) -> list[TrialState]:
        return self.journal.trials()

    @property
    def best(self) -> TrialState | None:
        """Of the runs that came to their end, the one with the lowest loss."""
        return best_of(self.trials, self.order.rungs)

    @property
    def used_runs(self) -> float:
        """Work that was done, in whole runs."""
        rungs = self.order.rungs
        return sum(rungs.cost(0, trial.reached) for trial in self.trials if trial.reached)

    @property
    def run_s(self) -> float | None:
        """Of a whole run, by those that were worked on to their goals; None at the beginning."""
        rungs, seconds = self.order.rungs, self.journal.seconds()
        going = [trial for trial in self.trials if trial.is_open and trial.reached]
        used = sum(rungs.cost(0, trial.reached) for trial in going)
        return sum(seconds[trial.number] for trial in going) / used if used else None

    @property
    def left_runs(self) -> float:
        """What the budget still has, in whole runs."""
        budget, used = self.order.budget, self.used_runs
        if budget.runs is not None:
            return budget.runs - used
        assert budget.seconds is not None, "SearchBudget"
        run_s = self.run_s
        if run_s is None:
            return math.inf
        spent = sum(self.journal.seconds())
        return (budget.seconds * self.runner.num_parallel - spent) / max(run_s, 1e-9)

    def run(self) -> None:
        self._work_off()
        while self._decide():
            self._work_off()

    def _decide(self) -> bool:
        """Note the next wave; False where nothing more fits."""
        order, trials = self.order, self.trials
        if trials and all(trial.problem for trial in trials):
            return False  # of so many as were begun together: it is not their settings
        self._check_budget(trials)
        surrogate = Surrogate(order.space, order.rungs, trials, order.seed)
        self.expected = surrogate.expected()
        moves = self._moves(surrogate, Room(order.rungs, self.left_runs))
        if not moves:
            return False
        self.journal.begin(moves)
        self.journal.fill()
        return True

    def _moves(self, surrogate: Surrogate, room: Room) -> list[Move]:
        """At first runs that are even over the space, the user's own settings before them; alone
        where the time that a run takes is not known.
        """
        begun = len(surrogate.trials)
        if begun < FIRST_TRIALS:
            is_timed = begun == 0 and self.order.budget.seconds is not None
            moves = self._first_moves(surrogate, 1 if is_timed else FIRST_TRIALS - begun, room)
            if moves:
                return moves
        moves = list[Move]()
        for _ in range(max(TOGETHER, self.runner.num_parallel)):
            move = surrogate.best_move(room)
            if move is None:
                break
            room.take(move)
            surrogate.imagine(move)
            moves.append(move)
        return moves

    def _first_moves(self, surrogate: Surrogate, count: int, room: Room) -> list[Move]:
        tried = [trial.point for trial in surrogate.trials]
        firsts = [point for point in self.order.firsts if point not in tried]
        spread = [point for point in surrogate.spread(count, firsts) if point not in firsts]
        moves = list[Move]()
        for point in [*firsts, *spread][:count]:
            if room.allows(0, 1 if moves else 0, is_leader=not moves):
                moves.append(Move(point, 1))
                room.take(moves[-1])
        return moves

    def _work_off(self) -> None:
        """What the wave decided and is not done."""
        wave = self.journal.wave
        if wave is None:
            return
        trials = self.trials
        jobs = [
            TrialJob(trial, trials[trial].point, self.order.rungs.shares[goal - 1])
            for trial, goal in wave.all_goals
            if trials[trial].is_open and trials[trial].reached < goal
        ]
        for result in self.runner.run(jobs):
            self._note(result)
            self._on_news(self)
        for trial in self.trials:  # a kill may have come between a trial's last rung and its end
            if trial.is_open and trial.reached == self.order.rungs.num:
                self.journal.end(trial.number)

    def _note(self, result: JobResult) -> None:
        self.journal.note(result.number, result.loss, result.seconds)
        if result.problem:
            self.journal.give_up(result.number, result.problem, is_diverged=result.is_diverged)

    def _check_budget(self, trials: Sequence[TrialState]) -> None:
        """Once the first trial has shown what a run takes."""
        budget, run_s = self.order.budget, self.run_s
        if budget.seconds is None or run_s is None or best_of(trials, self.order.rungs):
            return
        if run_s > budget.seconds and not any(trial.reached > 1 for trial in trials):
            raise UsageError(
                f"--budget is {clock_words(budget.seconds)} (minutes:seconds), too small for one "
                f"trial: a whole run takes about {clock_words(run_s)}; give more, or "
                f"{budget.shorter}"
            )


def best_of(trials: Sequence[TrialState], rungs: Rungs) -> TrialState | None:
    whole = [trial for trial in trials if trial.is_open and trial.reached == rungs.num]
    return min(whole, key=lambda trial: (trial.losses[-1], trial.number), default=None)


def check_any(trials: Sequence[TrialState]) -> None:
    """A study in which every trial failed says why, instead of an answer."""
    problems = [trial.problem for trial in trials]
    if not trials or not all(problems):
        return
    kind = NumericsError if all(trial.is_diverged for trial in trials) else RequestError
    raise kind(
        f"all {len(trials)} trials were given up; the first: {problems[0]}; give other ranges"
    )
