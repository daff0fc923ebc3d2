"""Codes of a state's scheme, made in a process of their own: found on data, or written as the
checkpoint that is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ridgeline.ladder.measuring.process import Process
from ridgeline.ladder.processes.judge_process import JUDGE_LIMIT_S
from ridgeline.ladder.state import ClimbState, ClimbSubject


def find_codes(process: Process, subject: ClimbSubject, state: ClimbState, folder: Path) -> None:
    with process:
        process.ask(
            "calibrate",
            path=str(subject.path),
            device=subject.device,
            scheme=state.recipe.scheme,
            dtype=state.recipe.dtype,
            folder=str(folder),
            limit_s=JUDGE_LIMIT_S,
        )


def write_codes(
    process: Process,
    subject: ClimbSubject,
    state: ClimbState,
    folder: Path,
    plain: Sequence[tuple[int, int]],
) -> None:
    """But for these shapes, which stay plain."""
    with process:
        process.ask(
            "write",
            path=str(subject.path),
            scheme=state.recipe.scheme,
            dtype=state.recipe.dtype,
            folder=str(folder),
            plain=[list(shape) for shape in plain],
            limit_s=JUDGE_LIMIT_S,
        )
