"""The numbers of a run as TensorBoard's event files, written by torch's writer, which needs the
package `tensorboard`.

    log = TensorBoardLog(run, after_step=0)
    log.write({"step": 10, "loss": 3.2})
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ridgeline.errors import MissingPackageError

FOLDER = "tensorboard"


def check_tensorboard() -> None:
    if find_spec("tensorboard") is None:
        raise MissingPackageError(
            "--tensorboard needs the package tensorboard; install ridgeline[tensorboard]"
        )


class TensorBoardLog:
    def __init__(self, run: Path, after_step: int) -> None:
        """Of a run that goes on, what was written of later steps is not shown."""
        check_tensorboard()
        from torch.utils.tensorboard import SummaryWriter

        purge = after_step + 1 if after_step else None
        self._writer: Any = SummaryWriter(str(run / FOLDER), purge_step=purge)

    def write(self, row: Mapping[str, Any]) -> None:
        """Every number of a row of metrics.jsonl, under its name there."""
        for name, value in row.items():
            if isinstance(value, int | float) and not isinstance(value, bool) and name != "step":
                self._writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        self._writer.close()
