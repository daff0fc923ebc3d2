"""Where measured curves of collectives are kept: one file for each kind of device, beside the
ceilings. `ridgeline bench collectives` writes it, plans read it.

    save_curves("NVIDIA H200", curves)
    load_curves("NVIDIA H200")          # () where nothing was measured
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from ridgeline.formats.files import atomic_write
from ridgeline.hardware.collectives import CollectiveCurve, CollectiveName
from ridgeline.hardware.paths import cache_dir

SCHEMA = 1
log = logging.getLogger(__name__)


def curves_path(device: str) -> Path:
    name = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") or "device"
    return cache_dir() / "hardware" / f"collectives-{name}.json"


def save_curves(device: str, curves: Iterable[CollectiveCurve]) -> Path:
    """Into the file; a curve of the same collective and group takes the place of an older one."""
    known = {(each.name, each.num_ranks): each for each in load_curves(device)}
    known |= {(each.name, each.num_ranks): each for each in curves}
    path = curves_path(device)
    document = {
        "schema": SCHEMA, "device": device, "curves": [asdict(each) for each in known.values()],
    }  # fmt: skip
    with atomic_write(path) as file:
        json.dump(document, file, indent=1)
    return path


def load_curves(device: str) -> tuple[CollectiveCurve, ...]:
    """A file that cannot be read costs a warning: plans then go by the model."""
    path = curves_path(device)
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["schema"] != SCHEMA or document["device"] != device:
            return ()
        return tuple(_curve(each) for each in document["curves"])
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, TypeError, KeyError) as error:
        log.warning("%s cannot be read (%s); collectives are modelled", path, type(error).__name__)
        return ()


def _curve(values: Mapping[str, Any]) -> CollectiveCurve:
    points = tuple((int(size), float(seconds)) for size, seconds in values["points"])
    in_order = [size for size, _ in points] == sorted({size for size, _ in points})
    if not points or not in_order or values["name"] not in get_args(CollectiveName):
        raise ValueError("no curve")
    if not all(size > 0 and 0 < seconds < math.inf for size, seconds in points):
        raise ValueError("no curve")
    return CollectiveCurve(values["name"], int(values["num_ranks"]), points, str(values["device"]))
