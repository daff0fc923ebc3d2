"""Files that are read again when they change, or at once when SIGHUP comes: API keys, and the
certificate. What cannot be read then leaves everything as it was, with a line in the log.

    reloading = Reloading(config.files, reload)
    task = asyncio.create_task(reloading.run())
    loop.add_signal_handler(signal.SIGHUP, reloading.now)

A SIGHUP also comes when the terminal is closed in which a server runs: then it is to end, as it did
without a handler, and `has_hung_up` says so.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from ridgeline.errors import UsageError

log = logging.getLogger(__name__)

LOOK_S = 2.0  # between two looks at the files
TERMINAL = "/dev/tty"  # of this process, whichever it is


class Reloading:
    def __init__(self, files: Sequence[Path], reload: Callable[[], None]) -> None:
        """`reload` raises UsageError where it changed nothing."""
        self._files, self._reload = files, reload
        self._states = self._look()
        self._had_terminal = _has_terminal()

    async def run(self) -> None:
        """Until cancelled. Files are replaced by a rename or written in place: a state that
        stays for two looks is one that was written to its end, most likely.
        """
        before = self._states
        while self._files:
            await asyncio.sleep(LOOK_S)
            states = self._look()
            if states == before and states != self._states:
                self.now()
            before = states

    def now(self) -> None:
        self._states = self._look()
        try:
            self._reload()
        except UsageError as error:
            log.error("files were not read again, what was valid stays valid: %s", error)
        else:
            log.info("files were read again")

    @property
    def has_hung_up(self) -> bool:
        """There was a terminal, and it is gone."""
        return self._had_terminal and not _has_terminal()

    def _look(self) -> list[tuple[int, int, int] | None]:
        return [_state(path) for path in self._files]


def _state(path: Path) -> tuple[int, int, int] | None:
    """What changes when a file does; None where there is none."""
    with suppress(OSError):
        status = path.stat()
        return (status.st_mtime_ns, status.st_size, status.st_ino)
    return None


def _has_terminal() -> bool:
    try:
        os.close(os.open(TERMINAL, os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True
