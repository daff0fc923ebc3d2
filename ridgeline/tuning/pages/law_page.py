"""A scaling law as a page: the constants with their intervals, each run beside what the law says,
and where FLOPs are spent best.

write_law_page(Path("law"), document)       # law/report.html
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ridgeline.formats.files import atomic_write
from ridgeline.hardware.units import human
from ridgeline.profiling.drawing import (
    Column,
    Interval,
    Markup,
    Section,
    Series,
    curves,
    element,
    intervals,
    join,
    page,
    table,
)
from ridgeline.tuning.pages.axes import loss_scale
from ridgeline.version import __version__

FILE_NAME = "report.html"
MOST_SIZES = 6  # lines of the drawing
CONSTANTS = {
    "floor": "E, what no size takes away",
    "size_exponent": "a, of parameters",
    "data_exponent": "b, of tokens",
    "size_factor": "A",
    "data_factor": "B",
}


def write_law_page(folder: Path, document: Mapping[str, Any]) -> Path:
    path = folder / FILE_NAME
    with atomic_write(path) as file:
        file.write(law_page(document))
    return path


def law_page(document: Mapping[str, Any]) -> str:
    sections = [
        Section("law", "The law", _law(document)),
        Section("runs", "Runs", _runs(document)),
    ]
    if document["splits"]:
        sections.append(Section("splits", "Where FLOPs are spent best", _splits(document)))
    return page(
        "Scaling law · Ridgeline",
        element("b", f"{len(document['points'])} runs"),
        "Scaling law",
        law_headline(document),
        sections,
        lead=element("p", " ".join([*document["problems"], *document["left_out"]])),
        footer=f"Drawn by Ridgeline {__version__}",
    )


def law_headline(document: Mapping[str, Any]) -> str:
    law = document["law"]
    return (
        f"loss = {law['floor']:.3f} + {law['size_factor']:.3g} / N^{law['size_exponent']:.3f} + "
        f"{law['data_factor']:.3g} / D^{law['data_exponent']:.3f}, off by "
        f"{document['error']:.2%} at the {len(document['points'])} runs in the mean."
    )


def _law(document: Mapping[str, Any]) -> Markup:
    rows = [
        Interval(
            CONSTANTS[name], document["law"][name],
            document["intervals"].get(name, {}).get("low"),
            document["intervals"].get(name, {}).get("high"),
        )
        for name in ("floor", "size_exponent", "data_exponent")
    ]  # fmt: skip
    return intervals(rows, "Constants", read=lambda value: f"{value:.3f}")


def _runs(document: Mapping[str, Any]) -> Markup:
    sizes = sorted({point["parameters"] for point in document["points"]})[:MOST_SIZES]
    lines = []
    for index, size in enumerate(sizes):
        own = [point for point in document["points"] if point["parameters"] == size]
        name = f"N = {human(size, '')}"
        measured = [(point["tokens"], point["loss"]) for point in own]
        fitted = [(point["tokens"], point["fitted"]) for point in own]
        lines.append(Series(name, measured, series=index))
        lines.append(Series(f"{name}, by the law", fitted, series=index, hollow=True))
    scale = loss_scale(loss for line in lines for _, loss in line.points)
    drawn = curves(
        lines, "Held-out loss", "tokens", "nats a token", read=lambda x: f"{x:.3f}", y_scale=scale
    )
    columns = (
        Column("run"),
        Column("parameters", is_number=True),
        Column("tokens", is_number=True),
        Column("loss", is_number=True),
        Column("by the law", is_number=True),
    )
    rows = [
        (
            Path(point["name"]).name,
            f"{point['parameters']:,.0f}",
            f"{point['tokens']:,.0f}",
            f"{point['loss']:.4f}",
            f"{point['fitted']:.4f}",
        )
        for point in document["points"]
    ]
    return join([drawn, table(columns, rows, "Runs")])


SPLIT_COLUMNS = (
    Column("FLOPs"),
    Column("parameters", is_number=True),
    Column("tokens", is_number=True),
    Column("loss", is_number=True),
)


def _splits(document: Mapping[str, Any]) -> Markup:
    return table(SPLIT_COLUMNS, split_rows(document), "Where FLOPs are spent best")


def split_rows(document: Mapping[str, Any]) -> list[tuple[str, ...]]:
    def words(values: Mapping[str, Any], digits: str) -> str:
        text = format(values["value"], digits)
        if values["low"] is None:
            return text
        return f"{text} ({format(values['low'], digits)} to {format(values['high'], digits)})"

    return [
        (
            f"{split['flops']:.1e}",
            words(split["parameters"], ".2e"),
            words(split["tokens"], ".2e"),
            words(split["loss"], ".3f"),
        )
        for split in document["splits"]
    ]
