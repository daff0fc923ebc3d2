"""Two climbs side by side: their answers, what each kept, the recipes' differing fields, and both
curves on one axis. As data for programs and the terminal, and as a page.

    both = compare(NamedClimb("a", load_climb(Path("a"))), NamedClimb("b", load_climb(Path("b"))))
    both.headline
    write_comparison(both, Path("page.html"))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from ridgeline.formats.files import atomic_write
from ridgeline.hardware.units import human
from ridgeline.ladder.outcome import RungOutcome
from ridgeline.ladder.reporting import summary
from ridgeline.ladder.reporting.left_section import gap_parts_of
from ridgeline.ladder.reporting.result import Climb, rate, shown_ratio
from ridgeline.profiling.drawing import (
    Bar,
    Column,
    Markup,
    Section,
    Series,
    curves,
    element,
    join,
    page,
    stacked_bars,
    table,
    times,
)

LONGEST = 28  # letters of a column's name


class NamedClimb(NamedTuple):
    name: str
    climb: Climb

    @property
    def column(self) -> str:
        """As its column is called: the end of a long name."""
        return self.name if len(self.name) <= LONGEST else "…" + self.name[1 - LONGEST :]


class BothValues(NamedTuple):
    """A row of a table: one value of each climb."""

    name: str
    first: str
    second: str


@dataclass(frozen=True)
class ClimbComparison:
    first: NamedClimb
    second: NamedClimb
    headline: str
    notes: tuple[str, ...]  # what is not the same, so that figures are not of the recipes alone
    figures: tuple[BothValues, ...]
    changes: tuple[BothValues, ...]  # what became of each, where one of the two kept it
    recipe: tuple[BothValues, ...]  # fields that differ

    @property
    def climbs(self) -> tuple[NamedClimb, NamedClimb]:
        return (self.first, self.second)

    def to_json(self) -> dict[str, Any]:
        result = {key: value for key, value in asdict(self).items() if key not in CLIMBS}
        rows = {key: [row._asdict() for row in getattr(self, key)] for key in ROWS}
        return {**result, **rows, "names": [each.name for each in self.climbs]}


CLIMBS, ROWS = ("first", "second"), ("figures", "changes", "recipe")


def compare(first: NamedClimb, second: NamedClimb) -> ClimbComparison:
    one, other = first.climb, second.climb
    return ClimbComparison(
        first,
        second,
        _headline(first, second),
        tuple(_unlike(first, second)),
        tuple(_rows(_figures, one, other)),
        tuple(_changes(one, other)),
        tuple(row for row in _rows(_recipe, one, other) if row.first != row.second),
    )


def _headline(first: NamedClimb, second: NamedClimb) -> str:
    before, after = (rate(each.climb.after.figures.output_tokens_per_s) for each in (first, second))
    unit = second.climb.rate_unit
    if first.climb.unit != second.climb.unit or float(before.replace(",", "")) <= 0:
        return f"{first.name} and {second.name} measure other things: their rates have no ratio"
    ratio = shown_ratio(before, after)
    return (
        f"{second.name} has {ratio} the speed of {first.name}: {after} {unit} instead of {before}"
    )


def _unlike(first: NamedClimb, second: NamedClimb) -> list[str]:
    """What has to be the same for the ratio to be of the recipes."""
    names: dict[str, Callable[[Climb], str]] = {
        "model": lambda climb: climb.model,
        "device": lambda climb: summary.device_in_words(climb.hardware),
        "workload": lambda climb: climb.workload,
        "goal": lambda climb: climb.goal,
        "quality bounds": summary.bounds_in_words,
    }
    return [
        f"not the same {name}: {one} in {first.name}, {other} in {second.name}"
        for name, read in names.items()
        if (one := read(first.climb)) != (other := read(second.climb))
    ]


def _rows(read: Callable[[Climb], dict[str, str]], one: Climb, other: Climb) -> list[BothValues]:
    values, others = read(one), read(other)
    none = summary.NONE
    return [
        BothValues(name, values.get(name, none), others.get(name, none))
        for name in dict.fromkeys([*values, *others])
    ]


def _figures(climb: Climb) -> dict[str, str]:
    result = {row.name: row.value for row in summary.comparisons(climb)}
    own = (row for row in summary.figure_pairs(climb) if row.name != summary.LIMIT)
    result |= {row.name: row.after for row in own}
    result |= {"quality": summary.quality_in_words(climb) or summary.NONE}
    return result | {"took": summary.duration(climb.seconds), "measured": summary.when(climb)}


def _recipe(climb: Climb) -> dict[str, str]:
    fields = summary.recipe_fields(climb.after)
    return {name: summary.plain(value) for name, value in fields.items()}


def _changes(one: Climb, other: Climb) -> list[BothValues]:
    titles = {rung.name: rung.title for climb in (one, other) for rung in climb.rungs}
    kept = {rung.name for climb in (one, other) for rung in climb.kept}
    outcomes = [{rung.name: rung for rung in climb.rungs} for climb in (one, other)]
    return [
        BothValues(title, *(_outcome(known.get(name)) for known in outcomes))
        for name, title in titles.items()
        if name in kept
    ]


def _outcome(rung: RungOutcome | None) -> str:
    if rung is None:
        return "not tried"
    gain = "" if rung.achieved is None else f", {times(rung.achieved.value)}"
    return rung.status + gain


def write_comparison(both: ClimbComparison, path: Path) -> None:
    """Whole or not at all; OutputError where the file cannot be written."""
    with atomic_write(path) as file:
        file.write(comparison_page(both))


def comparison_page(both: ClimbComparison) -> str:
    sections = [
        _table("figures", "Figures", both, both.figures, "The answers of both."),
        _curves(both),
        _gaps(both),
        _table("changes", "What each kept", both, both.changes, "Changes that one of them kept."),
        _table("recipe", "Recipes", both, both.recipe, "Fields that differ."),
        Section("repeat", "Repeat them", _commands(both)),
    ]
    names = [each.name for each in both.climbs]
    notes = [element("li", note) for note in both.notes]
    return page(
        f"{names[0]} and {names[1]} · Ridgeline",
        join([element("b", names[0]), " and ", element("b", names[1])]),
        "Two climbs side by side",
        both.headline,
        [section for section in sections if section is not None],
        lead=element("ul", *notes, class_="notes") if notes else "",
        footer="Drawn by Ridgeline from two files of climbs",
    )


def _table(
    key: str, title: str, both: ClimbComparison, rows: Sequence[BothValues], intro: str
) -> Section | None:
    if not rows:
        return None
    columns = (Column(""), *(Column(each.column) for each in both.climbs))
    cells: list[list[Markup | str]] = [list(row) for row in rows]
    return Section(key, title, table(columns, cells, title), intro)


def _curves(both: ClimbComparison) -> Section | None:
    if not any(each.climb.after.curve for each in both.climbs):
        return None
    figures = [
        curves(_series(both, "output_tokens_per_s"), "Throughput", "batch", "output tokens/s",
               read=rate),
        curves(_series(both, "per_output_token_s"), "Latency", "batch", "per output token",
               read=lambda value: human(value, "s")),
    ]  # fmt: skip
    intro = "The answers of both, by the number of requests that run at once."
    return Section("batch", "Over the batch", element("div", *figures, class_="pair"), intro)


def _series(both: ClimbComparison, key: str) -> list[Series]:
    return [
        Series(
            each.column, [(point.batch, getattr(point, key)) for point in each.climb.after.curve],
            series=number, hollow=number == 0,
        )
        for number, each in enumerate(both.climbs)
        if each.climb.after.curve
    ]  # fmt: skip


def _gaps(both: ClimbComparison) -> Section | None:
    bars = [
        Bar(each.column, [replace(part, meaning="") for part in gap_parts_of(each.climb)])
        for each in both.climbs
        if each.climb.gap
    ]
    if not bars:
        return None
    body = stacked_bars(bars, lambda share: f"{share:.1%}", are_shares=True)
    intro = "Where the time in steps goes, beside the hardware's limit."
    return Section("left", "Why they are not 100%", body, intro)


def _commands(both: ClimbComparison) -> Markup:
    return join(
        element("p", each.name, class_="command-name")
        + element("div", element("code", summary.shell(each.climb.command)), class_="command")
        for each in both.climbs
    )
