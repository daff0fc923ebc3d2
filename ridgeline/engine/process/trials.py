"""Requests that were in the steps of a process that died: which of them are run alone, or a few
together, to find the one that kills it.

One at a time, for a few tokens each, is how the guilty one is found with a single further death.
Everybody else waits meanwhile, so where that would take longer than a restart, they are tried in
groups that double; a group that dies is halved, and tried again.

    trials.suspect(requests)
    for request in trials.next(): ...            # to be sent to the new process
    trials.passed()                              # those who may go on; a new group is next
    trials.died()                                # the one who did it, where it was alone
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

from ridgeline.engine.process.held import Held
from ridgeline.engine.scheduling.scheduler import MAX_STEPS_OUT

TRIAL_TOKENS = MAX_STEPS_OUT + 2  # of each output: a suspect has then passed the steps it was in
PATIENCE_S = 2.0  # that trials one at a time may take in any case
PREPARING_S = 2.0  # that everybody waits for the grammar of a suspect


class SuspectTrials:
    """`running` are those that are being tried."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.running: list[Held] = []
        self.start_s = 0.0  # what the last process took to come up
        self._waiting: deque[Held] = deque()
        self._clock, self._began = clock, 0.0
        self._size, self._may_grow = 1, True

    def __bool__(self) -> bool:
        """Whether anybody is tried, or waits for it."""
        return bool(self.running or self._waiting)

    def suspect(self, requests: Iterable[Held]) -> None:
        """Those that may wait for a grammar are tried last, and together."""
        if not self:
            self._size, self._may_grow = 1, True
        everybody = sorted([*self._waiting, *requests], key=lambda held: held.waits_for_grammar)
        self._waiting = deque(everybody)

    def next(self) -> list[Held]:
        """The next to be tried, none if there are none. One who was suspected before is tried alone
        until it ends.
        """
        assert not self.running, "one trial at a time"
        if self._may_grow and self._waiting and self._waiting[0].waits_for_grammar:
            self._size = len(self._waiting)
        while self._waiting and len(self.running) < self._size:
            if self.running and self._waiting[0].num_trials:
                break
            held = self._waiting.popleft()
            held.num_trials += 1
            self.running.append(held)
            if held.num_trials > 1:
                break
        self._began = self._clock()
        return self.running

    def passed(self) -> list[Held]:
        """Those of a trial that all have survived; none while it goes on."""
        if not all(held.num_trials == 1 and _has_passed(held) for held in self.running):
            return []
        done, self.running = self.running, []
        left_s = (self._clock() - self._began) * len(self._waiting) / max(1, len(done))
        if self._may_grow and left_s > max(PATIENCE_S, self.start_s):
            self._size *= 2
        return done

    def let_prepare(self) -> None:
        """Those of a first trial that have computed nothing for long, because their grammars are
        being compiled: nobody waits for that. Who was in a lost step has had its trial by this: if
        the process dies again, it is tried alone, however long its grammar takes.
        """
        if self._clock() - self._began < PREPARING_S:
            return
        for held in [held for held in self.running if held.waits_for_grammar]:
            if held.num_trials == 1:
                held.num_trials = int(held.was_in_lost_step)
                self.running.remove(held)

    def died(self) -> Held | None:
        """The process has died in a trial, if there was one. Who was alone in it did it; of several
        it is one, and they are tried again, half of them at a time.
        """
        tried, self.running = self.running, []
        if len(tried) == 1:
            return tried[0]
        for held in reversed(tried):
            held.num_trials -= 1
            self._waiting.appendleft(held)
        if tried:
            self._size, self._may_grow = max(1, len(tried) // 2), False
        return None

    def knows(self, held: Held) -> bool:
        return held in self.running or held in self._waiting

    def discard(self, held: Held) -> None:
        """It has ended."""
        if held in self.running:
            self.running.remove(held)
        if held in self._waiting:
            self._waiting.remove(held)


def _has_passed(tried: Held) -> bool:
    """Whether a suspect has survived its trial. One with all its tokens waits for its end."""
    enough = TRIAL_TOKENS * len(tried.live.samples)
    return bool(tried.numbers and tried.open_samples) and tried.num_tokens >= enough
