"""One-line descriptions of a rung's outcome."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from ridgeline.ladder.measuring.observation import Observation
from ridgeline.ladder.outcome import Quality, RungOutcome, Speedup
from ridgeline.ladder.state import ClimbState

BUSY = 1.3  # fastest over slowest of a side's rounds: more, and the machine was not quiet


def state_words(state: ClimbState) -> str:
    loop = "the plain loop" if state.loop == "naive" else "the engine"
    return f"{loop} in {state.recipe.scheme or state.recipe.dtype}"


def faster_words(speedup: Speedup) -> str:
    return f"{speedup.value:.2f}x ({speedup.low:.2f} to {speedup.high:.2f})"


def slower_words(speedup: Speedup) -> str:
    word = "slower" if speedup.high < 1.0 else "not faster beyond noise"
    return f"{word}: {faster_words(speedup)} in {len(speedup.before)} rounds"


def quality_words(quality: Quality) -> str:
    task = "" if quality.task is None else f", {quality.task} {quality.task_score:.1%}"
    return f"mean KL {quality.mean_kl:.5f}, perplexity {quality.ppl_increase:+.2%}{task}"


def with_remarks(reason: str, observation: Observation) -> str:
    return "; ".join((reason, *observation.remarks))


def busy_words(outcomes: Sequence[RungOutcome]) -> str | None:
    """Where rounds of one recipe differ much, the machine was at something else too."""
    speedups = [outcome.achieved for outcome in outcomes if outcome.achieved is not None]
    factor = median(factor for each in speedups for factor in _factors(each)) if speedups else 1.0
    if factor < BUSY:
        return None
    return (
        f"noisy machine: rounds of the same recipe differ by a factor of {factor:.1f}, so smaller "
        "gains are lost in the noise; how good the predictions were is not remembered"
    )


def quiet_rungs(outcomes: Sequence[RungOutcome]) -> list[RungOutcome]:
    """Those whose rounds say something of their predictions: none of a noisy climb, nor one whose
    own rounds differ that much.
    """
    if busy_words(outcomes) is not None:
        return []
    return [
        outcome
        for outcome in outcomes
        if outcome.achieved is None or noise_factor(outcome.achieved) < BUSY
    ]


def noise_factor(speedup: Speedup) -> float:
    """Fastest over slowest round, of the side where that is more."""
    return max(_factors(speedup))


def _factors(speedup: Speedup) -> tuple[float, float]:
    """Fastest over slowest round of each side."""
    before, after = (max(side) / min(side) for side in (speedup.before, speedup.after))
    return before, after
