"""An error of one rank among many, in one line of a terminal that all share.

What went wrong in a rank is written where torchrun looks for it (TORCHELASTIC_ERROR_FILE); our own
supervisor looks there too, and shows one line for all. Under torchrun rank 0 shows its own, and
torchrun what other ranks have written.

    show_error("out of memory: …")
    read_error(path)                        # RankError, or None: nothing was written
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ridgeline.errors import OutputError, UsageError
from ridgeline.formats.files import atomic_write
from ridgeline.parallel.starting.place import ERROR_FILE, is_own_child, numbers_in

# After which torchrun may end rank 0, which has found the same and shows it.
LATER_S = 2.0


class RankError(NamedTuple):
    message: str
    time: float  # in seconds since 1970


def show_error(message: str, environment: Mapping[str, str] = os.environ) -> None:
    """On stderr, unless somebody else shows it for this rank."""
    name = ""
    try:
        numbers = numbers_in(environment)
    except UsageError:  # which may be what is to be shown
        numbers = None
    if numbers is not None:
        is_written = write_error(message, environment)
        is_own = is_own_child(environment)
        # Rank 0 of ours has the supervisor's terminal, the others a log that should end with it.
        if is_written and is_own == (numbers.rank == 0):
            time.sleep(0.0 if is_own else LATER_S)
            return
        name = "" if is_own or numbers.rank == 0 else f"rank {numbers.rank}: "
    with suppress(OSError, ValueError):
        print(f"ridgeline: error: {name}{message}", file=sys.stderr)


def write_error(message: str, environment: Mapping[str, str] = os.environ) -> bool:
    """In torchrun's form. False where nobody looks for it."""
    path, now = environment.get(ERROR_FILE), time.time()
    if not path:
        return False
    try:
        with atomic_write(path) as file:
            details = {"py_callstack": message, "timestamp": str(int(now))}
            text = {"message": message, "extraInfo": details}
            json.dump({"message": text, "time": now}, file)
    except OutputError:  # a full disk
        return False
    return True


def read_error(path: Path) -> RankError | None:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return RankError(str(values["message"]["message"]), float(values["time"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
