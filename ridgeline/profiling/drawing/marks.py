"""Marks of points and swatches of parts. Series differ in colour and in shape, parts in colour and
in lightness beside each other, so that no meaning hangs on colour alone.

    mark(0)                    # a filled circle around the origin
    swatch(2)                  # a small square for tables
"""

from __future__ import annotations

from ridgeline.profiling.drawing.markup import Markup, element

SHAPES = (
    "M-5 0a5 5 0 1 0 10 0a5 5 0 1 0-10 0Z",  # circle
    "M-4.6-4.6h9.2v9.2h-9.2Z",  # square
    "M0-6.2 6.2 0 0 6.2-6.2 0Z",  # diamond
    "M0-5.8 5.8 4.6h-11.6Z",  # triangle
    "M0 5.8 5.8-4.6h-11.6Z",  # triangle on its head
    "M-1.9-5.6h3.8v3.7h3.7v3.8h-3.7v3.7h-3.8v-3.7h-3.7v-3.8h3.7Z",  # cross
)
NUM_PARTS = 7  # colours of parts


def mark(series: int, hollow: bool = False, scale: float = 1.0) -> Markup:
    look = f"mark s{series % len(SHAPES)}" + (" hollow" if hollow else "")
    size = None if scale == 1.0 else f"scale({scale:.3g})"
    return element("path", class_=look, d=SHAPES[series % len(SHAPES)], transform=size)


def inline_mark(series: int, hollow: bool = False) -> Markup:
    """For a line of text or a table."""
    drawn = mark(series, hollow)
    return element("svg", drawn, class_="key", viewBox="-8 -8 16 16", aria_hidden="true")


def inline_line(series: int, hollow: bool = False) -> Markup:
    look = f"line s{series % len(SHAPES)}" + (" hollow" if hollow else "")
    line = element("line", class_=look, x1=-14, x2=14, y1=0, y2=0)
    drawn = line + mark(series, hollow)
    return element("svg", drawn, class_="key wide", viewBox="-15 -8 30 16", aria_hidden="true")


def swatch(part: int | None) -> Markup:
    """An empty one for a part that has no colour."""
    look = "part none" if part is None else f"part p{part}"
    square = element("rect", class_=look, x=0.5, y=0.5, width=11, height=11, rx=2)
    return element("svg", square, class_="key", viewBox="0 0 12 12", aria_hidden="true")


def point(x: str, y: float, label: str, *children: Markup, key: str = "") -> Markup:
    """Something at a place that can be pointed at and takes the focus: `label` is shown then, and
    read aloud. `x` is a percentage.
    """
    reach = element("circle", r=13, class_="reach")
    name = element("title", label)
    group = element(
        "g", name, reach, *children,
        class_="point", tabindex=0, role="img", aria_label=label, data_tip=label,
        data_key=key or None,
    )  # fmt: skip
    return element("svg", group, x=x, y=y, overflow="visible")
