"""What a run is expected to end with, from runs that were stopped early and those that were not
(process.py), and what is worth doing next.

That is the run, new or begun, that is expected to improve the most on the best, by more than a
little (LEAST_GAIN). Work that could no longer come to an answer is not begun, and enough is left to
bring the run that is expected to be the best to its end.

Losses far above a rung's middle are drawn in: how bad a bad run is says nothing of where the good
ones are.

    surrogate = Surrogate(space, rungs, trials, seed=0)
    surrogate.expected()                # {trial: loss at its end}
    surrogate.best_move(Room(rungs, left=4.0))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ridgeline.tuning.searching.halving import Move, Room, Rungs, TrialState
from ridgeline.tuning.searching.process import LossProcess
from ridgeline.tuning.searching.space import Point, SearchSpace, Setting

Floats = NDArray[np.float64]
LEAST_TRIALS = 4  # below it points are spread evenly, and nothing is expected
CANDIDATES, NEIGHBOURS, NEAR = 512, 24, 0.08
MOST_LISTED = 4096  # points of a space that are all candidates
RESPONSE_DRAWS, RESPONSE_VALUES = 256, 13
# Of losses scaled to one: less is no improvement. Around the best lie others nearly as good, and a
# budget that goes into telling those apart is not spent where something else may be found.
LEAST_GAIN = 0.2
FURTHEST = 2.0  # times the middle's distance from the best: losses above are drawn in


class Surrogate:
    def __init__(
        self,
        space: SearchSpace,
        rungs: Rungs,
        trials: Sequence[TrialState],
        seed: int,
        *,
        keeps_all: bool = False,  # losses are not drawn in: for the whole space, not its best part
    ) -> None:
        self.space, self.rungs, self.trials = space, rungs, trials
        self._random = np.random.default_rng([seed, len(trials), sum(t.reached for t in trials)])
        self._groups = _groups(space)
        rows = [(trial, rung) for trial in trials for rung in range(trial.reached)]
        self._imagined: list[Move] = []
        values, self._scale = _scaled(rows, keeps_all)
        self.is_ready = len({trial.number for trial, _ in rows}) >= LEAST_TRIALS
        self._process = LossProcess(self._groups, rungs.num, self._random)
        if self.is_ready:
            places = self._cube([trial.point for trial, _ in rows])
            known = np.array([rung for _, rung in rows], dtype=np.float64)
            self._process.learn(places, known, values)

    def expected(self) -> dict[int, float]:
        """The loss at the end of each run that has begun."""
        begun = [trial for trial in self.trials if trial.reached]
        if not self.is_ready:
            return {trial.number: trial.losses[-1] for trial in begun}
        means, _ = self._process.predicted(self._cube([trial.point for trial in begun]))
        scaled = means * self._scale.size + self._scale.middle
        return {trial.number: float(mean) for trial, mean in zip(begun, scaled, strict=True)}

    def best_move(self, room: Room) -> Move | None:
        """One rung more for the run, new or begun, that is expected to improve the most on the
        best. None where nothing fits that could come to an answer.
        """
        moves = self._moves(room)
        if not moves:
            return None
        if not self.is_ready:
            return min(moves, key=lambda move: self._last_loss(move))
        begun = [move for move in moves if move.trial is not None]
        new = [move for move in moves if move.trial is None]
        # a begun run has to beat those at their end, a new one what is expected of any
        open_trials = [trial for trial in self.trials if trial.is_open and trial.reached]
        imagined = [move.point for move in self._imagined]
        every = [trial.point for trial in open_trials] + imagined
        ends = [t.point for t in open_trials if t.reached == self.rungs.num] + imagined
        worth = [*self._improvements(begun, ends or every), *self._improvements(new, every)]
        return [*begun, *new][int(np.argmax(worth))]

    def _improvements(self, moves: Sequence[Move], rivals: Sequence[Point]) -> Floats:
        """Expected of each run's end on that of the best of others."""
        if not moves:
            return np.zeros(0)
        cube = self._cube(rivals)
        means, _ = self._process.predicted(cube)
        best = int(np.argmin(means))
        points = self._cube([move.point for move in moves])
        return self._process.improvements(points, cube[best : best + 1], LEAST_GAIN)

    def _moves(self, room: Room) -> list[Move]:
        """That fit into the room, with enough left to bring the best run to its end."""
        moved = {move.trial for move in self._imagined}
        leader = self._leader()
        own = 0 if leader is None else leader.reached + (leader.number in moved)
        moves = [
            Move(trial.point, trial.reached + 1, trial.number)
            for trial in self.trials
            if trial.is_open and trial.number not in moved
            if 0 < trial.reached < self.rungs.num
            if room.allows(trial.reached, own, is_leader=trial is leader)
        ]
        if room.allows(0, own, is_leader=leader is None):
            moves += [Move(point, 1) for point in self._candidates()]
        return moves or self._last_moves(room)

    def _last_moves(self, room: Room) -> list[Move]:
        """Where no run has come to its end: a run that became the leader may be too far from its
        own, while the one before it, for which enough was left, is not.
        """
        moved = {move.trial for move in self._imagined}
        open_trials = [trial for trial in self.trials if trial.is_open and trial.reached]
        if moved or any(trial.reached == self.rungs.num for trial in open_trials):
            return []
        return [
            Move(trial.point, trial.reached + 1, trial.number)
            for trial in open_trials
            if room.allows(trial.reached, trial.reached, is_leader=True)
        ]

    def _leader(self) -> TrialState | None:
        """The run that is expected to end lowest."""
        expected = self.expected()
        begun = [trial for trial in self.trials if trial.is_open and trial.reached]
        return min(begun, key=lambda trial: expected[trial.number], default=None)

    def imagine(self, move: Move) -> None:
        """As if it had come out as expected: what is chosen next is chosen beside it."""
        self._imagined.append(move)
        if self.is_ready:
            self._process.imagine(self._cube([move.point]), move.goal - 1)

    def _last_loss(self, move: Move) -> tuple[bool, float]:
        """New runs come first while nothing is known."""
        if move.trial is None:
            return (False, 0.0)
        return (True, self.trials[move.trial].losses[-1])

    def responses(self) -> dict[str, list[tuple[Setting, float]]]:
        """For each name the loss expected at the end over its values, in the mean over all others;
        nothing before there are runs enough.
        """
        if not self.is_ready:
            return {}
        cube, result = self._random_cube(), {}
        for index, (name, choices) in enumerate(self.space.entries):
            axes = self._groups == index
            means = []
            for value in choices.some(RESPONSE_VALUES):
                held = cube.copy()
                held[:, axes] = choices.place(value)
                means.append((value, self._mean_loss(held)))
            result[name] = means
        return result

    def importance(self) -> dict[str, float]:
        """The share of the losses' variance over the space that a name explains alone; what is left
        is how they act together.
        """
        if not self.is_ready:
            return {}
        means, _ = self._process.predicted(self._random_cube())
        whole = float((means * self._scale.size).var()) or 1.0
        shares = {
            name: float(np.var([loss for _, loss in values])) / whole
            for name, values in self.responses().items()
        }
        most = max(1.0, sum(shares.values()))  # of samples they may come to more
        return {name: share / most for name, share in shares.items()}

    def _random_cube(self) -> Floats:
        """Places of points: between two words there is nothing."""
        places = self._random.random((RESPONSE_DRAWS, self.space.size))
        return self._cube([self.space.at(place.tolist()) for place in places])

    def _mean_loss(self, cube: Floats) -> float:
        means, _ = self._process.predicted(cube)
        return float(means.mean()) * self._scale.size + self._scale.middle

    def spread(self, count: int, beside: Sequence[Point] = ()) -> list[Point]:
        """Even over the cube: each new point is the one furthest from all before it, and from those
        `beside`.
        """
        taken = [self.space.place(point) for point in (*(t.point for t in self.trials), *beside)]
        result: list[Point] = []
        candidates = self._candidates()
        while candidates and len(result) < count:
            cube = self._cube(candidates)
            if taken:
                distances = np.array([np.abs(cube - place).sum(1) for place in taken]).min(0)
                chosen = int(np.argmax(distances))
            else:
                chosen = int(np.argmin(np.abs(cube - 0.5).sum(1)))
            taken.append(cube[chosen].tolist())
            result.append(candidates.pop(chosen))
        return result

    def _candidates(self) -> list[Point]:
        """Untried points: all of a small space, else random ones and neighbours of the best."""
        tried = {_key(trial.point) for trial in self.trials}
        tried |= {_key(move.point) for move in self._imagined}
        points = self._listed() if self._is_small else self._drawn()
        unique = {_key(point): point for point in points}
        return [point for key, point in unique.items() if key not in tried]

    @property
    def _is_small(self) -> bool:
        count = self.space.num_points
        return count is not None and count <= MOST_LISTED

    def _listed(self) -> list[Point]:
        points: list[Point] = [{}]
        for name, choices in self.space.entries:
            assert not hasattr(choices, "low"), "a small space has values alone"
            points = [point | {name: value} for point in points for value in choices.values]
        return points

    def _drawn(self) -> list[Point]:
        places = self._random.random((CANDIDATES, self.space.size))
        expected = self.expected()
        best = sorted(expected, key=expected.__getitem__)[:4]
        middles = [self.space.place(t.point) for t in self.trials if t.number in best]
        for middle in middles:
            moved = self._random.normal(0.0, NEAR, (NEIGHBOURS, self.space.size))
            flips = self._random.random(moved.shape) < 1 / max(2, self.space.size)
            jumps = np.where(flips, self._random.random(moved.shape), np.array(middle) + moved)
            places = np.concatenate([places, np.clip(jumps, 0.0, 1.0)])
        return [self.space.at(place.tolist()) for place in places]

    def _cube(self, points: Sequence[Point]) -> Floats:
        rows = [self.space.place(point) for point in points]
        return np.array(rows, dtype=np.float64).reshape(len(points), self.space.size)


@dataclass(frozen=True)
class RungScale:
    middle: float
    size: float


def _scaled(rows: Sequence[tuple[TrialState, int]], keeps_all: bool) -> tuple[Floats, RungScale]:
    """Losses drawn in and scaled to a deviation of one within their rungs."""
    losses = np.array([trial.losses[rung] for trial, rung in rows], dtype=np.float64)
    rungs = np.array([rung for _, rung in rows])
    for rung in np.unique(rungs):
        own = losses[rungs == rung]
        known = own[np.isfinite(own)]
        if not len(known):
            continue
        middle, best = float(np.median(known)), float(known.min())
        most = float(known.max())
        if len(known) >= LEAST_TRIALS and not keeps_all:
            most = middle + FURTHEST * (middle - best)
        losses[rungs == rung] = np.where(np.isfinite(own), np.minimum(own, most), most)
    if not len(losses) or not np.isfinite(losses).all():
        return np.zeros(len(losses)), RungScale(0.0, 1.0)
    middle = float(losses.mean())
    within = [losses[rungs == rung].std() for rung in np.unique(rungs)]
    size = float(max(within)) or 1.0
    return (losses - middle) / size, RungScale(middle, size)


def _groups(space: SearchSpace) -> NDArray[np.intp]:
    """The name that each axis of the cube belongs to."""
    sizes = [choices.size for _, choices in space.entries]
    return np.repeat(np.arange(len(sizes)), sizes)


def _key(point: Point) -> tuple[tuple[str, object], ...]:
    return tuple(sorted(point.items()))
