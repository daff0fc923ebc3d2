"""The roofline: what the machine allows, and where the work lies under it. Both axes logarithmic.

roofline([Dot("decode", 1.9, 4.1e12, "46% of bandwidth")], Roofs(4.2e12, {"bf16": 7.3e14}))
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ridgeline.hardware.units import human
from ridgeline.profiling.drawing.geometry import (
    Dot,
    Flat,
    Roofs,
    digits,
    flats,
    known_roofs,
    limit_at,
    scales,
    slope,
    under_roof,
)
from ridgeline.profiling.drawing.labels import spread
from ridgeline.profiling.drawing.marks import inline_mark, mark, point
from ridgeline.profiling.drawing.markup import Markup, element, join
from ridgeline.profiling.drawing.plots import axis_names, plot, x_axis, y_axis
from ridgeline.profiling.drawing.scales import Scale, decades
from ridgeline.profiling.drawing.tables import Column, table

HEIGHT = 380
TOP, BOTTOM = 18.0, 336.0
WIDTH = 760  # pixels, for which names are kept apart; narrower screens show none
NUM_NAMED = 8  # dots whose names are written beside them
LONGEST_NAME = 30  # characters of a name in the plot
LETTER = 6.2  # pixels of one, in the names of rates
LINE = 14.0  # pixels from one of these names to the next
LEADER = 16.0  # pixels from the end of a flat to its name


Box = tuple[float, float, float, float]  # left, top, right, bottom


def roofline(dots: Sequence[Dot], roofs: Roofs | None, *, title: str = "Roofline") -> Markup:
    """A figure. Every dot takes the keyboard's focus and shows its figures then, as under the
    pointer; the same stand in a table below. Without roofs, dots only, and a line that says so.
    """
    roofs = known_roofs(roofs)
    dots = [under_roof(dot, roofs) for dot in dots]
    shown = [dot for dot in dots if dot.is_drawable]
    parts = [] if roofs else [_unknown()]
    if shown or roofs:
        parts.append(_plot(shown, roofs, title))
    parts.append(_table(dots) if dots else element("p", "No step was measured.", class_="soft"))
    return element("figure", *parts, class_="roofline")


def _unknown() -> Markup:
    hint = element("code", "ridgeline hardware")
    text = join(["This machine's limits are not known, so no roof is drawn; ", hint])
    return element("p", text, " measures them once.", class_="soft")


def _plot(dots: Sequence[Dot], roofs: Roofs | None, title: str) -> Markup:
    across, up = scales(dots, roofs)
    if roofs:
        across = _with_room(across, roofs)
    drawn = x_axis(across, decades(across.low, across.high), BOTTOM, _plain)
    drawn += y_axis(up, decades(up.low, up.high), BOTTOM, TOP, lambda rate: human(rate, "").strip())
    drawn += axis_names("FLOP per byte moved", "FLOP/s", BOTTOM)
    taken = [_around(dot, across, up) for dot in dots]
    if roofs:
        drawn += _roof(roofs, across, up, taken)
    drawn += _connections(dots, roofs, across, up)
    drawn += join(_dot(dot, across, up) for dot in dots)
    drawn += _names(dots, across, up, taken)
    text = "; ".join(f"{dot.label}: {dot.figures}" for dot in dots) or "nothing measured"
    source = f" Limits {roofs.source}." if roofs else ""
    return plot(HEIGHT, drawn, f"{title}. {text}.{source}")


def _roof(roofs: Roofs, across: Scale, up: Scale, taken: list[Box]) -> Markup:
    """The slope up to the highest flat, and a flat for each dtype, with their names."""
    (first, low), (ridge, highest) = slope(roofs, across, up)
    line = element(
        "line", class_="roof", x1=across.percent(first), x2=across.percent(ridge),
        y1=up.pixels(low, BOTTOM, TOP), y2=up.pixels(highest, BOTTOM, TOP),
    )  # fmt: skip
    drawn = line + _flats(roofs, across, up, taken)
    return drawn + _slope_name(roofs, first, ridge, across, up, taken)


def _slope_name(
    roofs: Roofs, first: float, ridge: float, across: Scale, up: Scale, taken: list[Box]
) -> Markup:
    """Left of the slope, near its middle, where nothing else is. Adds to `taken`."""
    text = human(roofs.bandwidth, "B/s")
    spots = [first * (ridge / first) ** share for share in (0.5, 0.65, 0.35, 0.8, 0.2)]
    boxes = []
    for spot in spots:
        x, y = across.share(spot) * WIDTH - 9, up.pixels(spot * roofs.bandwidth, BOTTOM, TOP) - 5
        boxes.append((x - LETTER * len(text), y - 10, x, y + 3))
    free = [not any(_meet(box, other) for other in taken) for box in boxes]
    index = free.index(True) if any(free) else 0
    taken.append(boxes[index])
    return element(
        "text", text, class_="halo end", x=across.percent(spots[index]),
        y=up.pixels(spots[index] * roofs.bandwidth, BOTTOM, TOP), dx=-9, dy=-5,
    )  # fmt: skip


def _flats(roofs: Roofs, across: Scale, up: Scale, taken: list[Box]) -> Markup:
    """Rates that are nearly alike share a line. Its name stands at its right end, where nothing
    else is drawn; names that would touch stand further apart, and lines lead to them. Adds to
    `taken`.
    """
    lines_of = flats(roofs)
    heights = [up.pixels(flat.rate, BOTTOM, TOP) for flat in lines_of]
    positions = spread(heights, LINE, LINE / 2, BOTTOM - LINE / 2)
    room = _room(roofs)
    lines, names = (
        [],
        [element("rect", class_="ground", x=-room, width=room + 3, height=BOTTOM - 1)],
    )
    for rank, (flat, y, position) in enumerate(zip(lines_of, heights, positions, strict=True)):
        first, look = across.percent(flat.ridge), "roof lower" if rank else "roof"
        lines.append(element("line", class_=look, x1=first, x2="100%", y1=y, y2=y))
        text = _rate_name(flat)
        wide = LETTER * len(text)
        taken.append((WIDTH - room, position - LINE / 2, float(WIDTH), position + LINE / 2))
        names += [
            element("line", class_="leader", x1=-room, x2=-wide - 3, y1=y, y2=round(position, 1)),
            element("text", text, class_="rate halo end", y=round(position + 4, 1)),
        ]
    return join([*lines, element("svg", *names, x="100%", overflow="visible")])


def _with_room(across: Scale, roofs: Roofs) -> Scale:
    """With the names of rates behind what lies furthest right."""
    free = 1 - _room(roofs) / WIDTH
    return across._replace(high=across.low * (across.high / across.low) ** (1 / free))


def _room(roofs: Roofs) -> float:
    """Pixels that the names of rates take, and the lines that lead to them."""
    names = [_rate_name(flat) for flat in flats(roofs)]
    return LETTER * max(map(len, names)) + LEADER


def _rate_name(flat: Flat) -> str:
    return f"{shortened(', '.join(flat.dtypes))} {human(flat.rate, 'FLOP/s')}"


def _connections(dots: Sequence[Dot], roofs: Roofs | None, across: Scale, up: Scale) -> Markup:
    """From what was to what became of it, and from a dot up to its roof."""
    result, by_label = [], {dot.label: dot for dot in dots}
    for dot in dots:
        x, y = across.percent(dot.flops_per_byte), up.pixels(dot.flops_per_s, BOTTOM, TOP)
        look = f"s{dot.series % 6}"
        became = by_label.get(dot.after or "")
        if became is not None:
            to_y = up.pixels(became.flops_per_s, BOTTOM, TOP)
            to_x = across.percent(became.flops_per_byte)
            result.append(element("line", class_=f"became {look}", x1=x, x2=to_x, y1=y, y2=to_y))
        if roofs and not dot.hollow and dot.weight is None:
            roof_y = up.pixels(limit_at(roofs, dot.flops_per_byte), BOTTOM, TOP)
            result.append(element("line", class_=f"drop {look}", x1=x, x2=x, y1=roof_y, y2=y))
    return join(result)


def _dot(dot: Dot, across: Scale, up: Scale) -> Markup:
    size = 1.15 if dot.weight is None else 0.6 + 1.8 * math.sqrt(min(1.0, max(0.0, dot.weight)))
    x, y = across.percent(dot.flops_per_byte), up.pixels(dot.flops_per_s, BOTTOM, TOP)
    text = f"{dot.label}: {dot.reached}, {dot.figures}"
    return point(x, y, text, mark(dot.series, dot.hollow, size), key=dot.label)


def _names(dots: Sequence[Dot], across: Scale, up: Scale, taken: list[Box]) -> Markup:
    """Beside the dot, where no other name or dot is; the heaviest first."""
    heaviest = sorted(dots, key=lambda dot: -(dot.weight or 0.0))[:NUM_NAMED]
    result = []
    for dot in heaviest:
        x, y = _place(dot, across, up)
        name = shortened(dot.label)
        wide = 6.6 * len(name)
        for anchor, dx, dy, left in (
            ("", 12, 4, 12.0), ("middle", 0, 22, -wide / 2), ("middle", 0, -13, -wide / 2),
            ("end", -12, 4, -12 - wide),
        ):  # fmt: skip
            box = (x + left, y + dy - 11, x + left + wide, y + dy + 3)
            if box[0] >= 0 and box[2] <= WIDTH and not any(_meet(box, other) for other in taken):
                taken.append(box)
                look = f"name halo {anchor}".strip()
                at = {"x": across.percent(dot.flops_per_byte), "y": y, "dx": dx, "dy": dy}
                result.append(element("text", name, class_=look, **at))
                break
    return join(result)


def _place(dot: Dot, across: Scale, up: Scale) -> tuple[float, float]:
    return (
        across.share(dot.flops_per_byte) * WIDTH,
        up.pixels(dot.flops_per_s, BOTTOM, TOP),
    )


def _around(dot: Dot, across: Scale, up: Scale) -> Box:
    x, y = _place(dot, across, up)
    return (x - 8, y - 8, x + 8, y + 8)


def _meet(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _table(dots: Sequence[Dot]) -> Markup:
    columns = (
        Column("work"),
        Column("FLOP per byte", is_number=True),
        Column("reached", is_number=True),
        Column(""),
    )
    rows: list[list[Markup | str]] = [
        [
            inline_mark(dot.series, dot.hollow) + " " + dot.label,
            digits(dot.flops_per_byte),
            dot.reached,
            dot.figures,
        ]
        for dot in dots
    ]
    return table(columns, rows, "Figures of the roofline", keys=[dot.label for dot in dots])


def shortened(name: str) -> str:
    """For a plot; in full it stands in the table."""
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"


def _plain(value: float) -> str:
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"
