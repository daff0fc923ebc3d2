"""How long a step takes, measured as the engine runs: plain steps by the number of tokens; and what
a step with drafts takes beside its tokens (whoever drafts, and the host that is waited for) by the
most drafts that a stream has.

A size's time is the median of its last few steps, so that one that compiled a kernel or met a busy
machine counts for nothing; between sizes it is interpolated. rehearsal.py measures a first curve
before anything has run. Pure numbers.

    costs = StepCosts()
    costs.note(num_tokens=1, seconds=0.004)
    costs.of(6, most_drafts=5) / costs.of(1)
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from statistics import median

KEPT = 9  # steps of a size that are remembered
TRUSTED = 3  # steps of a size after which its first measurement is forgotten


def size_class(num_tokens: int) -> int:
    """Each number up to 16 has its own class, above it they are an eighth wide."""
    if num_tokens <= 16:
        return num_tokens
    step = 1 << (num_tokens.bit_length() - 4)
    return (num_tokens + step // 2) // step * step


class Curve:
    """Medians at some sizes, and straight lines between them."""

    def __init__(self) -> None:
        self._first: dict[int, float] = {}
        self._last: dict[int, deque[float]] = {}
        self._points: list[tuple[int, float]] = []
        self._stale: set[int] = set()  # sizes whose point is older than what was noted of them

    def begin(self, num_tokens: int, value: float) -> None:
        """A first measurement, which counts until there are enough others."""
        size = size_class(num_tokens)
        self._first[size] = value
        self._stale.add(size)

    def note(self, num_tokens: int, value: float) -> None:
        """Every step comes here, and few ask afterwards: the rest is left to `of`."""
        size = size_class(num_tokens)
        if size not in self._last:
            self._last[size] = deque(maxlen=KEPT)
        self._last[size].append(value)
        self._stale.add(size)

    def of(self, num_tokens: int, grows: bool) -> float:
        """Between two sizes on the line between them, below the first what it has. Beyond the last:
        what that has, or if it `grows` on by its last line, where there is one.
        """
        while self._stale:
            self._set(self._stale.pop())
        points = self._points
        if not points:
            return 0.0
        index = bisect_left(points, (num_tokens, 0.0))
        if index < len(points) and (index == 0 or points[index][0] == num_tokens):
            return points[index][1]
        if index == len(points):
            return _beyond(points, num_tokens) if grows else points[-1][1]
        return _on_line(points[index - 1], points[index], num_tokens)

    def num_noted(self, num_tokens: int) -> int:
        return len(self._last.get(size_class(num_tokens), ()))

    def _set(self, size: int) -> None:
        last = self._last.get(size, ())
        known = list(last) if len(last) >= TRUSTED else [*last, *self._first_of(size)]
        index = bisect_left(self._points, (size, float("-inf")))
        if index < len(self._points) and self._points[index][0] == size:
            del self._points[index]
        self._points.insert(index, (size, median(known)))

    def _first_of(self, size: int) -> list[float]:
        return [self._first[size]] if size in self._first else []


def _beyond(points: list[tuple[int, float]], num_tokens: int) -> float:
    if len(points) == 1:  # what drafts add to it is measured by itself
        return points[0][1]
    return max(points[-1][1], _on_line(points[-2], points[-1], num_tokens))


def _on_line(a: tuple[int, float], b: tuple[int, float], x: int) -> float:
    return a[1] + (b[1] - a[1]) * (x - a[0]) / (b[0] - a[0])


class StepCosts:
    def __init__(self) -> None:
        self.plain = Curve()  # by tokens
        self.more = Curve()  # what drafts take beside their tokens, by the most of a stream

    def begin(self, num_tokens: int, seconds: float, most_drafts: int = 0) -> None:
        """A first measurement."""
        if most_drafts:
            self.more.begin(most_drafts, seconds - self.of(num_tokens))
        else:
            self.plain.begin(num_tokens, seconds)

    def note(self, num_tokens: int, seconds: float, most_drafts: int = 0) -> None:
        """A step has taken this long; `most_drafts` of one of its streams, 0 for a plain step."""
        if most_drafts:
            self.more.note(most_drafts, seconds - self.of(num_tokens))
        else:
            self.plain.note(num_tokens, seconds)

    def of(self, num_tokens: int, most_drafts: int = 0) -> float:
        """Seconds; 0 while nothing is known."""
        plain = self.plain.of(num_tokens, grows=True)
        return plain + self.more.of(most_drafts, grows=False) if most_drafts else plain

    def num_plain(self, num_tokens: int) -> int:
        """Plain steps of about this size that were measured as they ran, those remembered."""
        return self.plain.num_noted(num_tokens)
