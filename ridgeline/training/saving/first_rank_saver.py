"""Checkpoints of ranks that all learn the same, as adapters are: the first one writes, and what
that returned or raised is the same on every rank.

    with FirstRankSaver(run, trainer, exporter, keep=2) as saver:
        saver.begin(state)          # every rank, after the same step
        saver.finished()
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

from ridgeline.parallel.agreeing import host_group, together
from ridgeline.training.ranks.rank_trainer import MeshTrainer
from ridgeline.training.saving.adapter_files import AdapterExporter
from ridgeline.training.saving.checkpoint import CheckpointContent, SavedState, checkpoint_content
from ridgeline.training.saving.rank_saver import FAILED_WAIT_S
from ridgeline.training.saving.saver import CheckpointSaver, WrittenCheckpoint


class FirstRankSaver(CheckpointSaver):
    failed_wait_s = FAILED_WAIT_S

    def __init__(
        self, run: Path, trainer: MeshTrainer, exporter: AdapterExporter, keep: int
    ) -> None:
        super().__init__(run, trainer, exporter, keep)
        self._mesh, self._hosts = trainer.mesh, host_group(trainer.mesh)

    def _content(self, state: SavedState) -> CheckpointContent:
        state = replace(state, layout=self._mesh.layout)
        return checkpoint_content(self._trainer, state, self._exporter)

    def _store(self, content: CheckpointContent) -> tuple[Path, int]:
        stored: tuple[Path, int] | None
        stored, *_ = together(self._hosts, lambda: self._store_first(content))
        assert stored is not None, "the first rank has written"
        return stored

    def _store_first(self, content: CheckpointContent) -> tuple[Path, int] | None:
        return super()._store(content) if self._mesh.is_first else None

    def _has_room(self, num_bytes: int) -> bool:
        return bool(self._mesh.agreed(super()._has_room(num_bytes), "min"))

    def _is_written(self, writing: Future[WrittenCheckpoint]) -> bool:
        """On every rank, so that all hear of it after the same step."""
        return bool(self._mesh.agreed(writing.done(), "min"))
