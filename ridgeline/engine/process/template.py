"""What the process that engines are forked from has imported (cli/early.py). It holds no model and
no device, and ends with the server, whatever signals all of a service's processes get.
"""

from __future__ import annotations

import signal

import ridgeline.engine.process.worker  # noqa: F401

for _number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(_number, signal.SIG_IGN)
