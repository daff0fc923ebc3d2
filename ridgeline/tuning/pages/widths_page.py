"""A sweep over widths as a page: loss over the rate at each width, the exponents, the rate that is
carried on, and the coordinate check.

    write_widths_page(Path("widths"), document, "tiny on book.txt")     # widths/report.html
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from ridgeline.formats.files import atomic_write
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
from ridgeline.tuning.pages.axes import loss_scale, rounded
from ridgeline.version import __version__

FILE_NAME = "report.html"
ABOVE = 0.35  # of the way from a width's lowest loss to its highest; the rest is at the edge
SAME, BY_LAW = "one rate for all", "rates by the law"
BEST_COLUMNS = (
    Column("network"),
    Column("best rate", is_number=True),
    Column("95% interval", is_number=True),
    Column("lowest loss", is_number=True),
    Column(""),
)
CHECK_COLUMNS = (
    Column("place"),
    Column(SAME, is_number=True),
    Column(BY_LAW, is_number=True),
    Column("95% interval", is_number=True),
    Column(""),
)


def write_widths_page(folder: Path, document: Mapping[str, Any], subject: str) -> Path:
    path = folder / FILE_NAME
    with atomic_write(path) as file:
        file.write(widths_page(document, subject))
    return path


def widths_page(document: Mapping[str, Any], subject: str) -> str:
    sections = [
        Section("rates", "Loss over the rate, by width", _rates(document)),
        Section("exponents", "How the best rate moves", _exponents(document)),
        Section("check", "Coordinate check", _check(document), check_intro(document)),
    ]
    return page(
        f"Learning rate by width of {subject} · Ridgeline",
        element("b", subject),
        "Learning rate by width",
        widths_headline(document),
        sections,
        lead=element("p", " ".join([check_words(document), *document["problems"]])),
        footer=f"Drawn by Ridgeline {__version__}",
    )


def widths_headline(document: Mapping[str, Any]) -> str:
    target, rate = document["target"], document["target"]["rate"]
    return (
        f"Train a width of {target['width']} with a learning rate of {rate['value']:.2g} "
        f"({rate['low']:.2g} to {rate['high']:.2g}), batch {target['batch']}."
    )


def check_words(document: Mapping[str, Any]) -> str:
    """The verdict of the coordinate check."""
    rows = document["coordinates"]
    low = min(row["law"]["value"] for row in rows)
    high = max(row["law"]["value"] for row in rows)
    text = f"what a step changes goes as the width to the {low:+.2f} to {high:+.2f} at these rates"
    if not any(row["grows"] for row in rows):
        return f"Coordinate check passed: {text}."
    places = ", ".join(row["place"] for row in rows if row["grows"])
    return (
        f"Coordinate check failed at: {places}; {text}. Do not carry the rate far beyond the "
        "widths that were swept; sweep a wider one."
    )


def check_intro(document: Mapping[str, Any]) -> str:
    return (
        f"After {document['check_steps']} steps: the exponent with which the change of each place "
        "grows with the width. Near 0 the law can be gone on with."
    )


def best_rows(document: Mapping[str, Any]) -> list[tuple[str, ...]]:
    return [
        (
            f"width {best['width']}, batch {best['batch']}",
            f"{best['rate']['value']:.2g}",
            f"{best['rate']['low']:.2g} to {best['rate']['high']:.2g}",
            f"{best['loss']:.4f}",
            "at the end of the range" if best["is_at_end"] else "",
        )
        for best in document["best"]
    ]


def check_rows(document: Mapping[str, Any]) -> list[tuple[str, ...]]:
    return [
        (
            row["place"],
            f"{row['same']['value']:+.2f}",
            f"{row['law']['value']:+.2f}",
            f"{row['law']['low']:+.2f} to {row['law']['high']:+.2f}",
            "grows" if row["grows"] else "",
        )
        for row in document["coordinates"]
    ]


def _rates(document: Mapping[str, Any]) -> Markup:
    lines = []
    batches = {best["batch"] for best in document["best"]}
    for index, best in enumerate(document["best"]):
        own = [
            run for run in document["runs"]
            if (run["width"], run["batch"]) == (best["width"], best["batch"])
        ]  # fmt: skip
        name = f"width {best['width']}" + (f", batch {best['batch']}" if len(batches) > 1 else "")
        points = []
        for lr in sorted({run["lr"] for run in own}):
            losses = [run["loss"] for run in own if run["lr"] == lr]
            if None not in losses:
                points.append((rounded(lr), fmean(losses)))
        lines.append(Series(name, points, series=index))
    by_line = [[loss for _, loss in line.points] for line in lines if line.points]
    most = max(min(own) + ABOVE * (max(own) - min(own)) for own in by_line)
    drawn = curves(
        lines, "Held-out loss", "learning rate", "nats a token", read=lambda loss: f"{loss:.3f}",
        y_scale=loss_scale((loss for own in by_line for loss in own), most),
    )  # fmt: skip
    return join([drawn, table(BEST_COLUMNS, best_rows(document), "Best rates")])


def exponent_rows(document: Mapping[str, Any]) -> dict[str, Mapping[str, float]]:
    rows = {"p, of the width": document["width_exponent"]}
    if document["batch_exponent"] is not None:
        rows["q, of the batch"] = document["batch_exponent"]
    return rows


def _exponents(document: Mapping[str, Any]) -> Markup:
    rows = [
        Interval(name, each["value"], each["low"], each["high"])
        for name, each in exponent_rows(document).items()
    ]
    return intervals(rows, "best rate = c × width^p × batch^q", read=lambda value: f"{value:+.2f}")


def _check(document: Mapping[str, Any]) -> Markup:
    rows = [
        Interval(row["place"], row["law"]["value"], row["law"]["low"], row["law"]["high"])
        for row in document["coordinates"]
    ]
    drawn = intervals(rows, "Exponents, rates by the law", read=lambda value: f"{value:+.2f}")
    return join([drawn, table(CHECK_COLUMNS, check_rows(document), "Coordinate check")])
