"""Clocks, power and temperature as the vendor's tool reports them, for the record of a run. Read
only: nothing is ever set.

    read_clocks(detect())       # Clocks(sm_mhz=1980.0, …), or None on a CPU or without the tool
    with ClockSampler(hardware) as clocks: ...
    clocks.median               # of what was read while the block ran
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import median
from threading import Event, Thread
from typing import Any, Self

import torch

from ridgeline.hardware.facts import Hardware

NVIDIA_FIELDS = {  # ours -> nvidia-smi's
    "sm_mhz": "clocks.sm",
    "max_sm_mhz": "clocks.max.sm",
    "memory_mhz": "clocks.mem",
    "power_limit_w": "power.limit",
    "power_draw_w": "power.draw",
    "temperature_c": "temperature.gpu",
}
AMD_FIELDS = {  # ours -> how rocm-smi's JSON key begins
    "sm_mhz": "sclk clock speed",
    "memory_mhz": "mclk clock speed",
    "power_limit_w": "Max Graphics Package Power",
    "power_draw_w": "Average Graphics Package Power",
    "temperature_c": "Temperature (Sensor junction)",
}


@dataclass(frozen=True)
class Clocks:
    """A GPU's state at one moment; a field is None where the tool does not report it."""

    sm_mhz: float | None = None
    max_sm_mhz: float | None = None
    memory_mhz: float | None = None
    power_limit_w: float | None = None
    power_draw_w: float | None = None
    temperature_c: float | None = None
    num_samples: int | None = None  # readings during the run, of which these are medians; None: one


SAMPLE_S = 0.5  # between readings: each takes a core for a tenth of that


class ClockSampler:
    """Reads the clocks in a background thread while a block runs. A run shorter than the interval
    has one reading; a CPU has none, and no thread.
    """

    def __init__(
        self,
        hardware: Hardware,
        interval_s: float = SAMPLE_S,
        read: Callable[[Hardware], Clocks | None] | None = None,
    ) -> None:
        self.samples: list[Clocks] = []
        self._hardware, self._interval_s = hardware, interval_s
        self._read = read_clocks if read is None else read
        self._stop = Event()
        self._thread: Thread | None = None

    def __enter__(self) -> Self:
        if self._hardware.device_type != "cpu":
            self._thread = Thread(target=self._run, name="clocks", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    @property
    def median(self) -> Clocks | None:
        return median_clocks(self.samples)

    def _run(self) -> None:
        while True:
            clocks = self._read(self._hardware)
            if clocks is None:  # no tool: it will not appear
                return
            self.samples.append(clocks)
            if self._stop.wait(self._interval_s):
                return


def median_clocks(samples: Sequence[Clocks]) -> Clocks | None:
    """The median of each figure separately; None where nothing was read."""
    if not samples:
        return None
    medians: dict[str, Any] = {"num_samples": len(samples)}
    for name in (entry.name for entry in fields(Clocks) if entry.name != "num_samples"):
        known = [getattr(each, name) for each in samples if getattr(each, name) is not None]
        medians[name] = median(known) if known else None
    return Clocks(**medians)


def read_clocks(hardware: Hardware) -> Clocks | None:
    if hardware.device_type == "cpu":
        return None
    index = torch.device(hardware.device).index or 0
    if hardware.device_type == "rocm":
        flags = ("--showclocks", "--showpower", "--showmaxpower", "--showtemp", "--json")
        text = query(["rocm-smi", "-d", str(index), *flags])
        return None if text is None else parse_rocm_smi(text)
    # nvidia-smi counts all devices, torch only the visible ones: the identifier is the same for
    # both
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    which = str(index) if uuid is None else f"GPU-{uuid}"
    wanted = f"--query-gpu={','.join(NVIDIA_FIELDS.values())}"
    text = query(["nvidia-smi", wanted, "--format=csv,noheader,nounits", "-i", which])
    return None if text is None else parse_nvidia_smi(text)


def parse_nvidia_smi(text: str) -> Clocks | None:
    """One line such as `1980, 1980, 3201, 700.00, 120.5, 34`; `[N/A]` becomes None."""
    cells = text.strip().splitlines()[0].split(",") if text.strip() else []
    if len(cells) != len(NVIDIA_FIELDS):
        return None
    values: dict[str, Any] = dict(zip(NVIDIA_FIELDS, map(_number, cells), strict=True))
    return Clocks(**values)


def parse_rocm_smi(text: str) -> Clocks | None:
    """`{"card0": {"sclk clock speed:": "(2100Mhz)", …}}`."""
    try:
        cards = json.loads(text)
    except ValueError:
        return None
    card: Mapping[str, Any] = next((v for v in cards.values() if isinstance(v, dict)), {})
    values: dict[str, Any] = {
        name: next((_number(str(v)) for key, v in card.items() if key.startswith(prefix)), None)
        for name, prefix in AMD_FIELDS.items()
    }
    return Clocks(**values) if any(value is not None for value in values.values()) else None


def _number(text: str) -> float | None:
    match = re.search(r"\d+(?:\.\d+)?", text)
    return float(match[0]) if match else None


def query(command: list[str]) -> str | None:
    """What a vendor's tool prints, or None where it is missing or fails."""
    tool = shutil.which(command[0])
    if tool is None:
        return None
    try:
        return subprocess.run(
            [tool, *command[1:]], capture_output=True, text=True, timeout=10, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
