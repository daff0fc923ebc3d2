"""What every checkpoint offers: metadata, tensor headers, and a stream of raw tensors.

Owns the order of reading (file by file, in file order) and the progress calls. Names and meaning
of tensors belong to the model families; containers are in `safetensors.py` and `gguf.py`.

    for name, tensor in open_checkpoint(path).read():
        parameters[name].copy_(tensor)  # copy before asking for the next one
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import torch

from ridgeline.errors import CheckpointError, near_matches
from ridgeline.progress import Progress


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's header, known without reading its data."""

    name: str
    shape: tuple[int, ...]  # torch order: rows first
    dtype: str  # as stored: a short name of `formats.dtypes` ("bf16") or a GGUF type ("Q4_K")
    file: Path
    stored_bytes: int = 0  # its size in the file
    offset: int = 0  # GGUF: its first byte in the file; safetensors finds it by name

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


class Checkpoint(ABC):
    """An opened checkpoint: headers are parsed and checked, no tensor data has been read."""

    format: Literal["safetensors", "gguf"]

    def __init__(
        self, path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]
    ) -> None:
        self.path = path  # the folder or file that was opened
        self.metadata = metadata  # config.json, or GGUF's keys and values, as plain Python values
        self.tensors = tensors  # file by file, in file order

    def read(
        self, names: Collection[str] | None = None, progress: Progress | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield CPU tensors file by file; copy each before the next, it may view a mapped file.

        One file is mapped at a time, so host memory stays under the largest file plus what the
        caller keeps. Block types arrive in fp32, all others as stored.
        """
        infos = self._select(names)
        total_bytes = sum(info.stored_bytes for info in infos)
        done_bytes = 0
        for file, group in groupby(infos, key=lambda info: info.file):
            tensors = self._read_file(file, list(group))
            for info, tensor in tensors:
                yield info.name, tensor
                del tensor  # the last view of a file must not outlive it
                done_bytes += info.stored_bytes
                if progress is not None:
                    progress(f"reading {file.name}", done_bytes, total_bytes)

    @abstractmethod
    def _read_file(
        self, file: Path, infos: list[TensorInfo]
    ) -> Iterator[tuple[TensorInfo, torch.Tensor]]:
        """Map `file`, yield the tensors asked for, and drop the mapping."""

    def _select(self, names: Collection[str] | None) -> list[TensorInfo]:
        if names is None:
            return list(self.tensors.values())
        wanted = set(names)
        missing = sorted(wanted - self.tensors.keys())
        if missing:
            hint = near_matches(missing[0], self.tensors)
            raise CheckpointError(f"{self.path} has no tensor {shorten(missing)}{hint}")
        return [info for info in self.tensors.values() if info.name in wanted]


def shorten(names: Collection[str], limit: int = 8) -> str:
    """`a, b, c and 20 more`: a list of names that still fits an error line."""
    listed = sorted(names)
    text = ", ".join(listed[:limit])
    if len(listed) > limit:
        text += f" and {len(listed) - limit} more"
    return text
