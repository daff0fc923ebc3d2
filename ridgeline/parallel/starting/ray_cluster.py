"""Ray, where it is installed: a cluster that RAY_ADDRESS names, or one of this machine alone, which
ends with the process.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from ridgeline.errors import MissingPackageError, OfflineError

STORE_BYTES = 100 << 20  # of Ray's object store, which only passes commands and what they return


def load_ray() -> Any:
    """The package."""
    try:
        import ray
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            "this needs the package ray; try: pip install 'ridgeline[ray]'"
        ) from error
    return ray


def start_ray(shows_output: bool = False) -> None:
    """`shows_output`: what its processes write comes to this one's terminal."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage reports
    ray = load_ray()
    if ray.is_initialized():
        return
    local = {} if os.environ.get("RAY_ADDRESS") else {
        "include_dashboard": False, "object_store_memory": STORE_BYTES,
    }  # fmt: skip
    try:
        ray.init(
            log_to_driver=shows_output,
            logging_level=logging.ERROR,
            configure_logging=False,
            **local,
        )
    except Exception as error:  # Ray raises it plain where its own processes do not come up
        raise OfflineError(f"cannot start or reach Ray: {error}") from error


def lacking(wanted: Mapping[str, float]) -> str | None:
    """`8 GPUs and the Ray cluster has 4`: what it could not provide, and would wait for forever."""
    there = load_ray().cluster_resources()
    for name, number in wanted.items():
        if number > there.get(name, 0.0):
            return f"{number:g} {name}s and the Ray cluster has {there.get(name, 0.0):g}"
    return None
