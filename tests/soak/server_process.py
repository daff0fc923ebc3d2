"""`ridgeline serve` in a process of its own, and what can be seen of it from outside: memory, its
engine's process, its own figures.

    with ServerProcess("demo", "--max-batch", "64") as server:
        server.port, server.rss_bytes(), server.metric("ridgeline:engine_restarts_total")
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Self

START_S = 120.0
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def memory_flags(num_bytes: int) -> tuple[str, str]:
    """So much for weights and pages, however much is free: a cache that can be filled."""
    found = re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())
    assert found is not None
    return "--memory-share", f"{min(0.9, num_bytes / (int(found[1]) * 1024)):.4f}"


class ServerProcess:
    def __init__(self, model: str, *flags: str, log: Path | None = None) -> None:
        self._command = [sys.executable, "-m", "ridgeline", "serve", model, "--port", "0", *flags]
        self._log = open(log or os.devnull, "w+b")  # noqa: SIM115 - as long as the server lives

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()  # it says where it is when it is ready
        found = re.match(r"http://127\.0\.0\.1:(\d+) serves (.+?):", line)
        if found is None:
            self._process.kill()
            self._log.seek(0)
            said = self._log.read()[-300:] or "see its log, with --log FILE"
            raise RuntimeError(f"the server did not start: {line!r} {said!r}")
        self.port, self.model = int(found[1]), found[2]
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._log.close()

    def stop(self, seconds: float = 60.0) -> int:
        """Its exit code after SIGTERM."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(seconds)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def engine_pid(self) -> int | None:
        """Of its children the largest: the other one only tracks resources."""
        found = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        threads = Path(f"/proc/{self._process.pid}/task").glob("*/children")
        pids = {int(pid) for file in [found, *threads] for pid in _read(file).split()}
        return max(pids, key=_rss, default=None)

    def kill_engine(self) -> None:
        pid = self.engine_pid
        assert pid is not None, "the engine has a process"
        os.kill(pid, signal.SIGKILL)

    def rss_bytes(self) -> tuple[int, int]:
        """Of the server's own process, and of its engine's."""
        engine = self.engine_pid
        return _rss(self._process.pid), 0 if engine is None else _rss(engine)

    def metric(self, name: str) -> float:
        """The sum of a figure over its labels; a name with labels takes those alone."""
        plain, _, wanted = name.partition("{")
        total = 0.0
        for line in self.get("/metrics").decode().splitlines():
            if re.match(rf"{re.escape(plain)}[{{ ]", line) and wanted.rstrip("}") in line:
                total += float(line.rsplit(" ", 1)[1])
        return total

    def get(self, path: str) -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as answer:
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
            found = {name: self.metric(name) for name in names}
            if not any(found.values()) or time.monotonic() > end:
                return found
            time.sleep(1.0)


def _rss(pid: int) -> int:
    words = _read(Path(f"/proc/{pid}/statm")).split()
    return int(words[1]) * PAGE_BYTES if words else 0


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
