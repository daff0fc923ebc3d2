"""GGUF checkpoints: one file or the parts of a split one, dequantized as they are read.

Headers are parsed by `gguf_header`, blocks by `formats.gguf_blocks`. Tokenizer and chat template
are in the metadata (`tokenizer.ggml.*`, `tokenizer.chat_template`), for the tokenizer to read.

    checkpoint = GgufCheckpoint.open(Path("model.gguf"))
    checkpoint.metadata["general.architecture"]
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ridgeline.errors import CheckpointError, UnsupportedError
from ridgeline.formats import gguf_blocks
from ridgeline.formats.dtypes import dtype_name
from ridgeline.models.checkpoint.base import Checkpoint, TensorInfo, shorten
from ridgeline.models.checkpoint.gguf_header import GgufHeader, map_file, read_header

SPLIT_NAME = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf")
PLAIN_NAMES = {dtype_name(dtype): name for name, dtype in gguf_blocks.PLAIN_TYPES.items()}


class GgufCheckpoint(Checkpoint):
    format = "gguf"

    @classmethod
    def open(cls, path: Path) -> GgufCheckpoint:
        """Open a GGUF file; any part of a split one opens the whole, by the first part's header."""
        first = part_paths(path)[0]
        header = read_header(first if first.exists() else path)
        count = header.metadata.get("split.count", 1)
        if count in (0, 1):
            return cls(path, header.metadata, header.tensors)
        tensors = merge_parts(header, parts_named(path, count))
        return cls(path, header.metadata, tensors)

    def _read_file(
        self, file: Path, infos: list[TensorInfo]
    ) -> Iterator[tuple[TensorInfo, torch.Tensor]]:
        data = map_file(file)
        for info in infos:
            end = info.offset + info.stored_bytes
            if end > len(data):
                raise CheckpointError(f"{file} was truncated while it was being read")
            raw = np.frombuffer(data, np.uint8, info.stored_bytes, info.offset)
            plain = PLAIN_NAMES.get(info.dtype)
            yield info, gguf_blocks.dequantize(raw, plain or info.dtype, info.shape)
            del raw
            if plain is None:
                release_pages(data, info.offset, end)


def release_pages(data: mmap.mmap, start: int, end: int) -> None:
    """Give back the pages of a tensor that was dequantized: nothing views them any more."""
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    length = end // mmap.PAGESIZE * mmap.PAGESIZE - first
    if length > 0 and hasattr(mmap, "MADV_DONTNEED"):
        data.madvise(mmap.MADV_DONTNEED, first, length)


def part_paths(path: Path) -> list[Path]:
    """All parts of the split file that `path` is one of by its name, else `path` alone."""
    match = SPLIT_NAME.fullmatch(path.name)
    count = int(match["count"]) if match else 0
    if match is None or count == 0:
        return [path]
    stem = match["stem"]
    return [path.with_name(f"{stem}-{n:05d}-of-{count:05d}.gguf") for n in range(1, count + 1)]


def parts_named(path: Path, count: Any) -> list[Path]:
    parts = part_paths(path)
    if len(parts) != count:
        raise UnsupportedError(
            f"{path} is one of {count!r} parts, which must be named NAME-00001-of-0000N.gguf"
        )
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise CheckpointError(f"{path} is missing its parts {shorten(missing)}")
    return parts


def merge_parts(first: GgufHeader, parts: list[Path]) -> dict[str, TensorInfo]:
    tensors = dict(first.tensors)
    for number, part in enumerate(parts[1:], start=1):
        header = read_header(part)
        if header.metadata.get("split.no") != number:
            raise CheckpointError(f"{part} is not part {number + 1} of its split file")
        repeated = tensors.keys() & header.tensors.keys()
        if repeated:
            raise CheckpointError(f"{part} repeats tensors of earlier parts: {shorten(repeated)}")
        tensors.update(header.tensors)
    return tensors
