"""Diagrams of lessons: boxes, arrows, cells, bars and curves on one sheet, as SVG in the project's
colours, light and dark. Coordinates are pixels of a sheet 720 wide; text is 13 high.

    picture = LessonPicture(200, "a vector cut into blocks")
    picture.box(20, 40, 120, 30, "program 0", "a")
    picture.arrow(140, 55, 200, 55)
    picture.svg()
"""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.profiling.drawing import PALETTE, Markup, element, join
from ridgeline.profiling.drawing.scales import Scale

WIDTH = 720
# a: blue, b: orange, c: teal, d: violet, n: neutral, w: warning
STYLE = """
text{font:13px system-ui,sans-serif;fill:var(--ink)}
.soft{fill:var(--soft);font-size:12px}.bold{font-weight:600}.mid{text-anchor:middle}
.end{text-anchor:end}
rect,path,line,polyline,circle{stroke-width:1.4}
.sheet{fill:var(--raised);stroke:var(--line)}
.a{fill:var(--shade);stroke:var(--one)}.b{fill:var(--two-shade);stroke:var(--two)}
.c{fill:color-mix(in srgb,var(--three) 16%,transparent);stroke:var(--three)}
.d{fill:color-mix(in srgb,var(--four) 16%,transparent);stroke:var(--four)}
.n{fill:none;stroke:var(--six)}.w{fill:none;stroke:var(--warn);stroke-dasharray:4 3}
.g{fill:none;stroke:var(--grid)}
.arrow{fill:none;stroke:var(--soft)}.tip{fill:var(--soft);stroke:none}
polyline{fill:none!important}
"""


class LessonPicture:
    def __init__(self, height: float, words: str) -> None:
        self.height = height
        self.words = words  # read aloud, and shown where pictures are not
        self._parts: list[Markup] = []

    def text(self, x: float, y: float, words: str, look: str = "") -> None:
        self._parts.append(element("text", words, x=x, y=y, class_=look or None))

    def box(
        self, x: float, y: float, width: float, height: float, words: str = "", look: str = "a"
    ) -> None:
        """A rectangle with its words in the middle, several lines where they hold a break."""
        self._parts.append(element("rect", x=x, y=y, width=width, height=height, rx=4, class_=look))
        lines = words.splitlines()
        top = y + height / 2 - 8 * (len(lines) - 1) + 4.5
        for number, line in enumerate(lines):
            look_of_text = "mid" if number == 0 else "mid soft"
            self.text(x + width / 2, top + 16 * number, line, look_of_text)

    def cells(
        self, x: float, y: float, size: float, words: Sequence[str], looks: Sequence[str]
    ) -> None:
        """Squares side by side."""
        for at, (word, look) in enumerate(zip(words, looks, strict=True)):
            self.box(x + at * size, y, size - 2, size - 2, word, look)

    def arrow(self, x1: float, y1: float, x2: float, y2: float, words: str = "") -> None:
        length = max(1e-6, ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5)
        dx, dy = (x2 - x1) / length, (y2 - y1) / length
        back = (x2 - 8 * dx, y2 - 8 * dy)
        self._parts.append(element("line", x1=x1, y1=y1, x2=back[0], y2=back[1], class_="arrow"))
        points = [
            (x2, y2),
            (back[0] - 4 * dy, back[1] + 4 * dx),
            (back[0] + 4 * dy, back[1] - 4 * dx),
        ]
        path = "M" + "L".join(f"{px:.1f} {py:.1f}" for px, py in points) + "Z"
        self._parts.append(element("path", d=path, class_="tip"))
        if words:
            self.text((x1 + x2) / 2, (y1 + y2) / 2 - 6, words, "mid soft")

    def line(self, points: Sequence[tuple[float, float]], look: str = "a") -> None:
        text = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._parts.append(element("polyline", points=text, class_=look))

    def dot(self, x: float, y: float, look: str = "a") -> None:
        self._parts.append(element("circle", cx=x, cy=y, r=5, class_=look))

    def bars(
        self,
        x: float,
        y: float,
        rows: Sequence[tuple[str, float, str, str]],
        width: float = 380,
        label: float = 170,
    ) -> None:
        """Rows of name, length from 0 to 1, words behind the bar, look."""
        for at, (name, share, words, look) in enumerate(rows):
            top = y + 28 * at
            self.text(x + label - 10, top + 14, name, "end")
            self.box(x + label, top, max(2.0, share * width), 20, "", look)
            self.text(x + label + max(2.0, share * width) + 8, top + 14, words, "soft")

    def svg(self) -> str:
        """Standing alone, with its colours inside."""
        sheet = element(
            "rect", x=0.5, y=0.5, width=WIDTH - 1, height=self.height - 1, rx=8, class_="sheet"
        )
        body = element(
            "svg",
            element("title", self.words),
            element("style", Markup(PALETTE.read_text() + STYLE)),
            sheet,
            join(self._parts),
            xmlns="http://www.w3.org/2000/svg",
            viewBox=f"0 0 {WIDTH} {self.height}",
            role="img",
        )
        return str(body) + "\n"


class LogPlot:
    """Two logarithmic axes on a picture, and points on them."""

    def __init__(
        self,
        picture: LessonPicture,
        box: tuple[float, float, float, float],  # left, top, right, bottom
        across: tuple[float, float],
        up: tuple[float, float],
        names: tuple[str, str],
    ) -> None:
        self.picture, self.box = picture, box
        self.across, self.up = Scale(*across, is_log=True), Scale(*up, is_log=True)
        left, top, right, bottom = box
        picture.line([(left, top), (left, bottom), (right, bottom)], "n")
        picture.text((left + right) / 2, bottom + 34, names[0], "mid soft")
        picture.text(left, top - 8, names[1], "soft")

    def place(self, x: float, y: float) -> tuple[float, float]:
        left, top, right, bottom = self.box
        return (
            left + self.across.share(x) * (right - left),
            bottom - self.up.share(y) * (bottom - top),
        )

    def curve(self, points: Sequence[tuple[float, float]], look: str = "a") -> None:
        self.picture.line([self.place(x, y) for x, y in points], look)

    def dot(self, x: float, y: float, words: str, look: str = "b") -> None:
        px, py = self.place(x, y)
        self.picture.dot(px, py, look)
        self.picture.text(px + 9, py + 4, words)

    def ticks(self, across: Sequence[tuple[float, str]], up: Sequence[tuple[float, str]]) -> None:
        left, _, _, bottom = self.box
        for value, words in across:
            self.picture.text(self.place(value, 1)[0], bottom + 16, words, "mid soft")
        for value, words in up:
            self.picture.text(left - 6, self.place(1, value)[1] + 4, words, "end soft")
