"""How the engine's process behaves as part of a server.

SupervisedEngine(path, recipe, setup=prepare)
"""

from __future__ import annotations

import signal

from ridgeline.engine import Engine
from ridgeline.server.logs import start_logging


def prepare(engine: Engine) -> None:
    """In that process. Who stops a service may signal all its processes: this one goes on until the
    requests have ended, and ends with the server.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    start_logging()
