"""Items of a memory plan, the engine's and training's: what takes how much, and the words for it.

items = [MemoryItem("weights", 2 << 30, "in bf16")]
listed(items)       # "weights 2 GiB"
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ridgeline.hardware.units import human_bytes


class MemoryItem(NamedTuple):
    name: str
    num_bytes: int
    meaning: str


def total_bytes(items: Iterable[MemoryItem]) -> int:
    return sum(item.num_bytes for item in items)


def listed(items: Iterable[MemoryItem]) -> str:
    """`weights 2 GiB, moments 4 GiB`: the largest first."""
    ordered = sorted(items, key=lambda item: -item.num_bytes)
    return ", ".join(f"{item.name} {human_bytes(item.num_bytes)}" for item in ordered)
