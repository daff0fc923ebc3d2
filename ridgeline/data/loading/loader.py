"""Loader: batches that are ready, on the device, before the step wants them.

Threads pack the next batches while a step runs (numpy and torch release the interpreter for the
work on arrays); for a GPU they lie in pinned memory and are copied by a stream of their own. Which
samples are in a batch follows from the state alone (order.py), never from threads or timing. How
often a step had to wait is counted.

    with Loader(windows, DataState(seed=7), sequences=8, device=device) as loader:
        for batch in loader:
            ...
            loader.state        # after the batch just given; another Loader goes on from it
    loader.waits                # 0: no step waited for data
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

import numpy as np
import torch

from ridgeline.data.loading.order import DataState
from ridgeline.data.loading.packing import PackedBatch
from ridgeline.data.loading.sources import Origin
from ridgeline.data.loading.windows import Integers, TokenWindows
from ridgeline.errors import UsageError

BATCHES_AHEAD = 4  # packed before they are wanted


@dataclass(frozen=True)
class BatchPart:
    """The sequences of each step's batch that one of several ranks has."""

    batch: int  # sequences of all ranks
    own: range


@dataclass(frozen=True)
class _ReadyBatch:
    batch: PackedBatch
    copied: torch.cuda.Event | None  # when the device has it; None: it is there


class Loader:
    """Batches without end, `sequences` windows each."""

    def __init__(
        self,
        windows: TokenWindows,
        state: DataState,
        *,
        sequences: int,
        device: torch.device | str = "cpu",
        workers: int = 1,
        ahead: int = BATCHES_AHEAD,
        part: BatchPart | None = None,
        cut: Callable[[PackedBatch], PackedBatch] | None = None,
    ) -> None:
        """With `part` only that of each batch, with `cut` of each sequence what it returns; `state`
        is that of the whole data nevertheless, after a batch's last pass.
        """
        for name, value in (("sequences", sequences), ("workers", workers), ("ahead", ahead)):
            if value < 1:
                raise UsageError(f"{name} is {value}; give at least 1")
        self.windows = windows
        self.state = state
        self.sequences = sequences
        self.num_batches = 0  # given out
        self.waits = 0  # batches that were not ready; the first is not counted, nobody can be early
        self.waited_s = 0.0  # for those
        self.late_copies = 0  # ready on the host, and the copy to the device was still under way
        self._order = windows.order(state.seed)
        self._device = torch.device(device)
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._workers = ThreadPoolExecutor(workers, thread_name_prefix="data")
        self._queue: deque[Future[_ReadyBatch]] = deque()
        self._cut = cut
        part = part or BatchPart(sequences, range(sequences))
        assert len(part.own) % sequences == 0, (part, sequences)
        self._part = part
        self._passes = len(part.own) // sequences  # of a batch
        self._begun = state.consumed
        self._submitted = 0
        for _ in range(ahead):
            self._submit()

    @property
    def epoch(self) -> float:
        """How often the data was gone through."""
        return self.state.consumed / self.windows.num_windows

    def first_of(self, number: int) -> int:
        """The first sample of a pass, numbered from where this loader began."""
        batch, number = divmod(number, self._passes)
        return self._begun + batch * self._part.batch + self.first_of_pass(number)

    def first_of_pass(self, number: int) -> int:
        """Of the passes of one batch, counted from the batch's first sample."""
        return self._part.own.start + number * self.sequences

    def samples(self, first: int) -> Integers:
        """The windows of the batch that begins with this sample of the run."""
        return self._order.samples(first, self.sequences)

    def documents(self, first: int) -> list[Origin]:
        """Where the documents of the batch that begins with this sample come from."""
        return [
            origin
            for window in self.samples(first).tolist()
            for origin in self.windows.documents(window)
        ]

    def __iter__(self) -> Iterator[PackedBatch]:
        return self

    def __next__(self) -> PackedBatch:
        ready = self._wait(self._queue.popleft())
        self._submit()
        self.num_batches += 1
        if self.num_batches % self._passes == 0:
            consumed = self.state.consumed + self._part.batch
            self.state = replace(self.state, consumed=consumed)
        if ready.copied is not None:
            self.late_copies += not ready.copied.query()
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(ready.copied)
            ready.batch.record_stream(stream)
        return ready.batch

    def _wait(self, batch: Future[_ReadyBatch]) -> _ReadyBatch:
        if batch.done() or self.num_batches == 0:
            return batch.result()
        start = time.perf_counter()
        try:
            return batch.result()
        finally:
            self.waits += 1
            self.waited_s += time.perf_counter() - start

    def _submit(self) -> None:
        first = self.first_of(self._submitted)
        self._queue.append(self._workers.submit(self._make, first))
        self._submitted += 1

    def _make(self, first: int) -> _ReadyBatch:
        batch = self.windows.batch(self.samples(first))
        if self._cut is not None:
            batch = self._cut(batch)
        if self._stream is None:
            return _ReadyBatch(batch.to(self._device), None)
        with torch.cuda.stream(self._stream):
            batch = batch.pinned().to(self._device)
            copied = torch.cuda.Event()
            copied.record(self._stream)
        return _ReadyBatch(batch, copied)

    def close(self) -> None:
        self._workers.shutdown(cancel_futures=True)
        self._queue.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def held_out_batches(
    windows: TokenWindows, sequences: int, device: torch.device | str = "cpu"
) -> Iterator[PackedBatch]:
    """Every window once, in the order of the corpus; the last batch may be smaller."""
    target = torch.device(device)
    for first in range(0, windows.num_windows, sequences):
        last = min(first + sequences, windows.num_windows)
        yield windows.batch(np.arange(first, last)).to(target)
