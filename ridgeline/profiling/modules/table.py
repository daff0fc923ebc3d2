"""The tables of a module's profile: ops under the roofline, where a call's time goes, what to try
next. A terminal narrower than WIDE columns leaves out some of the ops' figures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from ridgeline.hardware.units import human, human_bytes, percent
from ridgeline.profiling.modules.changes import Suggestion
from ridgeline.profiling.modules.rows import OpRow
from ridgeline.profiling.printing import plain_table, safe_text

WIDE = 116  # columns of a terminal with room for everything
WORDS = ("module", "op", "bound by")  # columns of text; the others hold numbers
IN_WIDE = ("calls", "bytes", "FLOPs")


def ops_table(rows: Sequence[OpRow]) -> RenderableType:
    return _OpsView(tuple(rows))


@dataclass(frozen=True)
class _OpsView:
    rows: tuple[OpRow, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = [_cells(row) for row in self.rows]
        names = lines[0] if lines else {"module": "", "op": ""}
        shown = [name for name in names if options.max_width >= WIDE or name not in IN_WIDE]
        table = plain_table("Ops")
        for name in shown:
            is_text = name in WORDS
            fold = name in ("module", "op")
            table.add_column(
                name,
                justify="left" if is_text else "right",
                overflow="fold" if fold else "ellipsis",
                no_wrap=not fold,
            )
        for line in lines:
            table.add_row(*(safe_text(line[name]) for name in shown))
        yield table


def _cells(row: OpRow) -> dict[str, str]:
    backward = " (backward)" if row.phase == "backward" else ""
    return {
        "module": row.path,
        "op": row.op.removeprefix("aten.") + backward,
        "calls": str(row.num_calls),
        "time": human(row.seconds, "s"),
        "share": percent(row.share),
        "bytes": human_bytes(row.num_bytes) if row.num_bytes else "",
        "FLOPs": human(row.flops, "FLOP") if row.flops else "",
        "achieved": _achieved(row),
        "of limit": percent(row.share_of_limit or None),
        "bound by": row.bound,
    }


def _achieved(row: OpRow) -> str:
    if row.seconds <= 0 or row.share_of_limit is None:
        return ""
    if (row.matrix_share or 0.0) > (row.memory_share or 0.0):
        return human(row.flops / row.seconds, "FLOP/s")
    return human(row.num_bytes / row.seconds, "B/s") if row.num_bytes else ""


def division_table(division: Mapping[str, float], call_s: float) -> Table:
    table = plain_table("Where a call's time goes")
    table.add_column("part")
    table.add_column("time", justify="right")
    table.add_column("share", justify="right")
    for name, seconds in division.items():
        table.add_row(name, human(seconds, "s"), percent(seconds / call_s))
    total = sum(division.values())
    table.add_row("total", human(total, "s"), percent(total / call_s), style="bold")
    return table


def suggestions_table(suggestions: Sequence[Suggestion]) -> RenderableType:
    if not suggestions:
        return Text("What next: no known change is predicted to help here.")
    table = plain_table("What next, by predicted gain")
    table.add_column("gain", justify="right", no_wrap=True)
    table.add_column("likely", justify="right", no_wrap=True)
    table.add_column("change")
    for suggestion in suggestions:
        gain = suggestion.prediction
        change = Text(suggestion.title)
        change.append(f"\n{suggestion.how}", style="cyan").append(f"\n{gain.why}", style="dim")
        table.add_row(f"{gain.speedup:.2f}×", f"{gain.low:.2f}–{gain.high:.2f}", change)
    return table
