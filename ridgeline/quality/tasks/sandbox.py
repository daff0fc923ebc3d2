"""Runs a program that a model wrote, in a process of its own with little time, memory and reach.

It gets an empty folder, no environment, no network (a namespace of its own where the system allows
one, and Python's audit hook in any case: sandboxed.py), and is ended with everything it started
when its time is over. Callers ask the user first: nothing is run without their word.

    verdict = run_program("assert 1 + 1 == 2")
    verdict.passed, verdict.problem
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ridgeline.errors import UnsupportedError

SECONDS = 10
MEMORY_BYTES = 2**30
FILE_BYTES = 2**20
START_S = 5  # that a process may take to begin, on a busy machine
SCRIPT = Path(__file__).parent / "sandboxed.py"


class ProgramVerdict(NamedTuple):
    passed: bool
    problem: str | None  # why not
    own_network: bool | None  # whether it ran in a network namespace of its own, where it said so


def run_program(
    program: str, *, seconds: int = SECONDS, memory_bytes: int = MEMORY_BYTES
) -> ProgramVerdict:
    if os.name != "posix":
        raise UnsupportedError(
            "generated code runs only on Linux and macOS, where its resources can be limited"
        )
    secret = secrets.token_hex(16)
    order = {
        "program": program,
        "secret": secret,
        "seconds": seconds,
        "memory_bytes": memory_bytes,
        "file_bytes": FILE_BYTES,
    }
    with tempfile.TemporaryDirectory(prefix="ridgeline-") as folder:
        answer = _talk(json.dumps(order), folder, seconds + START_S)
    if answer is None:
        return ProgramVerdict(False, f"took longer than {seconds} s", None)
    try:
        verdict = json.loads(answer)
    except ValueError:
        return ProgramVerdict(False, "ended early", None)
    passed = verdict["secret"] == secret
    return ProgramVerdict(passed, None if passed else verdict["problem"], verdict["own_network"])


def _talk(order: str, folder: str, seconds: float) -> bytes | None:
    """What the process answers; None when its time is over. Nothing of it is left behind."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", str(SCRIPT)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=folder,
        env={},
        start_new_session=True,
    )
    try:
        return process.communicate(order.encode() + b"\n", timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.communicate()


def run_programs(programs: Sequence[str]) -> list[ProgramVerdict]:
    """One on each core at a time."""
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        return list(pool.map(run_program, programs))
