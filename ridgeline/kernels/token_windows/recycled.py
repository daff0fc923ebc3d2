"""Memory of batches that nobody holds any more, for the next ones.

What is asked of the system for each batch comes as pages that do not exist yet: 230 faults a batch
of 131,072 tokens took two thirds of all its time (two x86 cores, 2026-11-19).

    memory = RecycledMemory(rows=3, dtype=torch.int32)
    lent = memory.take(131_072)         # an array; a tensor by torch.from_numpy
    del lent                            # free again, once no tensor of it is left either
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from numpy.typing import NDArray

KEPT = 8  # arrays that are free: a loader has four batches ahead, and a step has one or two


class RecycledMemory:
    """Safe to share between threads: taking from a list and adding to it are one step each."""

    def __init__(self, rows: int, dtype: torch.dtype) -> None:
        self._rows, self._dtype = rows, dtype
        self._free: list[NDArray[Any]] = []

    def take(self, columns: int) -> NDArray[Any]:
        """[rows, columns] of anything."""
        array = self._free_one(columns)
        if array is None:  # torch's memory begins where vectors do
            array = torch.empty(self._rows, columns, dtype=self._dtype).numpy()
        lent = array[:]  # each tensor of it holds this view, which dies with the last
        weakref.finalize(lent, self._give_back, array).atexit = False
        return lent

    def _free_one(self, columns: int) -> NDArray[Any] | None:
        """Those of another size are let go."""
        while True:
            try:
                array = self._free.pop()
            except IndexError:
                return None
            if array.shape[1] == columns:
                return array

    def _give_back(self, array: NDArray[Any]) -> None:
        if len(self._free) < KEPT:
            self._free.append(array)
