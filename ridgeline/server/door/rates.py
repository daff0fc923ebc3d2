"""How much a key may use in a minute: requests, and tokens of prompts and outputs.

Each is a bucket that holds a minute's worth and fills evenly, so that a burst is fine and the mean
is kept. A request is counted when it comes, whatever becomes of it; its tokens when it has ended,
since nobody knows before how many there will be. What was used beyond the bucket is owed: the key
is refused, with Retry-After, until that has been refilled.

    rates = Rates(requests_per_minute=60, tokens_per_minute=100_000)
    rates.count_request(caller)             # or a RefusalError with status 429
    rates.count_tokens("search", 1200)

For the event loop's thread alone: nothing is locked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from ridgeline.server.door.keys import Caller
from ridgeline.server.door.refusals import RefusalError

MINUTE_S = 60.0


class Bucket:
    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute, self._level, self._filled = per_minute, float(per_minute), now

    def wait_s(self, num: float, now: float) -> float:
        """Until it holds so much."""
        missing = num - self._level_at(now)
        return max(0.0, missing * MINUTE_S / self.per_minute)

    def take(self, num: float, now: float) -> None:
        self._level = self._level_at(now) - num
        self._filled = now

    def resized(self, per_minute: int, now: float) -> Bucket:
        """With the same debt, or the same share left."""
        bucket = Bucket(per_minute, now)
        level = self._level_at(now)
        bucket._level = level if level < 0 else level * per_minute / self.per_minute
        return bucket

    def _level_at(self, now: float) -> float:
        refilled = (now - self._filled) * self.per_minute / MINUTE_S
        return min(float(self.per_minute), self._level + refilled)


class Rates:
    def __init__(
        self,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """What a key may use that has no limits of its own; None: as much as it likes. `clock` is
        for tests.
        """
        self._requests_per_minute = requests_per_minute
        self._tokens_per_minute = tokens_per_minute
        self._clock = clock
        self._requests: dict[str, Bucket] = {}  # by tenant
        self._tokens: dict[str, Bucket] = {}

    def count_request(self, caller: Caller) -> None:
        now = self._clock()
        num_requests = caller.requests_per_minute or self._requests_per_minute
        num_tokens = caller.tokens_per_minute or self._tokens_per_minute
        requests = _bucket(self._requests, caller.tenant, num_requests, now)
        tokens = _bucket(self._tokens, caller.tenant, num_tokens, now)
        if tokens is not None:
            _check(tokens, "tokens", now)
        if requests is not None:
            _check(requests, "requests", now)
            requests.take(1, now)

    def count_tokens(self, tenant: str, num: int) -> None:
        bucket = self._tokens.get(tenant)
        if bucket is not None:
            bucket.take(num, self._clock())

    def keep(self, tenants: Collection[str]) -> None:
        """Forget all others: their keys are gone."""
        for buckets in (self._requests, self._tokens):
            for tenant in buckets.keys() - set(tenants):
                del buckets[tenant]


def _bucket(
    buckets: dict[str, Bucket], tenant: str, per_minute: int | None, now: float
) -> Bucket | None:
    """The tenant's bucket, at its present size; None where it is not limited."""
    if per_minute is None:
        buckets.pop(tenant, None)
        return None
    bucket = buckets.setdefault(tenant, Bucket(per_minute, now))
    if bucket.per_minute != per_minute:
        bucket = buckets[tenant] = bucket.resized(per_minute, now)
    return bucket


def _check(bucket: Bucket, unit: str, now: float) -> None:
    wait_s = bucket.wait_s(1, now)
    if wait_s > 0:
        raise RefusalError(
            429,
            f"this API key has used its {bucket.per_minute:,} {unit} per minute; try again in "
            f"{max(1, round(wait_s + 0.499)):,} s",
            code="rate_limit_exceeded",
            retry_after_s=wait_s,
        )
