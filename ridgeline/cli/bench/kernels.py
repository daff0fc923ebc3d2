"""`ridgeline bench kernels` and `bench sequences`: every op, or sequences of them that belong
together, timed beside the machine's ceilings and torch's own ways.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ridgeline.bench.kernels.ops import KernelResult, as_record, bench_ops
from ridgeline.bench.kernels.sequences import all_sequences, get_sequence
from ridgeline.cli.terminal import Terminal
from ridgeline.errors import HardwareError
from ridgeline.hardware import detect, measure
from ridgeline.hardware.clocks import ClockSampler
from ridgeline.kernels.registry import all_ops
from ridgeline.lessons import get_op_or_lesson

WHAT = {"kernels": (get_op_or_lesson, all_ops), "sequences": (get_sequence, all_sequences)}
CEILINGS = {
    "copy_bandwidth",
    "read_bandwidth",
    "matrix_bf16",
    "matrix_fp16",
    "matrix_fp8",
    "matrix_int8",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--op", action="append", help="this op or sequence alone (may be given several times)"
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose label holds TEXT")
    parser.add_argument("--device", default="auto", help="cuda or cuda:N (default: auto)")
    parser.add_argument(
        "--no-compile", action="store_true", help="leave torch.compile out: quicker"
    )
    parser.add_argument("--save", type=Path, metavar="DIR", help="also write a record there")


def run(args: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    hardware = detect(args.device)
    if hardware.device_type == "cpu":
        raise HardwareError(
            "kernels are timed on a GPU, and there is none here; see `kernels check`"
        )
    get, everything = WHAT[args.what]
    ops = [get(name) for name in args.op] if args.op else everything()
    with terminal.progress() as progress:
        hardware = measure(hardware, CEILINGS, progress)
        about = {"only": args.only, "compiled": not args.no_compile, "progress": progress}
        with ClockSampler(hardware) as clocks:
            rows = bench_ops(ops, hardware, **about)
    record = as_record(rows, hardware, f"bench-{args.what}", clocks.median)
    document = {"device": hardware.name, "rows": [row_json(row) for row in rows]}
    if args.save is not None:
        document["record"] = str(record.save(args.save))
    return document


def row_json(row: KernelResult) -> dict[str, Any]:
    best = row.best_baseline
    return {
        "op": row.op,
        "case": row.case,
        "seconds": row.timing.median_s,
        "spread": row.timing.spread,
        "bytes_per_s": row.bytes_per_s,
        "flops_per_s": row.flops_per_s,
        "share": row.share,
        "bound": row.bound,
        "baselines": dict(row.baselines),
        "failed": dict(row.failed),
        "best_baseline": best[0] if best else None,
        "speedup": best[1] / row.timing.median_s if best else None,
    }


def render(document: dict[str, Any], console: Console) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("op", "case"):
        table.add_column(name, overflow="fold")
    for name in ("µs", "rate", "share", "best of torch", "speedup"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in document["rows"]:
        table.add_row(*cells(row))
    console.print(f"{document['device']}: share of the ceiling measured on this machine")
    console.print(table)
    if "record" in document:
        console.print(f"record: {document['record']}")


def cells(row: dict[str, Any]) -> list[str]:
    if row["bound"] == "memory":
        rate = f"{row['bytes_per_s'] / 1e12:.2f} TB/s"
    else:
        rate = f"{row['flops_per_s'] / 1e12:.0f} TFLOP/s"
    best = row["best_baseline"]
    return [
        row["op"],
        row["case"],
        f"{row['seconds'] * 1e6:.1f}",
        rate,
        "unknown" if row["share"] is None else f"{row['share']:.1%}",
        "none" if best is None else f"{best} {row['baselines'][best] * 1e6:.1f}",
        "" if best is None else f"{row['speedup']:.2f}x",
    ]
