"""A climb in the terminal: what report.html shows, in tables.

    console.print(climb_table(climb))

Words come from ladder/reporting/summary.py, bars and the roofline from plots.py. A name from a file
may hold anything: it goes through `safe_text`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ridgeline.cli.tables.plots import MARKS, STYLES, axis, bar, key, roofline_plot, stack
from ridgeline.hardware.units import human, human_bytes, percent
from ridgeline.ladder.outcome import CurvePoint, Quality, RungOutcome, Speedup
from ridgeline.ladder.reporting import summary
from ridgeline.ladder.reporting.left_section import gap_parts_of, left_title, next_actions
from ridgeline.ladder.reporting.levels import LEVEL_COLUMNS, level_rows, levels_words, peer_cells
from ridgeline.ladder.reporting.losses_section import NONE_ALTERS
from ridgeline.ladder.reporting.report_sections import memory_bars, roof_dots, roofs_of, step_of
from ridgeline.ladder.reporting.result import Climb, rate
from ridgeline.profiling.drawing import Bar, BarPart, Rise
from ridgeline.profiling.drawing.bars import part_colours
from ridgeline.profiling.drawing.geometry import digits
from ridgeline.profiling.drawing.scales import Scale, spanning
from ridgeline.profiling.drawing.waterfall import (
    ALL_KEPT,
    SYMBOLS,
    waterfall_scale,
    waterfall_starts,
)
from ridgeline.profiling.gap_words import gap_sentence
from ridgeline.profiling.predicting.prediction import Prediction
from ridgeline.profiling.printing import safe_text

WIDE = 92  # columns of a terminal that has room for
BAR = 26  # columns of a bar, instead of
NARROW_BAR = 14
QUALITY_TITLE = "Quality, against the unmodified model"
LEARNED_TITLE = "What is learned, against the defaults"
OUTCOMES = {"kept": "green", "failed": "red"}


def climb_table(climb: Climb) -> RenderableType:
    """All of it, for `console.print`; nothing in it is read as rich's markup."""
    return _View(climb)


@dataclass(frozen=True)
class _View:
    climb: Climb

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from _parts(self.climb, BAR if options.max_width >= WIDE else NARROW_BAR)


def _parts(climb: Climb, width: int) -> Iterator[RenderableType]:
    """`width` is that of a bar."""
    yield _head(climb)
    yield _figures(climb)
    for title, body in (
        ("Service levels", _service_levels(climb)),
        ("What was tried" if climb.ladder else "The ladder", _moves(climb, width)),
        (left_title(climb), _left(climb, width)),
        ("The ladder, from the plain loop", _ladder(climb, width)),
        ("Roofline, before and after", None if climb.is_training else _roofline(climb)),
        ("Over the batch", _curves(climb, width)),
        ("Memory plan", _memory(climb, width)),
        (LEARNED_TITLE if climb.is_training else QUALITY_TITLE, _quality(climb)),
        ("What was dropped, and why", _not_kept(climb)),
        ("Repeat it", _repeat(climb)),
    ):
        if body is not None:
            yield Text(f"\n{title}", style="bold")
            yield Padding(body, (0, 0, 0, 2))


def _plain_table(*columns: str, numbers: Sequence[int] = ()) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for index, name in enumerate(columns):
        table.add_column(safe_text(name), justify="right" if index in numbers else "left")
    return table


def _head(climb: Climb) -> Text:
    device = summary.device_in_words(climb.hardware)
    lines = [
        safe_text(f"{climb.model} on {device}, for {climb.goal}; {climb.workload}", "dim"),
        safe_text(climb.headline, "bold"),
        safe_text("; ".join(summary.facts(climb))),
    ]
    notes = summary.notes(climb)
    lines += [Text().append("! ", "yellow").append_text(safe_text(note)) for note in notes]
    return _lines(lines)


def _figures(climb: Climb) -> RenderableType:
    peer = peer_cells(climb.peer)
    names = ("", "before", "after", *(["peer"] if peer else []))
    table = _plain_table(*names, numbers=(1, 2, 3))
    for row in summary.figure_pairs(climb):
        cells = [safe_text(row.name, "dim"), safe_text(row.before), safe_text(row.after, "bold")]
        table.add_row(*cells, *([safe_text(peer.get(row.name, ""))] if peer else []))
    return Padding(table, (1, 0, 0, 2))


def _left(climb: Climb, width: int) -> RenderableType | None:
    steps = next_actions(climb)
    if not climb.gap and not steps:
        return None
    parts: list[RenderableType] = []
    if climb.gap:
        parts.append(safe_text(gap_sentence(climb.gap)))
        rows = gap_parts_of(climb)
        colours = part_colours([Bar("", rows)])
        table = _plain_table("", "", "", numbers=(1,))
        table.show_header = False
        parts.append(stack([(row.value, colours[row.name]) for row in rows], 1.0, 2 * width))
        for row in rows:
            name = key(colours[row.name]).append_text(safe_text(row.name))
            table.add_row(name, percent(row.value), safe_text(row.meaning, "dim"))
        parts.append(table)
    for step in steps:
        how = f": {step.how}" if step.how else ""
        parts.append(safe_text(f"→ {step.text} ({step.gain}){how}"))
    return Group(*parts)


def _service_levels(climb: Climb) -> RenderableType | None:
    if climb.levels is None:
        return None
    table = _plain_table(*LEVEL_COLUMNS, numbers=range(1, len(LEVEL_COLUMNS)))
    for row in level_rows(climb.levels):
        style = "bold" if row.name == climb.levels.chosen else ""
        table.add_row(*(safe_text(cell, style) for cell in row))
    return Group(safe_text(levels_words(climb.levels), "dim"), table)


def _ladder(climb: Climb, width: int) -> RenderableType | None:
    if not climb.ladder:
        return None
    return _waterfall(climb.ladder, _rise(climb.plain), width, summary.OVER_PLAIN)


def _moves(climb: Climb, width: int) -> RenderableType:
    rungs = summary.measured(climb)
    if not rungs:
        return Text("No change was measured.", style="dim")
    words = summary.predictions_in_words(climb)
    drawn = _waterfall(rungs, _rise(climb.total), width)
    return Group(drawn, *([safe_text(words)] if words else []))


def _waterfall(
    rungs: Sequence[RungOutcome], total: Rise | None, width: int, total_name: str = ALL_KEPT
) -> RenderableType:
    steps = [step_of(rung) for rung in rungs]
    starts = waterfall_starts(steps)
    scale = waterfall_scale(steps, starts, total)
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("change")
    table.add_column(axis(scale, width, lambda value: f"{value:g}×"), min_width=width, no_wrap=True)
    table.add_column("speedup, interval", no_wrap=True)
    table.add_column("", no_wrap=True)
    for rung, start in zip(rungs, starts, strict=True):
        _rung_row(table, rung, start, scale, width)
    if total is not None:
        drawn = bar(scale, 1.0, total.value, width, "█", "bold") if total.is_drawable else Text()
        table.add_row(Text(total_name, "bold"), drawn, Text(str(total), "bold"))
    legend = Text().append("▒", "yellow").append(" predicted  ", "dim").append("█", "blue")
    legend.append(" achieved  ", "dim").append("░", "").append(" measured and not kept", "dim")
    return Group(table, legend)


def _rung_row(table: Table, rung: RungOutcome, start: float, scale: Scale, width: int) -> None:
    """What was predicted above what was achieved, as in the page."""
    bars, figures = [], []
    own = ("█", "blue") if rung.status == "kept" else ("░", "")
    for rise, (fill, style) in (
        (_rise(rung.predicted), ("▒", "yellow")),
        (_rise(rung.achieved), own),
    ):
        if rise is None:
            continue
        is_drawable = rise.is_drawable
        end = start * rise.value
        bars.append(bar(scale, start, end, width, fill, style) if is_drawable else Text())
        figures.append(Text(str(rise), "dim" if fill == "▒" else ""))
    outcome = f"{SYMBOLS.get(rung.status, '·')} {rung.status}"
    table.add_row(
        _lines([safe_text(rung.area, "dim"), safe_text(rung.title)]),
        _lines(bars),
        _lines(figures),
        safe_text(outcome, OUTCOMES.get(rung.status, "dim")),
    )


def _lines(texts: Sequence[Text]) -> Text:
    return Text("\n").join(texts)


def _rise(gain: Speedup | Prediction | None) -> Rise | None:
    if gain is None:
        return None
    value = gain.value if isinstance(gain, Speedup) else gain.speedup
    return Rise(value, gain.low, gain.high)


def _roofline(climb: Climb) -> RenderableType:
    dots = roof_dots(climb)
    if not dots:
        return Text("No step was measured.", style="dim")
    table = _plain_table("", "FLOP/byte", "reached", "", numbers=(1, 2))
    for dot in dots:
        mark = MARKS[dot.hollow][dot.series % len(STYLES)]
        name = (
            Text()
            .append(f"{mark} ", STYLES[dot.series % len(STYLES)])
            .append_text(safe_text(dot.label))
        )
        table.add_row(name, digits(dot.flops_per_byte), dot.reached, safe_text(dot.figures, "dim"))
    plot = roofline_plot(dots, roofs_of(climb))
    if plot is None:
        hint = "This machine's limits are not known; `ridgeline hardware` measures them once."
        return Group(Text(hint, style="dim"), table)
    return Group(plot, Text(""), table)


def _curves(climb: Climb, width: int) -> RenderableType | None:
    before = {point.batch: point for point in climb.before.curve}
    after = {point.batch: point for point in climb.after.curve}
    points = (*before.values(), *after.values())
    if not points:
        return None
    names = ("batch", "tokens/s before", "after", "", "per token before", "after")
    table = _plain_table(*names, numbers=(0, 1, 2, 4, 5))
    scale = spanning((point.output_tokens_per_s for point in points), least=3.0, room=1.5)
    for batch in sorted({*before, *after}):
        one, other = before.get(batch), after.get(batch)
        bars = _speed_bars(one, other, scale, width - 6)
        table.add_row(f"{batch:,}", _speed(one), _speed(other), bars, _wait(one), _wait(other))
    return table


def _speed_bars(
    before: CurvePoint | None, after: CurvePoint | None, scale: Scale, width: int
) -> Text:
    """Both from the left, logarithmic, the longer one showing behind the other."""
    speeds = [0.0 if point is None else point.output_tokens_per_s for point in (before, after)]
    first, last = (round(scale.share(speed) * width) for speed in speeds)
    text = Text("▒" * first, style="yellow")
    return text.append("█" * max(0, last - first), style="blue")


def _speed(point: CurvePoint | None) -> str:
    return summary.NONE if point is None else rate(point.output_tokens_per_s)


def _wait(point: CurvePoint | None) -> str:
    return summary.NONE if point is None else human(point.per_output_token_s, "s")


def _memory(climb: Climb, width: int) -> RenderableType | None:
    bars = memory_bars(climb)
    colours = part_colours(bars)
    longest = max((sum(part.value for part in each.parts) for each in bars), default=0.0)
    if not longest:
        return None
    drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for each in bars:
        parts = [(part.value, colours[part.name]) for part in each.parts]
        total = human_bytes(round(sum(value for value, _ in parts)))
        drawn.add_row(each.name, stack(parts, longest, 2 * width), total)
    table = _plain_table("", *(each.name for each in bars), "", numbers=range(1, 1 + len(bars)))
    for name, colour in colours.items():
        sizes = [next((part for part in own.parts if part.name == name), None) for own in bars]
        meaning = next((each.meaning for each in reversed(sizes) if each is not None), "")
        table.add_row(
            key(colour).append_text(safe_text(name)), *map(_size, sizes), safe_text(meaning, "dim")
        )
    return Group(drawn, table)


def _size(part: BarPart | None) -> str:
    return summary.NONE if part is None else human_bytes(round(part.value))


def _losses(climb: Climb) -> RenderableType:
    """Of a climb of training."""
    rungs = [(rung, rung.losses) for rung in climb.rungs if rung.losses is not None]
    if not rungs:
        return safe_text(NONE_ALTERS, "dim")
    names = ("", "loss", "95% interval", "to an equal loss", "")
    table = _plain_table(*names, numbers=(1, 2, 3))
    for rung, paired in rungs:
        verdict = safe_text("inside", "green") if paired.problem is None else (
            safe_text("outside", "red")
        )  # fmt: skip
        gain = paired.equal_loss_gain
        table.add_row(
            safe_text(rung.title), f"{paired.increase:+.2%}",
            _ends(paired.low, paired.high, "{:+.2%}"),
            summary.NONE if gain is None else f"{gain:.2f}×", verdict,
        )  # fmt: skip
    return Group(table, safe_text(f"allowed: {summary.bounds_in_words(climb)}", "dim"))


def _quality(climb: Climb) -> RenderableType:
    if climb.is_training:
        return _losses(climb)
    rungs = [(rung, rung.quality) for rung in climb.rungs if rung.quality is not None]
    if not rungs:
        return safe_text(summary.no_quality(climb), "dim")
    table = _plain_table("", "mean KL", "95% interval", "perplexity", "95% interval", "",
                         numbers=(1, 2, 3, 4))  # fmt: skip
    for rung, quality in rungs:
        verdict = (
            safe_text("inside", "green") if quality.problem is None else safe_text("outside", "red")
        )
        table.add_row(safe_text(rung.title), *_quality_cells(quality), verdict)
    bounds = safe_text(f"allowed: {summary.bounds_in_words(climb)}", "dim")
    return Group(table, bounds, *_tasks(climb))


def _quality_cells(quality: Quality) -> tuple[str, str, str, str]:
    kl = _ends(quality.mean_kl_low, quality.mean_kl_high, "{:.3g}")
    increase = _ends(quality.ppl_increase_low, quality.ppl_increase_high, "{:+.2%}")
    return f"{quality.mean_kl:.3g}", kl, f"{quality.ppl_increase:+.2%}", increase


def _ends(low: float | None, high: float | None, form: str) -> str:
    return "" if low is None or high is None else f"{form.format(low)} to {form.format(high)}"


def _tasks(climb: Climb) -> list[Text]:
    return [
        safe_text(f"{rung.title}: {quality.task} {percent(quality.task_score)}, "
             f"before {percent(quality.task_score_before)}")
        for rung in climb.rungs
        if (quality := rung.quality) is not None and quality.task is not None
    ]  # fmt: skip


def _not_kept(climb: Climb) -> RenderableType | None:
    rungs = summary.not_kept(climb)
    if not rungs:
        return None
    table = _plain_table("", "", "")
    table.show_header = False
    for rung in rungs:
        style = OUTCOMES.get(rung.status, "dim")
        table.add_row(safe_text(rung.title), safe_text(rung.status, style), safe_text(rung.reason))
    return table


def _repeat(climb: Climb) -> RenderableType:
    lines = [safe_text(summary.shell(climb.command))]
    if climb.serve_command:
        lines.append(safe_text(summary.shell(climb.serve_command)))
    versions = ", ".join(f"{name} {version}" for name, version in climb.versions.items())
    measured = f"measured {summary.when(climb)}, in {summary.duration(climb.seconds)}"
    lines.append(safe_text(f"{measured}; {versions}" if versions else measured, "dim"))
    if rows := summary.time_rows(climb):
        spent = ", ".join(f"{name} {summary.duration(seconds)}" for name, seconds in rows)
        lines.append(safe_text(f"the time went into {spent}", "dim"))
    return _lines(lines)
