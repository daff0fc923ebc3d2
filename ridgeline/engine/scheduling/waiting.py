"""Streams that wait to be admitted, in order of rank, and the deadlines of requests.

Both are heaps in which what has ended meanwhile stays until it comes to the top: joining and
leaving cost O(log n), and nobody has to be searched for.
"""

from __future__ import annotations

from heapq import heappop, heappush

from ridgeline.engine.scheduling.state import Rank, Request, Stream


class WaitingQueue:
    __slots__ = ("_heap", "num_waiting")

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, Stream]] = []
        self.num_waiting = 0

    def push(self, stream: Stream) -> None:
        stream.state = "waiting"
        self.num_waiting += 1
        heappush(self._heap, (stream.rank, stream))

    def head(self) -> Stream | None:
        while self._heap and self._heap[0][1].state != "waiting":
            heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> None:
        """Take the head out; its new state is for the caller to set."""
        self.num_waiting -= 1
        heappop(self._heap)

    def discard(self, stream: Stream) -> None:
        """A stream of the queue has ended."""
        assert stream.state == "waiting", f"{stream.key} is {stream.state}, not in the queue"
        stream.state = "gone"
        self.num_waiting -= 1


class Deadlines:
    __slots__ = ("_heap",)

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []

    def add(self, request: Request) -> None:
        if request.ask.deadline is not None:
            heappush(self._heap, (request.ask.deadline, request.number, request))

    def passed(self, now: float) -> list[Request]:
        """Requests whose deadline has come, ended or not; each is given once."""
        due = []
        while self._heap and self._heap[0][0] <= now:
            due.append(heappop(self._heap)[2])
        return due
