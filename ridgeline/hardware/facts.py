"""`Hardware`: what one device is and what it can do. Plain data; nothing here touches a device.

Facts of detection (name, memory, caches, driver) are always there. Ceilings come in two kinds that
are never mixed: `ceilings` were measured on this machine, `datasheet` is what the vendor promises.
A ceiling nobody knows is missing, never infinite; `absent` says why a measurement is missing.

    hardware.ceiling("matrix_bf16")   # measured if there, else datasheet, else None
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from ridgeline.formats.files import reject_unknown_keys

# What can be measured, in the order of measuring and of tables: key -> (label, unit).
MEASURED = {
    "copy_bandwidth": ("memory copy (read + written)", "B/s"),
    "read_bandwidth": ("memory read", "B/s"),
    "matrix_fp32": ("matrix fp32", "FLOP/s"),
    "matrix_tf32": ("matrix tf32", "FLOP/s"),
    "matrix_bf16": ("matrix bf16", "FLOP/s"),
    "matrix_bf16_sustained": ("matrix bf16, sustained", "FLOP/s"),
    "matrix_fp16": ("matrix fp16", "FLOP/s"),
    "matrix_fp8": ("matrix fp8", "FLOP/s"),
    "matrix_int8": ("matrix int8", "OP/s"),
    "eager_launch": ("eager launch", "s"),
    "graph_step": ("graph replay, a kernel", "s"),
    "h2d_pinned": ("host to device, pinned", "B/s"),
    "h2d_pageable": ("host to device, pageable", "B/s"),
}
# What only a datasheet states. Links are totals of both directions, as vendors print them.
DATASHEET_ONLY = {
    "memory_bandwidth": ("memory bandwidth", "B/s"),
    "link_bandwidth": ("GPU link, both directions", "B/s"),
    "pcie_bandwidth": ("PCIe, both directions", "B/s"),
}


@dataclass(frozen=True)
class Ceiling:
    """One limit, in base units: B/s, FLOP/s, OP/s or s."""

    value: float
    unit: str
    source: Literal["measured", "datasheet"]
    spread: float | None = None  # (p90 - p10) / median of the measurement; None for a datasheet
    by: str | None = None  # what reached it; None: torch, or the datasheet

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Ceiling:
        reject_unknown_keys(data, {f.name for f in fields(cls)}, "a ceiling")
        return cls(**data)


@dataclass(frozen=True)
class Hardware:
    """One device. Made by `detect`, completed by `measure`."""

    vendor: str  # "nvidia", "amd", "intel", "arm", "apple" or "unknown"
    device_type: Literal["cuda", "rocm", "cpu"]
    device: str  # what torch calls it: "cuda:0" (on ROCm too) or "cpu"
    name: str
    architecture: str  # "sm_90", "gfx942", "x86_64 avx512 amx"
    memory_bytes: int
    num_units: int  # SMs, CUs, or the cores this process may use
    driver: str  # the GPU driver's version, or the kernel's on a CPU
    l2_bytes: int | None = None
    cache_bytes: int | None = None  # the largest cache: L2 on a GPU, L3 on most CPUs
    num_threads: int | None = None  # torch's threads on a CPU: its ceilings hold for that number
    versions: Mapping[str, str] = field(default_factory=dict)  # torch, triton, cuda or hip
    ceilings: Mapping[str, Ceiling] = field(default_factory=dict)
    datasheet: Mapping[str, Ceiling] = field(default_factory=dict)
    datasheet_source: str | None = (
        None  # document and address; None when the device is not in the table
    )
    absent: Mapping[str, str] = field(default_factory=dict)  # key -> why it was not measured

    def ceiling(self, key: str) -> Ceiling | None:
        """The measured ceiling, else the datasheet's, else None: unknown is never infinity."""
        assert key in MEASURED or key in DATASHEET_ONLY, f"no ceiling is called {key!r}"
        return self.ceilings.get(key) or self.datasheet.get(key)

    def share(self, key: str) -> float | None:
        """Measured over datasheet for a rate; None where either is unknown."""
        measured, promised = self.ceilings.get(key), self.datasheet.get(key)
        if measured is None or promised is None:
            return None
        return measured.value / promised.value

    def summary(self) -> dict[str, Any]:
        """What a record keeps of the device it ran on."""
        kept = (
            "vendor",
            "device_type",
            "name",
            "architecture",
            "memory_bytes",
            "num_units",
            "driver",
        )
        return {key: getattr(self, key) for key in kept} | {"num_threads": self.num_threads}

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Hardware:
        reject_unknown_keys(data, {f.name for f in fields(cls)}, "hardware")
        values = dict(data)
        for key in ("ceilings", "datasheet"):
            values[key] = {name: Ceiling.from_json(c) for name, c in values.get(key, {}).items()}
        return cls(**values)
