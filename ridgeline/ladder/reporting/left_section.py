"""Why the answer is not at the hardware's limit, and what to do next: a section of the page, and
its words for the terminal.

    for step in next_actions(climb): print(step.text, step.gain)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ridgeline.hardware.units import percent
from ridgeline.ladder.outcome import Quality, RungOutcome
from ridgeline.ladder.reporting import summary
from ridgeline.ladder.reporting.result import Climb
from ridgeline.profiling.drawing import (
    Bar,
    BarPart,
    Column,
    Markup,
    Section,
    element,
    join,
    stacked_bars,
    table,
    times,
)
from ridgeline.profiling.gap_words import gap_rows, gap_sentence

NEAR = 4.0  # times a quality bound: what misses it by less may be worth another bound
LEAST_GAIN = 1.02  # predicted: less is not worth a step


class NextAction(NamedTuple):
    """Something a user can do."""

    text: str
    gain: str  # "1.31×, measured"; "" where nothing is known of it
    how: str  # the command or flags; "" where there are none


def left_section(climb: Climb) -> Section | None:
    """None where nothing is known of either."""
    steps = next_actions(climb)
    if not climb.gap and not steps:
        return None
    if not climb.gap:
        return Section("left", left_title(climb), _next_table(steps))
    figure = stacked_bars([Bar("time in steps", gap_parts_of(climb))], percent, are_shares=True)
    parts = [figure, element("h3", "What to do next"), _next_table(steps)]
    return Section("left", left_title(climb), join(parts), gap_sentence(climb.gap))


def left_title(climb: Climb) -> str:
    return "Why it is not 100%, and what to do next" if climb.gap else "What to do next"


def gap_parts_of(climb: Climb) -> list[BarPart]:
    return gap_rows(climb.gap, on_cpu=climb.hardware.get("device_type") == "cpu")


def next_actions(climb: Climb) -> list[NextAction]:
    """What was not reached, what only the quality bound refused, what was never tried."""
    return [*_unreached(climb), *_refused(climb), *_untried(climb)]


def _unreached(climb: Climb) -> list[NextAction]:
    rungs = [
        rung
        for rung in climb.rungs
        if rung.status == "not reached"
        and rung.predicted is not None
        and rung.predicted.speedup >= LEAST_GAIN
    ]
    if not rungs:
        return []
    best = max(rungs, key=_promise)
    more = f" and {len(rungs) - 1} more" if len(rungs) > 1 else ""
    gain = f"{times(_promise(best))} predicted"
    return [NextAction(f"Go on: {best.title}{more} had no time", gain, _resuming(climb.command))]


def _resuming(command: tuple[str, ...]) -> str:
    """The same climb, going on; "" where it was started in another way."""
    if command[:2] != ("ridgeline", "optimize"):
        return ""
    if "--train" in command:
        return "a longer --budget"
    more = () if "--resume" in command else ("--resume",)
    return summary.shell((*command, *more))


def _promise(rung: RungOutcome) -> float:
    assert rung.predicted is not None, "it has a prediction"
    return rung.predicted.speedup


def _refused(climb: Climb) -> list[NextAction]:
    """The fastest that only the quality bound refused, where it missed that by little."""
    near = [
        rung
        for rung in climb.rungs
        if rung.status == "dropped"
        and rung.quality is not None
        and rung.quality.problem is not None
        and rung.achieved is not None
        and rung.achieved.is_beyond_noise
        and _missed(rung.quality, climb.bounds, NEAR) == {}
    ]
    if not near:
        return []
    best = max(near, key=lambda rung: rung.achieved.value if rung.achieved else 0.0)
    assert best.quality is not None, "it was judged"
    assert best.achieved is not None, "it was measured"
    flags = [
        f"--{name.replace('_', '-')} {1.1 * value:.2g}"
        for name, value in _missed(best.quality, climb.bounds).items()
    ]
    text = f"Allow {best.title}, if you can: {best.quality.problem}"
    return [NextAction(text, f"{times(best.achieved.value)} measured", " ".join(flags))]


def _missed(
    quality: Quality, bounds: Mapping[str, float | None], factor: float = 1.0
) -> dict[str, float]:
    """Figures that are more than so many times their bound."""
    values = {"max_kl": quality.mean_kl, "max_ppl_increase": quality.ppl_increase}
    known = {name: bounds.get(name) for name in values}
    return {
        name: value
        for name, value in values.items()
        if (bound := known[name]) is not None and value > factor * bound
    }


def _untried(climb: Climb) -> list[NextAction]:
    return [
        NextAction(_capital(step.title), f"{times(step.predicted.speedup)} predicted", step.flags)
        for step in climb.next_steps
    ]


def _next_table(steps: Sequence[NextAction]) -> Markup:
    if not steps:
        words = (
            "Nothing more that can be switched here is predicted to give 2%: what is left is in "
            "the kernels and in the machine."
        )
        return element("p", words, class_="soft")
    columns = (Column("step"), Column("gain", is_number=True), Column("with"))
    rows: list[list[Markup | str]] = [
        [step.text, step.gain, element("code", step.how) if step.how else ""] for step in steps
    ]
    return table(columns, rows, "What to do next")


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
