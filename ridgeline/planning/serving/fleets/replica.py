"""One engine, simulated: the real scheduler plans each step, `PredictedTimes` says what it takes,
and the tokens come back when it is over. Nothing is computed.

The order of things is the engine's loop (engine/local/loop.py): plan, launch, wait for the oldest
step. With `overlap` a step is planned while the one before it is on the device. Between an arrival,
a stream's end and a shortage of pages running requests only grow; with `jumps` such rounds are
taken at once, to the same times, bit by bit. One that `receives` is sent prompts with their keys
and values, which others have computed. All times here are ticks (step_times.py).

    replica = SimulatedReplica(config, times, RequestLog())
    replica.submit(ask, now=0)
    replica.advance(until=math.inf)
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from itertools import pairwise

from ridgeline.engine.scheduling.counting import CountedStep, CountingScheduler
from ridgeline.engine.scheduling.scheduler import MAX_STEPS_OUT, SchedulerConfig
from ridgeline.engine.scheduling.state import Ask, Stats
from ridgeline.planning.serving.fleets.calm import CalmRounds, Clock, OutStep, can_be_calm
from ridgeline.planning.serving.fleets.served import RequestLog
from ridgeline.planning.serving.step_times import PredictedTimes, SteadySteps, seconds_of

MOST_ROUNDS = 1 << 20  # taken at once


class SimulatedReplica:
    def __init__(
        self,
        config: SchedulerConfig,
        times: PredictedTimes,
        log: RequestLog,
        *,
        overlap: bool = True,
        jumps: bool = True,
        since: int = 0,
        receives: bool = False,
    ) -> None:
        self.scheduler = CountingScheduler(config, receives)
        self.num_requests = 0  # there, and not ended
        self._times, self._log, self._jumps = times, log, jumps
        self._depth = MAX_STEPS_OUT if overlap else 1
        self._sees_all = times.windows == [None]
        self._out: deque[OutStep] = deque()
        self._clock = Clock(since)
        self._is_idle = True
        self._config, self._may_be_calm = config, can_be_calm(config, times)
        self._may_be_calm &= jumps and not receives
        self._calm = self._calm_again()

    @property
    def now(self) -> int:
        """Of its host: when it plans next."""
        return self._clock.now

    @property
    def busy(self) -> int:
        """Ticks of its device."""
        return self._clock.busy

    @property
    def stats(self) -> Stats:
        self._settle()
        return self.scheduler.stats()

    @property
    def next_time(self) -> float:
        """When it does something again; infinity while nobody asks."""
        return math.inf if self._is_idle else self._clock.now

    def submit(self, ask: Ask, now: int) -> None:
        """A request reaches it. `advance(until=now)` comes first."""
        clock = self._clock
        if self._is_idle:
            clock.now, self._is_idle = max(clock.now, now), False
            self._calm = self._calm or self._calm_again()
        self.num_requests += 1
        if self._calm is not None and self._calm.takes(ask):
            self._calm.submit(ask)
            return
        self._settle()
        self.scheduler.submit(ask)
        self._note_ended()

    def advance(self, until: float) -> None:
        """All it does before `until`."""
        self._advance(until, to_end=False)

    def advance_to_end(self, until: float) -> int | None:
        """Up to when a request ends, if one does before `until`; when that is."""
        present = self.num_requests
        self._advance(until, to_end=True)
        return self._clock.now if self.num_requests < present else None

    def _advance(self, until: float, to_end: bool) -> None:
        clock, present, calm = self._clock, self.num_requests, self._calm
        if calm is not None:
            is_done = calm.advance(until, to_end)
            self.num_requests, self._is_idle = calm.num_requests, calm.is_idle
            if is_done:
                return
            self._settle()
        while clock.now < until and not self._is_idle:
            if to_end and self.num_requests < present:
                return
            if not (self._jumps and self._jump(until)):
                self._round()

    def _calm_again(self) -> CalmRounds | None:
        """While nobody is here."""
        if not self._may_be_calm:
            return None
        totals = self.scheduler.stats()
        return CalmRounds(
            self._config, self._times, self._log, self._clock, self._depth, totals=totals
        )

    def _settle(self) -> None:
        """The scheduler goes on from where a calm replica stands."""
        if self._calm is not None:
            state, self._out = self._calm.given_up()
            self.scheduler.restore(state)
            self._calm = None

    def _round(self) -> None:
        """As the engine's loop advances: plan and launch a step, wait for the one that is due."""
        step = self.scheduler.count()
        if step is not None:
            self._launch(step)
        if self._out and (step is None or len(self._out) >= self._depth):
            self._receive(self._out.popleft())
        elif step is None:
            self._is_idle = True

    def _launch(self, step: CountedStep) -> None:
        keys = self._keys(step.positions)
        longest = max(step.positions) + 1 if step.positions else 0
        taken = self._times.step(step.num_tokens, step.num_samples, keys, step.num_pairs, longest)
        end = self._clock.launch(taken)
        self._out.append(OutStep(step.step_id, end, step.prompts_ended))

    def _keys(self, positions: list[int]) -> list[int]:
        """Keys that rows at these positions read, for each kind of window."""
        if self._sees_all:
            return [sum(positions) + len(positions)]
        return [
            sum(positions) + len(positions)
            if window is None
            else sum(min(position + 1, window) for position in positions)
            for window in self._times.windows
        ]

    def _receive(self, out: OutStep) -> None:
        self._clock.now = max(self.now, out.end)
        has_ended = self.scheduler.bring(out.step_id)
        for request_id in out.prompts_ended:
            self._log.note_first(request_id, seconds_of(self.now))
        if has_ended:
            self._note_ended()

    def _note_ended(self) -> None:
        for end in self.scheduler.take_ended():
            self.num_requests -= 1
            self._log.note_end(end, seconds_of(self.now))

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
            self._out[0] = self._out[0]._replace(step_id=last, end=self._clock.device_free)
        return True

    def _pass(self, most: int, until: float, positions: list[int]) -> int:
        """Time goes on by the steps of quiet rounds, at most so many; how many began before
        `until`.
        """
        base, windows = self._times.of_rows(len(positions)), self._times.windows
        keys, longest, rounds = self._keys(positions), max(positions) + 1, 0
        steps = _steady(positions, windows)
        left, growth = next(steps)
        while rounds < most and self.now < until:
            series, holds = base.series(keys, growth, longest + rounds)
            count = self._pass_steady(series, min(left, holds, most - rounds), until)
            keys = [known + count * more for known, more in zip(keys, growth, strict=True)]
            rounds += count
            left -= count
            if not left:
                left, growth = next(steps)
        return rounds

    def _pass_steady(self, series: SteadySteps, most: int, until: float) -> int:
        """With `overlap` a round ends when the step before its own is done."""
        start, lag = max(self.now, self._clock.device_free), int(self._depth > 1)
        count = most
        if start + series.total(most - lag) >= until:
            wanted = until - start
            count = 1 + bisect_left(range(1, most), wanted, key=lambda n: series.total(n - lag))
        taken = series.total(count)
        self._clock.now = start + series.total(count - lag)
        self._clock.device_free = start + taken
        self._clock.busy += taken
        return count


def _steady(positions: list[int], windows: list[int | None]) -> Iterator[tuple[int, list[int]]]:
    """For so many rounds, so many keys more each, for each kind of window, while rows grow by a
    token each: a row at position p reads p + 1 keys until that is the window.
    """
    limits = [window for window in windows if window is not None]
    left = sorted({limit - 1 - p for limit in limits for p in positions if p < limit - 1})
    for begin, end in pairwise((0, *left, MOST_ROUNDS)):
        yield (
            end - begin,
            [
                len(positions) if window is None else sum(window - 1 - p > begin for p in positions)
                for window in windows
            ],
        )
