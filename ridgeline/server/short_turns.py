"""Python in a process of a server: no thread has it for long while others wait.

By default a thread that needs the interpreter gets it 5 ms after it asked, and an answer asks a
dozen times while a large body is read in another thread. And each collection of everything walks
what was there when the server began, a tenth of a second in which nothing else runs.

    take_short_turns()      # once what stays is loaded
"""

from __future__ import annotations

import atexit
import gc
import sys

TURN_S = 0.0005


def take_short_turns() -> None:
    """In this whole process."""
    sys.setswitchinterval(TURN_S)
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # or libraries would miss at the end what nobody collects
