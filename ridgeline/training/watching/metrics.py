"""`metrics.jsonl`: a line for each step, each measurement of held-out loss and each checkpoint.

    {"step": 10, "loss": 3.21, "lr": 1e-04, "gradient_norm": 0.8, "tokens": 40880, …}
    {"step": 10, "held_out_loss": 3.05}
    {"step": 10, "checkpoint": "step-00000010", "save_s": 1.2, "stall_s": 0.01, …}

A run that goes on after a crash first drops the lines of steps that will be run again.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from ridgeline.errors import OutputError
from ridgeline.formats.files import atomic_write

FILE_NAME = "metrics.jsonl"


class MetricsLog:
    """Lines are on disk as soon as they are written."""

    def __init__(self, run: Path, after_step: int, is_writer: bool = True) -> None:
        """Lines up to this step stay; -1 for none. Of several ranks one writes."""
        self._file: IO[str] | None = None
        if not is_writer:
            return
        path = run / FILE_NAME
        rows = [row for row in read_metrics(run) if row["step"] <= after_step]
        with atomic_write(path) as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        self._path = path
        self._file = path.open("a", encoding="utf-8")

    def write(self, row: dict[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(row, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise OutputError(f"cannot write {self._path}: {error.strerror}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is None:
            return
        try:
            self._file.close()
        except OSError as problem:  # a full disk: what `write` could not write either
            if error is None:
                raise OutputError(f"cannot write {self._path}: {problem.strerror}") from problem


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """All complete lines; the last one may have been cut short by a crash."""
    path = run / FILE_NAME
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows
