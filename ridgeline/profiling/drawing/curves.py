"""Lines over a number, such as throughput over the batch: told apart by colour, stroke and mark.

curves([Series("after", ((1, 250.0), (8, 1800.0)))], "Throughput", "batch", "tokens/s")
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ridgeline.profiling.drawing.marks import inline_line, mark, point
from ridgeline.profiling.drawing.markup import Markup, element, join
from ridgeline.profiling.drawing.plots import axis_names, plot, x_axis, y_axis
from ridgeline.profiling.drawing.scales import Scale, is_drawable, spanning
from ridgeline.profiling.drawing.tables import Column, table

HEIGHT = 240
TOP, BOTTOM = 10.0, 198.0
APART = 0.085  # of the width, from one number below the axis to the next at least


@dataclass(frozen=True)
class Series:
    name: str
    points: Sequence[tuple[float, float]]  # x, y; both positive
    series: int = 0  # colour and mark: 0 to 5
    hollow: bool = False  # as it was before: dashed


def curves(
    series: Sequence[Series],
    title: str,
    x_name: str,
    y_name: str,
    *,
    read: Callable[[float], str] | None = None,  # a value as people read it
    y_scale: Scale | None = None,  # None: logarithmic, over all values
) -> Markup:
    """A figure with logarithmic axes (batches double) and ticks at the batches measured.
    Points take the focus and show their figures; the figures stand in a table below as well.
    """
    tell = read or (lambda value: f"{value:,.4g}")
    head = element("h3", title, " ", element("small", y_name))
    places = sorted({x for each in series for x, y in _drawable(each)})
    if not places:
        return element("figure", head, element("p", "Not measured.", class_="soft"))
    across = spanning(places, least=2.0, room=1.12)
    heights = [y for each in series for _, y in _drawable(each)]
    up = y_scale or spanning(heights, least=3.0, room=1.25)
    drawn = x_axis(across, _thinned(places, across), BOTTOM, _plain)
    drawn += y_axis(up, up.ticks(), BOTTOM, TOP, tell) + axis_names(x_name, "", BOTTOM)
    drawn += join(_line(each, across, up, x_name, tell) for each in series)
    text = "; ".join(_said(each, tell) for each in series)
    figures = element(
        "details", element("summary", "Figures"), series_table(series, title, x_name, tell)
    )
    return element(
        "figure", head, legend(series), plot(HEIGHT, drawn, f"{title} over {x_name}. {text}."),
        figures, class_="curves",
    )  # fmt: skip


def _drawable(series: Series) -> list[tuple[float, float]]:
    return sorted((x, y) for x, y in series.points if is_drawable(x, y))


def _thinned(places: Sequence[float], across: Scale) -> list[float]:
    """Those whose numbers have room, from the left."""
    result = list[float]()
    for place in places:
        if not result or across.share(place) - across.share(result[-1]) >= APART:
            result.append(place)
    return result


def _line(
    series: Series, across: Scale, up: Scale, x_name: str, read: Callable[[float], str]
) -> Markup:
    places = [(across.percent(x), up.pixels(y, BOTTOM, TOP), x, y) for x, y in _drawable(series)]
    look = f"line s{series.series % 6}" + (" hollow" if series.hollow else "")
    lines = [
        element("line", class_=look, x1=one[0], x2=next_[0], y1=one[1], y2=next_[1])
        for one, next_ in pairwise(places)
    ]
    marks = [
        point(
            at, high, f"{series.name}, {x_name} {_plain(x)}: {read(y)}",
            mark(series.series, series.hollow, 0.8),
        )
        for at, high, x, y in places
    ]  # fmt: skip
    return join([*lines, *marks])


def _said(series: Series, read: Callable[[float], str]) -> str:
    points = _drawable(series)
    if not points:
        return f"{series.name}: not measured"
    (first, low), (last, high) = points[0], points[-1]
    return f"{series.name}: {read(low)} at {_plain(first)}, {read(high)} at {_plain(last)}"


def legend(series: Sequence[Series]) -> Markup:
    items = [
        element("li", inline_line(each.series, each.hollow), " ", each.name) for each in series
    ]
    return element("ul", *items, class_="legend")


def series_table(
    series: Sequence[Series], title: str, x_name: str, read: Callable[[float], str]
) -> Markup:
    columns = [Column(x_name), *(Column(each.name, is_number=True) for each in series)]
    values = [dict(each.points) for each in series]
    rows = [
        [_plain(x), *(read(known[x]) if x in known else "–" for known in values)]
        for x in sorted({x for known in values for x in known})
    ]
    return table(columns, rows, f"{title} over {x_name}")


def _plain(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:g}"
