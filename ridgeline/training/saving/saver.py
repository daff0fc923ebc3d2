"""Checkpoints written while the run goes on.

What is saved are the values of the moment of the save: they are copied into memory of the host that
is kept from save to save, and a thread writes the copies. On a GPU the copy runs on a stream of its
own beside the next forward and backward pass, and the next update waits for it on the device: the
host never does. Its memory is locked beside the first steps. Where the host has no room for copies,
the run waits while they are written.

    with CheckpointSaver(run, trainer, exporter, keep=2) as saver:
        saver.make_ready(state)     # of a GPU's run: memory for copies, beside the first steps
        saver.begin(state)          # returns when the copies are made, or under way
        saver.finished()            # what was written since, or None; OutputError if it failed
        saver.wait()                # the same, when it is written
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from ridgeline.hardware.detection import available_memory
from ridgeline.parallel.layout import Layout
from ridgeline.training.saving.adapter_files import AdapterExporter
from ridgeline.training.saving.checkpoint import (
    CheckpointContent,
    Exporter,
    SavedState,
    checkpoint_content,
    keep_last,
    write_checkpoint,
)
from ridgeline.training.stepping.step import Trainer

ALIGNMENT = 64  # bytes: copies into aligned memory are faster
ROOM_SHARE = 0.8  # of the host's free memory that copies may take


@dataclass(frozen=True)
class WrittenCheckpoint:
    path: Path
    steps: int
    num_bytes: int
    write_s: float  # of the thread
    stall_s: float  # that steps waited


class HostCopies:
    """Memory of the host for copies of tensors, as large as the first that are copied; page-locked
    where they come from a GPU, which then writes into it by itself.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        tensors = list(tensors)
        self._offsets = [0]
        for tensor in tensors:
            self._offsets.append(self._offsets[-1] + -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT)
        self._memory = torch.empty(self._offsets[-1], dtype=torch.uint8)
        self._stream: torch.cuda.Stream | None = None
        if (device := gpu_of(tensors)) is not None:
            with torch.cuda.device(device):
                self._stream = torch.cuda.Stream()
                self._memory.zero_()  # the system hands out pages here, which holds up no GPU
                self._is_locked = lock_pages(self._memory)

    @property
    def num_bytes(self) -> int:
        return self._offsets[-1]

    def copy(self, tensors: Iterable[Tensor]) -> tuple[list[Tensor], DeviceCopy | None]:
        """The copies, and where a GPU makes them what says when they are there."""
        if self._stream is None:
            return self._copy(tensors), None
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            copies = self._copy(tensors)
            done = torch.cuda.Event(enable_timing=True)
            done.record()
        return copies, DeviceCopy(done)

    def _copy(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        copies = []
        for offset, tensor in zip(self._offsets[:-1], tensors, strict=True):
            own = self._memory[offset : offset + tensor.nbytes]
            copy = own.view(tensor.dtype).view(tensor.shape)
            copy.copy_(tensor, non_blocking=True)
            if self._stream is not None and tensor.is_cuda:
                tensor.record_stream(self._stream)
            copies.append(copy)
        return copies

    def close(self) -> None:
        if self._stream is not None and self._is_locked:
            self._stream.synchronize()
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())
            self._is_locked = False


def gpu_of(tensors: Iterable[Tensor]) -> torch.device | None:
    return next((tensor.device for tensor in tensors if tensor.is_cuda), None)


def lock_pages(memory: Tensor) -> bool:
    """Exactly as much as there is: torch's own page-locked memory is rounded up to a power of two.
    Where the system does not allow it copies are slower, and no less right.
    """
    result = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    return int(result) == 0


class DeviceCopy:
    """A copy to the host that runs on a stream of its own."""

    def __init__(self, done: torch.cuda.Event) -> None:
        self._done = done
        self._reached: torch.cuda.Event | None = None

    def hold_stream(self) -> None:
        """What comes next on the current stream waits for it; the host does not."""
        self._reached = torch.cuda.Event(enable_timing=True)
        self._reached.record()
        torch.cuda.current_stream().wait_event(self._done)

    def wait(self) -> None:
        self._done.synchronize()

    def stall_s(self) -> float:
        """That the stream waited, or did so far."""
        if self._reached is None:
            return 0.0
        self._reached.synchronize()
        return max(0.0, self._reached.elapsed_time(self._done) / 1000)


class CheckpointSaver:
    """One checkpoint is written at a time; a save that comes before the last is written waits."""

    failed_wait_s: float | None = None  # of a run that fails, for what is being written

    def __init__(
        self, run: Path, trainer: Trainer, exporter: Exporter | AdapterExporter, keep: int
    ) -> None:
        self.stall_s = 0.0  # that steps waited for all saves
        self.waits = False  # there is no room for copies: steps wait for the disk
        self._run = run
        self._trainer = trainer
        self._exporter = exporter
        self._keep = keep
        self._copies: HostCopies | None = None
        self._making: Future[HostCopies] | None = None  # beside the first steps
        self._writing: Future[WrittenCheckpoint] | None = None
        self._device_copy: DeviceCopy | None = None
        self._stall_s = 0.0  # of the one being written

    def make_ready(self, state: SavedState) -> None:
        """Of a GPU's run: begin to make memory for copies, which takes seconds where it is large.
        A CPU's steps would only be slower meanwhile.
        """
        tensors = list(self._content(state).tensors())
        if gpu_of(tensors) is None:
            return
        self.waits = not self._has_room(sum(tensor.nbytes for tensor in tensors))
        if not self.waits:
            pool = ThreadPoolExecutor(1, "checkpoint-memory")
            self._making = pool.submit(HostCopies, tensors)
            pool.shutdown(wait=False)

    def begin(self, state: SavedState) -> None:
        """Save what the run is now."""
        assert self._writing is None, "wait comes first"
        start = time.perf_counter()
        content, copy = self._copied(self._content(state))
        future: Future[WrittenCheckpoint] = Future()
        thread = Thread(
            target=self._write, args=(content, copy, future), name="checkpoint", daemon=True
        )
        self._writing, self._device_copy = future, copy
        if copy is not None:
            self._trainer.before_update = lambda gradients, factor: copy.hold_stream()
        thread.start()
        if self.waits:
            thread.join()
        self._stall_s = time.perf_counter() - start

    def _content(self, state: SavedState) -> CheckpointContent:
        return checkpoint_content(self._trainer, replace(state, layout=Layout()), self._exporter)

    def _store(self, content: CheckpointContent) -> tuple[Path, int]:
        """Where, and how many bytes; in the thread."""
        write_model = partial(self._exporter.write, model=self._trainer.model)
        path = write_checkpoint(self._run, content, write_model)
        keep_last(self._run, self._keep)
        return path, sum(tensor.nbytes for tensor in content.tensors())

    def _has_room(self, num_bytes: int) -> bool:
        return num_bytes <= ROOM_SHARE * available_memory("cpu")

    def _is_written(self, writing: Future[WrittenCheckpoint]) -> bool:
        return writing.done()

    def _copied(self, content: CheckpointContent) -> tuple[CheckpointContent, DeviceCopy | None]:
        tensors = list(content.tensors())
        self._take_made()
        if self._copies is None and not self.waits:
            self.waits = not self._has_room(sum(tensor.nbytes for tensor in tensors))
            if not self.waits:
                self._copies = HostCopies(tensors)
        if self._copies is None:
            return content, None
        copies, device_copy = self._copies.copy(tensors)
        values = iter(copies)
        return replace(
            content,
            weights=[(name, next(values)) for name, _ in content.weights],
            optimizer=[(name, next(values)) for name, _ in content.optimizer],
        ), device_copy

    def _take_made(self) -> None:
        making, self._making = self._making, None
        if making is not None:
            self._copies = making.result()

    def _write(
        self, content: CheckpointContent, copy: DeviceCopy | None,
        future: Future[WrittenCheckpoint],
    ) -> None:  # fmt: skip
        try:
            if copy is not None:
                copy.wait()
            start = time.perf_counter()
            path, num_bytes = self._store(content)
            seconds = time.perf_counter() - start
            steps = content.state.counters.steps
            future.set_result(WrittenCheckpoint(path, steps, num_bytes, seconds, 0.0))
        except BaseException as error:  # whoever waits for it gets it
            future.set_exception(error)

    def finished(self) -> WrittenCheckpoint | None:
        """What was written since the last call; OutputError where it failed."""
        if self._writing is None or not self._is_written(self._writing):
            return None
        return self.wait()

    def wait(self, *, at_end: bool = False) -> WrittenCheckpoint | None:
        """For what is being written, if anything is. At a run's end no step waits for it."""
        if self._writing is None:
            return None
        start = time.perf_counter()
        try:
            written = self._writing.result()
        finally:
            self._writing = None
            if not at_end:
                self._stall_s += time.perf_counter() - start
            if self._device_copy is not None:
                self._stall_s += self._device_copy.stall_s()
            self.stall_s += self._stall_s
        return replace(written, stall_s=self._stall_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """A run that fails still finishes what it was writing; a second Ctrl-C does not wait."""
        if self._writing is not None and not isinstance(error, KeyboardInterrupt):
            with suppress(TimeoutError):
                self._writing.exception(None if error is None else self.failed_wait_s)
        with suppress(Exception):  # it was not needed
            self._take_made()
        if self._copies is not None and (self._writing is None or self._writing.done()):
            self._copies.close()
