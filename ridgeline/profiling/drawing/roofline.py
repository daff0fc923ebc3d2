"""The roofline: what the machine allows, and where the work lies under it. Both axes logarithmic.

roofline([Dot("decode", 1.9, 4.1e12, "46% of bandwidth")], Roofs(4.2e12, {"bf16": 7.3e14}))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ridgeline.profiling.drawing.markup import Markup


@dataclass(frozen=True)
class Roofs:
    """The ceilings, in base units. A slope, and a flat for each dtype."""

    bandwidth: float  # B/s
    rates: Mapping[str, float]  # FLOP/s by dtype
    source: str = "measured here"


@dataclass(frozen=True)
class Dot:
    label: str
    flops_per_byte: float
    flops_per_s: float
    figures: str  # one line, shown at the dot: "46% of bandwidth, 71% of the step"
    series: int = 0  # colour and shape: 0 to 5
    hollow: bool = False  # as it was before
    weight: float | None = None  # share of the time, 0 to 1: the area; None: all alike
    after: str | None = None  # label of the dot that this one became: an arrow goes there


def roofline(dots: Sequence[Dot], roofs: Roofs | None, *, title: str = "Roofline") -> Markup:
    """A figure. Every dot takes the keyboard's focus and shows its figures then, as under the
    pointer; the same stand in a table below. Without roofs, dots only, and a line that says so.
    """
    raise NotImplementedError
