"""A module's climb in the terminal: a line for each rung."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ridgeline.hardware.units import human, human_bytes
from ridgeline.ladder.modules.climb import in_words
from ridgeline.ladder.outcome import Climb, RungOutcome, Side

STYLES = {"kept": "green", "dropped": "yellow", "failed": "red"}
COLUMNS = ("rung", "area", "outcome", "predicted", "achieved", "error", "reason")


def climb_table(climb: Climb) -> RenderableType:
    table = Table(*COLUMNS, title="The ladder", title_justify="left")
    for rung in climb.rungs:
        style = STYLES.get(rung.status, "dim")
        table.add_row(*(Text(cell) for cell in _cells(rung)), style=style)
    notes = [Text(f"note: {note}") for note in climb.notes]
    return Group(Text(headline(climb)), table, *notes)


def headline(climb: Climb) -> str:
    if climb.total is None:
        return f"{climb.model}: nothing was kept; {_side(climb.before)}"
    return (
        f"{climb.model}: {in_words(climb.total)} the speed; {_side(climb.after)} instead of "
        f"{_side(climb.before)}"
    )


def _side(side: Side) -> str:
    assert side.figures.request_s is not None, "a module's side has the time of a call"
    weights = human_bytes(side.figures.weight_bytes)
    return f"{human(side.figures.request_s, 's')} a call with {weights} of weights"


def _cells(rung: RungOutcome) -> tuple[str, ...]:
    guess, came, found = rung.predicted, rung.achieved, rung.difference
    return (
        rung.title,
        rung.area,
        rung.status,
        "" if guess is None else f"{guess.speedup:.2f}× ({guess.low:.2f} to {guess.high:.2f})",
        "" if came is None else in_words(came),
        "" if found is None else f"{found.relative_error:.1e}",
        rung.reason,
    )
