"""A module's profile in the terminal: ops under the roofline, where the call went, what next."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ridgeline.hardware.units import human, human_bytes, percent
from ridgeline.profiling.modules.found import ModuleProfile, OpRow, grouped

COLUMNS = ("module", "op", "calls", "time", "share", "bytes", "FLOPs", "achieved", "limit", "bound")


def profile_table(found: ModuleProfile, num_rows: int) -> RenderableType:
    rows = grouped(found.rows)
    parts: list[RenderableType] = [Text(headline(found)), _ops(rows[:num_rows])]
    left = rows[num_rows:]
    if left:
        share = sum(row.share for row in left)
        parts.append(Text(f"and {len(left)} more rows, {percent(share)} of the call"))
    parts += [_division(found), _next(found)]
    parts += [Text(f"note: {note}") for note in found.notes]
    return Group(*parts)


def headline(found: ModuleProfile) -> str:
    spread = percent(found.call.spread)
    return (
        f"{found.name} on {found.hardware['name']}: {human(found.call.median_s, 's')} a call "
        f"(spread {spread}, untraced); {found.verdict.sentence}"
    )


def _ops(rows: list[OpRow]) -> Table:
    table = Table(*COLUMNS[:2], title="Ops", title_justify="left")
    for name in COLUMNS[2:]:
        table.add_column(name, justify="left" if name == "bound" else "right")
    for row in rows:
        table.add_row(*(Text(cell, overflow="fold") for cell in _cells(row)))
    return table


def _cells(row: OpRow) -> tuple[str, ...]:
    backward = " (backward)" if row.phase == "backward" else ""
    return (
        row.path,
        row.op.removeprefix("aten.") + backward,
        str(row.num_calls),
        human(row.seconds, "s"),
        percent(row.share),
        human_bytes(row.num_bytes) if row.num_bytes else "",
        human(row.flops, "FLOP") if row.flops else "",
        _achieved(row),
        percent(row.share_of_limit or None),
        row.bound,
    )


def _achieved(row: OpRow) -> str:
    if row.seconds <= 0 or row.share_of_limit is None:
        return ""
    if (row.matrix_share or 0.0) > (row.memory_share or 0.0):
        return human(row.flops / row.seconds, "FLOP/s")
    return human(row.num_bytes / row.seconds, "B/s") if row.num_bytes else ""


def _division(found: ModuleProfile) -> Table:
    table = Table("part", title="Where a call goes", title_justify="left")
    table.add_column("time", justify="right")
    table.add_column("share", justify="right")
    for name, seconds in found.division.items():
        table.add_row(name, human(seconds, "s"), percent(seconds / found.call.median_s))
    total = sum(found.division.values())
    table.add_row("all", human(total, "s"), percent(total / found.call.median_s), style="bold")
    return table


def _next(found: ModuleProfile) -> RenderableType:
    if not found.next:
        return Text("what next: no change known here is predicted to be worth a try")
    table = Table("what next", title="What next, by predicted gain", title_justify="left")
    table.add_column("faster", justify="right")
    table.add_column("interval", justify="right")
    table.add_column("why")
    table.add_column("how")
    for each in found.next:
        guess = each.prediction
        table.add_row(
            Text(each.title),
            f"{guess.speedup:.2f}×",
            f"{guess.low:.2f}–{guess.high:.2f}",
            Text(guess.why),
            Text(each.how),
        )
    return table
