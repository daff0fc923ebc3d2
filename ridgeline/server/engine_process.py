"""How the engine's process behaves as part of a server.

Engine.supervised(path, recipe, setup=prepare)
"""

from __future__ import annotations

import signal

from ridgeline.engine.local.local_backend import LocalBackend
from ridgeline.server.logs import start_logging


def prepare(local: LocalBackend) -> None:
    """In that process. Who stops a service may signal all its processes: this one goes on until the
    requests have ended, and ends with the server.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    start_logging()
