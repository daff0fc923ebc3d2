"""Faults for a server's engine process, switched on by files. Imported there: it imports little."""

from __future__ import annotations

import gc
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ridgeline.engine.local.local_backend import LocalBackend
from ridgeline.engine.process.worker import Setup
from ridgeline.server import engine_process
from ridgeline.server.config import ServerConfig

FAULTS = "RIDGELINE_TEST_FAULTS"  # names a folder, in the environment
STUCK_S, SLOW_S, PAUSE_S = 600.0, 0.05, 0.002


def setup_for(config: ServerConfig) -> Setup:
    """As the server's own, with faults."""
    return partial(_prepared_breakable, real=engine_process.setup_for(config))


def _prepared_breakable(engine: LocalBackend, real: Setup) -> None:
    real(engine)
    note_turns("engine")
    make_breakable(engine)


def note_turns(process: str) -> None:
    """A file says how long a thread of this process has Python, and how much is never collected."""
    text = f"{sys.getswitchinterval()} {gc.get_freeze_count()}"
    (Path(os.environ[FAULTS]) / f"turns-{process}").write_text(text)


def make_breakable(engine: LocalBackend, grammar_timeout: float | None = None) -> None:
    """A file `stuck` makes one step last, `slow` all of them a while, `paused` as long as it is
    there; `deadly` ends the process. While there is a file `first` one step is computed, and the
    next waits until it is gone.
    """
    engine_process.limit_grammars(engine, grammar_timeout)
    folder, forward = Path(os.environ[FAULTS]), engine.runner.forward
    num_steps = 0  # since there was a file `first`

    def breaking(inputs: Any, *rest: Any) -> torch.Tensor:
        nonlocal num_steps
        num_steps = num_steps + 1 if (folder / "first").exists() else 0
        while num_steps > 1 and (folder / "first").exists():
            time.sleep(0.005)
        if (folder / "stuck").exists():
            (folder / "stuck").unlink()
            time.sleep(STUCK_S)
        if (folder / "slow").exists():
            time.sleep(SLOW_S)
        while (folder / "paused").exists():
            time.sleep(PAUSE_S)
        if (folder / "deadly").exists():
            os._exit(9)
        return forward(inputs, *rest)

    engine.runner.forward = breaking  # type: ignore[method-assign]
