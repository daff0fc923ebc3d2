"""What a server counts: each request from its arrival to its end, and once a second where the engine
stands. Told by the routes and by the thread that runs the engine; read by /metrics and by the page.

    meters = Meters(served_by(engine, "demo"))
    meters.arrived("chatcmpl-1", "/v1/chat/completions", "")
    meters.admitted("chatcmpl-1", num_prompt_tokens=12)
    meters.tokens("chatcmpl-1", 1, time.monotonic())
    meters.ended("chatcmpl-1", "finished", "stop")
    meters.render()                     # Prometheus' text
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ridgeline.engine.loop import EngineProgress
from ridgeline.engine.state import Stats, Status
from ridgeline.server.served import Served


class Meters:
    """All methods may be called from any thread. `now` is in time.monotonic()'s clock."""

    def __init__(self, served: Served, clock: Callable[[], float] | None = None) -> None:
        """`clock` is for tests; time.monotonic otherwise."""
        self.served = served

    def arrived(self, request_id: str, route: str, tenant: str) -> None:
        """A request was accepted at the door; `tenant` is a name for its key, never the key."""

    def admitted(self, request_id: str, num_prompt_tokens: int) -> None:
        """Its prompt is known and it was handed to the engine."""

    def tokens(self, request_id: str, num_tokens: int, now: float) -> None:
        """So many new tokens of it came at `now`, of all its samples together."""

    def ended(self, request_id: str, status: Status, reason: str) -> None:
        """It has ended; one that is not known is ignored, so that ending twice does no harm."""

    def refused(self, route: str, status: int) -> None:
        """Turned away before it arrived: an HTTP status of 400 and above."""

    def sample(self, stats: Stats, progress: EngineProgress, num_restarts: int) -> None:
        """Where the engine stands; called about once a second, while idle too."""

    def render(self) -> bytes:
        """Prometheus' text format, for /metrics; its type is CONTENT_TYPE."""
        return b""

    def snapshot(self) -> dict[str, Any]:
        """What the page draws, ready for JSON."""
        return {}


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
