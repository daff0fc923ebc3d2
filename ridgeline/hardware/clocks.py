"""Clocks, power and temperature as the vendor's tool reports them, for the record of a run. Read
only: nothing is ever set.

read_clocks(detect()) # Clocks(sm_mhz=1980.0, power_limit_w=700.0, …) or None on a CPU or without
the tool
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
    """A moment's state of a GPU; a field is None where the tool does not tell."""

    sm_mhz: float | None = None
    max_sm_mhz: float | None = None
    memory_mhz: float | None = None
    power_limit_w: float | None = None
    power_draw_w: float | None = None
    temperature_c: float | None = None


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
    return Clocks(**{name: _number(cell) for name, cell in zip(NVIDIA_FIELDS, cells, strict=True)})


def parse_rocm_smi(text: str) -> Clocks | None:
    """`{"card0": {"sclk clock speed:": "(2100Mhz)", …}}`."""
    try:
        cards = json.loads(text)
    except ValueError:
        return None
    card: Mapping[str, Any] = next((v for v in cards.values() if isinstance(v, dict)), {})
    found = {
        name: next((_number(str(v)) for key, v in card.items() if key.startswith(prefix)), None)
        for name, prefix in AMD_FIELDS.items()
    }
    return Clocks(**found) if any(value is not None for value in found.values()) else None


def _number(text: str) -> float | None:
    found = re.search(r"\d+(?:\.\d+)?", text)
    return float(found[0]) if found else None


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
