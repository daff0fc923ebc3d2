"""Whether drafting pays off at all, measured: steps run in spans with and without drafts, and the
tokens per second of the two are compared.

The policy predicts from a table of costs, which can be wrong about the host, other work on the
machine and the waiting between steps; and preparing drafts costs something even in steps that end
up without any. The slower kind of span is tried again once the time its last trial lost is small
beside the time since: drafts that do not suit a workload should cost it less than 2%. Spans are
compared among steps with similar numbers of streams. Plain numbers, no tensors.

    pace = Pace()
    allowed = pace.allows(num_streams)
    drafts = policy.wanted(num_streams) if allowed else {}
    pace.note(num_streams, allowed, num_tokens=3, seconds=0.0007)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from statistics import median_low
from typing import NamedTuple

from ridgeline.engine.scheduling.step_costs import size_class

SPAN = 16  # steps
# Spans that are remembered: of those that may have drafts many, since drafts come in bursts.
KEPT = {False: 8, True: 64}
WORTH = 0.99  # times the plain way's tokens a second, for drafts to be allowed
ENOUGH = 2  # spans of each way before they are compared
LOST_SHARE = 0.01  # of the time, by trials of the way that loses
FEWEST = 4  # spans between two such trials, whatever was lost
DISTURBED = 2.0  # times the usual seconds: of a span that took longer, no more is counted
# tests/cpu/test_pace.py simulates what comes of these.


class PaceSpan(NamedTuple):
    num_tokens: int
    seconds: float


class DraftPace:
    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}
        self._of: dict[int, _Size] = {}  # the same for each number of streams that was there

    def allows(self, num_streams: int) -> bool:
        """Whether the step being planned, with this many streams, may have drafts."""
        return num_streams not in self._of or self._of[num_streams].allows

    def note(self, num_streams: int, allowed: bool, num_tokens: int, seconds: float) -> None:
        """Record a step: the tokens it produced and the seconds since the step before. `allowed`
        is what `allows` returned when it was planned, whether or not it then had drafts.
        """
        if num_streams not in self._of:
            self._of[num_streams] = self._sizes.setdefault(size_class(num_streams), _Size())
        size = self._of[num_streams]
        if allowed != size.allows:
            return  # it was out when the way changed, and is of neither span
        size.num_steps += 1
        size.num_tokens += num_tokens
        size.seconds += seconds
        if size.num_steps == SPAN:
            size.end_span()


class _Size:
    """Steps with similar numbers of streams."""

    __slots__ = ("_rest_s", "_spans", "allows", "num_steps", "num_tokens", "seconds")

    def __init__(self) -> None:
        self.allows = True  # in the span that runs
        self.num_steps, self.num_tokens, self.seconds = 0, 0, 0.0  # of the span that runs
        self._spans: dict[bool, deque[PaceSpan]] = {
            way: deque(maxlen=KEPT[way]) for way in (False, True)
        }
        self._rest_s = 0.0  # until the way that loses may be tried again

    def end_span(self) -> None:
        if self.seconds > 0:
            self._close(PaceSpan(self.num_tokens, self.seconds))
        self.num_steps, self.num_tokens, self.seconds = 0, 0, 0.0
        self.allows = self._next()

    def _close(self, span: PaceSpan) -> None:
        self._spans[self.allows].append(span)
        wins = self._wins()
        if self.allows != wins:
            took_s = min(span.seconds, _most_s(self._spans[self.allows]))
            lost_s = took_s - span.num_tokens / _rate(self._spans[wins])
            self._rest_s = max(lost_s / LOST_SHARE, FEWEST * took_s)
        else:
            self._rest_s -= span.seconds

    def _wins(self) -> bool:
        """Whether spans with drafts are faster, as far as is known."""
        plain, drafted = self._spans[False], self._spans[True]
        if not plain or not drafted:
            return bool(drafted)
        return _rate(drafted) > WORTH * _rate(plain)

    def _next(self) -> bool:
        if len(self._spans[True]) < ENOUGH:  # drafting is what was asked for: it is tried first
            return True
        if len(self._spans[False]) < ENOUGH:
            return False
        return self._wins() if self._rest_s > 0 else not self._wins()


def _rate(spans: Collection[PaceSpan]) -> float:
    """Tokens per second over all spans: drafts come in bursts, and most spans may have none."""
    most_s = _most_s(spans)
    return sum(span.num_tokens for span in spans) / sum(min(s.seconds, most_s) for s in spans)


def _most_s(spans: Collection[PaceSpan]) -> float:
    """The most that one span may count: a step that captures a graph is slow only once."""
    return DISTURBED * median_low(span.seconds for span in spans)
