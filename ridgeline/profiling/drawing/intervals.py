"""Figures with their intervals on one axis, beside the bound that they are held to.

intervals([Interval("weights in int8", 0.004, 0.003, 0.005, "inside")], "mean KL", bound=0.02)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ridgeline.profiling.drawing.marks import mark
from ridgeline.profiling.drawing.markup import Markup, element
from ridgeline.profiling.drawing.plots import cell_axis, cell_chart, cell_grid, whisker
from ridgeline.profiling.drawing.scales import Scale

FURTHEST = 3.0  # times the bound: what lies beyond is drawn at the edge


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
    origin: float = 0.0,
    ends_name: str = "95% interval",
) -> Markup:
    """A figure with a row for each. The axis begins at `origin`, or below it where a value does:
    0 for what is best at zero, 1 for speedups. `ends_name` says what the intervals are.
    """
    scale = _scale(rows, bound, origin)
    ticks = scale.ticks()
    limit = "" if bound is None else f" · allowed {read(bound)}"
    head = element(
        "tr",
        element("th", "change", scope="col"),
        element("th", cell_axis(scale, ticks, read), scope="col", class_="chart"),
        element("th", "value", scope="col", class_="number"),
        element("th", ends_name, scope="col", class_="number"),
    )
    body = [_row(row, scale, ticks, read, bound, ends_name) for row in rows]
    caption = element("caption", element("b", title), limit)
    table = element("table", caption, element("thead", head), element("tbody", *body))
    return element("figure", table, class_="chart-table intervals")


def _scale(rows: Sequence[Interval], bound: float | None, origin: float) -> Scale:
    values = [value for row in rows for value in (row.value, row.low, row.high, bound)]
    known = [value for value in values if value is not None and math.isfinite(value)]
    high = max([origin, *known])
    if bound:
        high = min(high, max(origin, FURTHEST * bound))
    low = max(min([origin, *known]), 2 * origin - high if high > origin else -math.inf)
    span = high - low or 1.0
    return Scale(low - 0.04 * span * (low < origin), high + 0.08 * span)


def _row(
    row: Interval,
    scale: Scale,
    ticks: Sequence[float],
    read: Callable[[float], str],
    bound: float | None,
    ends_name: str,
) -> Markup:
    look = "outside" if row.is_outside else "s0"
    drawn = cell_grid(scale, ticks)
    if bound is not None:
        x = scale.percent(bound)
        drawn += element("line", class_="bound", x1=x, x2=x, y1=0, y2="100%")
    if row.low is not None and row.high is not None:
        drawn += whisker(scale, row.low, row.high, 0, look)
    shape = mark(2 if row.is_outside else 0)
    drawn += element(
        "svg", element("g", shape, class_=look), x=scale.percent(row.value), y="50%",
        overflow="visible",
    )  # fmt: skip
    ends = "" if row.low is None or row.high is None else f"{read(row.low)} to {read(row.high)}"
    text = f"{row.label}: {read(row.value)}" + (f", {ends_name} {ends}" if ends else "")
    remark = element("small", row.remark) if row.remark else ""
    return element(
        "tr",
        element("th", row.label, " ", remark, scope="row"),
        element("td", cell_chart(drawn, text), class_="chart"),
        element("td", read(row.value), class_="number", data_name="value:"),
        element("td", ends or "–", class_="number", data_name="interval:"),
        class_="outside" if row.is_outside else None,
    )
