"""The section of a climb's report on service levels: which recipe holds which rate of requests."""

from __future__ import annotations

from ridgeline.ladder.reporting.levels import LEVEL_COLUMNS, level_rows, levels_words
from ridgeline.ladder.reporting.result import Climb
from ridgeline.profiling.drawing import Column, Markup, Section, element, table

NAMES = {"": "recipe", "not": "does not hold"}


def levels_section(climb: Climb) -> Section | None:
    """None where no latency bound was given."""
    levels = climb.levels
    if levels is None:
        return None
    rows: list[list[Markup | str]] = []
    for row in level_rows(levels):
        name = element("b", row.name) if row.name == levels.chosen else row.name
        rows.append([name, *row[1:]])
    columns = [
        Column(NAMES.get(name, name), is_number=number > 0)
        for number, name in enumerate(LEVEL_COLUMNS)
    ]
    body = table(columns, rows, "Highest rates within the latency bound")
    return Section("levels", "Service levels", body, f"{levels_words(levels)}.")
