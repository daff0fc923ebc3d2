"""`ridgeline serve` in a process of its own, and what can be seen of it from outside: memory, its
engine's process, its own figures.

    with ServerProcess("demo", "--max-batch", "64") as server:
        server.port, server.engine_pid, server.metric("ridgeline:engine_restarts_total")
"""

from __future__ import annotations

import os
import re
import signal
import time
import urllib.request
from pathlib import Path

from ridgeline.bench.serve.own_server import OwnServer

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def memory_flags(num_bytes: int) -> tuple[str, str]:
    """So much for weights and pages, however much is free: a cache that can be filled."""
    match = re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())
    assert match is not None
    return "--memory-share", f"{min(0.9, num_bytes / (int(match[1]) * 1024)):.4f}"


class ServerProcess(OwnServer):
    def __init__(
        self, model: str, *flags: str, log: Path | None = None, key: str | None = None
    ) -> None:
        """`key` is one that it asks for."""
        super().__init__(model, *flags, log=log)
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def engine_pid(self) -> int | None:
        """What was forked from the process that engines are forked from (cli/early.py)."""
        templates = [child for child in children_of(self.pid) if "forkserver" in _command(child)]
        engines = set().union(*(children_of(template) for template in templates))
        return max(engines, key=_rss, default=None)

    def kill_engine(self) -> None:
        pid = self.engine_pid
        assert pid is not None, "the engine has a process"
        os.kill(pid, signal.SIGKILL)

    def metric(self, name: str) -> float:
        """The sum of a figure over its labels; a name with labels takes those alone."""
        plain, _, wanted = name.partition("{")
        total = 0.0
        for line in self.get("/metrics").decode().splitlines():
            if re.match(rf"{re.escape(plain)}[{{ ]", line) and wanted.rstrip("}") in line:
                total += float(line.rsplit(" ", 1)[1])
        return total

    def get(self, path: str) -> bytes:
        url = f"http://127.0.0.1:{self.port}{path}"
        request = urllib.request.Request(url, headers=self._headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            body: bytes = answer.read()
            return body

    def wait_until_idle(self, seconds: float) -> dict[str, float]:
        """Figures that are all 0 when nothing is left behind; the last ones when time is up."""
        names = (
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
            'ridgeline:kv_pages{state="used"}',
        )
        end = time.monotonic() + seconds
        while True:
            figures = {name: self.metric(name) for name in names}
            if not any(figures.values()) or time.monotonic() > end:
                return figures
            time.sleep(1.0)


def children_of(pid: int, deep: bool = False) -> set[int]:
    """Its processes; `deep`: and theirs."""
    files = [_read(file) for file in Path(f"/proc/{pid}/task").glob("*/children")]
    pids = {int(child) for text in files for child in text.split()}
    return pids.union(*(children_of(child, deep=True) for child in pids)) if deep else pids


def _command(pid: int) -> str:
    return _read(Path(f"/proc/{pid}/cmdline"))


def _rss(pid: int) -> int:
    words = _read(Path(f"/proc/{pid}/statm")).split()
    return int(words[1]) * PAGE_BYTES if words else 0


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
