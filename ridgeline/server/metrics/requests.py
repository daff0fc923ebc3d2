"""The requests a server has now, and the last that ended: numbers and states, never their texts.

table = RequestTable()
table.live["chatcmpl-1"] = RequestRow("chatcmpl-1", "/v1/chat/completions", "search", now)
table.as_json(now, tenant="search")
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from ridgeline.engine.scheduling.state import Status

KEPT = 500  # requests that have ended
SHOWN_ENDED = 20  # of these, to one viewer
SHOWN = 200  # live requests that are shown; the table says how many there are

RequestState = Literal["arrived", "waiting", "running"] | Status


@dataclass(slots=True)
class RequestRow:
    """One request. Times are those of the caller's clock."""

    request_id: str
    route: str
    tenant: str
    arrived: float
    num_prompt_tokens: int = 0
    num_samples: int = 1
    num_tokens: int = 0
    first: float | None = None  # its first token came
    last: float | None = None  # its last token so far came
    ended: float | None = None
    state: RequestState = "arrived"
    reason: str = ""

    def as_json(self, now: float) -> dict[str, Any]:
        until = now if self.ended is None else self.ended
        running_s = None if self.first is None or self.last is None else self.last - self.first
        more = self.num_tokens - self.num_samples
        return {
            "id": self.request_id,
            "route": self.route,
            "tenant": self.tenant,
            "state": self.state,
            "reason": self.reason,
            "age_s": until - self.arrived,
            "first_token_s": None if self.first is None else self.first - self.arrived,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_tokens": self.num_tokens,
            "tokens_per_s": more / running_s if running_s and more > 0 else None,
        }


class RequestTable:
    def __init__(self) -> None:
        self.live: dict[str, RequestRow] = {}  # in the order in which they came
        self._ended: deque[RequestRow] = deque(maxlen=KEPT)

    def end(self, row: RequestRow, status: Status, reason: str, now: float) -> None:
        del self.live[row.request_id]
        row.state, row.reason, row.ended = status, reason, now
        self._ended.append(row)

    def as_json(self, now: float, tenant: str | None = None) -> dict[str, Any]:
        """The oldest that live, and the newest that ended, first; those of one tenant, or all."""
        live = [row for row in self.live.values() if tenant in (None, row.tenant)]
        ended = (row for row in reversed(self._ended) if tenant in (None, row.tenant))
        return {
            "num_live": len(live),
            "live": [row.as_json(now) for row in live[:SHOWN]],
            "ended": [row.as_json(now) for row in islice(ended, SHOWN_ENDED)],
        }
