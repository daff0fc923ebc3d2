"""What a request must keep to be good: the time to its first token, and per token after it.

    bound = Bound(ttft_s=0.5, tpot_s=0.05)
    bound.holds(first_token_s=0.3, per_token_s=0.04)

`bench serve` holds answers of servers against it, `optimize` those of an engine under a trace.
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.errors import UsageError

USUAL_SHARE = 0.9  # of requests that must keep it


@dataclass(frozen=True)
class LatencyBound:
    ttft_s: float | None = None  # time to its first token
    tpot_s: float | None = None  # per token after it, on average

    def __post_init__(self) -> None:
        for name, value in (("--ttft-ms", self.ttft_s), ("--tpot-ms", self.tpot_s)):
            if value is not None and not 0 < value < float("inf"):
                raise UsageError(f"{name} is {value * 1000:g}; give milliseconds above 0")

    def __bool__(self) -> bool:
        return self.ttft_s is not None or self.tpot_s is not None

    @classmethod
    def of_ms(cls, ttft_ms: float | None, tpot_ms: float | None) -> LatencyBound:
        return cls(*(None if ms is None else ms / 1000 for ms in (ttft_ms, tpot_ms)))

    def holds(self, first_token_s: float | None, per_token_s: float | None) -> bool:
        """A request of one token has no time per token, and keeps what is asked of it."""
        if self.ttft_s is not None and (first_token_s is None or first_token_s > self.ttft_s):
            return False
        return self.tpot_s is None or per_token_s is None or per_token_s <= self.tpot_s

    def longest_s(self, num_tokens: int) -> float:
        """A good request is done after this long, as far as the bound says."""
        return (self.ttft_s or 0.0) + (self.tpot_s or 0.0) * max(num_tokens - 1, 1)

    def words(self) -> str:
        first = [] if self.ttft_s is None else [f"first token {1000 * self.ttft_s:g} ms"]
        later = [] if self.tpot_s is None else [f"{1000 * self.tpot_s:g} ms a token"]
        return ", ".join(first + later)
