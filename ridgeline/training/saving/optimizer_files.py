"""The optimizer's state on disk: whole tensors called after what they are and the parameter they
belong to (`first.embed.weight`), in one safetensors file, or in several with an index.

    stored = StoredOptimizer.open(checkpoint / "training")
    stored.check({"first.embed.weight": (131, 32)})
    for name, tensor in stored.read(["first.embed.weight"]): ...
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ridgeline.errors import CheckpointError
from ridgeline.models.checkpoint.base import shorten
from ridgeline.models.checkpoint.safetensors import (
    SafetensorsCheckpoint,
    merge_shards,
    read_weight_map,
)

OPTIMIZER_NAME = "optimizer.safetensors"
OPTIMIZER_INDEX = "optimizer.safetensors.index.json"


def stored_name(kind: str, parameter: str) -> str:
    return f"{kind}.{parameter}"


@dataclass(frozen=True)
class StoredOptimizer:
    path: Path  # the file, or the index of several
    files: SafetensorsCheckpoint

    @staticmethod
    def open(folder: Path) -> StoredOptimizer:
        path = folder / OPTIMIZER_INDEX
        names = sorted(set(read_weight_map(path).values())) if path.is_file() else []
        if not names:
            path, names = folder / OPTIMIZER_NAME, [OPTIMIZER_NAME]
        tensors = merge_shards([folder / name for name in names])
        return StoredOptimizer(path, SafetensorsCheckpoint(folder, {}, tensors))

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """That these tensors are there, and no others."""
        tensors = self.files.tensors
        differing = tensors.keys() ^ shapes.keys()
        if differing:
            raise CheckpointError(
                f"{self.path} does not fit this run: {shorten(differing, 3)} are on one side only"
            )
        for name, shape in shapes.items():
            if tensors[name].shape != shape:
                raise CheckpointError(
                    f"{self.path}: {name} has the shape {list(tensors[name].shape)} instead of "
                    f"{list(shape)}"
                )

    def read(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """File by file, views of what is mapped: of a tensor no more is read than is copied."""
        yield from self.files.read(names)
