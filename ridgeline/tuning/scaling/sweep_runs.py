"""The finished runs of a sweep, a line each: a sweep that is killed goes on behind the last.
More widths, batches, rates or seeds are more runs of the same sweep.

    with opened_runs(Path("widths"), sweep_description(config), resume=True) as runs:
        runs.loss_of(SweepKey(64, 8, 3e-3, 0), lambda: final_loss(plan, 3e-3, 0))
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from ridgeline.errors import CheckpointError, OutputError
from ridgeline.training.config import TrainConfig
from ridgeline.tuning.kept_folder import cut_half_line, held_folder

RUNS = "runs.jsonl"


class SweepKey(NamedTuple):
    """What a run's loss follows from, beside the sweep's config."""

    width: int
    batch: int
    lr: float
    seed: int


class SweepRuns:
    def __init__(self, path: Path | None = None) -> None:
        """In memory without a path."""
        self._path = path
        self._losses: dict[SweepKey, float] = {}
        if path is not None and path.is_file():
            cut_half_line(path)
            self._read(path)

    def _read(self, path: Path) -> None:
        try:
            for line in path.read_text(encoding="utf-8").splitlines():
                *key, loss = json.loads(line)
                self._losses[SweepKey(*key)] = math.inf if loss is None else float(loss)
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}; give a new folder") from error

    def loss_of(self, key: SweepKey, run: Callable[[], float]) -> float:
        """Known, or found and on the disk when this returns."""
        if key not in self._losses:
            self._losses[key] = loss = run()
            if self._path is not None:
                _append(self._path, [*key, loss if math.isfinite(loss) else None])
        return self._losses[key]


def _append(path: Path, row: list[float | None]) -> None:
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from error


def sweep_description(config: TrainConfig) -> dict[str, Any]:
    """What all its runs have in common."""
    return {"train": asdict(config)}


@contextmanager
def opened_runs(
    folder: Path, description: Mapping[str, Any], *, resume: bool
) -> Iterator[SweepRuns]:
    with held_folder(folder, description, resume=resume, kind="sweep"):
        yield SweepRuns(folder / RUNS)
