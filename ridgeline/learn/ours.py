"""Our figures, to stand beside the reader's: those of the last recorded run of the course on two
CPU cores and on an H200. ours.json is written from records by record.py, never by hand.

    our_figure("cpu", "machine", "copy_bandwidth")       # an OurFigure, or None
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

PATH = Path(__file__).parent / "ours.json"
MACHINES = {"cpu": "two CPU cores", "h200": "H200"}  # in the order of tables


class OurFigure(NamedTuple):
    value: float
    unit: str


def our_figure(machine: str, lesson: str, key: str) -> OurFigure | None:
    value = figures_of(machine).get(f"{lesson}.{key}")
    return None if value is None else OurFigure(value["value"], value["unit"])


def figures_of(machine: str) -> Mapping[str, Any]:
    """By `lesson.key`, as in the record's values; empty where the course was not run yet."""
    return _read(PATH).get(machine, {}).get("figures", {})


def record_of(machine: str) -> str | None:
    """The name of the record in results/ that the figures are from."""
    name = _read(PATH).get(machine, {}).get("record")
    return None if name is None else str(name)


@cache
def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}
