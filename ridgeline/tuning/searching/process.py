"""A Gaussian process over places of a space's cube and rungs of a run, in numpy.

Two runs are alike where their points are near; a run at one rung is like itself at the next, less
so the further the rungs lie apart; and each rung has a level of its own. What a run's level is says
nothing of which run is better, so that comparisons are made without levels.

    process = LossProcess(groups, num_rungs=3, random=random)
    process.learn(places, rungs, values)    # and choose its settings
    process.predicted(cube)                 # mean and deviation at the end
    process.improvements(cube, best)        # expected at the end, on a run of reference
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
DRAWS, ROUNDS, MOVED = 48, 3, 12  # settings of the process that are compared: at first, then nearby
NOISE = 0.003  # variance that is expected of seeds, of losses scaled to one
# Settings that are asked together, so many steps of a walk apart: the likeliest alone would be too
# sure of what matters, and is another with every seed.
MIXED, APART = 6, 12
LEVELS = 25.0  # variance of a rung's level, of losses scaled to one
BORDER = 1e12  # any number above all sums of squares


@dataclass(frozen=True)
class ProcessSettings:
    lengths: Floats  # of each name of the space
    noise: float
    memory: float  # likeness of a run at two neighbouring rungs

    @property
    def log_prior(self) -> float:
        lengths = ((np.log(self.lengths) - math.log(0.5)) / 0.8) ** 2
        noise = ((math.log(self.noise) - math.log(NOISE)) / 1.2) ** 2
        odds = math.log(self.memory / (1 - self.memory))
        return -0.5 * (float(lengths.sum()) + noise + ((odds - 2.0) / 1.5) ** 2)


Scored = tuple[float, ProcessSettings]  # with how likely they are


def _score(scored: Scored) -> float:
    return scored[0]


@dataclass(frozen=True)
class ProcessFit:
    """Of the process with some settings to what was learned."""

    settings: ProcessSettings
    inverse: Floats  # of the covariance's Cholesky factor
    weights: Floats  # the inverse times what was measured


class LossProcess:
    def __init__(
        self, groups: NDArray[np.intp], num_rungs: int, random: np.random.Generator
    ) -> None:
        self._groups, self._last, self._random = groups, num_rungs - 1, random
        self._num_names = int(groups.max()) + 1
        self._mixed: list[ProcessSettings] = []
        self._fits: list[ProcessFit] = []

    def learn(self, places: Floats, rungs: Floats, values: Floats) -> None:
        self._places, self._rungs, self._values = places, rungs, values
        self._squares = self._distances(places, places)
        self._mixed = self._likely()
        self._fits = [self._fit(settings) for settings in self._mixed]

    def imagine(self, place: Floats, rung: int) -> None:
        """As if it had come out as expected."""
        mean, _ = self.predicted(place, rung)
        self._places = np.concatenate([self._places, place])
        self._rungs = np.append(self._rungs, float(rung))
        self._values = np.append(self._values, mean)
        self._squares = self._distances(self._places, self._places)
        self._fits = [self._fit(settings) for settings in self._mixed]

    def predicted(self, cube: Floats, rung: int | None = None) -> tuple[Floats, Floats]:
        """Mean and deviation at a rung, by default the last, over the settings that are mixed."""
        rungs = np.full(len(cube), float(self._last if rung is None else rung))
        squares = self._distances(self._places, cube)
        means, variances = [], []
        for fit in self._fits:
            across = self._covariance(fit.settings, squares, self._rungs, rungs)
            half = fit.inverse @ across
            means.append(half.T @ fit.weights)
            variances.append(np.maximum(1.0 + 2 * LEVELS - (half * half).sum(0), 1e-9))
        mixed: Floats = np.mean(means, 0)
        return mixed, np.sqrt(np.mean(variances, 0) + np.var(means, 0))

    def improvements(self, cube: Floats, best: Floats, least: float = 0.0) -> Floats:
        """Expected at the end, of each place on the best one, above the `least` that counts: of
        their difference, for what is near the best is as good as it and no better.
        """
        cube = np.concatenate([cube, best])
        ends = np.full(len(cube), float(self._last))
        squares, own = self._distances(self._places, cube), self._distances(cube, cube[-1:])
        result = np.zeros(len(cube))
        for fit in self._fits:
            half = fit.inverse @ self._likeness(fit.settings, squares, self._rungs, ends)
            means = half.T @ fit.weights
            likeness = self._likeness(fit.settings, own, ends, ends[-1:])[:, 0]
            shared = likeness - half.T @ half[:, -1]
            alone = 1.0 - (half * half).sum(0)
            variances = np.maximum(alone + alone[-1] - 2 * shared, 1e-12)
            result += _gain(means[-1] - means - least, np.sqrt(variances))
        improvements: Floats = result[:-1] / len(self._fits)
        return improvements

    def _likely(self) -> list[ProcessSettings]:
        """Drawn by how likely they are, in a walk (Metropolis) that begins at the best of random
        settings and of some near these.
        """
        best = ProcessSettings(np.full(self._num_names, 0.5), NOISE, 0.9)
        here = (self._likelihood(best), best)
        for turn in range(ROUNDS):
            middle = here[1]
            for _ in range(DRAWS if turn == 0 else MOVED):
                here = max(here, self._step(middle, turn), key=_score)
        kept = []
        for step in range(1, MIXED * APART + 1):
            there = self._step(here[1], 1)
            if self._random.random() < math.exp(min(0.0, there[0] - here[0])):
                here = there
            if step % APART == 0:
                kept.append(here[1])
        return kept

    def _step(self, middle: ProcessSettings, turn: int) -> Scored:
        settings = self._settings_near(middle, turn)
        return self._likelihood(settings), settings

    def _settings_near(self, best: ProcessSettings, turn: int) -> ProcessSettings:
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
        return ProcessSettings(
            lengths, float(np.clip(noise, 1e-4, 0.5)), float(np.clip(memory, 0.05, 0.995))
        )

    def _likelihood(self, settings: ProcessSettings) -> float:
        """Of what was measured, as the border of the matrix that is factored: its last row is then
        the factor's inverse times it.
        """
        size = len(self._values)
        bordered = np.empty((size + 1, size + 1))
        bordered[:size, :size] = self._own_covariance(settings)
        bordered[size, :size] = bordered[:size, size] = self._values
        bordered[size, size] = BORDER
        try:
            factor = np.linalg.cholesky(bordered)
        except np.linalg.LinAlgError:
            return -math.inf
        half = factor[size, :size]
        fit = -0.5 * float(half @ half) - float(np.log(np.diag(factor)[:size]).sum())
        return fit + settings.log_prior

    def _fit(self, settings: ProcessSettings) -> ProcessFit:
        factor = np.linalg.cholesky(self._own_covariance(settings))
        inverse = np.linalg.inv(factor)
        return ProcessFit(settings, inverse, inverse @ self._values)

    def _own_covariance(self, settings: ProcessSettings) -> Floats:
        own = self._covariance(settings, self._squares, self._rungs, self._rungs)
        own.flat[:: len(own) + 1] += settings.noise
        return own

    def _covariance(
        self, settings: ProcessSettings, squares: Floats, rungs: Floats, others: Floats
    ) -> Floats:
        """Of losses at `rungs` and at `others`."""
        same = rungs[:, None] == others[None]
        return self._likeness(settings, squares, rungs, others) + LEVELS * same + LEVELS

    def _likeness(
        self, settings: ProcessSettings, squares: Floats, rungs: Floats, others: Floats
    ) -> Floats:
        """The part of it that is of the points."""
        far = np.sqrt(5.0 * np.tensordot(settings.lengths**-2, squares, 1))
        alike = (1.0 + far + far * far / 3.0) * np.exp(-far)  # Matérn 5/2
        likeness: Floats = alike * settings.memory ** np.abs(rungs[:, None] - others[None])
        return likeness

    def _distances(self, one: Floats, other: Floats) -> Floats:
        """Squared, by each name of the space."""
        squares = (one[:, None] - other[None]) ** 2
        names = [squares[:, :, self._groups == name].sum(-1) for name in range(self._num_names)]
        return np.array(names)


def _gain(means: Floats, deviations: Floats) -> Floats:
    """What is expected above zero."""
    ratio = means / deviations
    density = np.exp(-0.5 * ratio * ratio) / math.sqrt(2 * math.pi)
    below = np.array([0.5 * (1.0 + math.erf(each / math.sqrt(2))) for each in ratio])
    gain: Floats = deviations * (ratio * below + density)
    return gain
