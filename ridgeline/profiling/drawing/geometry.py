"""The roofline's geometry: ceilings, dots, and where they lie, in FLOP per byte and FLOP/s. Pages
draw it in SVG (roofline.py), the terminal in characters (cli/tables/plots.py).

    roofs = Roofs(4.2e12, {"bf16": 7.3e14})
    across, up = scales([Dot("decode", 1.9, 4.1e12, "46% of bandwidth")], roofs)
    slope(roofs, across, up).end            # the ridge: (173.8, 7.3e14)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ridgeline.hardware.units import human, is_over
from ridgeline.profiling.drawing.scales import Scale, is_drawable

ALIKE = 0.97  # of another rate: one line for both
Spot = tuple[float, float]  # FLOP per byte, FLOP/s


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
    after: str | None = None  # label of the dot that this one became: a line goes there
    measured_per_s: float | None = None  # FLOP/s, where it is drawn lower than that

    @property
    def is_drawable(self) -> bool:
        return is_drawable(self.flops_per_byte, self.flops_per_s)

    @property
    def reached(self) -> str:
        """Its rate as people read it."""
        rate = self.flops_per_s if self.measured_per_s is None else self.measured_per_s
        return human(rate, "FLOP/s") if math.isfinite(rate) else "–"


def known_roofs(roofs: Roofs | None) -> Roofs | None:
    """Without rates that are no numbers; None where no roof is left."""
    if roofs is None or not is_drawable(roofs.bandwidth):
        return None
    rates = {name: rate for name, rate in roofs.rates.items() if is_drawable(rate)}
    return Roofs(roofs.bandwidth, rates, roofs.source) if rates else None


def scales(dots: Sequence[Dot], roofs: Roofs | None) -> tuple[Scale, Scale]:
    xs = [dot.flops_per_byte for dot in dots]
    ys = [dot.flops_per_s for dot in dots]
    low, high = min(xs, default=1.0) / 3, max(xs, default=1.0) * 3
    top = max(ys, default=1.0) * 3
    if roofs:
        ridges = [rate / roofs.bandwidth for rate in roofs.rates.values()]
        low, high = min(low, min(ridges) / 30), max(high, max(ridges) * 8)
        top = max(top, max(roofs.rates.values()) * 2.2)
        ys = [*ys, low * roofs.bandwidth * 2]
    bottom = min(ys, default=top / 100) / 2
    return Scale(low, high, is_log=True), Scale(bottom, max(top, bottom * 10), is_log=True)


class Line(NamedTuple):
    start: Spot
    end: Spot


class Flat(NamedTuple):
    """The limit by matrix rate: of dtypes that are nearly alike, from their ridge on."""

    dtypes: list[str]
    rate: float  # FLOP/s
    ridge: float  # FLOP per byte


def slope(roofs: Roofs, across: Scale, up: Scale) -> Line:
    """The limit by bandwidth, from the edge of the plot up to the highest flat."""
    first = max(across.low, up.low / roofs.bandwidth)
    highest = max(roofs.rates.values())
    return Line((first, first * roofs.bandwidth), (highest / roofs.bandwidth, highest))


def flats(roofs: Roofs) -> list[Flat]:
    """The highest first; rates that are nearly alike share one."""
    result: list[Flat] = []
    for dtype, rate in sorted(roofs.rates.items(), key=lambda each: -each[1]):
        if result and rate > ALIKE * result[-1].rate:
            result[-1].dtypes.append(dtype)
        else:
            result.append(Flat([dtype], rate, rate / roofs.bandwidth))
    return result


def limit_at(roofs: Roofs, flops_per_byte: float) -> float:
    """FLOP/s that no work of this intensity goes beyond."""
    return min(flops_per_byte * roofs.bandwidth, max(roofs.rates.values()))


def under_roof(dot: Dot, roofs: Roofs | None) -> Dot:
    """Nothing is drawn over the roof: what was measured there stands on it, and says so."""
    if roofs is None or not dot.is_drawable:
        return dot
    limit = limit_at(roofs, dot.flops_per_byte)
    if not is_over(dot.flops_per_s / limit):
        return dot
    words = f"{dot.figures}; above this roof, which was measured too low, and drawn on it"
    return replace(dot, flops_per_s=limit, figures=words, measured_per_s=dot.flops_per_s)


def digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
