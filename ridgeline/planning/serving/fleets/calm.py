"""A replica while nothing is short: no page that a running request will ever need is missing, and
no two prompts begin alike. Then all that the scheduler decides follows from when requests came, and
who decodes changes only when a prompt ends or a request does: a round costs what changes in it, and
rounds in which nothing does cost nothing each.

Requests wait in the order they came, for seats and for the budget of a step; each that decodes has
a row in every step from the one behind its prompt to its last. What could be short of a page is
left to the real scheduler (`given_up`), which goes on from where this stands.

    calm = CalmRounds(config, times, log, clock, depth=2)
    if not calm.submit(ask): …
    if not calm.advance(until): calm.given_up(scheduler)

All times are ticks. The tests hold that they are those of the scheduler, planned step by step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from heapq import heappop, heappush
from typing import NamedTuple

from ridgeline.engine.scheduling.admission import MAX_LOOKUP_PAGES
from ridgeline.engine.scheduling.counting import Progress, SchedulerState
from ridgeline.engine.scheduling.scheduler import SchedulerConfig
from ridgeline.engine.scheduling.state import Ask, Stats
from ridgeline.planning.serving.fleets.served import RequestLog
from ridgeline.planning.serving.step_times import PredictedTimes, StepTicks, seconds_of


class OutStep(NamedTuple):
    """A step on the device."""

    step_id: int
    end: int
    prompts_ended: list[Hashable]  # requests that have their first token with it


class Clock:
    """Of one replica, in ticks."""

    __slots__ = ("busy", "device_free", "now")

    def __init__(self, since: int) -> None:
        self.now = since  # of its host: when it plans next
        self.device_free = since
        self.busy = 0  # of its device

    def launch(self, taken: StepTicks) -> int:
        """When a step has ended that is launched now. Its host comes to nothing else meanwhile."""
        begun = self.now
        self.now = begun + taken.launches
        end = max(max(begun, self.device_free) + taken.device, self.now)
        self.device_free = end
        self.busy += taken.device
        return end


def can_be_calm(config: SchedulerConfig, times: PredictedTimes) -> bool:
    """Whether prompts share nothing, rows have one window, and each that decodes a row."""
    plain = config.window is None and not config.prefix_cache
    return plain and times.windows == [None] and config.max_batch <= config.token_budget


class CalmRequest:
    __slots__ = ("ask", "end_step", "full", "last_step", "pages", "position", "prompt")

    def __init__(self, ask: Ask, page_size: int) -> None:
        self.ask = ask
        self.prompt = len(ask.prompt)
        self.full = self.prompt + ask.max_tokens
        self.pages = -(-self.full // page_size) + 1  # at most, and one that must be left
        self.position = 0  # of its prompt, planned
        self.last_step = 0  # that had a piece of its prompt
        self.end_step = 0  # that has its last token; known when its prompt is planned


class PromptPiece(NamedTuple):
    """Of a prompt."""

    request: CalmRequest
    first: int
    end: int

    @property
    def is_last(self) -> bool:
        return self.end == self.request.prompt


class CalmStep(NamedTuple):
    """A step on the device."""

    step_id: int
    end: int
    pieces: list[PromptPiece]


class CalmRounds:
    def __init__(
        self,
        config: SchedulerConfig,
        times: PredictedTimes,
        log: RequestLog,
        clock: Clock,
        depth: int,
        totals: Stats,
    ) -> None:
        """Nobody is here; totals go on from those before."""
        self._budget, self._size = config.token_budget, config.page_size
        self._most_tokens = config.num_pages * config.page_size
        self._times, self._log = times, log
        self._clock, self._depth = clock, depth
        self.is_idle = True
        self.num_requests = 0
        self._num_steps = totals.num_steps
        self._computed, self._prompt_tokens = totals.computed_tokens, totals.prompt_tokens
        self._room, self._seats = config.num_pages, config.max_batch
        self._queue: deque[CalmRequest] = deque()
        self._prefilling: list[CalmRequest] = []
        self._running: dict[CalmRequest, None] = {}  # those and the ones that decode, in order
        self._out: deque[CalmStep] = deque()
        # Of the next step: rows that decode, and the keys they read.
        self._rows, self._keys = 0, 0
        self._last_rows: list[int] = []  # a heap of steps behind which rows are gone
        # A heap of rows, the longest first: the step before their first key, and their last step.
        self._by_length: list[tuple[int, int]] = []
        self._ending: dict[int, list[CalmRequest]] = {}  # by the step with their last token

    def takes(self, ask: Ask) -> bool:
        """Whether the scheduler would not refuse it."""
        length = len(ask.prompt) + ask.max_tokens
        return length - 1 <= self._most_tokens and bool(
            ask.prompt and ask.max_tokens and not ask.output
        )

    def submit(self, ask: Ask) -> None:
        self.is_idle = False
        self.num_requests += 1
        self._queue.append(CalmRequest(ask, self._size))

    def advance(self, until: float, to_end: bool = False) -> bool:
        """All rounds that begin before `until`, or up to one in which a request ends. False where
        a page might be missing in the next one.
        """
        clock, present = self._clock, self.num_requests
        while clock.now < until and not self.is_idle:
            waits = self._prefilling or (self._queue and self._seats)
            if waits or not self._rows or len(self._out) != self._depth - 1:
                if not self._round():
                    return False
            else:
                self._jump(until, to_end)
            if to_end and self.num_requests < present:
                break
        return True

    def _round(self) -> bool:
        """Plan and launch a step, wait for the one that is due."""
        pieces = self._pieces()
        if pieces is None:
            return False
        planned = bool(pieces) or self._rows > 0
        if planned:
            self._launch(pieces)
        if self._out and (not planned or len(self._out) >= self._depth):
            self._receive(self._out.popleft())
        elif not planned:
            self.is_idle = True
        return True

    def _pieces(self) -> list[PromptPiece] | None:
        """Of prompts in the step that is planned now: those that have begun, and that begin. None
        where one that begins might miss a page some day.
        """
        pieces, budget, room, seats = [], self._budget - self._rows, self._room, self._seats
        for request in self._prefilling:
            if budget > 0:
                pieces.append(self._piece(request, budget))
                budget -= pieces[-1].end - pieces[-1].first
        lookups = 0
        for request in self._queue:
            if budget <= 0 or not seats or lookups >= MAX_LOOKUP_PAGES:
                break
            lookups += 1 + request.prompt // self._size
            seats -= 1
            room -= request.pages
            if room < 0:
                return None
            pieces.append(self._piece(request, budget))
            budget -= pieces[-1].end
        return pieces

    def _begin(self, request: CalmRequest) -> None:
        """The head of the queue runs."""
        self._queue.popleft()
        self._seats -= 1
        self._room -= request.pages
        self._prompt_tokens += request.prompt
        self._running[request] = None
        self._prefilling.append(request)

    def _piece(self, request: CalmRequest, budget: int) -> PromptPiece:
        """Up to a page's end if it is not all, as rows.py's `plan_piece` has it."""
        first, target = request.position, request.prompt
        end = min(target, first + budget)
        whole = end - end % self._size
        return PromptPiece(request, first, whole if end < target and whole > first else end)

    def _launch(self, pieces: list[PromptPiece]) -> None:
        """A step of all that decode, and of these."""
        rows, keys, longest = self._rows, self._keys, self._longest_row()
        tokens, samples, pairs = rows, rows, 0
        self._num_steps = step = self._num_steps + 1
        self._keys = keys + rows
        self._drop_rows()
        for piece in pieces:
            request, first, end = piece
            if not first:
                self._begin(request)
            new = end - first
            tokens += new
            pairs += new * first + new * (new + 1) // 2
            request.position, request.last_step = end, step
            if end == request.prompt:
                samples += 1
                self._begin_decoding(request, step)
        self._computed += tokens
        taken = self._times.step(tokens, samples, (keys,), pairs, longest)
        self._out.append(CalmStep(step, self._clock.launch(taken), pieces))

    def _begin_decoding(self, request: CalmRequest, step: int) -> None:
        """Its first token is in this step, and its rows begin with the next."""
        self._prefilling.remove(request)
        request.end_step = last = step + request.full - request.prompt - 1
        ending = self._ending.get(last)
        if ending is None:
            ending = self._ending[last] = []
            if last > step:
                heappush(self._last_rows, last)
        ending.append(request)
        if last > step:
            self._rows += 1
            self._keys += request.prompt + 1
            heappush(self._by_length, (step - request.prompt, last))

    def _longest_row(self) -> int:
        """Keys that the longest row reads in the next step; 0 where none is."""
        by_length, done = self._by_length, self._num_steps
        while by_length and by_length[0][1] <= done:
            heappop(by_length)
        return done - by_length[0][0] + 1 if by_length else 0

    def _drop_rows(self) -> None:
        """Of requests whose last token is in the step that was planned last."""
        step, last_rows = self._num_steps, self._last_rows
        while last_rows and last_rows[0] <= step:
            for request in self._ending[heappop(last_rows)]:
                self._rows -= 1
                self._keys -= request.full

    def _receive(self, out: CalmStep) -> None:
        clock = self._clock
        clock.now = max(clock.now, out.end)
        self._note(out)

    def _note(self, out: CalmStep) -> None:
        """Of a step that came back: first tokens and ends."""
        now = seconds_of(self._clock.now)
        for piece in out.pieces:
            if piece.is_last:
                self._log.note_first(piece.request.ask.request_id, now)
        for request in self._ending.pop(out.step_id, ()):
            self._log.note_finished(request.ask.request_id, now)
            self.num_requests -= 1
            self._seats += 1
            self._room += request.pages
            del self._running[request]

    def _jump(self, until: float, to_end: bool) -> None:
        """Rounds in which nobody begins and no row ends but with the last, which begin before
        `until`. With `overlap` the first brings the step that is out.
        """
        most = self._last_rows[0] - self._num_steps
        out = self._out.pop() if self._out else None
        if out is not None and (self._queue or to_end) and out.step_id in self._ending:
            most = 1  # who ends makes room, or is waited for
        clock, rows, lag = self._clock, self._rows, self._depth - 1
        base, longest = self._times.of_rows(rows), self._longest_row()
        series, holds = base.series((self._keys,), (rows,), longest)
        most = min(most, holds)
        start = max(clock.now, clock.device_free)
        count = most
        if start + series.total(most - lag) >= until:
            count = min(most, max(1, series.num_until(until - start) + lag))
        taken = series.total(count)
        if out is not None:
            clock.now = start
            self._note(out)
        clock.now, clock.device_free = start + series.total(count - lag), start + taken
        clock.busy += taken
        self._num_steps += count
        self._computed += count * rows
        self._keys += count * rows
        self._drop_rows()
        last = CalmStep(self._num_steps, clock.device_free, [])
        if lag:
            self._out.append(last)
        elif last.step_id in self._ending:
            self._note(last)

    def given_up(self) -> tuple[SchedulerState, deque[OutStep]]:
        """Where everything stands: for the scheduler, and of the step that is out, if one is."""
        assert len(self._out) < 2, "a round ends with one step out at most"
        received = self._num_steps - len(self._out)
        state = SchedulerState(
            num_steps=self._num_steps,
            computed_tokens=self._computed,
            prompt_tokens=self._prompt_tokens,
            running=[_progress(each, self._num_steps, received) for each in self._running],
            waiting=[request.ask for request in self._queue],
            pieces=_ends(self._out[0].pieces) if self._out else None,
        )
        return state, deque(
            OutStep(out.step_id, out.end, _prompts_ended(out.pieces)) for out in self._out
        )


def _progress(request: CalmRequest, planned: int, received: int) -> Progress:
    """Of one that runs, where so many steps are planned and so many have come back."""
    ask, last = request.ask, request.end_step
    if not last:
        return Progress(ask, request.position, 0, request.last_step)
    first = last - ask.max_tokens + 1  # the step with its first token
    own = min(planned, last)
    made = max(0, min(received, last) - first + 1)
    return Progress(ask, request.prompt + own - first, made, own)


def _prompts_ended(pieces: list[PromptPiece]) -> list[Hashable]:
    return [piece.request.ask.request_id for piece in pieces if piece.is_last]


def _ends(pieces: list[PromptPiece]) -> dict[Hashable, int]:
    return {piece.request.ask.request_id: piece.end for piece in pieces}
