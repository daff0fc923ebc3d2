"""Bars made of parts, such as memory by what it holds or a step by where its time went.

stacked_bars([Bar("after", (Part("weights", 8.1e9, "int8 codes and scales"),))], human_bytes)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ridgeline.profiling.drawing.marks import NUM_PARTS, swatch
from ridgeline.profiling.drawing.markup import Markup, element
from ridgeline.profiling.drawing.tables import Column, table

MOST_COLUMNS = 3  # of bars in the table; of more each has a line
LEAST_SHARE = 0.004  # of its bar: what is less is not drawn, and stands in the table


@dataclass(frozen=True)
class BarPart:
    name: str  # the same name has the same colour in every bar
    value: float
    meaning: str = ""


@dataclass(frozen=True)
class Bar:
    name: str
    parts: Sequence[BarPart]


def stacked_bars(
    bars: Sequence[Bar],
    read: Callable[[float], str],
    *,
    whole: str = "",
    are_shares: bool = False,
) -> Markup:
    """A figure: the bars, and a table of all parts with a swatch, their figure in every bar and
    their meaning; of many bars two tables. `whole` names the sum ("in all"). Bars have one scale;
    with `are_shares` all are equally long, for things whose sums are not to be compared.
    """
    colours = part_colours(bars)
    longest = max((_sum(bar) for bar in bars), default=0.0)
    lengths = [_sum(bar) if are_shares else longest for bar in bars]
    drawn = [
        _bar(bar, colours, length, read)
        for bar, length in zip(bars, lengths, strict=True)
        if length > 0
    ]
    return element("figure", *drawn, _table(bars, colours, read, whole), class_="bars")


def part_colours(bars: Sequence[Bar]) -> dict[str, int | None]:
    """The number of each part's colour, in the order of the parts; None for those that are too
    small to be seen, and beyond as many as can be told apart.
    """
    shares: dict[str, float] = {}
    for bar in bars:
        for part in bar.parts:
            share = part.value / (_sum(bar) or 1.0)
            shares[part.name] = max(share, shares.get(part.name, 0.0))
    largest = sorted(shares, key=lambda name: -shares[name])[:NUM_PARTS]
    drawn = [name for name in shares if name in largest and shares[name] >= LEAST_SHARE]
    return {name: drawn.index(name) if name in drawn else None for name in shares}


def _sum(bar: Bar) -> float:
    return sum(part.value for part in bar.parts if math.isfinite(part.value))


def _bar(
    bar: Bar, colours: Mapping[str, int | None], length: float, read: Callable[[float], str]
) -> Markup:
    whole = f"{100 * _sum(bar) / length:.3f}%"
    pieces, start = [element("rect", class_="rest", width=whole, height=30)], 0.0
    for part in bar.parts:
        share, colour = part.value / length, colours[part.name]
        if colour is not None and share > 0:
            pieces.append(_piece(part, colour, start, share, read))
        start += share
    text = ", ".join(f"{part.name} {read(part.value)}" for part in bar.parts)
    label = f"{bar.name}: {text}"
    head = element("span", bar.name) + " " + element("b", read(_sum(bar)))
    svg = element("svg", *pieces, class_="stack", height=30, role="img", aria_label=label)
    return element("div", element("p", head, class_="bar-name"), svg, class_="bar")


def _piece(
    part: BarPart, colour: int, start: float, share: float, read: Callable[[float], str]
) -> Markup:
    text = f"{part.name}: {read(part.value)}"
    return element(
        "rect", element("title", text), class_=f"part p{colour}",
        x=f"{100 * start:.3f}%", width=f"{100 * share:.3f}%", height=30, data_key=part.name,
    )  # fmt: skip


def _table(
    bars: Sequence[Bar],
    colours: Mapping[str, int | None],
    read: Callable[[float], str],
    whole: str,
) -> Markup:
    if len(bars) > MOST_COLUMNS:
        return _legend(bars, colours) + _lines(bars, list(colours), read, whole)
    columns = [Column("part"), *(Column(bar.name, is_number=True) for bar in bars), Column("")]
    rows: list[list[Markup | str]] = []
    for name, colour in colours.items():
        result = [next((part for part in bar.parts if part.name == name), None) for bar in bars]
        meaning = next((part.meaning for part in reversed(result) if part and part.meaning), "")
        values = ["–" if part is None else read(part.value) for part in result]
        rows.append([swatch(colour) + " " + name, *values, meaning])
    if whole:
        total = [element("b", read(_sum(bar))) for bar in bars]
        rows.append([element("b", whole), *total, ""])
    return table(
        columns, rows, "Parts of " + " and ".join(bar.name for bar in bars), keys=list(colours)
    )


def _legend(bars: Sequence[Bar], colours: Mapping[str, int | None]) -> Markup:
    meanings = {part.name: part.meaning for bar in bars for part in bar.parts if part.meaning}
    rows: list[list[Markup | str]] = [
        [swatch(colour) + " " + name, meanings.get(name, "")] for name, colour in colours.items()
    ]
    return table([Column("part"), Column("")], rows, "What the parts are", keys=list(colours))


def _lines(
    bars: Sequence[Bar], names: Sequence[str], read: Callable[[float], str], whole: str
) -> Markup:
    """A line for each bar."""
    columns = [Column(""), *(Column(name, is_number=True) for name in names)]
    columns += [Column(whole, is_number=True)] * bool(whole)
    rows: list[list[Markup | str]] = []
    for bar in bars:
        values = {part.name: read(part.value) for part in bar.parts}
        total = [element("b", read(_sum(bar)))] * bool(whole)
        rows.append([bar.name, *(values.get(name, "–") for name in names), *total])
    return table(columns, rows, "Parts of each")
