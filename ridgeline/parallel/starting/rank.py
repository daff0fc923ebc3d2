"""What a process does first when it was started as a rank.

numbers = enter_rank(os.environ)        # None: it is no rank
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ridgeline.parallel.starting.child import end_with_parent
from ridgeline.parallel.starting.place import LOG, RankNumbers, is_own_child, numbers_in

SET_DEATH_SIGNAL = 1  # of linux/prctl.h


def enter_rank(environment: Mapping[str, str] = os.environ) -> RankNumbers | None:
    numbers = numbers_in(environment)
    if numbers is None:
        return None
    if is_own_child(environment):
        end_with_parent()
        _be_killed_with_parent()
        # What is shown there when this rank has hung, even if no line of Python can run any more.
        log = Path(environment[LOG]).open("ab")  # noqa: SIM115 - lives as long as the process
        faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
    elif numbers.rank:  # the answer is shown once, by rank 0
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return numbers


def _be_killed_with_parent() -> None:
    """For a rank in which no thread can run: it would not see its input close. Linux has it. The
    parent has started it from its main thread, whose end this is.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, signal.SIGKILL)
