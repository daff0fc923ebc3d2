"""Figures with their intervals on one axis, beside the bound that they are held to.

intervals([Interval("weights in int8", 0.004, 0.003, 0.005, "inside")], "mean KL", bound=0.02)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ridgeline.profiling.drawing.markup import Markup


@dataclass(frozen=True)
class Interval:
    label: str
    value: float
    low: float | None
    high: float | None
    remark: str = ""
    is_outside: bool = False  # of the bound: drawn as such


def intervals(
    rows: Sequence[Interval],
    title: str,
    *,
    read: Callable[[float], str],
    bound: float | None = None,
) -> Markup:
    """A figure with a row for each. The axis begins at zero, or below it where a value does."""
    raise NotImplementedError
