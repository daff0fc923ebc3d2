"""An engine's ranks: this process is rank 0, and starts the others itself.

A rank that is started here is a new Python that calls one function with one value. It ends when its
work is done, when it is told to, and when the process that started it has gone (starting/child.py).

    ranks = Ranks(2, "ridgeline.engine.local.ranks:main", value)
    ranks.wait_until_here()                             # HardwareError if one has gone before
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import time
import weakref
from contextlib import suppress
from typing import Any

import torch
from torch import distributed

from ridgeline.errors import HardwareError
from ridgeline.parallel.starting.child import (
    child_environment,
    end_children,
    end_with_parent,
    how_ended,
    local_store,
    start_child,
    stdin_of,
)
from ridgeline.parallel.starting.meeting import RankProcess

dist: Any = distributed  # whose stubs name only half of what it has

START_S = 300.0  # a rank that has not shown itself by then does not come


class Ranks:
    """Ranks 1 to size - 1, each a process of its own; this one is rank 0."""

    def __init__(self, size: int, entry: str, value: Any) -> None:
        self.store = local_store()
        self.processes: list[subprocess.Popen[bytes]] = []
        self._finalizer = weakref.finalize(
            self, end_children, self.processes
        )  # at exit, at the latest
        for rank in range(1, size):
            self.processes.append(_start(entry, size))
            start = pickle.dumps((self.store.port, rank, size, value))
            with suppress(BrokenPipeError):  # it has gone already: `wait_until_here` says so
                stdin_of(self.processes[-1]).write(start)
                stdin_of(self.processes[-1]).flush()

    def wait_until_here(self) -> None:
        """Until every rank has shown itself; one that ends before is an error."""
        names = [_here(rank) for rank in range(1, len(self.processes) + 1)]
        end = time.monotonic() + START_S
        while not self.store.check(names):
            reason = self.gone()
            if reason is None and time.monotonic() > end:
                reason = f"not all ranks have started within {START_S:.0f} s"
            if reason is not None:
                self.stop()
                raise HardwareError(f"tensor parallel could not start: {reason}")
            time.sleep(0.02)

    def gone(self, patience_s: float = 0.0) -> str | None:
        """Which rank has ended, and how. One whose connection is lost may take a moment for it."""
        end = time.monotonic() + patience_s
        while (reason := self._gone_now()) is None and time.monotonic() < end:
            time.sleep(0.02)
        return reason

    def _gone_now(self) -> str | None:
        for rank, process in enumerate(self.processes, 1):
            code = process.poll()
            if code is not None:
                return f"rank {rank} {how_ended(code)}"
        return None

    def stop(self) -> None:
        """End what has not ended by itself."""
        self._finalizer()


def _start(entry: str, size: int) -> subprocess.Popen[bytes]:
    module, _, function = entry.partition(":")
    environment = child_environment()
    environment["OMP_NUM_THREADS"] = str(max(1, torch.get_num_threads() // size))
    return start_child(["-c", f"from {module} import {function}; {function}()"], environment)


def started() -> tuple[RankProcess, Any]:
    """In a process that `Ranks` has started: its rank, and the value it was given."""
    port, rank, size, value = pickle.load(sys.stdin.buffer)  # from the process that started us
    end_with_parent()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    store.set(_here(rank), "")
    return RankProcess(rank, size, rank, size, store), value


def _here(rank: int) -> str:
    return f"rank {rank} is here"
