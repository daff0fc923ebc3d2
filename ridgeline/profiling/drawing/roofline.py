"""The roofline: what the machine allows, and where the work lies under it. Both axes logarithmic.

roofline([Dot("decode", 1.9, 4.1e12, "46% of bandwidth")], Roofs(4.2e12, {"bf16": 7.3e14}))
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ridgeline.hardware.units import human
from ridgeline.profiling.drawing.labels import spread
from ridgeline.profiling.drawing.marks import inline_mark, mark, point
from ridgeline.profiling.drawing.markup import Markup, element, join
from ridgeline.profiling.drawing.plots import axis_names, plot, x_axis, y_axis
from ridgeline.profiling.drawing.scales import Scale, decades, is_drawable
from ridgeline.profiling.drawing.tables import Column, table

HEIGHT = 380
TOP, BOTTOM = 18.0, 336.0
WIDTH = 760  # pixels, for which names are kept apart; narrower screens show none
NUM_NAMED = 8  # dots whose names are written beside them
LONGEST_NAME = 30  # characters of a name in the plot
ALIKE = 0.97  # of another rate: one line for both
LETTER = 6.2  # pixels of one, in the names of rates
LINE = 14.0  # pixels from one of these names to the next
LEADER = 16.0  # pixels from the end of a flat to its name


Box = tuple[float, float, float, float]  # left, top, right, bottom


@dataclass(frozen=True)
class Roofs:
    """The ceilings, in base units. A slope, and a flat for each dtype."""

    bandwidth: float  # B/s
    rates: Mapping[str, float]  # FLOP/s by dtype
    source: str = "measured here"


@dataclass(frozen=True)
class Dot:
    label: str
    flops_per_byte: float
    flops_per_s: float
    figures: str  # one line, shown at the dot: "46% of bandwidth, 71% of the step"
    series: int = 0  # colour and shape: 0 to 5
    hollow: bool = False  # as it was before
    weight: float | None = None  # share of the time, 0 to 1: the area; None: all alike
    after: str | None = None  # label of the dot that this one became: a line goes there

    @property
    def is_drawable(self) -> bool:
        return is_drawable(self.flops_per_byte, self.flops_per_s)

    @property
    def reached(self) -> str:
        """Its rate as people read it."""
        return human(self.flops_per_s, "FLOP/s") if math.isfinite(self.flops_per_s) else "–"


def roofline(dots: Sequence[Dot], roofs: Roofs | None, *, title: str = "Roofline") -> Markup:
    """A figure. Every dot takes the keyboard's focus and shows its figures then, as under the
    pointer; the same stand in a table below. Without roofs, dots only, and a line that says so.
    """
    roofs = known_roofs(roofs)
    shown = [dot for dot in dots if dot.is_drawable]
    parts = [] if roofs else [_unknown()]
    if shown or roofs:
        parts.append(_plot(shown, roofs, title))
    parts.append(_table(dots) if dots else element("p", "No step was placed.", class_="soft"))
    return element("figure", *parts, class_="roofline")


def known_roofs(roofs: Roofs | None) -> Roofs | None:
    """Without rates that are no numbers; None where no roof is left."""
    if roofs is None or not is_drawable(roofs.bandwidth):
        return None
    rates = {name: rate for name, rate in roofs.rates.items() if is_drawable(rate)}
    return Roofs(roofs.bandwidth, rates, roofs.source) if rates else None


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
    drawn += _ways(dots, roofs, across, up)
    drawn += join(_dot(dot, across, up) for dot in dots)
    drawn += _names(dots, across, up, taken)
    said = "; ".join(f"{dot.label}: {dot.figures}" for dot in dots) or "nothing measured"
    source = f" Limits {roofs.source}." if roofs else ""
    return plot(HEIGHT, drawn, f"{title}. {said}.{source}")


def scales(dots: Sequence[Dot], roofs: Roofs | None) -> tuple[Scale, Scale]:
    xs = [dot.flops_per_byte for dot in dots]
    ys = [dot.flops_per_s for dot in dots]
    low, high = min(xs, default=1.0) / 3, max(xs, default=1.0) * 3
    top = max(ys, default=1.0) * 3
    if roofs:
        ridges = [rate / roofs.bandwidth for rate in roofs.rates.values()]
        low, high = min(low, min(ridges) / 30), max(high, max(ridges) * 8)
        top = max(top, max(roofs.rates.values()) * 2.2)
        ys = [*ys, low * roofs.bandwidth * 2]
    bottom = min(ys, default=top / 100) / 2
    return Scale(low, high, is_log=True), Scale(bottom, max(top, bottom * 10), is_log=True)


def _roof(roofs: Roofs, across: Scale, up: Scale, taken: list[Box]) -> Markup:
    """The slope up to the highest flat, and a flat for each dtype, with their names."""
    highest = max(roofs.rates.values())
    first = max(across.low, up.low / roofs.bandwidth)
    ridge = highest / roofs.bandwidth
    slope = element(
        "line", class_="roof", x1=across.percent(first), x2=across.percent(ridge),
        y1=up.pixels(first * roofs.bandwidth, BOTTOM, TOP), y2=up.pixels(highest, BOTTOM, TOP),
    )  # fmt: skip
    middle = math.sqrt(first * ridge)
    name = element(
        "text", human(roofs.bandwidth, "B/s"), class_="halo end", x=across.percent(middle),
        y=up.pixels(middle * roofs.bandwidth, BOTTOM, TOP), dx=-9, dy=-5,
    )  # fmt: skip
    return slope + _flats(roofs, across, up, taken) + name


def _flats(roofs: Roofs, across: Scale, up: Scale, taken: list[Box]) -> Markup:
    """Rates that are nearly alike share a line. Its name stands at its right end, where nothing
    else is drawn; names that would touch stand further apart, and lines lead to them. Adds to
    `taken`.
    """
    flats = merged_rates(roofs.rates)
    heights = [up.pixels(rate, BOTTOM, TOP) for _, rate in flats]
    places = spread(heights, LINE, LINE / 2, BOTTOM - LINE / 2)
    room = _room(roofs)
    lines, names = [], [element("rect", class_="ground", x=-room, width=room, height=BOTTOM - 1)]
    for rank, ((dtypes, rate), y, place) in enumerate(zip(flats, heights, places, strict=True)):
        first, look = across.percent(rate / roofs.bandwidth), "roof lower" if rank else "roof"
        lines.append(element("line", class_=look, x1=first, x2="100%", y1=y, y2=y))
        text = _rate_name(dtypes, rate)
        wide = LETTER * len(text)
        taken.append((WIDTH - room, place - LINE / 2, float(WIDTH), place + LINE / 2))
        names += [
            element("line", class_="leader", x1=-room, x2=-wide - 3, y1=y, y2=round(place, 1)),
            element("text", text, class_="rate halo end", y=round(place + 4, 1)),
        ]
    return join([*lines, element("svg", *names, x="100%", overflow="visible")])


def _with_room(across: Scale, roofs: Roofs) -> Scale:
    """With the names of rates behind what lies furthest right."""
    free = 1 - _room(roofs) / WIDTH
    return across._replace(high=across.low * (across.high / across.low) ** (1 / free))


def _room(roofs: Roofs) -> float:
    """Pixels that the names of rates take, and the lines that lead to them."""
    names = [_rate_name(dtypes, rate) for dtypes, rate in merged_rates(roofs.rates)]
    return LETTER * max(map(len, names)) + LEADER


def _rate_name(dtypes: Sequence[str], rate: float) -> str:
    return f"{shortened(', '.join(dtypes))} {human(rate, 'FLOP/s')}"


def merged_rates(rates: Mapping[str, float]) -> list[tuple[list[str], float]]:
    """Those that are nearly alike together; the highest first."""
    found: list[tuple[list[str], float]] = []
    for dtype, rate in sorted(rates.items(), key=lambda each: -each[1]):
        if found and rate > ALIKE * found[-1][1]:
            found[-1][0].append(dtype)
        else:
            found.append(([dtype], rate))
    return found


def _ways(dots: Sequence[Dot], roofs: Roofs | None, across: Scale, up: Scale) -> Markup:
    """From what was to what became of it, and from a dot up to its roof."""
    found, by_label = [], {dot.label: dot for dot in dots}
    for dot in dots:
        x, y = across.percent(dot.flops_per_byte), up.pixels(dot.flops_per_s, BOTTOM, TOP)
        look = f"s{dot.series % 6}"
        became = by_label.get(dot.after or "")
        if became is not None:
            to_y = up.pixels(became.flops_per_s, BOTTOM, TOP)
            to_x = across.percent(became.flops_per_byte)
            found.append(element("line", class_=f"way {look}", x1=x, x2=to_x, y1=y, y2=to_y))
        if roofs and not dot.hollow and dot.weight is None:
            limit = min(dot.flops_per_byte * roofs.bandwidth, max(roofs.rates.values()))
            roof_y = up.pixels(limit, BOTTOM, TOP)
            found.append(element("line", class_=f"drop {look}", x1=x, x2=x, y1=roof_y, y2=y))
    return join(found)


def _dot(dot: Dot, across: Scale, up: Scale) -> Markup:
    size = 1.15 if dot.weight is None else 0.6 + 1.8 * math.sqrt(min(1.0, max(0.0, dot.weight)))
    x, y = across.percent(dot.flops_per_byte), up.pixels(dot.flops_per_s, BOTTOM, TOP)
    said = f"{dot.label}: {dot.reached}, {dot.figures}"
    return point(x, y, said, mark(dot.series, dot.hollow, size), key=dot.label)


def _names(dots: Sequence[Dot], across: Scale, up: Scale, taken: list[Box]) -> Markup:
    """Beside the dot, where no other name or dot is; the heaviest first."""
    heaviest = sorted(dots, key=lambda dot: -(dot.weight or 0.0))[:NUM_NAMED]
    found = []
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
                found.append(element("text", name, class_=look, **at))
                break
    return join(found)


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
            _plain(dot.flops_per_byte)
            if dot.flops_per_byte >= 100
            else f"{dot.flops_per_byte:.3g}",
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


def digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
