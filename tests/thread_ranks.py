"""Ranks of tensor parallel as threads of one process: quick to start, and easy to disturb.

parts = run_ranks(2, lambda group: work(group))     # what each rank returned
engine, runners = threaded_engine(model, size=2)    # rank 0's engine, and each rank's runner
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import Empty, Queue
from typing import Any
from unittest import mock

import torch
from engines import engine_for
from torch import Tensor

from ridgeline.engine import Engine, Sampling
from ridgeline.engine.execution import tensor_runner
from ridgeline.engine.execution.tensor_runner import TensorRunner
from ridgeline.engine.loading.loading import load_from
from ridgeline.engine.local import ranks
from ridgeline.errors import HardwareError
from ridgeline.models import Transformer
from ridgeline.parallel.inference.group import Group, Reduction
from ridgeline.recipe import Parallel, Recipe

PATIENCE_S = 20.0  # a rank that waits longer waits for nobody


class Meeting:
    """Where the ranks of a link meet."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=PATIENCE_S)
        self.brought: list[Any] = [None] * size
        self.mail: dict[tuple[int, int], Queue[Tensor]] = defaultdict(Queue)  # from one to another


class ThreadLink:
    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank, self.size = meeting, rank, len(meeting.brought)
        self.log: list[tuple[str, tuple[int, ...]]] = []  # the calls that were made

    def _meet(self, call: str, tensor: Tensor) -> list[Tensor]:
        """Copies of what all ranks have brought, who must have come for the same."""
        self.log.append((call, tuple(tensor.shape)))
        self.meeting.brought[self.rank] = (call, tensor)
        self._wait()
        found = list(self.meeting.brought)
        assert {each for each, _ in found} == {call}, found
        assert call == "broadcast" or {each.shape for _, each in found} == {tensor.shape}, found
        copies = [each.clone() for _, each in found]
        with suppress(HardwareError):  # whoever left then had all it came for, and so has this one
            self._wait()
        return copies

    def _wait(self) -> None:
        try:
            self.meeting.barrier.wait()
        except threading.BrokenBarrierError as error:
            raise HardwareError("tensor parallel has lost a rank: a thread") from error

    def all_reduce(self, tensor: Tensor, reduction: Reduction = "sum") -> None:
        found = torch.stack(self._meet(f"all_reduce {reduction}", tensor))
        tensor.copy_({"sum": found.sum, "max": found.amax, "min": found.amin}[reduction](0))

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return self._meet("all_gather", tensor)

    def broadcast(self, tensor: Tensor) -> None:
        tensor.copy_(self._meet("broadcast", tensor)[0])

    def send(self, tensor: Tensor, rank: int) -> None:
        self.log.append(("send", tuple(tensor.shape)))
        self.meeting.mail[self.rank, rank].put(tensor.clone())

    def receive(self, tensor: Tensor, rank: int) -> None:
        self.log.append(("receive", tuple(tensor.shape)))
        for _ in range(int(PATIENCE_S / 0.05)):
            with suppress(Empty):
                tensor.copy_(self.meeting.mail[rank, self.rank].get(timeout=0.05))
                return
            self.check()
        raise HardwareError("tensor parallel has lost a rank: a thread")

    def check(self) -> None:
        if self.meeting.barrier.broken:
            raise HardwareError("tensor parallel has lost a rank: a thread")

    def close(self) -> None:
        pass


def thread_groups(size: int, num_stages: int = 1) -> list[Group]:
    width, control = size // num_stages, Meeting(size)
    data = [Meeting(width) for _ in range(num_stages)]
    rings = [Meeting(num_stages) for _ in range(width)]
    groups = []
    for rank in range(size):
        stage, place = divmod(rank, width)
        ring = ThreadLink(rings[place], stage) if num_stages > 1 else None
        links = ThreadLink(data[stage], place), ThreadLink(control, rank)
        groups.append(Group(*links, ring))
    return groups


def _guarded(work: Callable[[Group], Any], group: Group) -> Any:
    """A rank that raises leaves the others, who hear of it."""
    try:
        return work(group)
    except BaseException:
        for link in filter(None, (group.data, group.control, group.ring)):
            link.meeting.barrier.abort()  # type: ignore[attr-defined]
        raise


def run_ranks(size: int, work: Callable[[Group], Any]) -> list[Any]:
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(_guarded, work, group) for group in thread_groups(size)]
        return [future.result() for future in futures]


class ThreadedEngine:
    """An engine whose other ranks are threads; `close` ends them."""

    def __init__(self, model: Transformer | Path, size: int = 2, **changes: Any) -> None:
        self.runners: dict[int, TensorRunner] = {}
        self.futures: list[Future[None]] = []
        parallel = changes.setdefault("parallel", Parallel(tensor=size))
        size = parallel.num_ranks
        self.groups = thread_groups(size, parallel.pipeline)
        self._pool = ThreadPoolExecutor(size)
        original = TensorRunner.__init__

        def noted(runner: TensorRunner, *arguments: Any, **named: Any) -> None:
            original(runner, *arguments, **named)
            self.runners[runner.group.control.rank] = runner

        with (
            mock.patch("ridgeline.engine.local.local_backend.load_on_ranks", self._load),
            mock.patch.object(tensor_runner.TensorRunner, "__init__", noted),
        ):
            self.engine: Engine = engine_for(model, **changes)  # type: ignore[arg-type]
            (output,) = self.engine.generate([[5]], Sampling(max_tokens=1))  # all ranks run
            assert output.status == "finished", output.reason

    def _load(self, model: Transformer | Path, recipe: Recipe, *_: Any) -> Any:
        size = len(self.groups)
        task = ranks.task_for(model, recipe, "cpu")
        whole = model if isinstance(model, Transformer) else None

        def serve(group: Group) -> None:
            part = load_from(task.source_for(group, size, whole), task.recipe)
            tensor_runner.serve(part.model, part.recipe, group)

        self.futures = [self._pool.submit(_guarded, serve, group) for group in self.groups[1:]]
        loaded = load_from(task.source_for(self.groups[0], size, whole), task.recipe)
        return loaded, ranks.Members(self.groups[0], lambda: None)

    def close(self) -> None:
        """Whatever became of the ranks, their threads end."""
        self.engine.close()
        self._pool.shutdown(wait=True)

    def __enter__(self) -> ThreadedEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
