"""The memory of a server's processes while clients run: pages that are shared count in parts, so
that the sum is what the machine lacks. Processes that compile one grammar come and go, each with a
limit of its own: they are not part of it, and none may be left in the end (`num_compiling`).

    with MemoryWatch(server) as memory: ...
    memory.growth("server", begin, end)
"""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path
from statistics import median
from typing import Literal, NamedTuple, Self

from soak.server_process import ServerProcess, children_of

from ridgeline.engine.grammars.compile_process import NUM_IDLE

Who = Literal["server", "engine"]


class MemorySample(NamedTuple):
    time: float  # by the monotonic clock
    server: int  # bytes
    engine: int  # its process, and those it started that stay


class MemoryWatch:
    def __init__(self, server: ServerProcess, every_s: float = 2.0) -> None:
        self.samples: list[MemorySample] = []
        self._server, self._every_s, self._end = server, every_s, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._end.wait(self._every_s):
            pid = self._server.pid
            engine = sum(pss_bytes(child) for child in children_of(pid, deep=True)
                         if not is_compiling(child))  # fmt: skip
            self.samples.append(MemorySample(time.monotonic(), pss_bytes(pid), engine))

    def growth(self, who: Who, begin: float, end: float) -> float | None:
        """From the first fifth of this time to its last; None where it was not looked at."""
        span = (end - begin) / 5
        early = [getattr(s, who) for s in self.samples if begin <= s.time < begin + span]
        late = [getattr(s, who) for s in self.samples if end - span <= s.time <= end]
        if not early or not late or not median(early):
            return None
        return float(median(late) / median(early)) - 1


def num_compiling(server: ServerProcess) -> int:
    """Processes that have a grammar to compile; two that wait for one stay."""
    forked = sum(is_compiling(child) for child in children_of(server.pid, deep=True))
    return max(0, forked - NUM_IDLE)


def is_compiling(pid: int) -> bool:
    """Whether it was forked by the process for grammars: it has the same command."""
    command = _read(pid, "cmdline")
    parent = re.search(r"^PPid:\s+(\d+)", _read(pid, "status"), re.MULTILINE)
    return "compile_process" in command and bool(parent) and command == _read(parent[1], "cmdline")


def _read(pid: int | str, name: str) -> str:
    """Nothing of a process that has ended."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except OSError:
        return ""


def pss_bytes(pid: int) -> int:
    """0 of a process that has ended."""
    match = re.search(r"^Pss: +(\d+) kB", _read(pid, "smaps_rollup"), re.MULTILINE)
    return int(match[1]) * 1024 if match else 0
