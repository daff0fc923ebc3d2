"""Bars made of parts, such as memory by what it holds or a step by where its time went. All bars of
one figure have one scale.

    stacked_bars([Bar("after", (Part("weights", 8.1e9, "int8 codes and scales"),))], human_bytes)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ridgeline.profiling.drawing.markup import Markup


@dataclass(frozen=True)
class Part:
    name: str  # the same name has the same colour in every bar
    value: float
    meaning: str = ""


@dataclass(frozen=True)
class Bar:
    name: str
    parts: Sequence[Part]


def stacked_bars(bars: Sequence[Bar], read: Callable[[float], str], *, whole: str = "") -> Markup:
    """A figure: the bars, and a table of all parts with a swatch, their figure in every bar and
    their meaning. `whole` names the sum's row ("in all").
    """
    raise NotImplementedError
