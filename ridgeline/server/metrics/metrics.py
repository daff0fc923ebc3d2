"""What a server counts: each request from its arrival to its end, and once a second where the
engine stands. Written by the routes and by the thread that runs the engine; read by /metrics and by
the page. `on_end` are called with each request that has ended.

    meters = Meters(served_by(engine, "demo"))
    meters.arrived("chatcmpl-1", "/v1/chat/completions", "")
    meters.admitted("chatcmpl-1", num_prompt_tokens=12)
    meters.tokens({"chatcmpl-1": 1}, time.monotonic())
    meters.ended("chatcmpl-1", "finished", "stop")
    meters.render()                     # Prometheus' text
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from ridgeline.engine.backend import EngineProgress
from ridgeline.engine.scheduling.state import Stats, Status
from ridgeline.server.metrics.counts import Counts
from ridgeline.server.metrics.exposition import CONTENT_TYPE, View, render
from ridgeline.server.metrics.history import History
from ridgeline.server.metrics.served import Served
from ridgeline.server.metrics.snapshot import server_facts, verdict_json
from ridgeline.server.metrics.tracing import OnEnd, from_environment
from ridgeline.server.metrics.verdict import ServerVerdict, judge
from ridgeline.server.metrics.window import Sample, Totalled, Window, window_of

__all__ = ["CONTENT_TYPE", "Meters"]

WINDOW_SAMPLES = 31  # half a minute, where a sample comes each second


class Meters:
    """All methods may be called from any thread. `now` is in time.monotonic()'s clock."""

    def __init__(self, served: Served, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` is for tests."""
        self.served = served
        self._clock, self._started = clock, clock()
        self._lock = threading.Lock()
        self._counts, self._history, self._totalled = Counts(), History(), Totalled()
        self._samples: deque[Sample] = deque(maxlen=WINDOW_SAMPLES)
        self._num_restarts = 0
        tracing = from_environment(served.model)
        self.on_end: list[OnEnd] = [] if tracing is None else [tracing]

    def arrived(self, request_id: str, route: str, tenant: str, began: float | None = None) -> None:
        """A request was accepted at the door; `tenant` is a name for its key, never the key. Times
        count from when it `began`, or from now: reading it and its template are in them.
        """
        with self._lock:
            self._counts.arrived(
                request_id, route, tenant, self._clock() if began is None else began
            )

    def admitted(self, request_id: str, num_prompt_tokens: int, num_samples: int = 1) -> None:
        """Its prompt is known and it was handed to the engine, for so many outputs."""
        with self._lock:
            self._counts.admitted(request_id, num_prompt_tokens, num_samples)

    def tokens(self, num_tokens: Mapping[str, int], now: float) -> None:
        """So many new tokens of each request came at `now`, of all its samples together."""
        with self._lock:
            for request_id, num in num_tokens.items():
                self._counts.tokens(request_id, num, now)

    def ended(self, request_id: str, status: Status, reason: str) -> None:
        """It has ended; one that is not known is ignored, so that ending twice does no harm."""
        with self._lock:
            now = self._clock()
            row = self._counts.ended(request_id, status, reason, now)
        if row is not None:
            for listener in self.on_end:
                listener(row, now)

    def refused(self, route: str, status: int) -> None:
        """Turned away before it arrived: an HTTP status of 400 and above."""
        with self._lock:
            self._counts.refused(route, status)

    def sample(self, stats: Stats, progress: EngineProgress, num_restarts: int) -> None:
        """Where the engine stands; called about once a second, while idle too."""
        with self._lock:
            now, counts = self._clock(), self._counts
            self._num_restarts = num_restarts
            sample = self._totalled.sample(now, stats, progress.work, num_restarts)
            since_last = window_of([*list(self._samples)[-1:], sample], self.served)
            self._samples.append(sample)
            tokens = counts.num_prompt_tokens, counts.num_output_tokens
            times = counts.first_token.counts, counts.inter_token.counts
            self._history.add(now - self._started, sample, since_last, tokens, times)

    def verdict(self) -> ServerVerdict:
        """On the last half minute."""
        with self._lock:
            return judge(self._window(), self.served)

    def render(self) -> bytes:
        """Prometheus' text format, for /metrics; its type is CONTENT_TYPE."""
        with self._lock:
            sample = self._samples[-1] if self._samples else None
            window, restarts = self._window(), self._num_restarts
            return render(View(self.served, self._counts, restarts, sample, window))

    def shows(self, request_id: str, tenant: str | None) -> bool:
        """Whether a live request is this tenant's; None: whether there is one."""
        with self._lock:
            row = self._counts.table.live.get(request_id)
            return row is not None and tenant in (None, row.tenant)

    def snapshot(self, after: float | None = None, tenant: str | None = None) -> dict[str, Any]:
        """What the page draws, ready for JSON: of the history only what is later than `after`,
        a time that an earlier snapshot had; of the requests those of one tenant, or all for None.
        """
        with self._lock:
            now, window, counts = self._clock(), self._window(), self._counts
            return {
                **server_facts(self.served, self._samples[-1] if self._samples else None),
                "uptime_s": now - self._started,
                "num_restarts": self._num_restarts,
                "num_prompt_tokens": counts.num_prompt_tokens,
                "num_output_tokens": counts.num_output_tokens,
                "verdict": verdict_json(judge(window, self.served), window),
                "points": self._history.since(after),
                "requests": counts.table.as_json(now, tenant),
            }

    def _window(self) -> Window | None:
        return window_of(list(self._samples), self.served)
