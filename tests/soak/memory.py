"""The memory of a server's processes while clients run: pages that are shared count in parts, so
that the sum is what the machine lacks.

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

Who = Literal["server", "engine"]


class MemorySample(NamedTuple):
    time: float  # by the monotonic clock
    server: int  # bytes
    engine: int  # its process, and those it started


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
            engine = sum(pss_bytes(child) for child in children_of(pid, deep=True))
            self.samples.append(MemorySample(time.monotonic(), pss_bytes(pid), engine))

    def growth(self, who: Who, begin: float, end: float) -> float | None:
        """From the first fifth of this time to its last; None where it was not looked at."""
        span = (end - begin) / 5
        early = [getattr(s, who) for s in self.samples if begin <= s.time < begin + span]
        late = [getattr(s, who) for s in self.samples if end - span <= s.time <= end]
        if not early or not late or not median(early):
            return None
        return float(median(late) / median(early)) - 1


def pss_bytes(pid: int) -> int:
    """0 of a process that has ended."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    match = re.search(r"^Pss: +(\d+) kB", text, re.MULTILINE)
    return int(match[1]) * 1024 if match else 0
