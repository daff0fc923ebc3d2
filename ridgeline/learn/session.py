"""What a lesson's code holds on to: the device, the timer, the ceilings, the figures it reports.

The same in `ridgeline learn`, in a notebook and in a script. Made before Triton is imported: on a
machine without a GPU kernels then run under Triton's interpreter, a thousand times slower and just
as right.

    here = Session("machine")
    here.figure("copy", bytes_moved / here.seconds(copy), "B/s", "a copy of 256 MB")
    here.missing("a GPU", "what a graph of 500 launches costs")
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined

from ridgeline.hardware import Hardware, detect
from ridgeline.hardware.units import human
from ridgeline.kernels.ceilings import measure
from ridgeline.learn.ours import MACHINES, our_figure
from ridgeline.timing import measure as time_call

SAMPLE_S = 0.1  # for each thing a lesson times


@dataclass(frozen=True)
class ReportedFigure:
    key: str
    value: float
    unit: str  # B/s, FLOP/s, s, B, tokens/s, or 1 for a ratio or a count
    words: str  # the row of the table


@dataclass(frozen=True)
class MissingPart:
    hardware: str
    shows: str  # what would be seen with it


class Session:
    def __init__(self, lesson: str) -> None:
        self.lesson = lesson
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.figures: list[ReportedFigure] = []
        self.missing_parts: list[MissingPart] = []
        self._hardware = detect()

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def interprets(self) -> bool:
        """Whether Triton's kernels run under its interpreter: their times mean nothing then."""
        return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")

    @property
    def hardware(self) -> Hardware:
        """With the ceilings that were asked for so far."""
        return self._hardware

    def ceiling(self, key: str) -> float:
        """What this device was measured to do (docs/hardware.md names the keys)."""
        if self._hardware.ceiling(key) is None or key not in self._hardware.ceilings:
            self._hardware = measure(self._hardware, only={*self._hardware.ceilings, key})
        ceiling = self._hardware.ceiling(key)
        if ceiling is None:
            raise RuntimeError(f"{key} cannot be measured here: {self._hardware.absent.get(key)}")
        return ceiling.value

    def seconds(self, call: Callable[[], object], target_s: float = SAMPLE_S) -> float:
        """The median time of a call on this device, by the project's own timer."""
        return time_call(call, self.device, target_s=target_s, min_samples=3).median_s

    def figure(self, key: str, value: float, unit: str, words: str) -> None:
        """Report one figure, and print it beside ours."""
        self.figures.append(ReportedFigure(key, float(value), unit, words))
        print(f"{words}: {shown(float(value), unit)}{self._ours(key)}")

    def missing(self, hardware: str, shows: str) -> None:
        """Say what this machine lacks, and what would be seen with it."""
        self.missing_parts.append(MissingPart(hardware, shows))
        print(f"not here: {hardware}; it would show {shows}")

    def _ours(self, key: str) -> str:
        parts = [
            f"{name} {shown(*ours)}"
            for machine, name in MACHINES.items()
            if (ours := our_figure(machine, self.lesson, key)) is not None
        ]
        return f"  (ours: {', '.join(parts)})" if parts else ""


def shown(value: float, unit: str) -> str:
    """As people read it: 4.25 TB/s, 12.4 µs, 0.53."""
    if unit == "1":
        return f"{value:,.0f}" if value >= 1000 or value == int(value) else f"{value:.3g}"
    return human(value, unit)
