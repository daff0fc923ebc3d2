"""What the user's own machine reached of the predictions, part by part, kept from one
`ridgeline plan --calibrate` to all later plans for such devices.

    save_corrections(Corrections(device, {"products": 0.93}, error=0.08))
    corrected_for(load_fitted(), pool)          # with them, where the pool's GPUs are those
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from ridgeline.formats.files import atomic_write
from ridgeline.hardware.paths import cache_dir
from ridgeline.planning.clusters.cluster import GpuPool
from ridgeline.planning.training.constants import Fitted
from ridgeline.planning.training.step import PARTS

SCHEMA = 1
# What a profile divides a step into, and the parts of a plan that it is made of.
MEASURED_PARTS: Mapping[str, tuple[str, ...]] = {
    "products": ("products",),
    "attention": ("attention",),
    "element-wise": ("element-wise",),
    "loss": ("loss",),
    "optimizer": ("optimizer",),
    "launches": ("launches",),
    "communication": ("tensor", "context", "expert", "shard", "replicate", "pipeline", "nodes"),
}
SAME_AS = {"copies": "element-wise", "host": "launches"}  # names that a profile has besides
LEAST, MOST = 0.02, 50.0  # beyond, something else than what was predicted was measured
LEAST_ERROR = 0.1  # measurements of whole steps differ by as much
ERROR_OF_ONE = 0.4  # where a single step was measured, and none other could judge it
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Corrections:
    device: str
    parts: Mapping[str, float]  # measured over predicted, of a plan's parts
    error: float  # how far the calibration's own steps are from the corrected prediction
    when: str = ""
    steps: Sequence[Mapping[str, Any]] = field(default=())  # what was measured

    def __post_init__(self) -> None:
        if not set(self.parts) <= set(PARTS):
            raise ValueError("unknown parts")
        if not all(0 < value < math.inf for value in (*self.parts.values(), self.error)):
            raise ValueError("no positive numbers")


def corrections_path(device: str) -> Path:
    name = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") or "device"
    return cache_dir() / "planning" / f"corrections-{name}.json"


def save_corrections(corrections: Corrections) -> Path:
    path = corrections_path(corrections.device)
    with atomic_write(path) as file:
        json.dump({"schema": SCHEMA, **asdict(corrections)}, file, indent=1)
    return path


def load_corrections(device: str) -> Corrections | None:
    """None where nothing was calibrated; a file that cannot be read costs a warning."""
    path = corrections_path(device)
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document.pop("schema") != SCHEMA or document["device"] != device:
            return None
        return Corrections(**document)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        log.warning("%s cannot be read (%s); plans go without it", path, type(error).__name__)
        return None


def corrected_for(fitted: Fitted, pool: GpuPool) -> Fitted:
    known = load_corrections(pool.device_name)
    return fitted if known is None else fitted.corrected(known.parts, known.error)


def as_measured(parts: Mapping[str, float]) -> dict[str, float]:
    """A plan's parts as a profile divides a step."""
    return {name: sum(parts.get(each, 0.0) for each in own) for name, own in MEASURED_PARTS.items()}


def merged(totals: Mapping[str, float]) -> dict[str, float]:
    """A profile's parts, with those that a plan does not tell apart together."""
    result = dict.fromkeys(MEASURED_PARTS, 0.0)
    for name, seconds in totals.items():
        result[SAME_AS.get(name, name)] += seconds
    return result


def ratios(
    steps: Sequence[tuple[Mapping[str, float], Mapping[str, float]]],
) -> dict[str, float]:
    """Of (predicted, measured) parts as a profile has them: measured over predicted, by a plan's
    parts; what was not predicted or not measured keeps its prediction.
    """
    result: dict[str, float] = {}
    for name, own in MEASURED_PARTS.items():
        quotients = [
            measured[name] / predicted[name]
            for predicted, measured in steps
            if predicted.get(name, 0.0) > 0 and measured.get(name, 0.0) > 0
        ]
        if quotients:
            ratio = min(max(geometric_mean(quotients), LEAST), MOST)
            result |= dict.fromkeys(own, ratio)
    return result


def error_of(
    steps: Sequence[tuple[Mapping[str, float], Mapping[str, float]]],
) -> float:
    """The largest of whole steps, each by the corrections that the others alone would give."""
    if len(steps) == 1:
        return ERROR_OF_ONE
    sizes = [LEAST_ERROR]
    for index, (predicted, measured) in enumerate(steps):
        parts = ratios([*steps[:index], *steps[index + 1 :]])
        corrected = sum(
            seconds * parts.get(MEASURED_PARTS[name][0], 1.0) for name, seconds in predicted.items()
        )
        total = sum(measured.values())
        if corrected > 0 and total > 0:
            sizes.append(math.exp(abs(math.log(corrected / total))) - 1)
    return max(sizes)
