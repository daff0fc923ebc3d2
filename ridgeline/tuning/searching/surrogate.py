"""What a run is expected to end with, from runs that were stopped early and those that were not: a
Gaussian process over the space and the share of a run, in numpy.

Two runs are alike where their points are near; a run at one rung is like itself at the next, less
so the further the rungs lie apart; and each rung has a level of its own. Losses far above a rung's
middle are drawn in: how bad a bad run is says nothing of where the good ones are.

    surrogate = Surrogate(space, rungs, trials, seed=0)
    surrogate.expected()                # {trial: loss at its end}
    surrogate.best_move(room.allows)    # what is worth doing next
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ridgeline.tuning.searching.halving import Move, Rungs, TrialState
from ridgeline.tuning.searching.space import Point, SearchSpace, Setting

Floats = NDArray[np.float64]
LEAST_TRIALS = 4  # below it points are spread evenly, and nothing is expected
DRAWS, ROUNDS, MOVED = 48, 3, 12  # settings of the process that are compared: at first, then nearby
NOISE = 0.003  # variance that is expected of seeds, of losses scaled to one
MIXED = 4  # of them that are asked together: one alone would be too sure of what matters
CANDIDATES, NEIGHBOURS, NEAR = 512, 24, 0.08
MOST_LISTED = 4096  # points of a space that are all candidates
RESPONSE_DRAWS, RESPONSE_VALUES = 256, 13
LEVELS = 25.0  # variance of a rung's level, of losses scaled to one
FURTHEST = 2.0  # times the middle's distance from the best: losses above are drawn in


@dataclass(frozen=True)
class SurrogateSettings:
    """Of the process."""

    lengths: Floats  # of each name of the space
    noise: float
    memory: float  # likeness of a run at two neighbouring rungs

    @property
    def log_prior(self) -> float:
        lengths = ((np.log(self.lengths) - math.log(0.5)) / 0.8) ** 2
        noise = ((math.log(self.noise) - math.log(NOISE)) / 1.2) ** 2
        odds = math.log(self.memory / (1 - self.memory))
        return -0.5 * (float(lengths.sum()) + noise + ((odds - 2.0) / 1.5) ** 2)


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
        self._places = self._cube([trial.point for trial, _ in rows])
        self._rungs = np.array([rung for _, rung in rows], dtype=np.float64)
        self._imagined: list[Move] = []
        values, self._scale = _scaled(rows, keeps_all)
        self._values = values
        self.is_ready = len({trial.number for trial, _ in rows}) >= LEAST_TRIALS
        if self.is_ready:
            self._settings = self._fitted()

    def expected(self) -> dict[int, float]:
        """The loss at the end of each run that has begun."""
        begun = [trial for trial in self.trials if trial.reached]
        if not self.is_ready:
            return {trial.number: trial.losses[-1] for trial in begun}
        means, _ = self._predicted(self._cube([trial.point for trial in begun]))
        scaled = means * self._scale.size + self._scale.middle
        return {trial.number: float(mean) for trial, mean in zip(begun, scaled, strict=True)}

    def best_move(self, allows: Callable[[int], bool]) -> Move | None:
        """One rung more for the run, new or begun, that is expected to improve the most on the
        best; `allows` says from how many rungs on there is work left. None where there is none.
        """
        moved = {move.trial for move in self._imagined}
        moves = [
            Move(trial.point, trial.reached + 1, trial.number)
            for trial in self.trials
            if trial.is_open and trial.number not in moved
            if 0 < trial.reached < self.rungs.num and allows(trial.reached)
        ]
        if allows(0):
            moves += [Move(point, 1) for point in self._candidates()]
        if not moves:
            return None
        if not self.is_ready:
            return min(moves, key=lambda move: self._last_loss(move))
        begun = [move for move in moves if move.trial is not None]
        new = [move for move in moves if move.trial is None]
        open_trials = [trial for trial in self.trials if trial.is_open]
        imagined = [move.point for move in self._imagined]
        ends = [t.point for t in open_trials if t.reached == self.rungs.num] + imagined
        if not ends and begun:  # an answer first
            expected = self.expected()
            return min(begun, key=lambda move: expected[move.trial or 0])
        # a begun run has to beat those at their end, a new one what is expected of any
        every = [trial.point for trial in open_trials] + imagined
        worth = [
            *self._improvements([move.point for move in begun], self._best_of(ends or every)),
            *self._improvements([move.point for move in new], self._best_of(every)),
        ]
        return [*begun, *new][int(np.argmax(worth))]

    def _best_of(self, points: Sequence[Point]) -> Point:
        """The point that is expected to end lowest."""
        means, _ = self._predicted(self._cube(points))
        return points[int(np.argmin(means))]

    def _improvements(self, points: Sequence[Point], best: Point) -> Floats:
        """Expected at the end, of each point on the best: of their difference, for what is near the
        best is as good as it and no better. What all have in common there decides nothing.
        """
        if not points:
            return np.zeros(0)
        cube = self._cube([*points, best])
        last = np.full(len(cube), float(self.rungs.num - 1))
        worth = np.zeros(len(points))
        for settings in self._settings:
            factor = self._factor(settings)
            assert factor is not None, "it was fitted"
            across = self._likeness(settings, self._places, self._rungs, cube, last)
            half = np.linalg.solve(factor, across)
            means = half.T @ np.linalg.solve(factor, self._values)
            likeness = self._likeness(settings, cube, last, cube[-1:], last[-1:])[:, 0]
            shared = likeness - half.T @ half[:, -1]  # with the best
            own = 1.0 - (half * half).sum(0)
            variances = np.maximum(own + own[-1] - 2 * shared, 1e-12)
            worth += _improvement(means[-1], means, np.sqrt(variances))[:-1]
        return worth

    def imagine(self, move: Move) -> None:
        """As if it had come out as expected: what is chosen next is chosen beside it."""
        self._imagined.append(move)
        if not self.is_ready:
            return
        cube, rung = self._cube([move.point]), float(move.goal - 1)
        mean, _ = self._predicted(cube, rung)
        self._places = np.concatenate([self._places, cube])
        self._rungs = np.append(self._rungs, rung)
        self._values = np.append(self._values, mean)

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
        means, _ = self._predicted(self._random_cube())
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
        means, _ = self._predicted(cube)
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

    def _fitted(self) -> list[SurrogateSettings]:
        """The most likely of random settings, and of some near the best of these."""
        best = SurrogateSettings(np.full(len(self.space.entries), 0.5), NOISE, 0.9)
        scored = [(self._likelihood(best), best)]
        for turn in range(ROUNDS):
            for _ in range(DRAWS if turn == 0 else MOVED):
                settings = self._settings_near(best, turn)
                scored.append((self._likelihood(settings), settings))
            best = max(scored, key=lambda each: each[0])[1]
        scored.sort(key=lambda each: -each[0])
        return [settings for score, settings in scored[:MIXED] if score > -math.inf]

    def _settings_near(self, best: SurrogateSettings, turn: int) -> SurrogateSettings:
        random, width = self._random, 0.4 / max(1, turn)
        if turn == 0:
            lengths = np.exp(random.normal(math.log(0.5), 0.8, len(best.lengths)))
            noise = math.exp(random.normal(math.log(NOISE), 1.2))
            odds = random.normal(2.0, 1.5)
        else:
            lengths = best.lengths * np.exp(random.normal(0.0, width, len(best.lengths)))
            noise = best.noise * math.exp(random.normal(0.0, width))
            odds = math.log(best.memory / (1 - best.memory)) + random.normal(0.0, width)
        memory = 1 / (1 + math.exp(-odds))
        return SurrogateSettings(
            lengths, float(np.clip(noise, 1e-4, 0.5)), float(np.clip(memory, 0.05, 0.995))
        )

    def _likelihood(self, settings: SurrogateSettings) -> float:
        factor = self._factor(settings)
        if factor is None:
            return -math.inf
        half = np.linalg.solve(factor, self._values)
        fit = -0.5 * float(half @ half) - float(np.log(np.diag(factor)).sum())
        return fit + settings.log_prior

    def _factor(self, settings: SurrogateSettings) -> Floats | None:
        """Of the covariance of all that was measured."""
        own = self._covariance(settings, self._places, self._rungs, self._places, self._rungs)
        own[np.diag_indices_from(own)] += settings.noise
        try:
            return np.asarray(np.linalg.cholesky(own), np.float64)
        except np.linalg.LinAlgError:
            return None

    def _covariance(
        self, settings: SurrogateSettings, one: Floats, rungs: Floats, other: Floats, others: Floats
    ) -> Floats:
        """Of losses; `others` are the rungs of `other`."""
        same = rungs[:, None] == others[None]
        return self._likeness(settings, one, rungs, other, others) + LEVELS * same + LEVELS

    def _likeness(
        self, settings: SurrogateSettings, one: Floats, rungs: Floats, other: Floats, others: Floats
    ) -> Floats:
        """The part of it that is of the points."""
        lengths = settings.lengths[self._groups]
        squares = (((one / lengths)[:, None] - (other / lengths)[None]) ** 2).sum(-1)
        far = np.sqrt(5.0 * squares)
        alike = (1.0 + far + far * far / 3.0) * np.exp(-far)  # Matérn 5/2
        likeness: Floats = alike * settings.memory ** np.abs(rungs[:, None] - others[None])
        return likeness

    def _predicted(self, cube: Floats, rung: float | None = None) -> tuple[Floats, Floats]:
        """Mean and deviation at a rung, by default the last, over the settings that are mixed."""
        last = float(self.rungs.num - 1) if rung is None else rung
        parts = [self._predicted_by(each, cube, last) for each in self._settings]
        means = np.array([mean for mean, _ in parts])
        variances = np.array([variance for _, variance in parts])
        mixed: Floats = means.mean(0)
        return mixed, np.sqrt(variances.mean(0) + means.var(0))

    def _predicted_by(
        self, settings: SurrogateSettings, cube: Floats, rung: float
    ) -> tuple[Floats, Floats]:
        rungs = np.full(len(cube), rung)
        factor = self._factor(settings)
        assert factor is not None, "it was fitted"
        across = self._covariance(settings, self._places, self._rungs, cube, rungs)
        half = np.linalg.solve(factor, across)
        means: Floats = half.T @ np.linalg.solve(factor, self._values)
        return means, np.maximum(1.0 + 2 * LEVELS - (half * half).sum(0), 1e-9)


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


def _improvement(best: float, means: Floats, deviations: Floats) -> Floats:
    """Expected, below the best so far."""
    ratio = (best - means) / deviations
    density = np.exp(-0.5 * ratio * ratio) / math.sqrt(2 * math.pi)
    below = np.array([0.5 * (1.0 + math.erf(each / math.sqrt(2))) for each in ratio])
    improvement: Floats = deviations * (ratio * below + density)
    return improvement


def _groups(space: SearchSpace) -> NDArray[np.intp]:
    """The name that each axis of the cube belongs to."""
    sizes = [choices.size for _, choices in space.entries]
    return np.repeat(np.arange(len(sizes)), sizes)


def _key(point: Point) -> tuple[tuple[str, object], ...]:
    return tuple(sorted(point.items()))
