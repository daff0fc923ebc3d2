"""What came of a server's requests: how many, how long, how large. One thread at a time; metrics.py
sees to that.

    counts = Counts()
    counts.arrived("chatcmpl-1", "/v1/chat/completions", "", now)
    counts.tokens("chatcmpl-1", 1, now)
"""

from __future__ import annotations

from collections import Counter

from ridgeline.engine.scheduling.histogram import Histogram
from ridgeline.engine.scheduling.state import Status
from ridgeline.server.metrics.requests import RequestRow, RequestTable

TOKEN_BOUNDS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))
# Paths that are counted by name. Others are whatever somebody typed: one name for all of them, so
# that nobody fills the server's memory, or the monitoring's, with names.
ROUTES = frozenset(
    (
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/embeddings",
        "/v1/models",
        "/tokenize",
        "/detokenize",
        "/health",
        "/ready",
        "/metrics",
        "/live",
        "/",
    )
)
OTHER = "other"
REASONS: dict[Status, str] = {"cancelled": "abort", "failed": "error", "refused": "error"}


class Counts:
    """Times are those of one clock, in seconds. A request that is not known is ignored: it has
    ended already.
    """

    def __init__(self) -> None:
        self.table = RequestTable()
        self.first_token, self.inter_token, self.per_token = Histogram(), Histogram(), Histogram()
        self.request, self.decode = Histogram(), Histogram()
        self.prompt_sizes, self.output_sizes = Histogram(TOKEN_BOUNDS), Histogram(TOKEN_BOUNDS)
        self.num_prompt_tokens = self.num_output_tokens = 0
        self.num_arrived: Counter[str] = Counter()  # by route
        self.num_ended: Counter[str] = Counter()  # by reason
        self.num_refused: Counter[tuple[str, int]] = Counter()  # by route and HTTP status

    def arrived(self, request_id: str, route: str, tenant: str, now: float) -> None:
        self.table.live[request_id] = RequestRow(request_id, route, tenant, now)
        self.num_arrived[route_name(route)] += 1

    def refused(self, route: str, status: int) -> None:
        self.num_refused[route_name(route), status] += 1

    def admitted(self, request_id: str, num_prompt_tokens: int, num_samples: int) -> None:
        row = self.table.live.get(request_id)
        if row is not None:
            row.state = "waiting"
            row.num_prompt_tokens, row.num_samples = num_prompt_tokens, num_samples
            self.num_prompt_tokens += num_prompt_tokens

    def tokens(self, request_id: str, num_tokens: int, now: float) -> None:
        """Those that come together, or of several samples, share the time since the last."""
        row = self.table.live.get(request_id)
        if row is None or num_tokens < 1:
            return
        if row.last is None:
            row.first, row.state = now, "running"
            self.first_token.add(now - row.arrived)
        else:
            gap_s = (now - row.last) * row.num_samples / num_tokens
            self.inter_token.add(max(0.0, gap_s), num_tokens)
        row.last = now
        row.num_tokens += num_tokens
        self.num_output_tokens += num_tokens

    def ended(self, request_id: str, status: Status, reason: str, now: float) -> RequestRow | None:
        """The request, for the last time; None if it has ended already."""
        row = self.table.live.get(request_id)
        if row is None:
            return None
        self.table.end(row, status, reason, now)
        finished = "length" if reason == "length" else "stop"
        self.num_ended[REASONS.get(status, finished)] += 1
        if status == "finished":
            self._finished(row, now)
        return row

    def _finished(self, row: RequestRow, now: float) -> None:
        self.request.add(now - row.arrived)
        self.prompt_sizes.add(row.num_prompt_tokens)
        self.output_sizes.add(row.num_tokens)
        if row.first is not None and row.last is not None:
            self.decode.add(row.last - row.first)
            if row.num_tokens > row.num_samples:
                more = row.num_tokens / row.num_samples - 1
                self.per_token.add((row.last - row.first) / more)


def route_name(path: str) -> str:
    return path if path in ROUTES else OTHER
