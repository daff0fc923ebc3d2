"""Why the answer is not at the hardware's limit, and what to do next: a section of the page, and
its words for the terminal.

    for step in next_actions(climb): print(step.text, step.gain)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ridgeline.hardware.units import human, percent
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
from ridgeline.profiling.predicting.prediction import GapPart

NAMED = 3  # parts of the gap that have a name of their own
NEAR = 4.0  # times a quality bound: what misses it by less may be worth another bound
LEAST_GAIN = 1.02  # predicted: less is not worth a step
LIMIT = "the hardware's limit"
CAUSES = {
    "matrices": "products with weights run below the ceiling",
    "attention": "attention runs below the ceiling",
    "other kernels": "norms, rotations, activations and sampling, which the limit does not count",
    "gaps": "the device waits between kernels until the next is launched",
    "host": "the device waits while the host plans, sends and receives",
    "copies": "copies between host and device, and on it",
    "communication": "sums and gathers between ranks, waiting for the slowest included",
}
ON_CPU = {"gaps": "between kernels: calls from Python, each with little work"}


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
    parts = [_gap_figure(climb), _next_table(steps)]
    return Section("left", "Why it is not 100%, and what to do next", join(parts), gap_words(climb))


def gap_words(climb: Climb) -> str:
    """The largest parts in a sentence."""
    if not climb.gap:
        return "The limits of this machine are not known, so nothing is said of the distance to it."
    largest = [f"{part_name(climb, part)} {percent(part.share)}" for part in climb.gap[:NAMED]]
    at_limit = percent(limit_share(climb))
    return (
        f"Of the time in steps, {at_limit} is what bytes and FLOPs take at this machine's "
        f"ceilings. The largest parts of the rest are {_listed(largest)}."
    )


def limit_share(climb: Climb) -> float:
    """Of the time in steps: what is left of it without the gap."""
    return max(0.0, 1.0 - sum(part.share for part in climb.gap))


def part_name(climb: Climb, part: GapPart) -> str:
    """With its phase, where there are several."""
    phases = {each.phase for each in climb.gap}
    return f"{part.name} ({part.phase})" if len(phases) > 1 else part.name


def gap_rows(climb: Climb) -> list[BarPart]:
    """The limit, the largest parts of the gap, and the rest of it: they add up to 1."""
    named, others = climb.gap[:NAMED], climb.gap[NAMED:]
    rows = [BarPart(LIMIT, limit_share(climb), "bytes and FLOPs at the ceilings")]
    rows += [BarPart(part_name(climb, part), part.share, _why(climb, part)) for part in named]
    if others:
        names = dict.fromkeys(part.name for part in others)
        rows.append(BarPart("the rest", sum(part.share for part in others), ", ".join(names)))
    return rows


def _why(climb: Climb, part: GapPart) -> str:
    on_cpu = climb.hardware.get("device_type") == "cpu"
    cause = (ON_CPU if on_cpu else {}).get(part.name) or CAUSES.get(part.name, "")
    took = f"{human(part.step_s, 's')} of a {part.phase} step"
    if part.least_s > 0:
        took += f", {human(part.least_s, 's')} would do"
    return f"{cause}: {took}" if cause else took


def _gap_figure(climb: Climb) -> Markup | None:
    if not climb.gap:
        return None
    return stacked_bars([Bar("time in steps", gap_rows(climb))], percent, are_shares=True)


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
    head = element("h3", "What to do next")
    if not steps:
        words = (
            "Nothing more that can be switched here is predicted to give 2%: what is left is in "
            "the kernels and in the machine."
        )
        return head + element("p", words, class_="soft")
    columns = (Column("step"), Column("gain", is_number=True), Column("with"))
    rows: list[list[Markup | str]] = [
        [step.text, step.gain, element("code", step.how) if step.how else ""] for step in steps
    ]
    return head + table(columns, rows, "What to do next")


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
