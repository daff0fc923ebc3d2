"""A study on disk: Optuna's trials in a journal of lines, and nothing else that is needed to go on.

A wave is noted whole before any of its trials begins, and what a trial found at a rung is one line,
so that a study that is killed at any moment decides again what it had decided. One search at a time
holds the folder; half a line at the journal's end is cut off. Optuna's own tools read the journal.

    with open_journal(Path("study"), {"space": space.to_json()}, space, resume=False) as journal:
        journal.begin([Move({"lr": 1e-3}, goal=1)])
        journal.note(0, loss=3.2, seconds=4.1)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgeline.errors import CheckpointError, MissingPackageError
from ridgeline.tuning.kept_folder import cut_half_line, held_folder
from ridgeline.tuning.searching.halving import Move, TrialState
from ridgeline.tuning.searching.space import Between, Choices, Point, SearchSpace

JOURNAL = "journal.jsonl"
STUDY = "search"  # its name in the journal
WAVE, POINT, RUNG, PROBLEM = "wave", "point", "rung", "problem"
SECONDS = "seconds"


@dataclass(frozen=True)
class NotedWave:
    """As it was decided."""

    number: int
    points: tuple[Point, ...]  # of new trials
    first: int  # number of the first of these
    goals: tuple[tuple[int, int], ...]  # trial, rungs to reach; the new ones' are one

    @property
    def all_goals(self) -> list[tuple[int, int]]:
        new = [(self.first + index, 1) for index in range(len(self.points))]
        return [*self.goals, *new]


class StudyJournal:
    def __init__(self, storage: Any, space: SearchSpace) -> None:
        optuna = load_optuna()
        self._optuna, self._storage = optuna, storage
        self._distributions = {name: _distribution(each) for name, each in space.entries}
        self._study = optuna.create_study(
            study_name=STUDY, storage=storage, direction="minimize", load_if_exists=True
        )

    def trials(self) -> list[TrialState]:
        return [_state(trial) for trial in self._study.get_trials(deepcopy=False)]

    @property
    def num_trials(self) -> int:
        return len(self._study.get_trials(deepcopy=False))

    def seconds(self) -> list[float]:
        """Of each trial."""
        trials = self._study.get_trials(deepcopy=False)
        return [sum(row[SECONDS] for row in _rows(trial)) for trial in trials]

    @property
    def wave(self) -> NotedWave | None:
        values = self._study.user_attrs.get(WAVE)
        if values is None:
            return None
        return NotedWave(
            values["number"],
            tuple(values["points"]),
            values["first"],
            tuple((trial, rung) for trial, rung in values["goals"]),
        )

    def begin(self, moves: Sequence[Move]) -> None:
        """A wave, in one line: from then on it is done to its end, whatever happens."""
        wave = self.wave
        values = {
            "number": 0 if wave is None else wave.number + 1,
            "points": [move.point for move in moves if move.trial is None],
            "first": self.num_trials,
            "goals": [[move.trial, move.goal] for move in moves if move.trial is not None],
        }
        self._study.set_user_attr(WAVE, values)

    def fill(self) -> None:
        """Make the trials of the wave that are not there yet."""
        wave = self.wave
        if wave is None:
            return
        for point in wave.points[self.num_trials - wave.first :]:
            self._study.enqueue_trial(point, user_attrs={POINT: point})
        waiting = self._optuna.trial.TrialState.WAITING
        for _ in self._study.get_trials(deepcopy=False, states=(waiting,)):
            self._study.ask(self._distributions)

    def note(self, number: int, loss: float, seconds: float) -> None:
        """What a trial has at the next rung."""
        trial = self._trial(number)
        rung = len(_rows(trial))
        is_known = math.isfinite(loss)
        row = {"loss": loss if is_known else None, SECONDS: seconds}
        self._storage.set_trial_user_attr(trial._trial_id, f"{RUNG}-{rung}", row)
        if is_known:  # for Optuna's tools
            self._storage.set_trial_intermediate_value(trial._trial_id, rung, loss)

    def end(self, number: int) -> None:
        """It has come to its end, with the loss noted last."""
        trial = self._trial(number)
        if not trial.state.is_finished():
            self._study.tell(number, _state(trial).losses[-1])

    def give_up(self, number: int, problem: str, *, is_diverged: bool) -> None:
        trial = self._trial(number)
        values = {"problem": problem, "diverged": is_diverged}
        self._storage.set_trial_user_attr(trial._trial_id, PROBLEM, values)
        states = self._optuna.trial.TrialState
        self._study.tell(number, state=states.PRUNED if is_diverged else states.FAIL)

    def _trial(self, number: int) -> Any:
        return self._study.get_trials(deepcopy=False)[number]


def _rows(trial: Any) -> list[dict[str, Any]]:
    attrs, rows = trial.user_attrs, list[dict[str, Any]]()
    while f"{RUNG}-{len(rows)}" in attrs:
        rows.append(attrs[f"{RUNG}-{len(rows)}"])
    return rows


def _state(trial: Any) -> TrialState:
    rows = _rows(trial)
    losses = tuple(math.inf if row["loss"] is None else row["loss"] for row in rows)
    values = trial.user_attrs.get(PROBLEM, {"problem": "", "diverged": False})
    point = dict(trial.user_attrs[POINT])
    return TrialState(trial.number, point, losses, values["problem"], values["diverged"])


def _distribution(choices: Choices) -> Any:
    optuna = load_optuna()
    if not isinstance(choices, Between):
        return optuna.distributions.CategoricalDistribution(choices.values)
    if choices.is_whole:
        low, high = int(choices.low), int(choices.high)
        return optuna.distributions.IntDistribution(low, high, log=choices.is_log)
    return optuna.distributions.FloatDistribution(choices.low, choices.high, log=choices.is_log)


def load_optuna() -> Any:
    """The package, without its own messages."""
    try:
        import optuna
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            "`tune search` needs the package optuna; try: pip install 'ridgeline[tune]'"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def journal_in_memory(space: SearchSpace) -> StudyJournal:
    """For replays: nothing is written."""
    return StudyJournal(load_optuna().storages.InMemoryStorage(), space)


@contextmanager
def open_journal(
    folder: Path, description: Mapping[str, Any], space: SearchSpace, *, resume: bool
) -> Iterator[StudyJournal]:
    """The study of a folder, new or gone on with; UsageError lists what differs from its own."""
    optuna = load_optuna()
    with held_folder(folder, description, resume=resume):
        path = folder / JOURNAL
        cut_half_line(path)
        backend = optuna.storages.journal.JournalFileBackend(str(path), HeldFolderLock())
        try:
            journal = StudyJournal(optuna.storages.JournalStorage(backend), space)
            journal.trials()
        except (ValueError, KeyError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}; begin a new study") from error
        journal.fill()
        yield journal


class HeldFolderLock:
    """For Optuna, whose own lock is a link that a killed process leaves: the folder is held."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass
