"""`ridgeline serve` in a process of its own, from its start to its end.

with OwnServer("demo", "--max-batch", "64", log=Path("serve.log")) as server:
    server.url, server.model, server.log_lines()
    server.stop()
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from ridgeline.errors import HardwareError

_READY = re.compile(r"(http://127\.0\.0\.1:(\d+)) serves (.+?):")


class OwnServer:
    def __init__(self, model: str, *flags: str, log: Path | None = None) -> None:
        """`log` keeps what it logs; otherwise that is gone when the server is."""
        words = [sys.executable, "-m", "ridgeline", "serve", model, "--port", "0", *flags]
        self._command = words
        self._log = open(log, "w+b") if log is not None else tempfile.TemporaryFile()  # noqa: SIM115

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()  # it says where it is when it is ready
        match = _READY.match(line)
        if match is None:
            self._process.kill()
            self._process.wait()
            end = self._read_log()[-400:].decode("utf-8", "replace").strip()
            raise HardwareError(f"the server did not start: {line.strip()} {end}")
        self.url, self.port, self.model = match[1], int(match[2]), match[3]
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
    def pid(self) -> int:
        return self._process.pid

    def log_lines(self) -> Iterator[dict[str, Any]]:
        """What it has logged so far."""
        for line in self._read_log().splitlines():
            if line.startswith(b"{"):
                yield json.loads(line)

    def _read_log(self) -> bytes:
        """Without moving the position at which the server writes."""
        file = self._log.fileno()
        return os.pread(file, os.fstat(file).st_size, 0)
