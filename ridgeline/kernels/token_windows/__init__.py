"""Batches of training out of tokens in memory or mapped files, in C++ (cpu.cpp).

data/loading/packing.py has the definition in numpy, which is what runs where there is no compiler,
and what the tests compare with.

    packer = WindowPacker(WindowTables(...))
    row = packer.pack(np.array([17, 3]))        # None: it cannot be built here
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ridgeline.kernels import host_library
from ridgeline.kernels.token_windows.recycled import RecycledMemory

OP = "token_windows"
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class WindowTables:
    """A corpus and how it is cut into windows, field by field as cpu.cpp has it."""

    begins: Integers  # [S + 1]: of spans, counted in tokens of all spans in their order
    first: Integers  # [S]: the token of the corpus that each begins with
    limit: Integers  # [S]: tokens up to here go on with it
    num_spans: int
    ends: Integers | None  # of windows, counted as `begins`, 0 first; None: every `length` tokens
    length: int
    bases: Integers  # tokens of the corpus before each shard, then all
    addresses: Integers  # of the shards' tokens
    counted: Integers  # of the shards' marks; 0 where all are learned
    num_shards: int
    width: int  # bytes of a token, 2 or 4
    padding_id: int


@dataclass(frozen=True)
class PackedRow:
    ids: Tensor
    targets: Tensor
    positions: Tensor
    starts: Tensor
    largest: int  # of the ids read
    num_targets: int  # that count
    lengths: tuple[int, ...]  # of each document
    learned: tuple[int, ...]  # of each document, the tokens up to its last target that counts


class WindowPacker:
    """Safe to share between threads."""

    def __init__(self, tables: WindowTables) -> None:
        self._length = tables.length
        self._kept, numbers = [], []
        for each in fields(tables):
            value = getattr(tables, each.name)
            if isinstance(value, np.ndarray):
                value = np.ascontiguousarray(value, dtype=np.int64)
                self._kept.append(value)  # the source has its address
                value = value.ctypes.data
            numbers.append(0 if value is None else value)
        self._tables = np.array(numbers, dtype=np.int64)
        self._rows = RecycledMemory(rows=3, dtype=torch.int32)
        self._pieces = RecycledMemory(rows=2, dtype=torch.int64)

    def pack(self, windows: Integers) -> PackedRow | None:
        """One row with these windows; None where the source cannot be built."""
        if not host_library.load(OP):
            return None
        windows = np.ascontiguousarray(windows, dtype=np.int64)
        size = len(windows) * self._length
        rows = torch.from_numpy(self._rows.take(size))
        pieces = self._pieces.take(size + 1)
        learned, starts = pieces[0], pieces[1].view(np.int32)
        result = np.empty(3, dtype=np.int64)
        host_library.function(OP, "pack", "pplpppp")(
            self._tables.ctypes.data,
            windows.ctypes.data,
            len(windows),
            rows.data_ptr(),
            starts.ctypes.data,
            learned.ctypes.data,
            result.ctypes.data,
        )
        num_pieces, largest, num_targets = result.tolist()
        starts = starts[: num_pieces + 1].copy()
        ids, targets, positions = rows
        return PackedRow(
            ids,
            targets,
            positions,
            torch.from_numpy(starts),
            largest,
            num_targets,
            tuple(np.diff(starts).tolist()),
            tuple(learned[:num_pieces].tolist()),
        )
