"""A checkpoint that all ranks of a layout write: its tensors are whole, dealt out to ranks
(deal.py), and put together from what the others send (exchange.py).

All of it goes over a group of its own, so that it can run in a thread beside a step. The folder has
its name when every rank has written its files, and never where one could not: then all ranks raise
the same error.

    writer = RankWriter(run, rounds, hosts, rank, describe, pieces, keep=2)
    path = writer.write(content)                # on every rank
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from ridgeline.errors import OutputError
from ridgeline.models.checkpoint.safetensors import INDEX_NAME
from ridgeline.models.checkpoint.save import (
    METADATA,
    folder_beside,
    own_memory,
    write_index,
    write_shard,
    writing,
)
from ridgeline.models.families import WeightPart
from ridgeline.parallel.agreeing import together
from ridgeline.parallel.mesh import Axis, Mesh
from ridgeline.training.saving.checkpoint import (
    STATE_FOLDER,
    CheckpointContent,
    LastWhole,
    SavedState,
    checkpoint_path,
    finish_checkpoint,
    keep_last,
    last_whole,
)
from ridgeline.training.saving.deal import WEIGHT, DealtFile, DealtTensor, Round
from ridgeline.training.saving.exchange import exchanged
from ridgeline.training.saving.optimizer_files import OPTIMIZER_INDEX


def last_whole_of_ranks(run: Path, mesh: Mesh) -> LastWhole:
    """What the first rank finds, on every rank."""
    return together(mesh.control, lambda: last_whole(run) if mesh.is_first else LastWhole(None))[0]


@dataclass(frozen=True)
class RankWriter:
    run: Path
    rounds: Sequence[Round]
    hosts: Axis | None  # all ranks; None: this one is alone
    rank: int
    describe: Callable[[Path], None]  # writes what a model's folder has besides weights
    pieces: Mapping[str, Sequence[WeightPart]]  # that a parameter is stored in
    keep: int  # checkpoints

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(each.num_bytes for file in self._files() for each in file.tensors)

    @property
    def largest_bytes(self) -> int:
        """Of this rank's files."""
        own = [file for file in self._files() if file.owner == self.rank]
        return max((sum(each.num_bytes for each in file.tensors) for file in own), default=0)

    def write(self, content: CheckpointContent) -> Path:
        """`content` has what this rank sends, by stored name. A checkpoint that is there already is
        this one.
        """
        target = checkpoint_path(self.run, content.state.counters.steps)
        held = dict((*content.weights, *content.optimizer))
        with ExitStack() as stack:
            folder = self._together(partial(self._begin, target, stack))
            if folder is None:
                return target
            self._together(partial(_check_seen, folder))
            for files in self.rounds:
                tensors = exchanged(files, held, self.hosts, self.rank)
                self._together(partial(self._write_file, target, folder, files, tensors))
                del tensors  # before there are the next ones
            self._together(partial(self._finish, target, folder, content.state, stack))
        return target

    def _together(self, work: Callable[[], Any]) -> Any:
        """What the first rank's returned."""
        return together(self.hosts, work)[0]

    def _begin(self, target: Path, stack: ExitStack) -> Path | None:
        """The first rank makes the folder; it takes its name when the stack is closed."""
        if self.rank or target.exists():
            return None
        folder = stack.enter_context(folder_beside(target))
        with writing(target):
            (folder / STATE_FOLDER).mkdir()
        return folder

    def _write_file(
        self,
        target: Path,
        folder: Path,
        files: Round,
        tensors: Sequence[tuple[DealtTensor, Tensor]],
    ) -> None:
        storages: set[int] = set()
        shard = {
            name: own_memory(tensor, storages)
            for each, whole in tensors
            for name, tensor in self._stored(each, whole)
        }
        for file in files:
            if file.owner == self.rank:
                with writing(target):
                    write_shard(folder / _place_of(file), shard, METADATA)

    def _stored(self, each: DealtTensor, whole: Tensor) -> Iterator[tuple[str, Tensor]]:
        if each.kind != WEIGHT:
            yield each.stored, whole
            return
        for piece in self.pieces[each.parameter]:
            yield piece.name, whole[piece.index]

    def _finish(self, target: Path, folder: Path, state: SavedState, stack: ExitStack) -> None:
        """The first rank, when all others have written."""
        if self.rank:
            return
        with writing(target):
            self.describe(folder)
            self._write_index(folder / INDEX_NAME, "model")
            self._write_index(folder / STATE_FOLDER / OPTIMIZER_INDEX, "optimizer")
            finish_checkpoint(folder, state)
        stack.close()
        keep_last(self.run, self.keep)

    def _write_index(self, path: Path, stem: str) -> None:
        weight_map: dict[str, str] = {}
        total_bytes = 0
        for file in self._files():
            for each in file.tensors if file.stem == stem else ():
                names = [each.stored]
                if each.kind == WEIGHT:
                    names = [piece.name for piece in self.pieces[each.parameter]]
                weight_map |= dict.fromkeys(names, file.name)
                total_bytes += each.num_bytes
        write_index(path, weight_map, total_bytes)

    def _files(self) -> Iterator[DealtFile]:
        for files in self.rounds:
            yield from files


def _check_seen(folder: Path) -> None:
    if not folder.is_dir():
        raise OutputError(
            f"cannot write {folder.parent}: not every rank sees what the first one made there; a "
            "run over several machines needs a folder that all of them have"
        )


def _place_of(file: DealtFile) -> Path:
    return Path(file.name) if file.stem == "model" else Path(STATE_FOLDER, file.name)
