"""A process for the engine that is started before this one has imported anything, so that both
import at the same time: with two cores a server is up a third sooner.

It waits until `Engine.supervised(early=…)` sends it what to load, and ends with the process that
started it. Nothing is imported here that takes time.

    begin()                             # before torch is imported
    Engine.supervised(path, early=taken())
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

BEGAN = time.monotonic()  # about when the process did
M_ARENA_MAX = -8  # of glibc's malloc.h
NUM_VALUES = 1 << 16  # fp64 numbers that both processes see: more than a heartbeat has


class Early(NamedTuple):
    process: Any  # multiprocessing's
    connection: Connection
    memory: Any  # shared by both


_begun: list[Early] = []


def begin() -> None:
    """Unless there is nothing left to be won."""
    if "torch" in sys.modules:
        return
    context = get_context("spawn")
    memory = context.RawArray("d", NUM_VALUES)
    ours, theirs = context.Pipe()
    process = context.Process(
        target=_run, args=(theirs, memory), name="ridgeline-engine", daemon=True
    )
    process.start()
    theirs.close()
    _begun.append(Early(process, ours, memory))


def taken() -> Early | None:
    """The process that was begun, for the one who uses it."""
    return _begun.pop() if _begun else None


def share_cores() -> None:
    """Threads that wait for work sleep. Those that spin take the cores from whoever they wait for,
    as soon as anything else runs: another process of ours, or of somebody else. (`demo` decoded 1.2
    and 3.3 tokens/s on two busy cores, and 13.5 and 13.9 so, 2026-11.) Before torch is imported.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def one_arena() -> None:
    """glibc keeps what was freed in an arena for each thread that ever needed much: after large
    requests through several threads that is hundreds of MiB (10,000 hostile ones: 727 instead of
    416). Before threads are started; elsewhere than glibc there is nothing to set.
    """
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)


def _run(connection: Connection, memory: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the other one to act upon
    from ridgeline.engine.process.worker import run_early

    run_early(connection, memory)
