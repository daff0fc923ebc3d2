"""Captures GPU work as a graph.

`torch.cuda.graph` first collects garbage and releases all cached memory, which takes most of a
second in a process with a model: too long for an engine that captures when a new shape occurs, and
for a tuner that captures hundreds. Here neither happens; the garbage collector is only paused,
because freeing memory during a capture would end it.

    graph, result = capture(lambda: model(x))
    graph.replay()                              # `result` now holds what it computes from x
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import local
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")
_of_thread = local()


def capture(
    work: Callable[[], Result], pool: tuple[int, int] | None = None, *, own_thread: bool = False
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """The graph of what `work` enqueues, and what it returns. Nothing runs now: anything compiled
    or allocated on first use must have been used before. Graphs with the same `pool`
    (`torch.cuda.graph_pool_handle()`) share memory. `own_thread` lets other threads make calls that
    a capture forbids.
    """
    graph = torch.cuda.CUDAGraph()
    current, side = torch.cuda.current_stream(), _side_stream()
    torch.cuda.synchronize()
    side.wait_stream(current)
    with no_garbage_collection(), torch.cuda.stream(side):
        options: dict[str, Any] = {} if pool is None else {"pool": pool}
        mode = "thread_local" if own_thread else "global"
        graph.capture_begin(**options, capture_error_mode=mode)
        try:
            result = work()
        except BaseException:
            with suppress(RuntimeError):  # the caller should see the first error
                graph.capture_end()
            raise
        graph.capture_end()
    current.wait_stream(side)
    return graph, result


def _side_stream() -> torch.cuda.Stream:
    """One for each device and thread: memory that a capture frees serves later ones on the same
    stream only.
    """
    streams: dict[int, torch.cuda.Stream] = _of_thread.__dict__.setdefault("streams", {})
    device = torch.cuda.current_device()
    if device not in streams:
        streams[device] = torch.cuda.Stream()
    return streams[device]


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
