"""`Climb`: what `ridgeline optimize` found, written as climb.json; reports are drawn from it.

    climb = Climb.from_json(json.loads(Path("out/climb.json").read_text()))
    print(climb)                # the headline, each rung, and why the others were dropped
    climb.speedup               # the ratio of the two rates shown

For a language model "before" is the engine with its defaults: what a user gains over doing nothing.
`ladder` explains the answer from the plain loop upward, and `over_plain` is what that comes to.

Two numbers say how much faster it became. `speedup` is the rate after over the rate before, the
two rates that stand beside it. `total` is the estimate from rounds that took turns, with its 95%
interval: what else the machine did cancels out of it, so the two may differ by a few percent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from ridgeline.ladder.outcome import (
    Goal,
    NextStep,
    PeerFigures,
    RungOutcome,
    ServiceLevels,
    Side,
    Speedup,
    from_document,
)
from ridgeline.ladder.reporting.levels import levels_headline, peer_words
from ridgeline.ladder.reporting.rung_table import reasons_table, rungs_table
from ridgeline.profiling.drawing import times
from ridgeline.profiling.drawing.waterfall import end_of
from ridgeline.profiling.predicting.prediction import GapPart
from ridgeline.profiling.printing import PrintedResult, safe_text

SCHEMA = 1
LEARNED = "learned tokens/s"  # the unit of a climb of training
WIDE = 1.2  # the interval's upper end over its lower: more, and the headline says "about"


@dataclass(frozen=True, repr=False)
class Climb(PrintedResult):
    model: str  # as the user named it
    goal: Goal
    workload: str
    command: tuple[str, ...]  # repeats it
    created: str  # UTC, ISO 8601
    seconds: float
    hardware: Mapping[str, Any]  # Hardware.summary()
    versions: Mapping[str, str]
    bandwidth: float | None  # B/s, the ceiling used; None where unknown
    bandwidth_source: str | None
    matrix_rates: Mapping[str, float]  # FLOP/s by dtype
    bounds: Mapping[str, float | None]  # max_kl, max_ppl_increase; empty: quality was off
    before: Side
    after: Side
    rungs: tuple[RungOutcome, ...]
    total: Speedup | None  # after over before, measured in the same rounds
    notes: tuple[str, ...] = ()  # what a reader must know: started from another rung, stopped, …
    serve_command: tuple[str, ...] = ()
    ladder: tuple[RungOutcome, ...] = ()  # from the plain loop to the answer: it explains
    plain: Speedup | None = None  # the answer over the plain loop, where that was run beside it
    time_ledger: Mapping[str, float] = field(default_factory=dict)  # seconds, by what they went to
    gap: tuple[GapPart, ...] = ()  # why the answer is not at the limit, the largest part first
    next_steps: tuple[NextStep, ...] = ()  # not tried, and predicted to help
    levels: ServiceLevels | None = None  # where a latency bound was given
    peer: PeerFigures | None = None  # where another server was named
    first_answer_s: float | None = None  # until the defaults and the first answer were measured
    # of the rates, here and in speedups; a module has "calls/s", training LEARNED
    unit: str = "tokens/s"
    is_by_model: bool = False  # the rates: a part was run, and what it tells of the whole is told
    schema: int = field(default=SCHEMA)

    def __repr__(self) -> str:
        return f"<Climb of {self.model} for {self.goal}: {self.headline}>"

    @property
    def kept(self) -> list[RungOutcome]:
        return [rung for rung in self.rungs if rung.status == "kept"]

    @property
    def kept_product(self) -> float:
        """What the kept changes came to, each measured against the one before."""
        return math.prod(rung.achieved.value for rung in self.kept if rung.achieved is not None)

    @property
    def is_of_tokens(self) -> bool:
        """Not of a module outside our families, whose rates are calls."""
        return self.unit == "tokens/s"

    @property
    def is_training(self) -> bool:
        return self.unit == LEARNED

    @property
    def call_name(self) -> str:
        """What `request_s` is the time of."""
        if self.is_training:
            return "a step"
        return "whole request" if self.is_of_tokens else "a call"

    @property
    def rate_unit(self) -> str:
        return f"output {self.unit}" if self.is_of_tokens else self.unit

    @property
    def speedup(self) -> float | None:
        """The rate after over the rate before; None where a file has no such rate."""
        before = self.before.figures.output_tokens_per_s
        return self.after.figures.output_tokens_per_s / before if before > 0 else None

    @property
    def headline(self) -> str:
        """One line. Its ratio is the quotient of the two rates as they stand in it; a wide interval
        stands beside it and softens the words. Where a latency bound was given it is about the rate
        that is held.
        """
        if self.levels is not None:
            return levels_headline(self.levels)
        before = rate(self.before.figures.output_tokens_per_s)
        after = rate(self.after.figures.output_tokens_per_s)
        if not self.kept:
            if self.ladder:
                return f"The defaults are the fastest that was found: {after} {self.rate_unit}"
            word = "kept" if self.rungs else "tried"
            return f"Nothing was {word}: {before} {self.rate_unit}, as before"
        if self.total is None:
            return f"About {times(self.kept_product)} the speed, by the changes kept one by one"
        ratio, whose = shown_ratio(before, after), " of the defaults" if self.ladder else ""
        rates = f"{after} {self.rate_unit} instead of {before}"
        if self.total.low <= 1.0:
            return f"Not faster beyond noise: {rates}, {between_words(self.total)}"
        if self.is_by_model:
            return f"About {ratio} the speed{whose}: {rates}, by the model of a step"
        if self.total.high > WIDE * self.total.low:
            return f"About {ratio} the speed{whose}, {between_words(self.total)}: {rates}"
        return f"{ratio} the speed{whose}: {rates}"

    @property
    def over_plain(self) -> float | None:
        """The answer over the plain loop, as measured or else step by step; None where there is no
        ladder to it.
        """
        if self.plain is not None:
            return self.plain.value
        steps = [_gain(step) for step in self.ladder]
        known = [gain for gain in steps if gain is not None]
        return math.prod(known) if known and len(known) == len(steps) else None

    @property
    def over_plain_words(self) -> str:
        """How that is known."""
        if self.plain is not None:
            low, high = end_of(self.plain.low), end_of(self.plain.high)
            return f"measured in {len(self.plain.before)} rounds ({low} to {high}×)"
        return "measured step by step" if self.ladder_is_measured else "predicted in part"

    @property
    def ladder_is_measured(self) -> bool:
        return all(step.achieved is not None for step in self.ladder)

    def table(self) -> RenderableType:
        """For `rich.print`: what was tried, predicted, achieved, and why the rest was dropped."""
        parts: list[RenderableType] = [safe_text(self.headline, "bold")]
        if self.total is not None:
            parts.append(Text(paired_words(self.total)))
        if self.peer is not None:
            parts.append(safe_text(peer_words(self.peer, self.after.figures, self.levels)))
        parts += [Text(), rungs_table(self.rungs)]
        rest = [rung for rung in self.rungs if rung.status != "kept"]
        if rest:
            parts += [Text(), reasons_table(rest)]
        return Group(*parts, *(safe_text(f"note: {note}") for note in self.notes))

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "speedup": self.speedup}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Climb:
        fields = {name: value for name, value in document.items() if name != "speedup"}
        climb: Climb = from_document(cls, fields, "a climb")
        return climb


def _gain(step: RungOutcome) -> float | None:
    """What it gave, or is predicted to."""
    if step.achieved is not None:
        return step.achieved.value
    return None if step.predicted is None else step.predicted.speedup


def rate(per_s: float) -> str:
    """As people read it: 311, 27.3, 4.12."""
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"


def shown_ratio(before: str, after: str) -> str:
    """Of two rates as `rate` writes them, so that a reader who divides them gets the same."""
    first, last = (float(text.replace(",", "")) for text in (before, after))
    return times(last / first) if first > 0 else times(math.inf)


def between_words(total: Speedup) -> str:
    return f"between {end_of(total.low)} and {end_of(total.high)}×"


def paired_words(total: Speedup) -> str:
    low, high, count = end_of(total.low), end_of(total.high), len(total.before)
    return f"{times(total.value)} in {count} paired rounds, 95% interval {low} to {high}×"
