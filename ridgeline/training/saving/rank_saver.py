"""Checkpoints of a layout, written by all its ranks while the run goes on. As `CheckpointSaver`,
and what it returns or raises is the same on every rank: each calls the same of it after the same
step.

    with RankSaver(run, rank_trainer, exporter, keep=2) as saver:
        saver.begin(state)
        saver.finished()
"""

from __future__ import annotations

import socket
from collections import Counter, defaultdict
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import Tensor

from ridgeline.hardware.detection import available_memory
from ridgeline.models.families import WeightPart, parts
from ridgeline.parallel.agreeing import host_group, together
from ridgeline.parallel.holdings import Holdings
from ridgeline.parallel.shards import whole_shapes
from ridgeline.training.ranks.rank_trainer import RankTrainer
from ridgeline.training.saving.checkpoint import CheckpointContent, Exporter, SavedState
from ridgeline.training.saving.deal import WEIGHT, deal
from ridgeline.training.saving.optimizer_files import stored_name
from ridgeline.training.saving.rank_files import RankWriter
from ridgeline.training.saving.saver import ROOM_SHARE, CheckpointSaver, WrittenCheckpoint

FAILED_WAIT_S = 60.0  # for a checkpoint that other ranks may have given up


class RankSaver(CheckpointSaver):
    failed_wait_s = FAILED_WAIT_S

    def __init__(self, run: Path, trainer: RankTrainer, exporter: Exporter, keep: int) -> None:
        super().__init__(run, trainer, exporter, keep)
        self._mesh, self._local = trainer.mesh, trainer.local
        plan = trainer.weights.plan
        kinds = {WEIGHT: plan.dtype, **plan.stored()}
        rounds = deal(
            Holdings(trainer.whole, self._mesh.layout),
            whole_shapes(trainer.whole),
            {kind: dtype.itemsize for kind, dtype in kinds.items()},
        )
        self._sent = {
            each.stored
            for files in rounds
            for file in files
            for each in file.tensors
            if each.sent_by(self._mesh.rank) is not None
        }
        pieces: dict[str, list[WeightPart]] = defaultdict(list)
        for piece in parts(trainer.whole, exporter.description.family.hf_names):
            pieces[piece.parameter].append(piece)
        self._writer = RankWriter(
            run,
            rounds,
            host_group(self._mesh),
            self._mesh.rank,
            partial(exporter.write_beside, model=trainer.model),
            pieces,
            keep,
        )

    def _content(self, state: SavedState) -> CheckpointContent:
        """What this rank sends or writes; of copies another rank may do it."""
        weights = {stored_name(WEIGHT, name): each for name, each in self._local.tensors().items()}
        return CheckpointContent(
            self._own(weights),
            self._own(dict(self._trainer.weights.tensors())),
            replace(state, layout=self._mesh.layout),
        )

    def _own(self, tensors: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
        """Without what fills them up."""
        own = []
        for name, tensor in tensors.items():
            if name in self._sent:
                _, parameter = name.split(".", 1)
                num_rows = self._local.parts[parameter].region.shape[0]
                own.append((name, tensor[:num_rows]))
        return own

    def _store(self, content: CheckpointContent) -> tuple[Path, int]:
        return self._writer.write(content), self._writer.num_bytes

    def _has_room(self, num_bytes: int) -> bool:
        """On every machine, for its ranks' copies and the files that they put together, each with
        its parts.
        """
        needed = num_bytes + 2 * self._writer.largest_bytes
        hosts = together(
            self._mesh.control, lambda: (socket.gethostname(), needed, available_memory("cpu"))
        )
        total: Counter[str] = Counter()
        for host, count, _ in hosts:
            total[host] += count
        return all(total[host] <= ROOM_SHARE * free for host, _, free in hosts)

    def _is_written(self, writing: Future[WrittenCheckpoint]) -> bool:
        """On every rank, so that all hear of it after the same step."""
        return bool(self._mesh.agreed(writing.done(), "min"))
