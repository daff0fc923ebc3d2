"""Runs a planned step on this machine, for `plan --calibrate` and `plan --verify`: as a child of
`ridgeline profile --train`, which divides the step's time as plans do.

    measured = measured_step(StepOrder("tiny", True, sequence=128, batch=4, micro=2))
    measured.step_s, measured.parts["products"]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from ridgeline.errors import HardwareError
from ridgeline.parallel.starting.child import child_environment
from ridgeline.planning.training.corrections import merged


@dataclass(frozen=True)
class StepOrder:
    model: str
    is_shape: bool
    sequence: int
    batch: int
    micro: int
    recomputation: str = "none"
    precision: str = "bf16"
    layout: Path | None = None  # a plan's file; None: one device
    num_steps: int | None = None

    def words(self) -> list[str]:
        words = ["profile", "--train", *(["--shape"] if self.is_shape else []), self.model]
        words += ["--sequence-length", str(self.sequence), "--batch", str(self.batch)]
        words += ["--micro-batch", str(self.micro), "--recomputation", self.recomputation]
        words += ["--precision", self.precision]
        if self.layout is not None:
            words += ["--layout", str(self.layout)]
        if self.num_steps is not None:
            words += ["--steps", str(self.num_steps)]
        return words


@dataclass(frozen=True)
class MeasuredStep:
    step_s: float
    tokens_per_s: float
    parts: dict[str, float]  # as corrections.py names them
    device: str


MUCH_TAKEN = 0.25  # of a machine's cores


def taken_words() -> str:
    """Ask before measuring: what other programs take of the cores, which steps then lack; "" where
    it is little.
    """
    cores, taken = os.cpu_count() or 1, os.getloadavg()[0]
    if taken < MUCH_TAKEN * cores:
        return ""
    return (
        f"other programs wanted {taken:.1f} of {cores} cores in the minute before: what is "
        "measured here is slower than the machine alone"
    )


def measured_step(order: StepOrder, timeout_s: float = 600.0) -> MeasuredStep:
    """HardwareError with the child's own line where it fails."""
    command = [sys.executable, "-P", "-m", "ridgeline", *order.words(), "--json"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=child_environment(), timeout=timeout_s,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise HardwareError(
            f"`ridgeline {' '.join(order.words())}` took more than {timeout_s:.0f} s; a smaller "
            "model or --batch takes less"
        ) from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"it ended with code {done.returncode}"]
        raise HardwareError(f"`ridgeline {' '.join(order.words())}` failed: {lines[-1]}")
    document = json.loads(done.stdout)
    step = document["steps"][0]
    return MeasuredStep(
        step["step_s"], step["tokens_per_s"], merged(step["totals"]), document["device"]
    )
