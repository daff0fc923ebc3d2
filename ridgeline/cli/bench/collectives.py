"""`ridgeline bench collectives`: all-reduce, all-gather, reduce-scatter, all-to-all and send
between this machine's devices, by size; kept beside the ceilings, where plans find them.

    ridgeline bench collectives
    torchrun --nproc-per-node 8 -m ridgeline bench collectives       # of several nodes too
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ridgeline.bench.collectives import (
    NAMES,
    as_record,
    group_sizes_to,
    measure_collectives,
    measure_under_torchrun,
    sizes_to,
)
from ridgeline.cli.arguments.options import add_save
from ridgeline.cli.arguments.parser import group
from ridgeline.cli.terminal import Terminal
from ridgeline.errors import UsageError
from ridgeline.hardware import Hardware, detect
from ridgeline.hardware.collective_curves import save_curves
from ridgeline.hardware.units import human, human_bytes
from ridgeline.parallel.starting.meeting import torchrun_process
from ridgeline.profiling.printing import safe_text

EXAMPLE = """\
ridgeline bench collectives
ridgeline bench collectives --device cpu --ranks 2 --most-mib 16
torchrun --nproc-per-node 8 -m ridgeline bench collectives"""
MOST_MIB = {"cpu": 64, "gpu": 1024}
SHOWN = (1 << 10, 1 << 20, 16 << 20, 64 << 20, 1 << 30)  # bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    work = group(parser, "what to time")
    work.add_argument("--device", default="auto", metavar="DEVICE",
                      help="cpu or cuda (default: the GPUs if there are any)")  # fmt: skip
    work.add_argument("--ranks", type=int, metavar="N",
                      help="at most so many devices together (default: all GPUs, or the cores of "
                      "a CPU, up to 8)")  # fmt: skip
    work.add_argument(
        "--most-mib", type=int, metavar="N",
        help="the largest message (default: 1024 between GPUs, 64 on a CPU)",
    )  # fmt: skip
    work.add_argument("--only", action="append", choices=NAMES, metavar="NAME",
                      help=f"of {', '.join(NAMES)} (repeat for several)")  # fmt: skip
    add_save(parser)


def run(args: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    hardware = detect(args.device)
    kind = "cpu" if hardware.device_type == "cpu" else "gpu"
    most = MOST_MIB[kind] if args.most_mib is None else args.most_mib
    if most < 1:
        raise UsageError(f"--most-mib is {most}; give at least 1")
    sizes, names = sizes_to(most << 20), args.only or NAMES
    process = torchrun_process()
    if process is not None:
        result = measure_under_torchrun(hardware, process, sizes, names)
    else:
        groups = group_sizes_to(num_ranks(args.ranks, hardware))
        with terminal.progress() as progress:
            result = measure_collectives(hardware, groups, sizes, names, progress)
    document: dict[str, Any] = {
        "device": hardware.name,
        "device_type": hardware.device_type,
        "curves": [
            {"name": each.name, "num_ranks": each.num_ranks, "points": list(each.points)}
            for each in result.curves
        ],
        "absent": result.absent,
    }
    if process is None or process.rank == 0:
        document["file"] = str(save_curves(hardware.name, result.curves))
        if args.save is not None:
            document["record"] = str(as_record(result, hardware).save(args.save))
    return document


def num_ranks(given: int | None, hardware: Hardware) -> int:
    is_cpu = hardware.device_type == "cpu"
    there = (os.cpu_count() or 1) if is_cpu else torch.cuda.device_count()
    count = min(8, there) if given is None else given
    if count < 2:
        have = f"{there} {'core' if is_cpu else 'GPU'}{'' if there == 1 else 's'}"
        raise UsageError(
            f"collectives need two ranks, and this machine has {have}; give --ranks 2 "
            "--device cpu to time two processes"
        )
    if not is_cpu and count > there:
        raise UsageError(f"--ranks is {count}, and this machine has {there} GPUs")
    return count


def render(document: dict[str, Any], console: Console) -> None:
    console.print(safe_text(document["device"]), style="bold")
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("collective", no_wrap=True)
    table.add_column("ranks", justify="right")
    measured = {size for curve in document["curves"] for size, _ in curve["points"]}
    sizes = [size for size in SHOWN if size in measured]
    for size in sizes:
        table.add_column(human_bytes(size), justify="right", no_wrap=True)
    table.add_column("at most", justify="right", no_wrap=True)
    for curve in document["curves"]:
        points = dict(curve["points"])
        rate = max(size / seconds for size, seconds in points.items())
        cells = [human(points[size], "s") if size in points else "" for size in sizes]
        table.add_row(curve["name"], str(curve["num_ranks"]), *cells, human(rate, "B/s"))
    console.print(table)
    for name, reason in document["absent"].items():
        console.print(safe_text(f"not measured: {name}: {reason}"))
    if "file" in document:
        console.print(safe_text(f"kept in {document['file']}; plans for such devices use them"),
                      style="dim", soft_wrap=True)  # fmt: skip
