"""`ridgeline plan --calibrate`: a few training steps and collectives measured on this machine, and
by what each part of a plan for such devices is corrected from now on. Ten minutes at most.

    ridgeline plan --calibrate
    ridgeline plan llama-3.2-1b --calibrate         # with steps of this model
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.table import Table

from ridgeline.bench.collectives import group_sizes_to, measure_collectives, sizes_to
from ridgeline.cli.plan.measuring import MeasuredStep, StepOrder, measured_step, taken_words
from ridgeline.cli.plan.models import is_shape, model_of
from ridgeline.cli.terminal import Terminal
from ridgeline.errors import HardwareError
from ridgeline.hardware import detect
from ridgeline.hardware.collective_curves import save_curves
from ridgeline.hardware.units import human
from ridgeline.parallel.layout import Layout
from ridgeline.planning.clusters.cluster import GpuPool
from ridgeline.planning.clusters.here import this_machine
from ridgeline.planning.training.constants import Fitted, load_fitted
from ridgeline.planning.training.corrections import (
    Corrections,
    as_measured,
    error_of,
    ratios,
    save_corrections,
)
from ridgeline.planning.training.setup import TrainSetup
from ridgeline.planning.training.step import estimate_step
from ridgeline.profiling.printing import safe_text

MOST_S = 540.0  # after which no further step is begun: ten minutes in all


@dataclass(frozen=True)
class CalibrationSize:
    shape: str
    sequence: int
    batch: int
    micro: int


# Small and large products, short and long attention; a machine takes those that fit.
SIZES = {
    "cpu": (
        CalibrationSize("tiny", 128, 4, 2),
        CalibrationSize("tiny", 512, 4, 4),
        CalibrationSize("smollm2-135m", 128, 1, 1),
    ),
    "cuda": (
        CalibrationSize("smollm2-1.7b", 2048, 8, 8),
        CalibrationSize("llama-3.2-1b", 4096, 8, 8),
        CalibrationSize("llama-3.2-1b", 8192, 4, 2),
        CalibrationSize("llama-3.2-3b", 4096, 8, 4),
    ),
}
LARGEST_MESSAGE = {"cpu": 4 << 20, "cuda": 1 << 30}


def run(args: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    begin, taken = time.monotonic(), taken_words()
    pool = this_machine(None)
    alone = GpuPool(pool.gpu, 1, pool.node, kind=pool.kind)
    sizes = SIZES[pool.kind]
    if args.model is not None:
        sizes = (CalibrationSize(args.model, args.sequence_length or 256, args.batch or 2, 1),)
    steps, failed = list[dict[str, Any]](), dict[str, str]()
    with terminal.progress() as progress:
        for number, size in enumerate(sizes):
            progress("measuring steps", number, len(sizes))
            left = MOST_S - (time.monotonic() - begin)
            name = f"{size.shape}, {size.batch} x {size.sequence}"
            if left <= 0:
                failed[name] = "no time is left of the ten minutes"
                continue
            try:
                steps.append(_step(size, alone, load_fitted(), left))
            except HardwareError as error:
                failed[name] = str(error)
        if not steps:
            raise HardwareError("; ".join(f"{name}: {why}" for name, why in failed.items()))
        curves = _collectives(pool, progress)
    pairs = [(step["predicted"], step["measured"]) for step in steps]
    parts = ratios(pairs)
    corrections = Corrections(
        alone.device_name, parts, error_of(pairs),
        datetime.now(UTC).isoformat(timespec="seconds"), steps,
    )  # fmt: skip
    return {
        "device": alone.device_name,
        "steps": steps,
        "failed": failed,
        "parts": parts,
        "error": corrections.error,
        "collectives": curves,
        "file": str(save_corrections(corrections)),
        "seconds": time.monotonic() - begin,
        "taken": taken,
    }


def _step(size: CalibrationSize, pool: GpuPool, fitted: Fitted, timeout_s: float) -> dict[str, Any]:
    units: Any = "fp32" if pool.kind == "cpu" else "bf16"
    order = StepOrder(
        size.shape, is_shape(size.shape), size.sequence, size.batch, size.micro, precision=units,
        num_steps=3 if pool.kind == "cpu" else None,
    )  # fmt: skip
    setup = TrainSetup(
        model_of(size.shape), Layout(), size.sequence, size.batch, size.micro, units=units,
        device=pool.kind,
    )  # fmt: skip
    predicted = as_measured(estimate_step(setup, pool, fitted).parts)
    measured: MeasuredStep = measured_step(order, timeout_s)
    return {
        "shape": size.shape,
        "sequence": size.sequence,
        "batch": size.batch,
        "predicted": predicted,
        "measured": measured.parts,
        "step_s": measured.step_s,
    }


def _collectives(pool: GpuPool, progress: Any) -> str | None:
    """Where there are several devices; of a CPU two processes."""
    count = 2 if pool.kind == "cpu" else pool.num_gpus
    if count < 2:
        return None
    hardware = detect()
    sizes = sizes_to(LARGEST_MESSAGE[pool.kind])
    result = measure_collectives(hardware, group_sizes_to(count), sizes, progress=progress)
    return str(save_curves(hardware.name, result.curves))


def render(document: dict[str, Any], console: Console) -> None:
    console.print(safe_text(document["device"]), style="bold")
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("step", no_wrap=True)
    for name in ("predicted", "measured"):
        table.add_column(name, justify="right", no_wrap=True)
    for step in document["steps"]:
        table.add_row(
            f"{step['shape']}, {step['batch']} x {step['sequence']}",
            human(sum(step["predicted"].values()), "s"), human(step["step_s"], "s"),
        )  # fmt: skip
    console.print(table)
    for name, why in document["failed"].items():
        console.print(safe_text(f"left out: {name}: {why}"))
    if document["taken"]:
        console.print(document["taken"], soft_wrap=True)
    words = ", ".join(f"{name} ×{value:.2f}" for name, value in document["parts"].items())
    console.print(safe_text(f"corrections: {words}"), soft_wrap=True)
    console.print(
        safe_text(f"steps like these are then predicted within ±{document['error']:.0%}; kept in "
                  f"{document['file']} ({document['seconds']:.0f} s)"),
        style="dim", soft_wrap=True,
    )  # fmt: skip
