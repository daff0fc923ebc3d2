"""Changes one after the other as a waterfall: each row begins where the kept ones before it ended,
and shows what was predicted beside what was achieved, with their intervals. Logarithmic, because
speedups multiply.

    waterfall([Step("weights in int8", "quantize", "kept", True, Rise(1.9, 1.6, 2.3),
                    Rise(2.05, 2.0, 2.1))])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ridgeline.profiling.drawing.markup import Markup


@dataclass(frozen=True)
class Rise:
    """How many times faster, with an interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Step:
    title: str
    group: str  # small, above the title; "" for none
    outcome: str  # a word or two: "kept", "dropped"
    counts: bool  # whether what follows begins where this one ended
    predicted: Rise | None = None
    achieved: Rise | None = None
    detail: Markup | str = ""  # shown when the row is opened


def waterfall(steps: Sequence[Step], *, total: Rise | None = None) -> Markup:
    """A figure with a row for each step, those without figures included, and one for the total.
    With no step achieved (predictions only) the predicted ones are what rows begin at.
    """
    raise NotImplementedError
