"""Bars made of parts, such as memory by what it holds or a step by where its time went.

stacked_bars([Bar("after", (Part("weights", 8.1e9, "int8 codes and scales"),))], human_bytes)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ridgeline.profiling.drawing.marks import NUM_PARTS, swatch
from ridgeline.profiling.drawing.markup import Markup, element, join
from ridgeline.profiling.drawing.tables import Column, table

LEAST_SHARE = 0.002  # of the longest bar: less is not drawn, and stands in the table


@dataclass(frozen=True)
class Part:
    name: str  # the same name has the same colour in every bar
    value: float
    meaning: str = ""


@dataclass(frozen=True)
class Bar:
    name: str
    parts: Sequence[Part]


def stacked_bars(
    bars: Sequence[Bar],
    read: Callable[[float], str],
    *,
    whole: str = "",
    are_shares: bool = False,
) -> Markup:
    """A figure: the bars, and a table of all parts with a swatch, their figure in every bar and
    their meaning. `whole` names the sum's row ("in all"). Bars have one scale; with `are_shares`
    all are equally long, for things whose sums are not to be compared.
    """
    names = list(dict.fromkeys(part.name for bar in bars for part in bar.parts))
    longest = max((_sum(bar) for bar in bars), default=0.0)
    lengths = [_sum(bar) if are_shares else longest for bar in bars]
    drawn = [
        _bar(bar, names, length, read)
        for bar, length in zip(bars, lengths, strict=True)
        if length > 0
    ]
    return element("figure", *drawn, _table(bars, names, read, whole), class_="bars")


def _sum(bar: Bar) -> float:
    return sum(part.value for part in bar.parts if math.isfinite(part.value))


def _bar(bar: Bar, names: Sequence[str], longest: float, read: Callable[[float], str]) -> Markup:
    pieces, start = [], 0.0
    for part in bar.parts:
        share = part.value / longest
        if share >= LEAST_SHARE:
            pieces.append(_piece(part, names.index(part.name), start, share, read))
            start += share
    said = ", ".join(f"{part.name} {read(part.value)}" for part in bar.parts)
    label = f"{bar.name}: {said}"
    head = element("span", bar.name) + " " + element("b", read(_sum(bar)))
    svg = element("svg", *pieces, class_="stack", height=30, role="img", aria_label=label)
    return element("div", element("p", head, class_="bar-name"), svg, class_="bar")


def _piece(
    part: Part, index: int, start: float, share: float, read: Callable[[float], str]
) -> Markup:
    text = f"{part.name}: {read(part.value)}"
    return element(
        "rect", element("title", text), class_=f"part p{index % NUM_PARTS}",
        x=f"{100 * start:.3f}%", width=f"{100 * share:.3f}%", height=30, data_key=part.name,
    )  # fmt: skip


def _table(
    bars: Sequence[Bar], names: Sequence[str], read: Callable[[float], str], whole: str
) -> Markup:
    columns = [Column("part"), *(Column(bar.name, is_number=True) for bar in bars), Column("")]
    rows: list[list[Markup | str]] = []
    for index, name in enumerate(names):
        found = [next((part for part in bar.parts if part.name == name), None) for bar in bars]
        meaning = next((part.meaning for part in reversed(found) if part and part.meaning), "")
        values = ["–" if part is None else read(part.value) for part in found]
        rows.append([swatch(index) + " " + name, *values, meaning])
    if whole:
        total = [element("b", read(_sum(bar))) for bar in bars]
        rows.append([element("b", whole), *total, ""])
    return table(columns, rows, "Parts of " + " and ".join(bar.name for bar in bars), keys=names)


def legend(names: Sequence[str]) -> Markup:
    """Parts by their colours, in a line, for bars that have no table."""
    items = [element("li", swatch(index), " ", name) for index, name in enumerate(names)]
    return element("ul", join(items), class_="legend")
