"""How many requests are let in, so that those inside are served. Whoever comes while it is full
gets an error that says when to try again; nobody is refused later.

    entry = gate.enter("key-1f0ac3e2")     # or a RefusalError
    entry.widen(num_outputs)               # once it is known how many outputs are requested
    entry.leave()

For the event loop's thread alone: nothing is locked.
"""

from __future__ import annotations

import time
from collections import Counter, deque

from ridgeline.server.door.refusals import RefusalError, shutting_down

REMEMBERED = 64  # ends, from which it is guessed when there will be room
LONGEST_RETRY_S = 60.0


class GateEntry:
    """What one request takes up."""

    def __init__(self, gate: Gate, tenant: str) -> None:
        self._gate, self.tenant, self.size = gate, tenant, 1

    def widen(self, size: int) -> None:
        """Take up as much as `size` outputs. One that is larger than all there is may be alone."""
        size = min(size, self._gate.room)
        self._gate.check_room(size - self.size)
        self._gate.num_inside += size - self.size
        self.size = size

    def leave(self) -> None:
        """Once; again is nothing."""
        if self.size:
            self._gate.note_end(self)
            self.size = 0


class Gate:
    def __init__(self, max_running: int, max_waiting: int, max_per_tenant: int) -> None:
        self.room = max_running + max_waiting
        self.num_inside = 0  # outputs
        self.is_closed = False  # nobody enters any more
        self._max_per_tenant = max_per_tenant
        self._tenants: Counter[str] = Counter()
        self._ends: deque[float] = deque(maxlen=REMEMBERED)

    @property
    def num_requests(self) -> int:
        return self._tenants.total()

    def enter(self, tenant: str) -> GateEntry:
        self.check(tenant)
        self.num_inside += 1
        self._tenants[tenant] += 1
        return GateEntry(self, tenant)

    def check(self, tenant: str) -> None:
        """Refuse whoever would not be let in now."""
        if self.is_closed:
            raise shutting_down()
        if self._tenants[tenant] >= self._max_per_tenant:
            raise RefusalError(
                429,
                f"this API key already has {self._max_per_tenant} requests running; wait for one "
                "to finish",
                code="too_many_requests",
                retry_after_s=self._wait_for(1),
            )
        self.check_room(1)

    def check_room(self, more: int) -> None:
        if self.num_inside + more > self.room:
            raise RefusalError(
                429,
                f"the queue is full: {self.num_inside} of {self.room} outputs running or waiting, "
                f"{more} more requested; try again later",
                code="queue_full",
                retry_after_s=self._wait_for(self.num_inside + more - self.room),
            )

    def note_end(self, entry: GateEntry) -> None:
        self.num_inside -= entry.size
        self._tenants[entry.tenant] -= 1
        if not self._tenants[entry.tenant]:
            del self._tenants[entry.tenant]
        self._ends.append(time.monotonic())

    def _wait_for(self, num: int) -> float:
        """Seconds until so many have ended, if it goes on as it went."""
        if len(self._ends) < 2:
            return 1.0
        each = (time.monotonic() - self._ends[0]) / len(self._ends)
        return min(LONGEST_RETRY_S, num * each)
