"""The scheduler of who simulates: it decides what the engine's decides, with the same code, and
says of a step only how much is in it. Nothing is computed, so no token, slot or page has to reach
a device.

Most rounds of planning and receiving only give each running stream its next token. `num_quiet` says
how many such are ahead, and `take_quiet` takes them at once. Afterwards all is as it would be
behind so many rounds, but for which page of the pool is whose.

    scheduler = CountingScheduler(config)
    scheduler.submit(ask)
    counted = scheduler.count(now)
    counted.num_tokens, counted.positions, counted.num_pairs
    scheduler.bring(counted.step_id)
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ridgeline.engine.scheduling.rows import plan_late_tokens
from ridgeline.engine.scheduling.running import Running
from ridgeline.engine.scheduling.scheduler import Received, Scheduler, SchedulerConfig
from ridgeline.engine.scheduling.state import Ask, Stream
from ridgeline.engine.scheduling.step_plan import Step, StepPlan
from ridgeline.engine.scheduling.tables import Tables

NOTHING = StepPlan(0)
RECEIVED_TOKENS = 1 << 40  # of a step: prompts that come whole


class CountedStep(NamedTuple):
    """How much is in a step."""

    step_id: int
    num_tokens: int
    num_samples: int
    positions: list[int]  # of the rows that decode: how many tokens each has before it
    num_pairs: int  # of a prompt's token and a token it may see, itself included
    prompts_ended: list[Hashable]  # requests whose prompt's last piece it has


class Progress(NamedTuple):
    """How far a request is that runs."""

    ask: Ask
    position: int  # the next to be planned
    num_made: int  # tokens of its output that have
    last_step: int  # that was planned with it


class SchedulerState(NamedTuple):
    """All there is to know where nothing is kept for others and nobody was preempted."""

    num_steps: int
    computed_tokens: int
    prompt_tokens: int  # of those that have begun
    running: list[Progress]  # in order of rank
    waiting: list[Ask]  # the same
    # Of the last step, if it is out: prompts, and where they end. All that decode have a row in it.
    pieces: dict[Hashable, int] | None


class CountingStep(Step):
    """A step without the lists of its plan."""

    __slots__ = ("num_pairs", "positions")

    def __init__(self, step_id: int, budget: int) -> None:
        self.step_id, self.budget, self.num_lookups = step_id, budget, 0
        self.rows, self.samples, self.pieces, self.pins, self.leaving = [], [], [], [], []
        self.positions: list[int] = []
        self.num_pairs = 0
        self.plan = NOTHING

    def add_row(self, stream: Stream, token_ids: Sequence[int], slots: Sequence[int]) -> None:
        first, new = stream.position, len(token_ids)
        self.rows.append(stream)
        if stream.state == "decoding":
            self.positions.append(first)
        else:
            self.num_pairs += new * first + new * (new + 1) // 2
        self.budget -= new
        stream.last_step = self.step_id

    def add_sample(self, stream: Stream, num_drafts: int = 0, holds: bool = False) -> None:
        assert not num_drafts, "nothing is drafted"
        stream.last_step = self.step_id
        self.samples.append(stream)

    def close_decode_rows(self) -> None:
        self.budget -= len(self.rows)
        self.samples.extend(self.rows)

    def seat(self, stream: Stream, seat: int) -> None:
        stream.seat = seat

    def take_from_device(self, stream: Stream) -> None:
        """Its token is nobody's question."""

    def set_page(self, stream: Stream, index: int, page: int) -> None:
        """No device has a table."""

    def copy_page(self, source: int, page: int) -> None:
        self.pins.append(source)

    def close(self, num_decode_rows: int, num_draft_rows: int) -> StepPlan:
        return NOTHING


class CountingTables(Tables):
    """Nobody asks where keys and values are written, or which page is whose."""

    def slots(self, stream: Stream, first: int, end: int) -> range:
        return range(0)

    def extend(self, stream: Stream, end: int, step: Step) -> int:
        """Where nothing is kept for others, pages are free or somebody's: taken all at once."""
        wanted = -(-end // self.size) - len(stream.pages)
        if self.reuse or stream.copy_source is not None:
            return super().extend(stream, end, step)
        if wanted > 0:
            pages = self.cache.pool.take_some(wanted)
            stream.pages += pages
            if stream.promised:
                self.promise(stream, max(0, stream.promised - len(pages)))
        return min(len(stream.pages) * self.size, end)

    def release(self, stream: Stream) -> None:
        if self.reuse or stream.num_hit or stream.copy_source is not None or self.window:
            super().release(stream)
        else:
            self.cache.pool.give_back_some(stream.pages)
            self.promise(stream, 0)


def count_decode(running: Running, step: Step) -> None:
    """rows.py's `plan_decode`, without its lists."""
    assert isinstance(step, CountingStep), "for steps that are counted"
    rest, step_id = [], step.step_id
    add_row, add_position = step.rows.append, step.positions.append
    for stream in running.decoding[: step.budget]:
        position = stream.position
        if position >= stream.limit:
            if position < stream.full_length - 1:  # otherwise its last token is planned
                rest.append(stream)
            continue
        add_row(stream)
        add_position(position)
        stream.position = position + 1
        stream.last_step = step_id
    step.close_decode_rows()
    plan_late_tokens(running, rest, step)


class CountingScheduler(Scheduler):
    """Requests have a length to reach and no stop ids, and nothing is drafted. With `receives` keys
    and values of a request's prompt come with it (its output so far being a token): of all that is
    planned for it until it decodes, only that token is computed. One that is preempted begins anew.
    """

    _tables_type = CountingTables
    _step_type = CountingStep
    _plan_decode = staticmethod(count_decode)

    def __init__(self, config: SchedulerConfig, receives: bool = False) -> None:
        if receives:
            config = replace(config, token_budget=RECEIVED_TOKENS, prefix_cache=False)
        super().__init__(config)
        self._received: set[Hashable] | None = set() if receives else None

    def count(self, now: float = 0.0) -> CountedStep | None:
        """What `plan` would plan."""
        budget = self.token_budget
        if self.plan(now) is None:
            return None
        step = self._running.steps[self._num_steps]
        assert isinstance(step, CountingStep), "it makes no others"
        if self._received is not None:
            self._take_received(step, self._received)
        pieces = step.pieces
        return CountedStep(
            step.step_id,
            budget - step.budget,
            len(step.samples),
            step.positions,
            step.num_pairs,
            [stream.key[0] for stream, end in pieces if end == stream.target] if pieces else [],
        )

    def restore(self, state: SchedulerState) -> None:
        """Go on from there. Nobody may be here."""
        assert not self._requests, f"{len(self._requests)} requests are here"
        running, scratch = self._running, CountingStep(state.num_steps, 0)
        for progress in state.running:
            self.submit(progress.ask)
            stream = running.queue.head()
            assert stream is not None, "it was submitted"
            self._place(stream, progress, scratch)
        for ask in state.waiting:
            self.submit(ask)
        self._num_steps = running.received = state.num_steps
        if state.pieces is not None:
            running.received -= 1
            running.steps[state.num_steps] = self._step_out(state.num_steps, state.pieces)
        self._computed_tokens = state.computed_tokens
        self._admission.prompt_tokens = state.prompt_tokens

    def _place(self, stream: Stream, progress: Progress, scratch: CountingStep) -> None:
        """A stream that waits runs, and is so far."""
        tables, number = self._running.tables, stream.request.number
        self._admission.take_in(stream, tables.find(stream), scratch)
        tables.extend(stream, progress.position, scratch)
        stream.position = stream.prefilled = progress.position
        stream.tokens.extend(array("i", [number]) * progress.num_made)
        stream.last_step = progress.last_step
        if stream.position >= stream.target:
            tables.promise(stream, 0)
            self._running.decode(stream)

    def _step_out(self, number: int, pieces: Mapping[Hashable, int]) -> CountingStep:
        step = CountingStep(number, 0)
        for (request_id, _), stream in self._running.streams.items():
            end = pieces.get(request_id)
            if end is not None:
                step.pieces.append((stream, end))
            if stream.state == "decoding":
                step.samples.append(stream)
            if end is not None or stream.state == "decoding":
                step.rows.append(stream)
        return step

    def _take_received(self, step: CountingStep, known: set[Hashable]) -> None:
        for stream, end in step.pieces:
            if stream.key[0] not in known:
                known.add(stream.key[0])
                assert end == stream.target, "there is room for a whole prompt in a step"
                step.budget += end - 1
                step.num_pairs -= end * (end + 1) // 2
                step.positions.append(end - 1)

    def bring(self, step_id: int) -> bool:
        """The oldest step that is out has its tokens. Whether a request has ended with them."""
        return bool(self.receive(step_id, ()).finished)

    def num_quiet(self, most: int) -> int:
        """How many rounds, up to `most`, of planning a step and receiving the one before it have a
        token for each stream and nothing else: no prompt, no stream that ends, none that is short
        of a page. The step that is out, if any, must be such a one.
        """
        running = self._running
        if (
            running.prefilling
            or running.tables.window is not None
            or len(running.decoding) > self.token_budget
            or not self._admission.admits_nobody()
            or (running.steps and _quiet_step(running) is None)
        ):
            return 0
        last = self._num_steps if running.steps else None
        unplanned = 2 if last is None else 1  # a last token comes by a step that is brought
        for stream in running.decoding:
            left = stream.full_length - unplanned - stream.position
            if left < most:
                most = left
            if most < 1 or (last is not None and stream.last_step != last) or stream.copy_source:
                return 0
        return _with_pages(running, most) if running.decoding else 0

    def take_quiet(self, rounds: int) -> int:
        """So many of them at once; the number of the last step."""
        running = self._running
        self._num_steps += rounds
        self._computed_tokens += rounds * len(running.decoding)
        last = running.received = self._num_steps
        step = _quiet_step(running)
        if step is not None:
            running.steps = {last: step}
            step.step_id = last
            running.received -= 1
        scratch, extend = CountingStep(last, 0), running.tables.extend
        for stream in running.decoding:
            stream.position += rounds
            stream.last_step = last
            stream.tokens.extend(array("i", [stream.request.number]) * rounds)
            if stream.position > stream.limit:
                reach = extend(stream, stream.position, scratch)
                assert reach == stream.position, "quiet rounds have their pages"
                room = len(stream.pages) * running.tables.size
                stream.limit = min(room, stream.full_length - 1)
        return last

    def decoding_positions(self) -> list[int]:
        """Of the streams that decode: the position of the token each has next."""
        return [stream.position for stream in self._running.decoding]

    def _deliver(self, samples: list[Stream], tokens: Sequence[int]) -> Received:
        """A token for each sample; a request's tokens are its own number, so that no two answers
        are alike.
        """
        received = Received([], [], [])
        for stream in samples:
            if not stream.ended:
                known = stream.tokens
                known.append(stream.request.number)
                if len(known) >= stream.full_length:
                    self._finish_if_done(stream, stream.request.number, received)
        return received


def _quiet_step(running: Running) -> CountingStep | None:
    """The step that is out, if it is the only one and had a token for each stream that decodes, and
    nothing else.
    """
    if len(running.steps) != 1:
        return None
    (step,) = running.steps.values()
    others = step.pieces or step.leaving or step.pins
    if others or len(step.samples) != len(running.decoding):
        return None
    assert isinstance(step, CountingStep), "it makes no others"
    return step


def _with_pages(running: Running, most: int) -> int:
    """Of so many rounds, those for which there are pages."""
    streams, size = running.decoding, running.tables.size
    available = running.tables.cache.num_available

    def fits(rounds: int) -> bool:
        return available >= sum(
            max(0, -(-(stream.position + rounds) // size) - len(stream.pages)) for stream in streams
        )

    if len(streams) * (most // size + 1) <= available or fits(most):
        return most
    enough, too_many = 0, most
    while too_many - enough > 1:
        middle = (enough + too_many) // 2
        enough, too_many = (middle, too_many) if fits(middle) else (enough, middle)
    return enough
