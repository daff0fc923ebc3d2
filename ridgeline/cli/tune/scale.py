"""`ridgeline tune scale`: a scaling law of finished runs, and where FLOPs are spent best."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from ridgeline.cli.arguments.parser import group
from ridgeline.cli.terminal import Terminal
from ridgeline.errors import UsageError
from ridgeline.formats.files import atomic_write
from ridgeline.tuning.pages.law_page import (
    CONSTANTS,
    SPLIT_COLUMNS,
    law_headline,
    split_rows,
    write_law_page,
)
from ridgeline.tuning.scaling.law import (
    FLOPS_EACH,
    HIGHEST,
    LOWEST,
    LawPoint,
    ScalingLaw,
    fit_law,
    interval,
    law_intervals,
)
from ridgeline.tuning.scaling.runs import law_points, run_folders

EXAMPLE = """\
ridgeline tune scale runs/ --out law
ridgeline tune scale run-1 run-2 run-3 run-4 run-5 --flops 1e18 --flops 1e19"""
DOCUMENT = "law.json"
BEYOND = (1.0, 10.0, 100.0)  # times the FLOPs of the largest run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN", help="folders of runs, or of folders of runs"
    )
    fitting = group(parser, "law")
    fitting.add_argument(
        "--flops",
        type=float,
        action="append",
        metavar="X",
        help="say where so many FLOPs are spent best (default: those of the largest run, and 10 "
        "and 100 times as many)",
    )
    fitting.add_argument(
        "--draws", type=int, default=200, metavar="N",
        help="fits to runs drawn again, for the intervals (default: %(default)s)",
    )  # fmt: skip
    group(parser, "output").add_argument(
        "--out", type=Path, default=Path("law"), metavar="DIR",
        help="folder of the page (default: %(default)s)",
    )  # fmt: skip


def run(args: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    if args.draws < 20:
        raise UsageError(f"--draws is {args.draws}; give at least 20")
    for flops in args.flops or ():
        if not 0 < flops < 1e40:
            raise UsageError(f"--flops is {flops:g}; give a number above zero, such as 1e18")
    points, left_out = law_points(run_folders(args.runs))
    law = fit_law(points)
    intervals, drawn = law_intervals(points, args.draws)
    largest = max(FLOPS_EACH * point.parameters * point.tokens for point in points)
    budgets = args.flops or [times * largest for times in BEYOND]
    document = {
        "out": str(args.out),
        "law": asdict(law),
        "intervals": {name: asdict(each) for name, each in intervals.items()},
        "error": fmean(abs(_fitted(law, point) / point.loss - 1) for point in points),
        "points": [asdict(point) | {"fitted": _fitted(law, point)} for point in points],
        "left_out": left_out,
        "problems": problems(law),
        "splits": [each for flops in budgets if (each := split(law, drawn, flops)) is not None],
    }
    with atomic_write(args.out / DOCUMENT) as file:
        json.dump(document, file, indent=2)
    return document | {"report": str(write_law_page(args.out, document))}


def problems(law: ScalingLaw) -> list[str]:
    """What the runs leave open."""
    ends = [
        name
        for name, exponent in (("a", law.size_exponent), ("b", law.data_exponent))
        if not LOWEST * 1.01 < exponent < HIGHEST / 1.01
    ]
    if not ends:
        return []
    return [
        f"The runs do not say {' and '.join(ends)}: the best fit lies at the end of what is tried "
        f"({LOWEST:g} to {HIGHEST:g}). Give runs of more sizes and lengths before this is used."
    ]


def _fitted(law: ScalingLaw, point: LawPoint) -> float:
    return law.loss(point.parameters, point.tokens)


def split(law: ScalingLaw, drawn: Sequence[ScalingLaw], flops: float) -> dict[str, Any] | None:
    """With intervals; None where one of size and data makes no difference."""
    best = law.best_split(flops)
    if best is None:
        return None
    others = [(each, each.best_split(flops)) for each in drawn]
    known = [(each, point) for each, point in others if point is not None]
    columns = {
        "parameters": (best[0], [point[0] for _, point in known]),
        "tokens": (best[1], [point[1] for _, point in known]),
        "loss": (law.loss(*best), [each.loss(*point) for each, point in known]),
    }
    return {"flops": flops} | {name: _value(*each) for name, each in columns.items()}


def _value(value: float, drawn: list[float]) -> dict[str, float | None]:
    if len(drawn) < 2:
        return {"value": value, "low": None, "high": None}
    return {"value": value} | asdict(interval(drawn))


def render(document: dict[str, Any], console: Console) -> None:
    for line in (law_headline(document), *document["problems"]):
        console.print(line, soft_wrap=True, markup=False)
    for name, words in CONSTANTS.items():
        ends = document["intervals"].get(name)
        value = document["law"][name]
        text = f"  {words}: {value:.4g}"
        text += f" ({ends['low']:.4g} to {ends['high']:.4g})" if ends else ""
        console.print(text, soft_wrap=True, markup=False)
    console.print()
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in SPLIT_COLUMNS:
        table.add_column(column.name, justify="right" if column.is_number else "left")
    for row in split_rows(document):
        table.add_row(*row)
    console.print(table)
    for line in document["left_out"]:
        console.print(f"left out: {line}", soft_wrap=True, markup=False)
    console.print(f"report: {document['report']}", soft_wrap=True, markup=False)
