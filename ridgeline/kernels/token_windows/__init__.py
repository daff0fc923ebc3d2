"""Rows of a training batch out of tokens in memory or mapped files, in C++ (cpu.cpp).

data/loading/packing.py has the definition in numpy, which is what runs where there is no compiler,
and what the tests compare with.

    ids, targets, positions, largest = packed(runs, padding_id=0)       # None: not built here
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ridgeline.kernels import host_library

OP = "token_windows"


@dataclass(frozen=True)
class TokenRuns:
    """Where each piece of a row lies in memory."""

    addresses: NDArray[np.int64]  # of its first token
    width: int  # bytes of a token, 2 or 4
    counted: NDArray[np.int64] | None  # of its first mark whether it is learned; 0: all are
    lengths: NDArray[np.int64]
    has_next: NDArray[np.bool_]
    is_padding: NDArray[np.bool_]


@dataclass(frozen=True)
class PackedRow:
    ids: Tensor
    targets: Tensor
    positions: Tensor
    largest: int  # of the ids read


def packed(runs: TokenRuns, padding_id: int) -> PackedRow | None:
    """One row with these pieces; None where the source cannot be built."""
    if not host_library.load(OP):
        return None
    lengths = np.ascontiguousarray(runs.lengths, dtype=np.int64)
    # one allocation: three of them are given back to the system and faulted in for every batch
    ids, targets, positions = torch.empty(3, int(lengths.sum()), dtype=torch.int64)
    largest = np.zeros(1, dtype=np.int64)
    host_library.function(OP, "pack", "ppppplllpppp")(
        runs.addresses.ctypes.data,
        None if runs.counted is None else runs.counted.ctypes.data,
        lengths.ctypes.data,
        runs.has_next.ctypes.data,
        runs.is_padding.ctypes.data,
        len(lengths),
        runs.width,
        padding_id,
        ids.data_ptr(),
        targets.data_ptr(),
        positions.data_ptr(),
        largest.ctypes.data,
    )
    return PackedRow(ids, targets, positions, int(largest[0]))
