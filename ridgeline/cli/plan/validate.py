"""`ridgeline plan --validate --points FOLDER`: predictions beside published measurements.

ridgeline plan --validate --points points       # train.csv, memory.csv and serve.csv there
ridgeline plan --validate --points results      # our engine under traces: traces-*.json there
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ridgeline.cli.arguments.parser import group
from ridgeline.cli.terminal import Terminal
from ridgeline.errors import UsageError
from ridgeline.hardware.units import human_bytes
from ridgeline.planning.training.constants import load_fitted
from ridgeline.planning.validating.judging import (
    JudgedRow,
    by_source,
    errors_of,
    judge_steps,
    sweep_of,
    worst,
)
from ridgeline.planning.validating.memory_points import FITTED_TO as MEMORY_FITTED_TO
from ridgeline.planning.validating.memory_points import judge_memory, read_memory_points
from ridgeline.planning.validating.own_runs import PREFIX, judge_rows, own_records
from ridgeline.planning.validating.points import read_points
from ridgeline.planning.validating.serve_judging import CALIBRATING, judge_serving
from ridgeline.planning.validating.serve_points import read_serve_points
from ridgeline.profiling.printing import safe_text

FILES = ("train.csv", "memory.csv", "serve.csv")
MEMORY_KINDS = ("steady", "peak", "activations", "out of memory")
SWEEP = "bloom_layouts"  # a source that tried layouts for one size of model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    checking = group(parser, "checking the planner")
    checking.add_argument(
        "--validate", action="store_true",
        help="predict published measurements and show the error by source",
    )  # fmt: skip
    checking.add_argument(
        "--points", type=Path, metavar="DIR",
        help=f"the measurements: {' and '.join(FILES)} (docs/planning.md has the columns)",
    )  # fmt: skip


def run(args: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    if args.points is None:
        raise UsageError("--validate needs measurements; give --points DIR with train.csv")
    if not args.points.is_dir():
        raise UsageError(f"--points {args.points} is no folder; give one with {FILES[0]}")
    fitted, rows = load_fitted(), list[JudgedRow]()
    training, memory, serving = (args.points / name for name in FILES)
    has_own = bool(own_records(args.points))
    if not has_own and not any(path.exists() for path in (training, memory, serving)):
        raise UsageError(
            f"{args.points} has none of {', '.join(FILES)}, nor records {PREFIX}*.json"
        )
    with terminal.progress() as progress:
        points = read_points(training) if training.exists() else []
        for number in range(0, len(points), 40):
            progress("predicting", number, len(points))
            rows += judge_steps(points[number : number + 40], fitted)
        if memory.exists():
            rows += judge_memory(read_memory_points(memory))
        served = read_serve_points(serving) if serving.exists() else []
        rows += judge_serving(served, progress)
        rows += judge_rows(args.points)
    fitted_to = {row.source for row in rows if row.source.endswith(CALIBRATING)}
    pairs = {(source, "step") for source in fitted.fitted_to}
    pairs |= {(source, kind) for source in MEMORY_FITTED_TO for kind in ("steady", "peak")}
    pairs |= {(row.source, row.kind) for row in rows if row.source in fitted_to}
    return summary(rows, pairs)


def summary(rows: list[JudgedRow], fitted_to: Collection[tuple[str, str]]) -> dict[str, Any]:
    """`fitted_to`: sources, and of what."""
    sources = by_source(rows, fitted_to)
    judged: dict[str, list[float]] = {}
    together: dict[str, list[float]] = {}
    for row in rows:
        if row.error is not None:
            together.setdefault(row.kind, []).append(row.error)
            if (row.source, row.kind) not in fitted_to:
                judged.setdefault(row.kind, []).append(row.error)
    refused = Counter((row.source, row.refused) for row in rows if row.refused)
    return {
        "num": len({_row_of(row) for row in rows}),
        "num_predicted": len({_row_of(row) for row in rows if not row.refused}),
        "sources": [asdict(each) for each in sources],
        "judged": [
            asdict(errors_of("all not fitted to", kind, errors, False))
            for kind, errors in judged.items()
        ],
        "together": [
            asdict(errors_of("all", kind, errors, False)) for kind, errors in together.items()
        ],
        "layouts": _layouts(rows),
        "out_of_memory": [
            asdict(row) | {"is_wrong_fit": row.is_wrong_fit} for row in rows if row.limit
        ],
        "worst": [asdict(row) | {"error": row.error} for row in worst(rows)],
        "refused": [
            {"source": source, "reason": reason, "num": count}
            for (source, reason), count in refused.items()
        ],
    }


def _row_of(row: JudgedRow) -> tuple[str, str]:
    """Of which file, since files share names of rows."""
    kind = "memory" if row.kind in MEMORY_KINDS else "step" if row.kind == "step" else "serving"
    return kind, row.id


def _layouts(rows: list[JudgedRow]) -> dict[str, Any] | None:
    """Of a sweep over layouts of one model: whether the fast ones were predicted fast."""
    sweep = [row for row in rows if row.kind == "step" and row.source == SWEEP and row.predicted]
    if not sweep:
        return None
    return {"source": SWEEP, **asdict(sweep_of(sweep))}


def render(document: dict[str, Any], console: Console) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("source")  # long names wrap, so that figures are there on narrow terminals
    table.add_column("of", no_wrap=True)
    for name in ("rows", "median", "p90", "p95", "bias"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for row in document["sources"] + document["judged"] + document["together"]:
        table.add_row(
            safe_text(row["source"]), row["kind"], str(row["num"]), f"{row['median']:.1%}",
            f"{row['p90']:.1%}", f"{row['p95']:.1%}", f"{row['bias']:+.1%}",
            "fitted to" if row["is_fitted"] else "",
        )  # fmt: skip
    console.print(table)
    share = document["num_predicted"] / document["num"]
    console.print(f"{document['num_predicted']} of {document['num']} rows predicted ({share:.1%})")
    for row in document["out_of_memory"]:
        verdict = "WRONGLY called fitting" if row["is_wrong_fit"] else "predicted not to fit"
        console.print(
            safe_text(f"{row['id']} ran out of memory: {verdict} "
                      f"({human_bytes(int(row['predicted']))} of {human_bytes(row['limit'])})")
        )  # fmt: skip
    sweep = document["layouts"]
    if sweep is not None:
        console.print(
            safe_text(f"{sweep['num']} layouts of {sweep['source']}: rank correlation "
                      f"{sweep['rank_correlation']:.2f}; the first choice ({sweep['first']}) is "
                      f"{sweep['regret']:.1%} from the best ({sweep['best']})")
        )  # fmt: skip
    console.print("the worst:")
    for row in document["worst"]:
        console.print(
            safe_text(f"  {row['id']}: predicted {row['predicted']:.4g}, "
                      f"measured {row['measured']:.4g} ({row['error']:+.1%})")
        )  # fmt: skip
    for row in document["refused"]:
        console.print(safe_text(f"refused {row['num']} of {row['source']}: {row['reason']}"))
