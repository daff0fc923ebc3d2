"""The report of a climb: one HTML file that needs no network.

    write_report(climb, Path("out/report.html"))

What stands in its sections is in report_sections.py, the look in profiling/drawing.
"""

from __future__ import annotations

from pathlib import Path

from ridgeline.formats.files import atomic_write
from ridgeline.ladder.reporting import summary
from ridgeline.ladder.reporting.left_section import left_section
from ridgeline.ladder.reporting.levels import peer_cells
from ridgeline.ladder.reporting.levels_section import levels_section
from ridgeline.ladder.reporting.report_sections import (
    curves_section,
    dropped_section,
    ladder_section,
    memory_section,
    moves_section,
    quality_section,
    repeat_section,
    roofline_section,
)
from ridgeline.ladder.reporting.result import Climb
from ridgeline.profiling.drawing import Markup, element, join, page

SECTIONS = (
    levels_section,
    moves_section,
    left_section,
    ladder_section,
    roofline_section,
    curves_section,
    memory_section,
    quality_section,
    dropped_section,
    repeat_section,
)


def write_report(climb: Climb, path: Path) -> None:
    """Whole or not at all; OutputError where the file cannot be written."""
    with atomic_write(path) as file:
        file.write(report(climb))


def report(climb: Climb) -> str:
    """The document."""
    result = [make(climb) for make in SECTIONS]
    device = summary.device_in_words(climb.hardware)
    return page(
        f"{climb.model} on {device} · Ridgeline report",
        join([element("b", climb.model), f" on {device}"]),
        f"Optimized for {climb.goal} · {climb.workload}",
        climb.headline,
        [section for section in result if section is not None],
        lead=_lead(climb),
        footer=f"Measured {summary.when(climb)} by Ridgeline",
    )


def _lead(climb: Climb) -> Markup:
    facts = "; ".join(summary.facts(climb))
    notes = [element("li", note) for note in summary.notes(climb)]
    return join(
        [
            _comparisons(climb),
            element("p", facts[:1].upper() + facts[1:], ".", class_="facts"),
            element("ul", *notes, class_="notes") if notes else None,
            _figures(climb),
        ]
    )


def _comparisons(climb: Climb) -> Markup:
    rows = [(row.name, row.value, row.detail) for row in summary.comparisons(climb)]
    return element("dl", *map(_figure, rows), class_="comparisons", aria_label="The answer against")


def _figures(climb: Climb) -> Markup:
    peer, rows = peer_cells(climb.peer), []
    for row in summary.figure_pairs(climb):
        beside = f"; peer: {peer[row.name]}" if row.name in peer else ""
        rows.append((row.name, row.after, f"before: {row.before}{beside}"))
    return element("dl", *map(_figure, rows), class_="figures", aria_label="After the climb")


def _figure(row: tuple[str, str, str]) -> Markup:
    """A name, its figure, and what is small below it."""
    name, value, detail = row
    return element("div", element("dt", name), element("dd", value, element("small", detail)))
