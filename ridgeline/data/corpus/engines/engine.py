"""What every engine does: performs tasks and gives their notes as they come.

engine = LocalProcesses(2)
for note in engine.run(folder, [(task, key), ...]): ...
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from ridgeline.data.corpus.ledger.task import CorpusTask, TaskNote

Keyed = tuple[CorpusTask, str]


class TaskEngine(Protocol):
    workers: int  # tasks at once

    def run(self, folder: Path, tasks: Sequence[Keyed]) -> Iterator[TaskNote]:
        """Notes in any order. The first task that fails ends all."""
        ...

    def close(self) -> None: ...
