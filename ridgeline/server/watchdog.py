"""Turns a step that never ends into a restart. A thread of its own: the one that runs the engine
may be waiting for it.

    watchdog = Watchdog(pump, step_timeout=120.0)
    watchdog.start()
    watchdog.stop()
"""

from __future__ import annotations

import logging
import threading

from ridgeline.server.pump import Pump

log = logging.getLogger(__name__)

LOOK_S = 0.25
START_S = 900.0  # that an engine may take to load again


class Watchdog:
    def __init__(self, pump: Pump, step_timeout: float) -> None:
        self._pump, self._step_timeout = pump, step_timeout
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(LOOK_S):
            reason = self._reason()
            if reason:
                log.error("restarting the engine: %s", reason)
                self._pump.engine.restart()
                self._end.wait(1.0)  # until that has been noticed

    def _reason(self) -> str:
        stalled_s, engine = self._pump.stalled_s, self._pump.engine
        if stalled_s > self._step_timeout:
            return f"no step has ended for {stalled_s:.1f} s"
        since_s = engine.progress.idle_s  # its start, as long as it loads
        if not engine.is_up and engine.broken is None and since_s > START_S:
            return f"it has been loading for {since_s:.0f} s"
        return ""
