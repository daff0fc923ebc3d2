"""From values to positions: 0 to 100% of a plot's width, pixels of its height, and its ticks.

Widths are percentages, so that a drawing fits any screen without a script; heights are pixels.

    scale = Scale(1.0, 100.0, is_log=True)
    scale.percent(10.0)      # "50%"
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

ROUND = ((1.0,), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0))
MOST_TICKS = 7


class Scale(NamedTuple):
    low: float
    high: float
    is_log: bool = False

    def share(self, value: float) -> float:
        """0 at `low`, 1 at `high`; what lies outside is drawn at the edge."""
        if self.is_log:
            value = max(value, self.low * 1e-9)
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return min(1.0, max(0.0, share))

    def percent(self, value: float) -> str:
        return f"{100 * self.share(value):.2f}".rstrip("0").rstrip(".") + "%"

    def pixels(self, value: float, bottom: float, top: float) -> float:
        return round(bottom + self.share(value) * (top - bottom), 1)

    def ticks(self) -> list[float]:
        return log_ticks(self.low, self.high) if self.is_log else even_ticks(self.low, self.high)


def is_drawable(*values: float | None) -> bool:
    """Whether a logarithmic axis can show them: numbers above zero that something could be."""
    return all(value is not None and 1e-30 < value < 1e30 for value in values)


def spanning(values: Iterable[float], *, least: float = 1.2, room: float = 1.0) -> Scale:
    """A logarithmic scale over all values, `least` times wide at least, with `room` (a factor) at
    both ends.
    """
    known = [value for value in values if is_drawable(value)] or [1.0]
    low, high = min(known), max(known)
    wider = math.sqrt(max(1.0, least / (high / low))) * room
    return Scale(low / wider, high * wider, is_log=True)


def even_ticks(low: float, high: float) -> list[float]:
    """Three to six round steps inside."""
    rough = (high - low) / 4
    power = 10 ** math.floor(math.log10(rough))
    step = next(each * power for each in (1, 2, 2.5, 5, 10) if each * power >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(count * step, 12) for count in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Round values inside: powers of ten, or closer ones where these are too few."""
    for steps in ROUND:
        result = [value for value in _powers(low, high, steps) if low <= value <= high * (1 + 1e-9)]
        if len(result) >= 3:
            return result[:: math.ceil(len(result) / MOST_TICKS)]
    return even_ticks(low, high)


def decades(low: float, high: float) -> list[float]:
    """Powers of ten inside, every second one where there are many."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    return [10.0**power for power in range(first, last + 1, 2 if last - first > 5 else 1)]


def _powers(low: float, high: float, steps: Iterable[float]) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    return [
        float(f"{step * 10.0**power:.6g}") for power in range(first, last + 1) for step in steps
    ]
