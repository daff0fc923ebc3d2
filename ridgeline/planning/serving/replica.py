"""One engine, simulated: the real scheduler plans each step, `PredictedTimes` says what it takes,
and the tokens come back when it is over. Nothing is computed.

The order of things is the engine's loop (engine/local/loop.py): plan, launch, wait for the oldest
step. With `overlap` a step is planned while the one before it is on the device. Between an arrival,
a stream's end and a shortage of pages running requests only grow; with `jumps` such rounds are
taken at once, to the same times, bit by bit.

    replica = SimulatedReplica(config, times, RequestLog())
    replica.submit(ask, now=0.0)
    replica.advance(until=math.inf)
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Hashable
from typing import NamedTuple

from ridgeline.engine.scheduling.counting import CountedStep, CountingScheduler
from ridgeline.engine.scheduling.scheduler import MAX_STEPS_OUT, SchedulerConfig
from ridgeline.engine.scheduling.state import Ask, Stats
from ridgeline.planning.serving.served import RequestLog
from ridgeline.planning.serving.step_times import PredictedTimes

MOST_ROUNDS = 1 << 20  # taken at once


class OutStep(NamedTuple):
    """A step on the device."""

    step_id: int
    end: float
    prompts_ended: list[Hashable]  # requests that have their first token with it


class SimulatedReplica:
    def __init__(
        self,
        config: SchedulerConfig,
        times: PredictedTimes,
        log: RequestLog,
        *,
        overlap: bool = True,
        jumps: bool = True,
        since: float = 0.0,
    ) -> None:
        self.scheduler = CountingScheduler(config)
        self.now = since  # of its host: when it plans next
        self.num_requests = 0  # there, and not ended
        self.busy_s = 0.0  # its device
        self._times, self._log, self._jumps = times, log, jumps
        self._depth = MAX_STEPS_OUT if overlap else 1
        self._out: deque[OutStep] = deque()
        self._device_free = since
        self._is_idle = True

    @property
    def stats(self) -> Stats:
        return self.scheduler.stats()

    @property
    def next_time(self) -> float:
        """When it does something again; infinity while nobody asks."""
        return math.inf if self._is_idle else self.now

    def submit(self, ask: Ask, now: float) -> None:
        """A request reaches it. `advance(until=now)` comes first."""
        if self._is_idle:
            self.now, self._is_idle = max(self.now, now), False
        self.num_requests += 1
        self.scheduler.submit(ask)
        self._note_ended()

    def advance(self, until: float) -> None:
        """All it does before `until`."""
        while self.now < until and not self._is_idle:
            if not (self._jumps and self._jump(until)):
                self._round()

    def advance_to_end(self, until: float) -> float | None:
        """Up to when a request ends, if one does before `until`; when that is."""
        present = self.num_requests
        while self.now < until and not self._is_idle and self.num_requests == present:
            if not (self._jumps and self._jump(until)):
                self._round()
        return self.now if self.num_requests < present else None

    def _round(self) -> None:
        """As the engine's loop advances: plan and launch a step, wait for the one that is due."""
        step = self.scheduler.count(self.now)
        if step is not None:
            self._launch(step)
        if self._out and (step is None or len(self._out) >= self._depth):
            self._receive(self._out.popleft())
        elif step is None:
            self._is_idle = True

    def _launch(self, step: CountedStep) -> None:
        keys = self._keys(step.positions)
        seconds = self._times.seconds(step.num_tokens, step.num_samples, keys, step.num_pairs)
        self._device_free = max(self.now, self._device_free) + seconds
        self.busy_s += seconds
        self._out.append(OutStep(step.step_id, self._device_free, step.prompts_ended))

    def _keys(self, positions: list[int]) -> list[int]:
        """Keys that rows at these positions read, for each kind of window."""
        return [
            sum(positions) + len(positions)
            if window is None
            else sum(min(position + 1, window) for position in positions)
            for window in self._times.windows
        ]

    def _receive(self, out: OutStep) -> None:
        self.now = max(self.now, out.end)
        has_ended = self.scheduler.bring(out.step_id)
        for request_id in out.prompts_ended:
            self._log.note_first(request_id, self.now)
        if has_ended:
            self._note_ended()

    def _note_ended(self) -> None:
        for end in self.scheduler.take_ended():
            self.num_requests -= 1
            self._log.note_end(end, self.now)

    def _jump(self, until: float) -> bool:
        """Quiet rounds, all that begin before `until`. Whether there were any."""
        if len(self._out) != self._depth - 1:
            return False
        most = self.scheduler.num_quiet(MOST_ROUNDS)
        if not most:
            return False
        rounds = self._pass(most, until, self.scheduler.decoding_positions())
        last = self.scheduler.take_quiet(rounds)
        if self._out:
            self._out[0] = self._out[0]._replace(step_id=last, end=self._device_free)
        return True

    def _pass(self, most: int, until: float, positions: list[int]) -> int:
        """Time goes on by the steps of quiet rounds, at most so many; how many began before
        `until`.
        """
        rows, keys = len(positions), self._keys(positions)
        growth = _Growth(positions, self._times.windows)
        now, free, rounds, busy = self.now, self._device_free, 0, self.busy_s
        quiet_s = self._times.of_rows(rows)
        overlaps = self._depth > 1
        while rounds < most and now < until:
            seconds = quiet_s(keys)
            due = free
            free = (now if now > free else free) + seconds
            now = max(now, due) if overlaps else free
            busy += seconds
            growth.add_to(keys)
            rounds += 1
        self.now, self._device_free, self.busy_s = now, free, busy
        return rounds


class _Growth:
    """By how many keys a round more reads, while rows grow by a token each."""

    def __init__(self, positions: list[int], windows: list[int | None]) -> None:
        self._num_rows, self._windows, self._rounds = len(positions), windows, 0
        self._sorted = sorted(positions) if len(windows) > 1 or windows[0] is not None else []

    def add_to(self, keys: list[int]) -> None:
        for index, window in enumerate(self._windows):
            if window is None:
                keys[index] += self._num_rows
            else:  # rows at position p read p + 1 keys until that is the window
                keys[index] += bisect_left(self._sorted, window - 1 - self._rounds)
        self._rounds += 1
