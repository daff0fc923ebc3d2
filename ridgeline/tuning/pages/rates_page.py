"""A range test as a page: the smoothed loss of each seed over the rising rate, and what each says.

write_rates_page(Path("rates"), document, "demo on book.txt")      # rates/report.html
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ridgeline.formats.files import atomic_write
from ridgeline.profiling.drawing import (
    Column,
    Markup,
    Section,
    Series,
    curves,
    element,
    page,
    table,
)
from ridgeline.tuning.pages.axes import loss_scale, rounded
from ridgeline.tuning.rates.verdict import smoothed
from ridgeline.version import __version__

FILE_NAME = "report.html"
MOST_POINTS = 24  # of a seed
ABOVE = 1.1  # times the first loss: what lies higher is drawn at the edge
COLUMNS = (
    Column("seed"),
    Column("falls from", is_number=True),
    Column("falls fastest at", is_number=True),
    Column("flattens at", is_number=True),
    Column("diverges at", is_number=True),
)


def write_rates_page(folder: Path, document: Mapping[str, Any], subject: str) -> Path:
    path = folder / FILE_NAME
    with atomic_write(path) as file:
        file.write(rates_page(document, subject))
    return path


def rates_page(document: Mapping[str, Any], subject: str) -> str:
    sections = [
        Section("loss", "Loss under a rising rate", _curves(document)),
        Section("seeds", "Seeds", table(COLUMNS, seed_rows(document), "What each seed says")),
    ]
    return page(
        f"Learning rate of {subject} · Ridgeline",
        element("b", subject),
        "Learning rate",
        rate_headline(document),
        sections,
        lead=element("p", document["problem"]),
        footer=f"Drawn by Ridgeline {__version__}",
    )


def rate_headline(document: Mapping[str, Any]) -> str:
    if document["suggested"] is None:
        return "No learning rate can be suggested."
    return (
        f"Train with a learning rate of {document['suggested']:.2g} "
        f"({document['low']:.2g} to {document['high']:.2g} over {len(document['seeds'])} seeds)."
    )


def seed_rows(document: Mapping[str, Any]) -> list[Sequence[str]]:
    names = ("falls_from", "steepest", "flattens_at", "diverges_at")
    return [
        [str(number), *("–" if seed[name] is None else f"{seed[name]:.2g}" for name in names)]
        for number, seed in enumerate(document["seeds"])
    ]


def _curves(document: Mapping[str, Any]) -> Markup:
    rates, series = document["rates"], []
    for number, losses in enumerate(document["losses"]):
        known = [loss for loss in losses if loss is not None and math.isfinite(loss)]
        means = smoothed(known, len(rates))
        step = max(1, math.ceil(len(means) / MOST_POINTS))
        points = [(rounded(rates[index]), means[index]) for index in range(0, len(means), step)]
        series.append(Series(f"seed {number}", points, series=number))
    losses = [loss for line in series for _, loss in line.points]
    first = max((line.points[0][1] for line in series if line.points), default=1.0)
    return curves(
        series, "Smoothed loss", "learning rate", "nats a token",
        read=lambda loss: f"{loss:.3f}", y_scale=loss_scale(losses, ABOVE * first),
    )  # fmt: skip
