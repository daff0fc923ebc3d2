"""One rung on trial: measured against the best so far, its answers judged, and, where
rounding to nearest is just outside the quality bound, its codes found on data.

    outcome, state = trial.run(rung, offer, candidate)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ridgeline.ladder.measuring.process import WorkerError
from ridgeline.ladder.outcome import Quality, RungOutcome
from ridgeline.ladder.reporting.words import faster_words, quality_words, slower_words
from ridgeline.ladder.rungs import ClimbFacts, Offer, Rung
from ridgeline.ladder.searching.bench import Bench, Enough
from ridgeline.ladder.searching.budget import Budget, RungTimes
from ridgeline.ladder.searching.progress import ClimbProgress, Options
from ridgeline.ladder.state import ClimbState
from ridgeline.quality.gate import QualityBounds
from ridgeline.quantization.scheme import parse_scheme

CALIBRATION_S = 240.0  # that must be left to find codes on data: `demo` takes 200 s on a CPU
CALIBRATION_GAIN = 8.0  # times the bound: what is further outside stays outside
SAME_ARITHMETIC = "the same arithmetic, so its quality was not measured"


@dataclass
class Trial:
    facts: ClimbFacts
    options: Options
    bench: Bench
    budget: Budget
    progress: ClimbProgress
    enough: Enough
    times: RungTimes

    def run(
        self, rung: Rung, offer: Offer, candidate: ClimbState
    ) -> tuple[RungOutcome, ClimbState]:
        base = RungOutcome(rung.name, rung.area, rung.title, offer.edit, "failed", offer.reason)
        try:
            achieved = self.bench.compare(self.progress.best, candidate, self.enough)
            base = replace(base, achieved=achieved)
            if not achieved.is_beyond_noise:
                self.bench.drop(candidate)
                return replace(base, status="dropped", reason=slower_words(achieved)), candidate
            if not (rung.changes_answers and self.options.quality):
                why = "quality was not measured" if rung.changes_answers else SAME_ARITHMETIC
                reason = f"{faster_words(achieved)}; {offer.reason}; {why}"
                return replace(base, status="kept", reason=reason), candidate
            return self._judged(base, candidate)
        except WorkerError as error:
            self.bench.drop(candidate)
            return replace(base, reason=f"{error.kind}: {error}"), candidate

    def _judged(self, base: RungOutcome, candidate: ClimbState) -> tuple[RungOutcome, ClimbState]:
        began = self.budget.used_s
        quality = self.bench.judge(candidate)
        self.times.judged(self.budget.used_s - began)
        assert base.achieved is not None, "it was compared"
        if quality.problem is None:
            reason = f"{faster_words(base.achieved)}; {quality_words(quality)}"
            return replace(base, status="kept", quality=quality, reason=reason), candidate
        refused = replace(base, status="dropped", quality=quality)
        reason = f"{faster_words(base.achieved)}, but {quality.problem}"
        self.bench.drop(candidate)
        if not _can_calibrate(candidate):
            return replace(refused, reason=reason), candidate
        is_near = _is_near(quality, self.facts.bounds)
        if not is_near or self.budget.left_s < CALIBRATION_S:
            why = "there is no time to" if is_near else "it is too far outside to"
            return replace(refused, reason=f"{reason}; {why} find codes on data"), candidate
        return self._calibrated(refused, candidate, reason)

    def _calibrated(
        self, refused: RungOutcome, candidate: ClimbState, reason: str
    ) -> tuple[RungOutcome, ClimbState]:
        """Rounding to nearest is outside the bound: codes found on data may be inside."""
        better = self.bench.calibrated(candidate)
        quality = self.bench.judge(better)
        if quality.problem is not None:
            text = f"{reason}; with codes found on data: {quality.problem}"
            return replace(refused, quality=quality, reason=text), candidate
        achieved = self.bench.compare(self.progress.best, better, self.enough)
        result = replace(refused, achieved=achieved, quality=quality)
        if not achieved.is_beyond_noise:
            self.bench.drop(better)
            return replace(result, reason=f"codes found on data: {slower_words(achieved)}"), better
        text = f"{faster_words(achieved)} with codes found on data; {quality_words(quality)}"
        return replace(result, status="kept", reason=text), better


def _is_near(quality: Quality, bounds: QualityBounds) -> bool:
    """Whether codes found on data may bring it inside: they take some bits' worth of error away."""
    pairs = ((quality.mean_kl, bounds.max_kl), (quality.ppl_increase, bounds.max_ppl_increase))
    return all(allowed is None or value <= CALIBRATION_GAIN * allowed for value, allowed in pairs)


def _can_calibrate(state: ClimbState) -> bool:
    """Whether the scheme has a better method than rounding, and has it not been used yet."""
    if state.recipe.scheme is None or state.folder is not None:
        return False
    scheme = parse_scheme(state.recipe.scheme)
    return scheme.weight == "int4" or scheme.inputs != "16-bit"
