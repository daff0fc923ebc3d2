"""`ridgeline bench kernels` and `bench sequences`: every op, or sequences of them that belong
together, timed beside the machine's ceilings and torch's own ways.
"""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console
from rich.table import Table

from ridgeline.bench.kernels.ops import KernelResult, as_record, bench_ops
from ridgeline.bench.kernels.sequences import all_sequences, get_sequence
from ridgeline.cli.arguments.options import add_save
from ridgeline.cli.arguments.parser import group
from ridgeline.cli.terminal import Terminal
from ridgeline.errors import HardwareError
from ridgeline.hardware import detect
from ridgeline.hardware.clocks import ClockSampler
from ridgeline.hardware.units import over_words
from ridgeline.kernels.ceilings import measure
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
    work = group(parser, "what to time")
    work.add_argument("--op", action="append", help="only this op or sequence (repeat for several)")
    work.add_argument(
        "--only", default="", metavar="TEXT", help="only cases whose label contains TEXT"
    )
    work.add_argument("--no-compile", action="store_true", help="skip torch.compile: quicker")
    work.add_argument(
        "--device", default="auto", metavar="DEVICE", help="cuda or cuda:N (default: auto)"
    )
    add_save(parser)


def run(args: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    hardware = detect(args.device)
    if hardware.device_type == "cpu":
        raise HardwareError("timing kernels requires a GPU, and none was found")
    get, everything = WHAT[args.what]
    ops = [get(name) for name in args.op] if args.op else everything()
    with terminal.progress() as progress:
        hardware = measure(hardware, CEILINGS, progress)
        with ClockSampler(hardware) as clocks:
            rows = bench_ops(
                ops, hardware, only=args.only, compiled=not args.no_compile, progress=progress
            )
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
    table.add_column("op and case", overflow="fold", min_width=24)
    for name in ("µs", "rate", "of limit", "PyTorch", "speedup"):
        table.add_column(name, justify="right", no_wrap=name != "PyTorch", max_width=13)
    op = None
    for row in document["rows"]:
        if row["op"] != op:
            op = row["op"]
            table.add_row(op, style="bold")
        table.add_row(*cells(row))
    console.print(f"{document['device']}; the limit is the one measured on this machine")
    console.print(table)
    over = over_words({f"{row['op']} {row['case']}": row["share"] for row in document["rows"]})
    if over is not None:
        console.print(over, markup=False, soft_wrap=True)
    if "record" in document:
        console.print(f"record: {document['record']}")


def cells(row: dict[str, Any]) -> list[str]:
    if row["bound"] == "memory":
        rate = f"{row['bytes_per_s'] / 1e12:.2f} TB/s"
    else:
        rate = f"{row['flops_per_s'] / 1e12:.0f} TFLOP/s"
    best = row["best_baseline"]
    return [
        f"  {row['case']}",
        f"{row['seconds'] * 1e6:.1f}",
        rate,
        "unknown" if row["share"] is None else f"{row['share']:.1%}",
        "none" if best is None else f"{row['baselines'][best] * 1e6:.1f} {best}",
        "" if best is None else f"{row['speedup']:.2f}x",
    ]
