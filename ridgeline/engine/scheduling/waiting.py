"""Streams that wait to be admitted, in order of rank, and the deadlines of requests.

The order is that of priorities, and between equals that of arrival. Nobody starves: when
`MAX_PASSED` requests of higher priorities have started before the one that has waited longest, that
one is next, and is not preempted for a priority again.

All are heaps in which what has ended meanwhile stays until it comes to the top: joining and leaving
cost O(log n), and nobody has to be searched for.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from heapq import heapify, heappop, heappush

from ridgeline.engine.scheduling.state import Rank, Stream

MAX_PASSED = 8
NEXT = -math.inf  # the precedence of a request whose turn has come


class WaitingQueue:
    __slots__ = ("_ages", "_heap", "_num_passed", "_num_pushed", "num_waiting")

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, Stream]] = []
        # By arrival; a stream that waits again, after a preemption, may be there twice.
        self._ages: list[tuple[float, int, int, int, Stream]] = []
        self._num_pushed = 0
        self._num_passed = 0  # starts in a row before the one that has waited longest
        self.num_waiting = 0

    def push(self, stream: Stream) -> None:
        stream.state = "waiting"
        self.num_waiting += 1
        self._num_pushed += 1
        heappush(self._heap, (stream.rank, stream))
        heappush(self._ages, (*stream.rank[1:], self._num_pushed, stream))

    def head(self) -> Stream | None:
        while self._heap and not _is_current(*self._heap[0]):
            heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> None:
        """Take the head out; its new state is for the caller to set."""
        self.num_waiting -= 1
        heappop(self._heap)

    def note_start(self, stream: Stream) -> None:
        """A stream has been taken out to run, perhaps before one that has waited longer."""
        oldest = self._oldest()
        if oldest is None or oldest.rank[1:] > stream.rank[1:]:
            self._num_passed = 0
            return
        self._num_passed += 1
        if self._num_passed >= MAX_PASSED:
            self._num_passed = 0
            oldest.request.precedence = NEXT
            oldest.rank = (NEXT, *oldest.rank[1:])
            heappush(self._heap, (oldest.rank, oldest))

    def discard(self, stream: Stream) -> None:
        """A stream of the queue has ended."""
        assert stream.state == "waiting", f"{stream.key} is {stream.state}, not in the queue"
        stream.state = "gone"
        self.num_waiting -= 1

    def _oldest(self) -> Stream | None:
        while self._ages and self._ages[0][-1].state != "waiting":
            heappop(self._ages)
        return self._ages[0][-1] if self._ages else None


def _is_current(rank: Rank, stream: Stream) -> bool:
    """Whether an entry still stands for a stream that waits, at the rank it has now."""
    return stream.state == "waiting" and stream.rank is rank


class Deadlines:
    """By request id. What has ended is forgotten, however far its deadline is."""

    __slots__ = ("_due", "_heap", "_num_added")

    def __init__(self) -> None:
        self._due: dict[Hashable, float] = {}
        self._heap: list[tuple[float, int, Hashable]] = []
        self._num_added = 0

    def add(self, request_id: Hashable, deadline: float | None) -> None:
        if deadline is not None:
            self._due[request_id] = deadline
            self._num_added += 1
            heappush(self._heap, (deadline, self._num_added, request_id))

    def discard(self, request_id: Hashable) -> None:
        """A request has ended, with a deadline or without."""
        if self._due.pop(request_id, None) is None:
            return
        if len(self._heap) > 64 + 2 * len(self._due):
            self._heap = [entry for entry in self._heap if self._due.get(entry[2]) == entry[0]]
            heapify(self._heap)

    def passed(self, now: float) -> list[Hashable]:
        """Requests whose deadline has come; each is given once."""
        passed = []
        while self._heap and self._heap[0][0] <= now:
            deadline, _, request_id = heappop(self._heap)
            if self._due.get(request_id) == deadline:
                del self._due[request_id]
                passed.append(request_id)
        return passed
