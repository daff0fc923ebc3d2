"""A profile in the terminal: a table of ops for each kind of step, where its time went, and what to
change next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from ridgeline.hardware.units import human
from ridgeline.profiling.collective_rows import HEADINGS, NUM_WORDS, collective_rows
from ridgeline.profiling.gap_words import gap_sentence
from ridgeline.profiling.profile_page import achieved_text, gap_of, seconds_text, share_text
from ridgeline.profiling.run_rows import TEXTS, run_sentence, run_tables

WIDE = 112  # columns of a terminal that has room for everything
NARROW = ("calls", "bytes", "FLOPs")  # what others leave out
LEAST_SHARE = 0.005  # of the step: ops with less stand together in one line
LONG_SHARE = 0.1  # of a run: kinds of steps with less have no table of ops in a terminal
COUNTERS = ("occupancy", "dram", "tensor")


def draw(document: Mapping[str, Any], console: Console) -> None:
    if "steps" not in document:  # a run under a profiler, which nobody reads
        return
    console.print(
        f"{document['model']} on {document['device']}: {document['loop']}, {document['form']}"
    )
    steps = document["steps"]
    if "run" in document:
        draw_run(document["run"], console)
        steps = long_steps(document)
    for step in steps:
        console.print()
        console.print(f"[bold]{step['label']}[/bold]: {headline(step)}")
        console.print(ops_table(step, is_wide=console.width >= WIDE))
        console.print(totals_line(step))
        if step.get("communication") is not None:
            console.print()
            console.print(collectives_table(step["communication"]))
        if step.get("predicted_s") is not None:
            console.print()
            console.print(predicted_table(step))
    console.print()
    if "run" not in document:
        sentences = [step["sentence"] for step in steps]
        console.print(". ".join(text[:1].upper() + text[1:] for text in sentences) + ".")
    if document["gap"]:
        console.print(gap_sentence(gap_of(document)))
    if document["next"]:
        console.print()
        console.print(f"[bold]What next[/bold] ({document['assumed']})")
        console.print(next_table(document["next"]))
    for note in document["notes"]:
        console.print(f"note: {note}", soft_wrap=True)
    for what in ("trace", "html", "record"):
        if document[what] is not None:
            console.print(f"{what}: {document[what]}", soft_wrap=True)


def draw_run(run: Mapping[str, Any], console: Console) -> None:
    console.print(run_sentence(run))
    for each in run_tables(run):
        console.print()
        console.print(f"[bold]{each.title}[/bold]. {each.words}")
        console.print(table_of(each.headings, each.rows))
    for kind in run["kinds"]:
        if kind["why_not_divided"] is not None and kind["share"] >= LEAST_SHARE:
            console.print(f"not divided: {kind['label']}: {kind['why_not_divided']}")
    console.print("[dim]ops of all kinds of steps: --html FILE, or --json[/dim]")


def long_steps(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Steps of kinds that took much of the run; those of all are in --html and --json."""
    shares = {kind["label"]: kind["share"] for kind in document["run"]["kinds"]}
    return [step for step in document["steps"] if shares[step["name"]] >= LONG_SHARE]


def table_of(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in headings:
        is_text = name in TEXTS
        justify: Literal["left", "right"] = "left" if is_text else "right"
        table.add_column(name, justify=justify, no_wrap=not is_text, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def headline(step: Mapping[str, Any]) -> str:
    text = f"{human(step['step_s'], 's')}, {step['tokens_per_s']:.4g} tokens/s"
    for key, name in (("mfu", "datasheet"), ("mfu_measured", "measured")):
        if step.get(key) is not None:
            text += f", MFU {step[key]:.1%} ({name})"
    if step["share_of_limit"] is not None:
        limit, source = human(step["limit_s"], "s"), step["ceiling_source"]
        text += f", {step['share_of_limit']:.0%} of the limit ({limit}, {step['bound']}, {source})"
    return text


def ops_table(step: Mapping[str, Any], is_wide: bool = True) -> Table:
    counted = [name for name in COUNTERS if any(row[name] is not None for row in step["rows"])]
    lines = [cells(row, counted) for row in step["rows"] if row["share"] >= LEAST_SHARE]
    small = [row for row in step["rows"] if row["share"] < LEAST_SHARE]
    if small:
        seconds, share = sum(r["seconds"] for r in small), sum(r["share"] for r in small)
        lines.append({"op": f"{len(small)} more", "time": human(seconds, "s")})
        lines[-1]["share"] = f"{share:.1%}"
    names = ["op", "calls", "time", "share", "bytes", "FLOPs", "achieved", "of ceiling", *counted]
    table = Table(box=None, header_style="bold", pad_edge=False)
    shown = [name for name in [*names, "bound by"] if is_wide or name not in NARROW]
    for name in shown:
        is_text = name in ("op", "bound by")
        justify: Literal["left", "right"] = "left" if is_text else "right"
        table.add_column(name, justify=justify, no_wrap=name != "op", overflow="fold")
    for line in lines:
        table.add_row(*(line.get(name, "") for name in shown))
    return table


def collectives_table(waits: Mapping[str, Any]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for number, name in enumerate(HEADINGS):
        table.add_column(name, justify="left" if number < NUM_WORDS else "right", no_wrap=True)
    for row in collective_rows(waits["collectives"], waits["measured_step_s"]):
        table.add_row(*row)
    return table


def cells(row: Mapping[str, Any], counted: Sequence[str]) -> dict[str, str]:
    return {
        "op": row["op"].removeprefix("layers.*."),
        "calls": f"{row['calls']:.0f}",
        "time": human(row["seconds"], "s"),
        "share": f"{row['share']:.1%}",
        "bytes": human(row["bytes"], "B") if row["bytes"] else "",
        "FLOPs": human(row["flops"], "FLOP") if row["flops"] else "",
        "achieved": achieved_text(row),
        "of ceiling": share_text(row["share_of_ceiling"]),
        "bound by": row["verdict"],
        **{name: share_text(row[name]) for name in counted},
    }


def totals_line(step: Mapping[str, Any]) -> str:
    parts = [
        f"{name} {seconds / step['step_s']:.0%}"
        for name, seconds in step["totals"].items()
        if seconds > 0
    ]
    kernels = f"{step['num_kernels']:.0f} kernels"
    return f"[dim]{', '.join(parts)}; {kernels}[/dim]"


def predicted_table(step: Mapping[str, Any]) -> Table:
    """The parts of a training step beside what was predicted of them."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("part")
    for name in ("measured", "predicted", "measured over predicted"):
        table.add_column(name, justify="right", no_wrap=True)
    whole = ("in all", step["step_s"], step["predicted_s"])
    parts = [
        (name, seconds, step["predicted_totals"][name]) for name, seconds in step["totals"].items()
    ]
    for name, seconds, predicted in (*parts, whole):
        if seconds or predicted:
            ratio = f"{seconds / predicted:.2f}" if predicted else ""
            table.add_row(name, human(seconds, "s"), seconds_text(predicted), ratio)
    return table


def next_table(advice: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("change")
    table.add_column("gain", justify="right", no_wrap=True)
    table.add_column("likely", justify="right", no_wrap=True)
    table.add_column("why")
    for each in advice:
        span = f"{each['low']:.2f}–{each['high']:.2f}x"
        title = each["title"] + (f" ({each['flags']})" if each["flags"] else "")
        table.add_row(title, f"{each['speedup']:.2f}x", span, each["why"])
    return table
