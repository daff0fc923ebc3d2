"""What plots have in common: the frame with its axes and grid, and charts inside a table's cells.

plot(200, axes + marks, "Throughput over the batch: …")
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ridgeline.profiling.drawing.markup import Markup, element, join
from ridgeline.profiling.drawing.scales import Scale


def plot(height: float, content: Markup, label: str) -> Markup:
    """An SVG as wide as there is room. It is a group, not an image, so that what is inside can be
    reached.
    """
    return element("svg", content, class_="plot", height=height, role="group", aria_label=label)


def x_axis(scale: Scale, ticks: Sequence[float], y: float, read: Callable[[float], str]) -> Markup:
    """Lines up from the bottom at `y`; of many numbers every second one goes on a narrow screen."""
    result = [element("line", class_="axis", x1=0, x2="100%", y1=y, y2=y)]
    for index, tick in enumerate(ticks):
        x = scale.percent(tick)
        spare = " spare" if len(ticks) > 5 and index % 2 else ""
        result += [
            element("line", class_="grid", x1=x, x2=x, y1=0, y2=y),
            element("text", read(tick), class_=f"tick middle{spare}", x=x, y=y + 17),
        ]
    return join(result)


def y_axis(
    scale: Scale, ticks: Sequence[float], bottom: float, top: float, read: Callable[[float], str]
) -> Markup:
    result = []
    for tick in ticks:
        y = scale.pixels(tick, bottom, top)
        result += [
            element("line", class_="grid", x1=0, x2="100%", y1=y, y2=y),
            element("text", read(tick), class_="tick end", x=-8, y=y + 4),
        ]
    return join(result)


def axis_names(x_name: str, y_name: str, bottom: float) -> Markup:
    return element("text", x_name, class_="tick end", x="100%", y=bottom + 34) + element(
        "text", y_name, class_="tick end", x=-8, y=4
    )


# In a table: every row has a small chart of its own, with the same scale in all.


def cell_chart(content: Markup, label: str) -> Markup:
    """As large as its cell."""
    return element("svg", content, class_="cell-chart", role="img", aria_label=label)


def cell_grid(scale: Scale, ticks: Sequence[float]) -> Markup:
    places = [scale.percent(tick) for tick in ticks]
    return join(element("line", class_="grid", x1=x, x2=x, y1=0, y2="100%") for x in places)


def cell_axis(scale: Scale, ticks: Sequence[float], read: Callable[[float], str]) -> Markup:
    """For the head of the column."""
    texts = [
        element("text", read(tick), class_="tick middle", x=scale.percent(tick), y="100%", dy=-6)
        for tick in ticks
    ]
    return element("svg", join(texts), class_="cell-chart", aria_hidden="true")


def whisker(scale: Scale, low: float, high: float, offset: float, look: str) -> Markup:
    """An interval, `offset` pixels below the middle of the cell. An end that lies outside the scale
    is open: the line goes to the edge.
    """
    first, last = scale.percent(low), scale.percent(high)
    parts = [element("line", x1=first, x2=last, y1="50%", y2="50%")]
    for x in (scale.percent(end) for end in (low, high) if scale.low <= end <= scale.high):
        end = element("line", x1=0, x2=0, y1=-3, y2=3)
        parts.append(element("svg", end, x=x, y="50%", overflow="visible"))
    return element("g", *parts, class_=f"whisker {look}", transform=f"translate(0 {offset})")
