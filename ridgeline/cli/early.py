"""Where the engine's processes come from: all are forked from one that has imported what an engine
needs, and does nothing else. It is begun before this one has imported anything, so that both import
at the same time: with two cores a server is up a third sooner. After a death another engine is
there at once, where torch alone takes seconds to import.

Each waits until `Engine.supervised(early=…)` sends it what to load, and ends with the process that
started it. Nothing is imported here that takes time.

    begin()                             # before torch is imported
    Engine.supervised(path, early=starter())
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_all_start_methods, get_context
from multiprocessing.connection import Connection
from multiprocessing.forkserver import ensure_running
from threading import Event
from typing import Any, NamedTuple

BEGAN = time.monotonic()  # about when the process did
TEMPLATE = "ridgeline.engine.process.template"  # what engines are forked from imports it
M_ARENA_MAX = -8  # of glibc's malloc.h
NUM_VALUES = 1 << 16  # fp64 numbers that both processes see: more than a heartbeat has


class Early(NamedTuple):
    process: Any  # multiprocessing's
    connection: Connection
    memory: Any  # shared by both


_begun = Event()


def begin() -> None:
    """Unless there is nothing left to be won."""
    if "torch" in sys.modules or "forkserver" not in get_all_start_methods():
        return
    get_context("forkserver").set_forkserver_preload([TEMPLATE])
    ensure_running()
    _begun.set()


def starter() -> Callable[[], Early] | None:
    """Gives a new process each time; None where nothing was begun."""
    return _start if _begun.is_set() else None


def _start() -> Early:
    """It waits until all is imported there."""
    context = get_context("forkserver")
    memory = context.RawArray("d", NUM_VALUES)
    ours, theirs = context.Pipe()
    process = context.Process(
        target=run_engine, args=(theirs, memory), name="ridgeline-engine", daemon=True
    )
    process.start()
    theirs.close()
    return Early(process, ours, memory)


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


def run_engine(connection: Connection, memory: Any) -> None:
    """The process, once it is forked."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the other one to act upon
    from ridgeline.engine.process.worker import run_early

    run_early(connection, memory)
