"""Where the ranks come from: torchrun has started them, or this process starts the others itself.

A rank that is started here is a new Python that calls one function with one value. It ends when its
work is done, when it is told to, and when the process that started it has gone, however that came:
its standard input is a pipe from there, and closes with it. Nothing is left behind.

    process = torchrun_process()                            # None: nobody has started any ranks
    ranks = Ranks(2, "ridgeline.engine.local.ranks:main", value)
    ranks.wait_until_here()                             # HardwareError if one has gone before
"""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from ridgeline.errors import HardwareError

dist: Any = distributed  # whose stubs name only half of what it has

START_S = 300.0  # a rank that has not shown itself by then does not come
STOP_S = 5.0  # what ranks get to end by themselves


@dataclass(frozen=True)
class RankProcess:
    """A process among the ranks."""

    rank: int
    size: int
    local_rank: int  # among those on this machine
    local_size: int
    store: Any  # where all of them meet


def torchrun_process(environment: Mapping[str, str] = os.environ) -> RankProcess | None:
    """This process's rank if torchrun has started it as one of several."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if any(name not in environment for name in names) or int(environment["WORLD_SIZE"]) < 2:
        return None
    rank, size, local_rank, local_size = (int(environment[name]) for name in names[:4])
    store, _, _ = next(dist.rendezvous("env://", rank, size))
    return RankProcess(rank, size, local_rank, local_size, dist.PrefixStore("ridgeline", store))


class Ranks:
    """Ranks 1 to size - 1, each a process of its own; this one is rank 0."""

    def __init__(self, size: int, entry: str, value: Any) -> None:
        self.store = _local_store()
        self.processes: list[subprocess.Popen[bytes]] = []
        self._finalizer = weakref.finalize(self, _end, self.processes)  # at exit, at the latest
        for rank in range(1, size):
            self.processes.append(_start(entry, size))
            start = pickle.dumps((self.store.port, rank, size, value))
            with suppress(BrokenPipeError):  # it has gone already: `wait_until_here` says so
                _stdin(self.processes[-1]).write(start)
                _stdin(self.processes[-1]).flush()

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
                how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
                return f"rank {rank} {how}"
        return None

    def stop(self) -> None:
        """End what has not ended by itself."""
        self._finalizer()


def _local_store() -> Any:
    """A store that only this machine reaches; torch's own would listen on every interface."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _start(entry: str, size: int) -> subprocess.Popen[bytes]:
    module, _, function = entry.partition(":")
    environment = child_environment()
    environment["OMP_NUM_THREADS"] = str(max(1, torch.get_num_threads() // size))
    return subprocess.Popen(
        # -P: a file in the current folder must not stand in for a module.
        [sys.executable, "-P", "-c", f"from {module} import {function}; {function}()"],
        stdin=subprocess.PIPE,
        env=environment,
        start_new_session=True,  # a Ctrl-C is for rank 0, which then ends the others
    )


def child_environment() -> dict[str, str]:
    """This process's, in which a new Python finds this package, however this one came to it."""
    package = str(Path(__file__).parents[2])
    paths = filter(None, [package, os.environ.get("PYTHONPATH")])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def _stdin(process: subprocess.Popen[bytes]) -> Any:
    assert process.stdin is not None, "it was started with a pipe"
    return process.stdin


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """A rank that still runs sees its input close, and ends; one that does not is killed."""
    for process in processes:
        with suppress(BrokenPipeError):
            _stdin(process).close()
    end = time.monotonic() + STOP_S
    for process in processes:
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def started() -> tuple[RankProcess, Any]:
    """In a process that `Ranks` has started: its rank, and the value it was given."""
    port, rank, size, value = pickle.load(sys.stdin.buffer)  # from the process that started us
    threading.Thread(target=_end_with_parent, daemon=True).start()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    store.set(_here(rank), "")
    return RankProcess(rank, size, rank, size, store), value


def _end_with_parent() -> None:
    os.read(0, 1)  # nothing more is ever written: this is the end of the pipe
    os._exit(1)


def _here(rank: int) -> str:
    return f"rank {rank} is here"
