"""Processes of tests forked from one that has imported torch and what an engine and a rung's worker
need, where each would import that by itself for three seconds. `ridgeline serve` starts its engines
in this way (cli/early.py); tests of the other ways of starting name them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from ridgeline.cli.early import NUM_VALUES, TEMPLATE, Early, run_engine

WORKER = "ridgeline.ladder.measuring.worker"


def forking() -> Any:
    context = get_context("forkserver")
    context.set_forkserver_preload([TEMPLATE, WORKER])
    return context


def forked_engine() -> Early:
    """For `Engine.supervised(early=forked_engine)`; with the environment of this moment."""
    context = forking()
    memory = context.RawArray("d", NUM_VALUES)
    ours, theirs = context.Pipe()
    arguments = (dict(os.environ), theirs, memory)
    process = context.Process(target=_run_engine, args=arguments, daemon=True)
    process.start()
    theirs.close()
    return Early(process, ours, memory)


def _run_engine(environment: dict[str, str], connection: Connection, memory: Any) -> None:
    _set(environment)
    run_engine(connection, memory)


class ForkedWorker:
    """A rung's worker as ladder/measuring/process.py sees one: what it uses of a Popen."""

    def __init__(self, environment: Mapping[str, str], errors: int) -> None:
        context = forking()
        asked, ours = context.Pipe(duplex=False)
        answers, theirs = context.Pipe(duplex=False)
        files = (asked, theirs, Connection(os.dup(errors), readable=False))
        self._process = context.Process(
            target=_run_worker, args=(dict(environment), *files), daemon=True
        )
        self._process.start()
        for file in files:
            file.close()
        self.stdin = os.fdopen(os.dup(ours.fileno()), "wb")
        self.stdout = os.fdopen(os.dup(answers.fileno()), "rb")
        ours.close(), answers.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None, "it was started"
        return int(self._process.pid)

    def poll(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(WORKER, timeout or 0.0)
        return code

    def kill(self) -> None:
        self._process.kill()


def _run_worker(environment: dict[str, str], *files: Connection) -> None:
    """As `python -m` runs it: its own session, signals as they are by default."""
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    _set(environment)
    for handle, file in enumerate(files):
        os.dup2(file.fileno(), handle)
        file.close()
    sys.stdin, sys.stderr = os.fdopen(0), os.fdopen(2, "w", buffering=1)
    from ridgeline.ladder.measuring.worker import Workers, run_worker

    run_worker(Workers())


def _set(environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
