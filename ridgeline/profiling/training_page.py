"""A training run as a page, one HTML file that needs no network: its loss, speed, memory and
gradients over its steps, its checkpoints, and the steps that were left out.

write_training_page(Path("run"), name="demo")       # run/report.html, from its metrics.jsonl
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ridgeline.formats.files import atomic_write
from ridgeline.hardware.units import human_bytes
from ridgeline.profiling.collective_rows import collectives_figure, waiting_sentence
from ridgeline.profiling.drawing import (
    Column,
    Markup,
    Section,
    Series,
    element,
    join,
    page,
    table,
    timeline,
)
from ridgeline.training.watching.metrics import read_metrics
from ridgeline.version import __version__

FILE_NAME = "report.html"
Row = Mapping[str, Any]
SAVES = (
    Column("checkpoint"), Column("size", is_number=True), Column("written in", is_number=True),
    Column("steps waited", is_number=True),
)  # fmt: skip
LEFT_OUT = (Column("step"), Column("problem"), Column("documents"))
MOST_ROWS = 50
MOST_DOCUMENTS = 8


def write_training_page(
    run: Path, name: str, *, predicted_tokens_per_s: float | None = None
) -> Path:
    """Whole or not at all; OutputError where the file cannot be written."""
    path = run / FILE_NAME
    with atomic_write(path) as file:
        file.write(training_page(read_metrics(run), name, predicted_tokens_per_s))
    return path


def training_page(
    rows: Sequence[Row], name: str, predicted_tokens_per_s: float | None = None
) -> str:
    steps = [row for row in rows if "lr" in row]
    sections = [
        Section("loss", "Loss", _loss(rows, steps)),
        Section("speed", "Speed", _speed(steps, predicted_tokens_per_s)),
        Section("gradients", "Gradients and learning rate", _gradients(steps)),
    ]
    memory = _curve(steps, "memory_bytes", "memory", scale=2.0**-30)
    if memory.points:
        sections.append(
            Section(
                "memory",
                "Memory",
                timeline([memory], "Peak of memory", "step", "GiB", from_zero=True),
            )
        )
    waits = [row for row in rows if "collectives" in row]
    if waits:
        sections.append(
            Section("communication", "Communication", _waits(waits), _sentence(waits[-1]))
        )
    saves = [row for row in rows if "checkpoint" in row]
    if saves:
        sections.append(Section("checkpoints", "Checkpoints", _saves(saves)))
    wrong = [row for row in steps if "problem" in row]
    if wrong:
        sections.append(Section("steps", "Steps that looked wrong", _wrong(wrong)))
    return page(
        f"Training of {name} · Ridgeline",
        element("b", name),
        "Training",
        _headline(rows, steps),
        sections,
        footer=f"Drawn from metrics.jsonl by Ridgeline {__version__}",
    )


def _headline(rows: Sequence[Row], steps: Sequence[Row]) -> str:
    if not steps:
        return "No step was run."
    count = f"{steps[-1]['step']:,} steps, {steps[-1]['tokens']:,} tokens"
    held_out = [row["held_out_loss"] for row in rows if "held_out_loss" in row]
    if len(held_out) > 1:
        return f"Held-out loss went from {held_out[0]:.4f} to {held_out[-1]:.4f} in {count}."
    losses = [row["loss"] for row in steps if row["loss"] is not None]
    return f"Loss went from {losses[0]:.4f} to {losses[-1]:.4f} in {count}." if losses else count


def _curve(
    rows: Sequence[Row], key: str, name: str, *, series: int = 0, scale: float = 1.0
) -> Series:
    points = [(row["step"], scale * row[key]) for row in rows if row.get(key) is not None]
    return Series(name, points, series)


def _loss(rows: Sequence[Row], steps: Sequence[Row]) -> Markup:
    lines = [
        _curve(steps, "loss", "of steps"),
        _curve(rows, "held_out_loss", "held out", series=1),
    ]
    return timeline(lines, "Loss", "step", "nats a token", read=lambda value: f"{value:.3f}")


def _speed(steps: Sequence[Row], predicted: float | None) -> Markup:
    lines = [_curve(steps, "tokens_per_s", "tokens/s")]
    if predicted is not None and steps:
        ends = dict.fromkeys((steps[0]["step"], steps[-1]["step"]), predicted)
        lines.append(Series("predicted", list(ends.items()), series=1))
    figures = [
        timeline(lines, "Speed", "step", "tokens/s", read=lambda x: f"{x:,.0f}", from_zero=True)
    ]
    shares = [
        _curve(steps, "mfu", "of the datasheet's peak"),
        _curve(steps, "mfu_measured", "of the measured peak", series=1),
    ]
    if any(each.points for each in shares):
        figures.append(
            timeline(shares, "MFU", "step", "share", read=lambda x: f"{x:.0%}", from_zero=True)
        )
    return join(figures)


def _gradients(steps: Sequence[Row]) -> Markup:
    norm = _curve(steps, "gradient_norm", "norm")
    rate = _curve(steps, "lr", "learning rate", series=1)
    return timeline([norm], "Gradient norm", "step", "before clipping") + timeline(
        [rate], "Learning rate", "step", "", read=lambda value: f"{value:.2e}"
    )


def _sentence(waits: Row) -> str:
    return (
        f"Step {waits['step']:,}, as it was measured: {waiting_sentence(waits)}. Times and bytes "
        "are means over the ranks."
    )


def _waits(measured: Sequence[Row]) -> Markup:
    """The newest, and how the share of a step went."""
    last = measured[-1]
    figure = collectives_figure(last["collectives"], last["measured_step_s"])
    if len(measured) == 1:
        return figure
    points = [(row["step"], row["exposed_s"] / row["measured_step_s"]) for row in measured]
    curve = timeline(
        [Series("waited for others", points)], "Waiting", "step", "share of a step",
        read=lambda value: f"{value:.0%}", from_zero=True,
    )  # fmt: skip
    return figure + curve


def _saves(saves: Sequence[Row]) -> Markup:
    cells = [
        (
            row["checkpoint"],
            human_bytes(row["save_bytes"]),
            f"{row['save_s']:.2f} s",
            f"{row['stall_s']:.3f} s",
        )
        for row in saves[-MOST_ROWS:]
    ]
    return table(SAVES, cells, "Checkpoints")


def _wrong(steps: Sequence[Row]) -> Markup:
    cells = [
        (
            f"{row['step']:,}",
            f"{row['problem']}: {row['cause']}" + (", left out" if "skipped" in row else ""),
            ", ".join(row.get("documents", ["–"])[:MOST_DOCUMENTS]),
        )
        for row in steps[-MOST_ROWS:]
    ]
    return table(LEFT_OUT, cells, "Steps that looked wrong")
