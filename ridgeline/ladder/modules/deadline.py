"""A limit on what cannot be asked to stop by itself: compiling, and a first call of a form that
nobody has timed yet.

The main thread is interrupted as Ctrl-C would interrupt it, between two ops or while it waits for a
compiler. In another thread Python has no such means: there the block runs to its end.

    with time_limit(20.0, "compiling"):
        compiled(x)                       # raises OutOfTimeError after 20 s
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from ridgeline.errors import RidgelineError

AGAIN_S = 1.0  # until it is interrupted once more: code may have caught the first
SOON_S = 1e-3  # a timer of 0 never rings


class OutOfTimeError(RidgelineError):
    """What was begun did not end in the time it had."""


class _Interrupt(BaseException):
    """No Exception: a compiler takes those for its own, and goes on."""


def _imports(frame: FrameType | None) -> bool:
    """A module is being imported: cut short, it would be half there for whoever wants it next. The
    timer rings again.
    """
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


@contextmanager
def time_limit(seconds: float | None, label: str) -> Iterator[None]:
    """None: no limit. A timer that somebody else had set goes on after it."""
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    armed, rang = True, False

    def ring(_: int, frame: FrameType | None) -> None:
        nonlocal rang
        if armed and not _imports(frame):
            rang = True
            raise _Interrupt

    handler, began = signal.signal(signal.SIGALRM, ring), time.monotonic()
    rest_s, interval_s = signal.setitimer(signal.ITIMER_REAL, max(seconds, SOON_S), AGAIN_S)
    try:
        yield
        armed = False
    except (_Interrupt, Exception) as error:
        armed = False
        if not rang:
            raise
        took_s = time.monotonic() - began
        raise OutOfTimeError(f"{label} was stopped after {took_s:.1f} s") from error
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, handler)
        if rest_s > 0:
            left_s = rest_s - (time.monotonic() - began)
            signal.setitimer(signal.ITIMER_REAL, max(left_s, SOON_S), interval_s)
