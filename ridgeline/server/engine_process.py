"""How the engine's process behaves as part of a server.

Engine.supervised(path, recipe, setup=prepare)
"""

from __future__ import annotations

import signal

from ridgeline.engine.local.local_backend import LocalBackend
from ridgeline.server.logs import start_logging


def prepare(local: LocalBackend) -> None:
    """In that process. Who stops a service, or makes it read its files again, may signal all its
    processes: this one goes on until the requests have ended, and ends with the server.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    start_logging()
