"""How long a step waits for each kind of collective, beside how often it runs and with how many
bytes: what communication costs beyond what is hidden behind compute.

    with CollectiveClock(mesh) as clock:
        trainer.step(batches, lr)
    for each in clock.timed(): print(each.kind, each.over, each.num_bytes, each.exposed_s)

On a CPU that is the time in which a rank stands still until the collective is done: waiting for
slower ranks counts. On a GPU events around it say how long the stream that computes stood behind
it. What runs on a stream of its own (`shard`, `replicate`) has no such time: it is None.

Every op of torch goes through Python meanwhile, so that a step is looked at now and then. A
pipeline says by itself when it waits for neighbours (`waited_for`), and when not (`at_work`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, distributed

from ridgeline.parallel.mesh import Mesh
from ridgeline.parallel.recording import KINDS, Collective, CollectiveRecorder, Key

dist: Any = distributed
BETWEEN_STAGES = ("send", "receive")  # are waited for by the pipeline, not where they begin
AT_WORK = "passes of a stage"
Range = Callable[[str], AbstractContextManager[Any]]


@dataclass(frozen=True)
class TimedCollective(Collective):
    """With what a step waited for it."""

    exposed_s: float | None  # None: it runs beside what is computed, and nobody can say

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"sent_bytes": self.sent_bytes}


class Stopwatch:
    """Adds times up as the device has them: on a GPU those of the stream that is current, which are
    known when it is through.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_host = device.type == "cpu"
        self._total_s, self._began = 0.0, 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def start(self) -> None:
        if self._is_host:
            self._began = time.perf_counter()
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self._events.append((begin, end))

    def stop(self) -> None:
        if self._is_host:
            self._total_s += time.perf_counter() - self._began
        else:
            self._events[-1][1].record()

    def seconds(self) -> float:
        """Waits for a GPU."""
        if self._is_host:
            return self._total_s
        for _, end in self._events:
            end.synchronize()
        return sum(1e-3 * begin.elapsed_time(end) for begin, end in self._events)


class CollectiveClock(CollectiveRecorder):
    """`ranged` makes a range around what is waited for, in whatever traces the step."""

    def __init__(self, mesh: Mesh, ranged: Range = lambda name: nullcontext()) -> None:
        super().__init__(mesh)
        self._device, self._ranged = mesh.device, ranged
        self._watches: dict[Key, Stopwatch] = {}
        self._hidden: set[Key] = set()  # that ran on streams of their own
        self._running: Stopwatch | None = None
        self._stream = torch.cuda.current_stream(mesh.device) if self._is_gpu else None

    @property
    def _is_gpu(self) -> bool:
        return self._device.type != "cpu"

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = func._schema.name.removeprefix("c10d::") if func.namespace == "c10d" else ""
        kind = KINDS.get(name)
        if kind is None or kind in BETWEEN_STAGES:
            return super().__torch_dispatch__(func, types, args, kwargs)
        key = self._record(name, args)
        assert key is not None, name
        with self._waiting(key, is_here(args)):
            result = func(*args, **(kwargs or {}))
            if not self._is_gpu:
                wait_for(result)
        return result

    def waited_for(self, key: Key) -> AbstractContextManager[Any]:
        """For a `with`: while this rank can do nothing but wait for that."""
        return self._waiting(key, is_on_host=not self._is_gpu)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Inside of `waited_for`: it is not waited for now."""
        with self._ranged(AT_WORK), self._instead(None):
            yield

    @contextmanager
    def _waiting(self, key: Key, is_on_host: bool) -> Iterator[None]:
        beside = self._is_gpu and (
            is_on_host or torch.cuda.current_stream(self._device) != self._stream
        )
        if beside:
            self._hidden.add(key)
            yield
            return
        watch = self._watches.setdefault(key, Stopwatch(self._device))
        with self._ranged(f"{key[0]} over {key[1]}"), self._instead(watch):
            yield

    @contextmanager
    def _instead(self, watch: Stopwatch | None) -> Iterator[None]:
        """No time counts twice: the watch that runs stands still meanwhile."""
        before, self._running = self._running, watch
        if before is not None:
            before.stop()
        if watch is not None:
            watch.start()
        try:
            yield
        finally:
            if watch is not None:
                watch.stop()
            if before is not None:
                before.start()
            self._running = before

    def timed(self, num_steps: int = 1) -> list[TimedCollective]:
        """Of one of so many steps. What was waited for longest comes first."""
        result = []
        for each in self.totals():
            watch = self._watches.get(each.key)
            is_known = watch is not None and each.key not in self._hidden
            seconds = watch.seconds() / num_steps if watch is not None and is_known else None
            count, num_bytes = each.count // num_steps, each.num_bytes // num_steps
            result.append(
                TimedCollective(each.kind, each.over, each.num_ranks, count, num_bytes, seconds)
            )
        return sorted(result, key=lambda each: -(each.exposed_s or 0.0))


def is_here(args: Sequence[Any]) -> bool:
    """Whether it goes from host to host."""
    for each in args:
        if isinstance(each, Tensor):
            return each.device.type == "cpu"
        if isinstance(each, list | tuple) and each:
            return is_here(each)
    return False


def wait_for(result: Any) -> None:
    """Until the collective is done. gloo's are, for those who wait, always right behind it."""
    for each in result if isinstance(result, tuple | list) else (result,):
        if isinstance(each, torch.ScriptObject):
            dist.Work.unbox(each).wait()


def over_ranks(ranks: Sequence[Sequence[TimedCollective]]) -> list[dict[str, Any]]:
    """Means over the ranks that have a collective, and the least and the most that one waited."""
    own: dict[Key, list[TimedCollective]] = {}
    for rank in ranks:
        for each in rank:
            own.setdefault(each.key, []).append(each)
    rows = [_row(each) for each in own.values()]
    return sorted(rows, key=lambda row: -(row["exposed_s"] or 0.0))


def _row(ranks: Sequence[TimedCollective]) -> dict[str, Any]:
    kind, over, num_ranks = ranks[0].key
    count = round(sum(each.count for each in ranks) / len(ranks))
    size = round(sum(each.num_bytes for each in ranks) / len(ranks))
    seconds = [each.exposed_s for each in ranks if each.exposed_s is not None]
    mean = sum(seconds) / len(seconds) if seconds else None
    return TimedCollective(kind, over, num_ranks, count, size, mean).as_json() | {
        "least_s": min(seconds, default=None),
        "most_s": max(seconds, default=None),
    }
