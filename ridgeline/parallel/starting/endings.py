"""Which of several ranks that have ended was the cause, and the one line that says so.

A rank that is killed takes the others down with it: they miss it, and end with errors that are not
the cause. What ended without a word of its own came first, then the error that was written first.

    ending = judged(ends)               # of the ranks that have ended by themselves
    ending.code, ending.message, ending.may_restart
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ridgeline import errors
from ridgeline.errors import (
    CHECK_FAILED_EXIT_CODE,
    INTERNAL_EXIT_CODE,
    INTERRUPTED_EXIT_CODE,
    HardwareError,
    OutOfMemoryError,
    RidgelineError,
)
from ridgeline.parallel.starting.child import how_ended
from ridgeline.parallel.starting.telling import RankError

OWN_CODES = {
    CHECK_FAILED_EXIT_CODE,
    INTERNAL_EXIT_CODE,
    *(
        kind.exit_code
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, RidgelineError) and kind != RidgelineError
    ),
}
# What the same start may not meet again. The others are the input's, and would be found again.
PASSING_CODES = {HardwareError.exit_code, OutOfMemoryError.exit_code, INTERNAL_EXIT_CODE}
INTERRUPTED = (INTERRUPTED_EXIT_CODE, -signal.SIGINT)
LONGEST = 400  # letters of a log's last line
PREFIX = "ridgeline: error: "
START = "--- rank "


class RankEnd(NamedTuple):
    """A rank that has ended otherwise than well."""

    rank: int
    code: int  # of subprocess: below 0 a signal
    time: float  # when it was seen, in seconds since 1970
    error: RankError | None = None  # what it has written about itself
    log: Path | None = None  # None: its output went to the terminal

    @property
    def order(self) -> tuple[bool, float]:
        """Abortion may be NCCL's way of saying that another rank has gone."""
        if self.error is not None:
            return True, self.error.time
        return self.code == -signal.SIGABRT, self.time


class Ending(NamedTuple):
    """Of all ranks."""

    code: int  # of the command
    message: str | None = None
    may_restart: bool = False
    order: tuple[bool, float] = (True, 0.0)  # of causes on several machines the first counts


def judged(ends: Sequence[RankEnd]) -> Ending:
    """What ended them all."""
    cause = min(ends, key=lambda end: end.order)
    is_own = cause.error is not None and cause.code in OWN_CODES
    code = cause.code if is_own else HardwareError.exit_code
    may_restart = not is_own or code in PASSING_CODES
    messages = {end.rank: end.error.message for end in ends if end.error is not None}
    if cause.error is not None and messages.get(0) == cause.error.message:  # each has met the same
        return Ending(code, cause.error.message, may_restart, cause.order)
    return Ending(code, described(cause), may_restart, cause.order)


def described(end: RankEnd) -> str:
    """`rank 1 was killed by signal 9; its log RUN/logs/rank-1.log ends with: step 12, loss 3.1`."""
    words = f"rank {end.rank} {how_ended(end.code)}"
    if end.error is not None:
        words += f": {end.error.message}"
        return words if end.log is None else f"{words} (its log: {end.log})"
    if end.log is None:
        return words
    line = last_line(end.log)
    says = "has nothing more" if line is None else f"ends with: {line.removeprefix(PREFIX)}"
    return f"{words}; its log {end.log} {says}"


def start_line(rank: int, size: int, start: int) -> str:
    """What a start puts into a rank's log before the rank writes there itself."""
    return f"{START}{rank} of {size}, start {start}\n"


def last_line(log: Path) -> str | None:
    """Of the last start. None where it has written nothing."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - 8192))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return None
    line = next((line.strip() for line in reversed(lines) if line.strip()), None)
    if line is None or line.startswith(START):
        return None
    return line if len(line) <= LONGEST else line[:LONGEST] + "…"
