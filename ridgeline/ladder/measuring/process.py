"""A worker (worker.py) as its parent sees it: asked one thing at a time, with a limit for every
answer. One that dies, hangs or answers with an error raises WorkerError, and is gone.

    with Process(Path("climb/int8.log")) as process:
        loaded = process.ask("load", spec=spec.to_json(), limit_s=300)
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Self

from ridgeline.errors import RidgelineError
from ridgeline.ladder.measuring.time_ledger import TimeLedger

FailureKind = Literal["memory", "refused", "failed", "died", "hung"]
CLOSE_S = 10.0  # for a worker to end by itself
COMMAND = (sys.executable, "-m", "ridgeline.ladder.measuring.worker")
ENVIRONMENT = {"PYTHONUNBUFFERED": "1"}
NOTED = "noted:"  # begins lines of a worker's log that are no reason to end


class WorkerError(RidgelineError):
    """A rung's process ended, or could not do what it was asked."""

    exit_code = 8

    def __init__(self, kind: FailureKind, text: str) -> None:
        super().__init__(text)
        self.kind = kind


def start(
    command: Sequence[str], environment: Mapping[str, str], errors: int
) -> subprocess.Popen[bytes]:
    """What it prints beside its answers goes to the file `errors`."""
    return subprocess.Popen(
        list(command),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        env=environment,
        start_new_session=True,  # Ctrl-C is for the climb, which then ends its workers
    )


class Process:
    def __init__(
        self, log: Path, command: Sequence[str] = COMMAND, ledger: TimeLedger | None = None
    ) -> None:
        """It begins to import at once; what it and its libraries print goes to `log`. How long it
        is waited for is written into the ledger.
        """
        self.ledger = ledger or TimeLedger()
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        with open(log, "wb") as errors:
            self._process = start(command, os.environ | ENVIRONMENT, errors.fileno())
        self._heard = b""
        self.seats: set[str] = set()  # recipes that it holds

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(
        self, do: str, *, limit_s: float, lives_on: bool = False, **arguments: Any
    ) -> dict[str, Any]:
        """`lives_on`: an error that it answers with does not end it."""
        try:
            with self.ledger.timing(do):
                self._send({"do": do, **arguments})
                line = self._line(time.monotonic() + limit_s)
        except BaseException:
            self.close(at_once=True)
            raise
        if line is None:
            self.close(at_once=True)
            raise WorkerError("hung", f"no answer to {do!r} within {limit_s:.0f} s")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            if not lives_on:
                self.close(at_once=True)
            raise WorkerError(answer["kind"], answer["error"])
        return answer

    def begin(self, do: str, **arguments: Any) -> None:
        """Ask, and never mind the answer."""
        self._send({"do": do, **arguments})

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None, "it was asked for"
        try:
            self._process.stdin.write((json.dumps(message) + "\n").encode())
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):
            raise WorkerError("died", self._how_it_ended()) from None

    def _line(self, deadline: float) -> bytes | None:
        """The next line; None where it does not come in time."""
        assert self._process.stdout is not None, "it was asked for"
        handle = self._process.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(handle, selectors.EVENT_READ)
            while b"\n" not in self._heard:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    return None
                piece = os.read(handle, 1 << 16)
                if not piece:
                    raise WorkerError("died", self._how_it_ended())
                self._heard += piece
        line, _, self._heard = self._heard.partition(b"\n")
        return line

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            return "its process closed its output"
        if code < 0:
            name = signal.Signals(-code).name
            hint = "; was memory short?" if name == "SIGKILL" else ""
            return f"its process was ended by {name}{hint}"
        return f"its process ended with code {code}: {self._last_line()}"

    def _last_line(self) -> str:
        try:
            text = self._log.read_text(encoding="utf-8", errors="replace").strip()
            lines = [line for line in text.splitlines() if not line.startswith(NOTED)]
        except OSError:
            lines = []
        return lines[-1][:300] if lines else "it said nothing"

    def leave(self) -> None:
        """To itself: it ends when it has done what it was asked."""
        for stream in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                if stream is not None:
                    stream.close()

    def kill(self) -> None:
        """Whoever waits for an answer hears that it died."""
        self._process.kill()

    def close(self, at_once: bool = False) -> None:
        process = self._process
        if at_once:
            process.kill()
        self.leave()
        try:
            process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close(at_once=True)


class WorkerSeat:
    """One recipe in a process. Others may run the same weights there (worker.py `Workers`); the
    process ends with the last of them.
    """

    def __init__(self, process: Process, name: str, sharing: WorkerSeat | None = None) -> None:
        self.process, self.name = process, name
        self.sharing = None if sharing is None else sharing.name
        process.seats.add(name)

    @property
    def is_alive(self) -> bool:
        return self.name in self.process.seats and self.process.is_alive

    def ask(self, do: str, *, limit_s: float, **arguments: Any) -> dict[str, Any]:
        return self.process.ask(do, limit_s=limit_s, seat=self.name, **arguments)

    def load(self, spec: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """Beside another one a recipe that cannot be loaded leaves that one as it is."""
        if self.sharing is None:
            return self.ask("load", spec=spec, limit_s=limit_s)
        return self.ask("load", spec=spec, sharing=self.sharing, lives_on=True, limit_s=limit_s)

    def close(self, at_once: bool = False) -> None:
        seats = self.process.seats
        seats.discard(self.name)
        if not seats:
            self.process.close(at_once)
        elif self.process.is_alive:
            with suppress(WorkerError):
                self.process.ask("drop", seat=self.name, limit_s=CLOSE_S)
