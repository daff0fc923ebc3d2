"""Lines over the steps of a run: even axes, and of thousands of steps the means of some hundred
groups; what lies far outside is drawn at the edge.

timeline([Series("loss", ((1, 3.2), (2, 3.1)))], "Loss", "step", "nats a token")
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from ridgeline.profiling.drawing.curves import Series, legend, series_table
from ridgeline.profiling.drawing.marks import mark, point
from ridgeline.profiling.drawing.markup import Markup, element, join
from ridgeline.profiling.drawing.plots import axis_names, plot, x_axis, y_axis
from ridgeline.profiling.drawing.scales import Scale, even_ticks

HEIGHT = 240
TOP, BOTTOM = 10.0, 198.0
MOST_POINTS = 160  # of a line
MOST_MARKS = 16  # points of a line that can be asked for their figures


def timeline(
    series: Sequence[Series],
    title: str,
    x_name: str,
    y_name: str,
    *,
    read: Callable[[float], str] | None = None,  # a value as people read it
    from_zero: bool = False,  # small changes of a large value stay small
) -> Markup:
    tell = read or (lambda value: f"{value:,.4g}")
    head = element("h3", title, " ", element("small", y_name))
    lines = [replace(each, points=grouped(each.points, MOST_POINTS)) for each in series]
    lines = [each for each in lines if each.points]
    if not lines:
        return element("figure", head, element("p", "Not measured.", class_="soft"))
    across, up = _scales(lines, from_zero)
    ticks = [tick for tick in even_ticks(across.low, across.high) if tick == int(tick)]
    drawn = x_axis(across, ticks, BOTTOM, lambda x: f"{x:,.0f}")
    drawn += y_axis(up, up.ticks(), BOTTOM, TOP, tell) + axis_names(x_name, "", BOTTOM)
    drawn += join(_line(each, across, up, x_name, tell) for each in lines)
    marked = [replace(each, points=_marked(each.points)) for each in lines]
    text = "; ".join(_summary(each, tell) for each in lines)
    figures = element(
        "details", element("summary", "Figures"), series_table(marked, title, x_name, tell)
    )
    return element(
        "figure", head, legend(lines), plot(HEIGHT, drawn, f"{title} over {x_name}. {text}."),
        figures, class_="curves",
    )  # fmt: skip


def grouped(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """At most this many: the mean of each group of neighbours, at the last of them."""
    known = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    size = max(1, math.ceil(len(known) / most))
    groups = [known[first : first + size] for first in range(0, len(known), size)]
    return [(group[-1][0], sum(y for _, y in group) / len(group)) for group in groups]


def _marked(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Some of the points, the first and the last among them."""
    if len(points) <= MOST_MARKS:
        return list(points)
    step = (len(points) - 1) / (MOST_MARKS - 1)
    return [points[round(number * step)] for number in range(MOST_MARKS)]


def _scales(lines: Sequence[Series], from_zero: bool) -> tuple[Scale, Scale]:
    xs = [x for each in lines for x, _ in each.points]
    ys = sorted(y for each in lines for _, y in each.points)
    low, high = min(ys[0], 0.0) if from_zero else ys[0], ys[-1]
    usual = ys[math.floor(0.98 * (len(ys) - 1))]
    if high - low > 3 * (usual - low) > 0:  # a few that would flatten all others
        high = low + 1.5 * (usual - low)
    room = 0.08 * (high - low) or 0.1 * abs(high) or 1.0
    bottom = max(0.0, low - room) if low >= 0 else low - room
    return Scale(min(xs), max(max(xs), min(xs) + 1)), Scale(bottom, high + room)


def _line(
    series: Series, across: Scale, up: Scale, x_name: str, read: Callable[[float], str]
) -> Markup:
    def spot(x: float, y: float) -> tuple[str, float]:
        return across.percent(x), up.pixels(y, BOTTOM, TOP)

    look = f"line s{series.series % 6}" + (" hollow" if series.hollow else "")
    spots = [spot(x, y) for x, y in series.points]
    lines = [
        element("line", class_=look, x1=one[0], x2=next_[0], y1=one[1], y2=next_[1])
        for one, next_ in pairwise(spots)
    ]
    marks = [
        point(
            *spot(x, y), f"{series.name}, {x_name} {x:,.0f}: {read(y)}",
            mark(series.series, series.hollow, 0.6),
        )
        for x, y in _marked(series.points)
    ]  # fmt: skip
    return join([*lines, *marks])


def _summary(series: Series, read: Callable[[float], str]) -> str:
    (first, begun), (last, ended) = series.points[0], series.points[-1]
    return f"{series.name}: {read(begun)} at {first:,.0f}, {read(ended)} at {last:,.0f}"
