"""Ctrl-C that lets what is under way come to an end.

with interruption() as stop:
    while not stop.is_set(): ...
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def interruption() -> Iterator[threading.Event]:
    """An event that Ctrl-C sets, so that a step is finished first; a second one interrupts at once.
    Outside of the main thread, where no signal arrives, one that nothing sets.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = signal.getsignal(signal.SIGINT)

    def request(number: int, frame: Any) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    signal.signal(signal.SIGINT, request)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
