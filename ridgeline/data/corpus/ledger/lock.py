"""One builder of a corpus at a time. The system lets go of the lock when its holder ends, however.

with builder_lock(corpus): ...
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ridgeline.errors import CorpusError

NAME = "lock"


@contextmanager
def builder_lock(folder: Path) -> Iterator[None]:
    """CorpusError names the holder where there is one."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / NAME, "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise CorpusError(
                f"{folder.parent} is being built by {holder}; wait for it, or give another --out"
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield
