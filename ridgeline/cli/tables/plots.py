"""Drawings made of characters, for terminals: bars on a common scale, and the roofline.

    bar(scale, 1.0, 2.4, width=30, fill="█")          # text of 30 columns
    roofline_plot(dots, roofs, width=72)              # lines of text

Text that comes from files goes through `safe_text`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rich.text import Text

from ridgeline.hardware.units import human
from ridgeline.profiling.drawing import Dot, Roofs
from ridgeline.profiling.drawing.geometry import flats, known_roofs, scales, slope, under_roof
from ridgeline.profiling.drawing.scales import Scale, decades
from ridgeline.profiling.printing import safe_text

HEIGHT = 13  # lines of a roofline
MARKS = {False: "●■◆▲▼✚", True: "○□◇△▽✕"}  # filled, hollow
STYLES = ("blue", "yellow", "cyan", "magenta", "green", "white")
PARTS = ("blue", "yellow", "cyan", "magenta", "green", "red", "white")
FILLS = "█▓▒░▚▞▤"  # parts differ without colours too
LEFT = 8  # columns for the numbers of the vertical axis


def bar(scale: Scale, start: float, end: float, width: int, fill: str, style: str) -> Text:
    """From `start` to `end`, whichever is larger; one column at least."""
    first, last = sorted((scale.share(start), scale.share(end)))
    left = min(width - 1, math.floor(first * width))
    length = max(1, round(last * width) - left)
    return Text(" " * left).append(fill * min(length, width - left), style=style)


def axis(scale: Scale, width: int, read: Callable[[float], str]) -> Text:
    """Ticks as words, where they do not run into each other."""
    line, end = [" "] * width, -1
    for tick in scale.ticks():
        word, at = read(tick), math.floor(scale.share(tick) * width)
        if at > end and at + len(word) <= width:
            line[at : at + len(word)] = word
            end = at + len(word)
    return Text("".join(line), style="dim")


def stack(parts: Sequence[tuple[float, int | None]], longest: float, width: int) -> Text:
    """One bar of values and the numbers of their colours; one without a colour is too small."""
    line, reached = Text(), 0.0
    for value, colour in parts:
        reached += value
        missing = round(reached / longest * width) - len(line)
        if colour is not None and missing > 0:
            line.append(FILLS[colour] * missing, style=PARTS[colour])
    return line


def key(colour: int | None) -> Text:
    """What marks a part in a list."""
    if colour is None:
        return Text("  ")
    return Text().append(f"{FILLS[colour]} ", style=PARTS[colour])


def roofline_plot(dots: Sequence[Dot], roofs: Roofs | None, width: int = 72) -> Text | None:
    """None where nothing can be placed."""
    dots, roofs = [dot for dot in dots if dot.is_drawable], known_roofs(roofs)
    if roofs is None:
        return None
    dots = [under_roof(dot, roofs) for dot in dots]
    across, up = scales(dots, roofs)
    canvas = _Canvas(width - LEFT, across, up)
    canvas.roof(roofs)
    for dot in dots:
        mark = MARKS[dot.hollow][dot.series % len(STYLES)]
        canvas.put(dot.flops_per_byte, dot.flops_per_s, mark, STYLES[dot.series % len(STYLES)])
    return canvas.text().append("\n").append_text(safe_text(_roofs_in_words(roofs), "dim"))


def _roofs_in_words(roofs: Roofs) -> str:
    rates = [f"{', '.join(flat.dtypes)} {human(flat.rate, 'FLOP/s')}" for flat in flats(roofs)]
    return f"limits, {roofs.source}: {human(roofs.bandwidth, 'B/s')}; " + "; ".join(rates)


class _Canvas:
    def __init__(self, width: int, across: Scale, up: Scale) -> None:
        self.width, self.across, self.up = width, across, up
        self.cells = [[(" ", "")] * width for _ in range(HEIGHT)]

    def row(self, y: float) -> int:
        return HEIGHT - 1 - round(self.up.share(y) * (HEIGHT - 1))

    def column(self, x: float) -> int:
        return round(self.across.share(x) * (self.width - 1))

    def put(self, x: float, y: float, mark: str, style: str) -> None:
        self.cells[self.row(y)][self.column(x)] = (mark, style)

    def roof(self, roofs: Roofs) -> None:
        """Every flat from its ridge on with its name at the end, the slope up to the highest."""
        span = math.log(self.across.high / self.across.low)
        lines, (start, ridge) = flats(roofs), slope(roofs, self.across, self.up)
        for column in range(self.width):
            x = self.across.low * math.exp(span * column / (self.width - 1))
            for flat in lines:
                if x >= flat.ridge:
                    self.put(x, flat.rate, "─", "" if flat is lines[0] else "dim")
            if start[0] <= x < ridge[0]:
                self.put(x, x * roofs.bandwidth, "╱", "")
        for flat in reversed(lines):
            name = safe_text(f" {flat.dtypes[0]}").plain[: self.width // 4]
            for index, char in enumerate(name):
                self.cells[self.row(flat.rate)][self.width - len(name) + index] = (char, "dim")

    def text(self) -> Text:
        ticks = {self.row(value): human(value, "").strip() for value in _inside(self.up)}
        drawn = Text()
        for row, cells in enumerate(self.cells):
            drawn.append(f"{ticks.get(row, ''):>{LEFT - 2}} ┤", style="dim")
            for mark, style in cells:
                drawn.append(mark, style=style)
            drawn.append("\n")
        line = [" "] * self.width
        for value in _inside(self.across):
            word, at = f"{value:,g}", self.column(value)
            if at + len(word) <= self.width:
                line[at : at + len(word)] = word
        drawn.append(" " * (LEFT - 1) + "└" + "─" * self.width + "\n", style="dim")
        return drawn.append(" " * LEFT + "".join(line).rstrip() + "  FLOP per byte", style="dim")


def _inside(scale: Scale) -> list[float]:
    return decades(scale.low, scale.high)
