"""Whether guessing ahead pays at all, by what really comes out: tokens a second of spans of steps
with drafts, beside spans without.

The policy weighs drafts by a table of costs, and a table can be wrong about what the host, the
machine's other work and the waiting between steps do. So steps are taken in spans, and what a
span brought in the time it took is held against the other way's. The way that loses is tried again
when the time that its last trial lost has become small beside all that has passed since. So guesses
that do not suit a workload cost it less than 2%. Spans are compared among steps of about as many
streams. Pure numbers.

    pace = Pace()
    drafts = policy.wanted(num_rows) if pace.allows(num_rows) else {}
    pace.note(num_rows, has_drafts=bool(drafts), num_tokens=3, seconds=0.0007)
"""

from __future__ import annotations

from collections import deque
from statistics import median

from ridgeline.engine.step_costs import size_class

SPAN = 16  # steps
KEPT = 5  # spans of each way that are remembered
ENOUGH = 2  # spans of each way before they are compared
MARGIN = 1.01  # times the pace of plain spans, for drafts to go on
LOST_SHARE = 0.01  # of the time, by trials of the way that loses
FEWEST = 4  # spans between two such trials, whatever was lost
# tests/cpu/test_pace.py simulates what comes of these.


class Pace:
    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}

    def allows(self, num_rows: int) -> bool:
        """Whether a step of so many streams may have drafts."""
        return self._size(num_rows).allows

    def note(self, num_rows: int, has_drafts: bool, num_tokens: int, seconds: float) -> None:
        """A step of streams that go on brought so many tokens, so long after the one before."""
        self._size(num_rows).note(has_drafts, num_tokens, seconds)

    def _size(self, num_rows: int) -> _Size:
        size = size_class(num_rows)
        if size not in self._sizes:
            self._sizes[size] = _Size()
        return self._sizes[size]


class _Size:
    """Steps of about as many streams."""

    __slots__ = ("_drafted", "_rates", "_rest_s", "_seconds", "_steps", "_tokens", "allows")

    def __init__(self) -> None:
        self.allows = True  # in the span that runs
        self._rates: dict[bool, deque[float]] = {way: deque(maxlen=KEPT) for way in (False, True)}
        self._steps, self._tokens, self._seconds = 0, 0, 0.0  # of the span that runs
        self._drafted = False  # whether one of its steps had drafts
        self._rest_s = 0.0  # until the way that loses may be tried again

    def note(self, has_drafts: bool, num_tokens: int, seconds: float) -> None:
        self._steps, self._tokens = self._steps + 1, self._tokens + num_tokens
        self._seconds, self._drafted = self._seconds + seconds, self._drafted or has_drafts
        if self._steps == SPAN:
            self._close()
            self._steps, self._tokens, self._seconds, self._drafted = 0, 0, 0.0, False
            self.allows = self._next()

    def _close(self) -> None:
        if self._seconds <= 0:
            return
        self._rates[self._drafted].append(self._tokens / self._seconds)
        wins = self._wins()
        if self._drafted != wins and self._rates[wins]:
            lost_s = self._seconds - self._tokens / median(self._rates[wins])
            self._rest_s = max(lost_s / LOST_SHARE, FEWEST * self._seconds)
        else:
            self._rest_s -= self._seconds

    def _wins(self) -> bool:
        """Whether drafts do, as far as is known."""
        plain, drafted = self._rates[False], self._rates[True]
        if not plain or not drafted:
            return bool(drafted)
        return median(drafted) > MARGIN * median(plain)

    def _next(self) -> bool:
        if len(self._rates[True]) < ENOUGH:  # guessing is what was asked for: it is tried first
            return True
        if len(self._rates[False]) < ENOUGH:
            return False
        return self._wins() if self._rest_s > 0 else not self._wins()
