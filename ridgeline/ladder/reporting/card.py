"""A climb as a card to share: an SVG of 1200 × 630, which needs no font and no network.

    write_card(climb, Path("out/card.svg"))

Its colours are the light ones of profiling/drawing/palette.css. Text has no line breaks in SVG, so
each line is made to fit: smaller first, then cut with an ellipsis.
"""

from __future__ import annotations

import re
from pathlib import Path

from ridgeline.formats.files import atomic_write
from ridgeline.ladder.reporting import summary
from ridgeline.ladder.reporting.result import Climb
from ridgeline.profiling.drawing import Markup, element, join

WIDTH, HEIGHT, MARGIN = 1200, 630, 64
GROUND, INK, SOFT, LINE = "#fbfaf7", "#1b1d20", "#5a5f66", "#e2dfd8"
BLUE, ORANGE = "#1f5fb4", "#b3560b"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', 'Liberation Sans', sans-serif"
LETTER, BOLD = 0.56, 0.66  # of the type's size: the width of a letter, in the wider fonts
SMALLEST = 0.6  # of the wanted size: smaller is not read any more
NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def write_card(climb: Climb, path: Path) -> None:
    """Whole or not at all; OutputError where the file cannot be written."""
    with atomic_write(path) as file:
        file.write(card(climb) + "\n")


def card(climb: Climb) -> str:
    """The document."""
    device = summary.device_in_words(climb.hardware)
    parts = [
        element("rect", width=WIDTH, height=HEIGHT, fill=GROUND),
        element("rect", width=12, height=HEIGHT, fill=ORANGE),
        _brand(),
        _text(summary.when(climb), WIDTH - MARGIN, 84, 22, fill=SOFT, text_anchor="end"),
        _text(climb.model, MARGIN, 168, 40, font_weight=700),
        _text(f"{device} · for {climb.goal} · {climb.workload}", MARGIN, 212, 24, fill=SOFT),
        _gain(climb),
        _others(climb),
        _text(_quality(climb), MARGIN, HEIGHT - 36, 22, fill=SOFT),
    ]
    label = f"{climb.model} on {device}: {climb.headline}"
    return element(
        "svg", element("title", _clean(label)), *parts, xmlns="http://www.w3.org/2000/svg",
        width=WIDTH, height=HEIGHT, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", font_family=FONT,
    )  # fmt: skip


def _brand() -> Markup:
    stroke = {"fill": "none", "stroke": INK, "stroke_width": 2, "stroke_linecap": "round"}
    ridge = element("path", d="M1 19 14 4h17", stroke_linejoin="round", **stroke)
    dot = element("circle", cx=9.5, cy=9.2, r=2.6, fill=ORANGE)
    mark = element("g", ridge, dot, transform=f"translate({MARGIN} 56) scale(1.6)")
    return mark + _text("Ridgeline", MARGIN + 66, 86, 30, font_weight=700)


def _gain(climb: Climb) -> Markup:
    """The first comparison, large: what a user gains over doing nothing."""
    first = summary.comparisons(climb)[0]
    is_gain = climb.kept or first.name == summary.HELD
    name = first.name if is_gain else "nothing was faster"
    return join(
        [
            _text(first.value, MARGIN - 6, 362, 150, width=560, fill=BLUE, font_weight=750),
            _text(name, 660, 312, 36, font_weight=650),
            _text(first.detail, 660, 356, 26, fill=SOFT),
        ]
    )


def _others(climb: Climb) -> Markup:
    """Beside each other below a line, with a bar for the share of the limit."""
    parts = [element("rect", x=MARGIN, y=414, width=WIDTH - 2 * MARGIN, height=2, fill=LINE)]
    for number, row in enumerate(summary.comparisons(climb)[1:4]):
        x = MARGIN + number * 370
        parts += [
            _text(row.name, x, 456, 24, width=340, fill=SOFT),
            _text(row.value, x, 508, 48, width=210, font_weight=700),
            _text(_shared(row.detail), x, 537, 20, width=340, fill=SOFT),
        ]
    return join(parts)


def _shared(detail: str) -> str:
    """A peer's address is nothing to share."""
    return "under the same load" if "://" in detail else detail


def _quality(climb: Climb) -> str:
    text = summary.quality_in_words(climb)
    return text[:1].upper() + text[1:]


def _text(
    text: str, x: float, y: float, size: float, *, width: float | None = None, **look: object
) -> Markup:
    """In one line that fits between `x` and the margin, or into `width`."""
    text = _clean(text)
    room = width or (x - MARGIN if look.get("text_anchor") == "end" else WIDTH - MARGIN - x)
    letter = BOLD if "font_weight" in look else LETTER
    size = min(size, max(room / (letter * max(1, len(text))), SMALLEST * size))
    most = int(room / (letter * size) + 1e-6)
    if len(text) > most:
        text = text[: max(1, most - 1)] + "…"
    return element("text", text, x=x, y=y, font_size=round(size, 1), **{"fill": INK, **look})


def _clean(text: str) -> str:
    """XML has no way to write control characters."""
    return NOT_XML.sub("", " ".join(text.split()))
