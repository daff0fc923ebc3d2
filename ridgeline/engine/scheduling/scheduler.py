"""The scheduler: requests come in, plans of steps go out, tokens come back. Integers only.

A step has one token budget. Streams that decode get their next token first, then pieces of prompts
fill what is left, so that a long prompt never stalls them; streams join and leave at any step. A
step may be planned before the last one's tokens are known: a stream has positions *planned* and
tokens *known*, and between them at most one token that only the device has, or one and the drafts
before it that turn out right. Each request ends exactly once, as finished, refused, cancelled or
failed: see `take_ended`.

    scheduler = Scheduler(SchedulerConfig(num_pages=4096))
    scheduler.submit(Ask("a", prompt, max_tokens=64))
    while (plan := scheduler.plan(now)) is not None:
        received = scheduler.receive(plan.step_id, run(plan))

Rows are made in rows.py, admission is admission.py's, running and preempted streams running.py's.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ridgeline.engine.requests.request import FinishReason
from ridgeline.engine.scheduling.admission import Admission
from ridgeline.engine.scheduling.prefix_cache import PrefixCache
from ridgeline.engine.scheduling.rows import note_drafts, plan_decode, plan_drafts
from ridgeline.engine.scheduling.running import Running
from ridgeline.engine.scheduling.state import (
    Ask,
    End,
    Request,
    Stats,
    Status,
    Stream,
    StreamKey,
    duplicate_id,
)
from ridgeline.engine.scheduling.step_plan import Step, StepPlan
from ridgeline.engine.scheduling.tables import Tables
from ridgeline.engine.scheduling.waiting import Deadlines
from ridgeline.errors import UsageError

MAX_STEPS_OUT = 2  # planned and not yet back, the newest included


@dataclass(frozen=True)
class SchedulerConfig:
    num_pages: int  # of the KV cache
    page_size: int = 64  # tokens a page
    token_budget: int = 8192  # tokens a step
    max_batch: int = 512  # streams that run at once: lines of the device's page table
    window: int | None = None  # tokens the widest layer sees; None when one sees all
    prefix_cache: bool = True  # keep pages for requests that begin alike
    # Whether a stream is planned on behind drafts that have not come back: where the device can
    # move its rows (see `StepPlan.moved_tokens`).
    ahead_of_drafts: bool = False

    def __post_init__(self) -> None:
        for name in ("num_pages", "page_size", "token_budget", "max_batch", "window"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} is {value}; give at least 1")


class Received(NamedTuple):
    """What a step brought: tokens, each with the stream it belongs to, and the samples that are
    done with them.
    """

    keys: list[StreamKey]
    tokens: list[int]
    finished: list[tuple[StreamKey, FinishReason]]


class Scheduler:
    # What counting.py has in their place, where nothing is computed.
    _tables_type: type[Tables] = Tables
    _step_type: type[Step] = Step
    _plan_decode = staticmethod(plan_decode)

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.token_budget = config.token_budget  # may be changed between steps
        self.cache = PrefixCache(config.num_pages, config.page_size)
        tables = self._tables_type(self.cache, config.window, config.prefix_cache)
        self._running = Running(tables, config.max_batch, ahead=config.ahead_of_drafts)
        self._admission = Admission(self._running)
        self._deadlines = Deadlines()
        self._requests: dict[Hashable, Request] = {}
        self._ended: list[End] = []
        self._num_submitted = 0
        self._num_steps = 0
        self._computed_tokens = 0
        self._drafted_tokens = 0
        self._accepted_tokens = 0

    def submit(self, ask: Ask) -> None:
        """Take a request into the queue, or refuse it if it can never run."""
        if ask.request_id in self._requests:
            raise duplicate_id(ask.request_id)
        refusal = self._refusal(ask)
        if refusal is not None:
            self._ended.append(End(ask.request_id, "refused", refusal))
            return
        self._num_submitted += 1
        request = self._requests[ask.request_id] = Request(ask, self._num_submitted)
        tokens = array("i", ask.prompt)
        tokens.extend(ask.output)
        self._running.queue.push(self._running.new_stream(request, 0, tokens))
        self._deadlines.add(ask.request_id, ask.deadline)

    def cancel(self, request_id: Hashable, reason: str = "cancelled") -> bool:
        """End a request wherever it is; False if it has ended already."""
        return self._end_request(request_id, "cancelled", reason)

    def fail(self, request_id: Hashable, reason: str) -> bool:
        """End a request whose computation went wrong; call it before `receive` of that step. What
        it has computed is not kept for others.
        """
        request = self._requests.get(request_id)
        for stream in request.streams if request is not None else ():
            stream.failed = True
            self._running.tables.forget(stream)
        return self._end_request(request_id, "failed", reason)

    def finish(self, request_id: Hashable, sample: int = 0) -> bool:
        """End one sample because its text is complete (a stop string); False if it has ended, or
        not begun because the prompt of several samples is not yet computed.
        """
        stream = self._running.streams.get((request_id, sample))
        if stream is None or not stream.request.forked:
            return False
        self._finish_stream(stream, "stop")
        return True

    def take_ended(self) -> list[End]:
        """The requests that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def reset(self) -> None:
        """The device has lost everything: planned steps will not come back, and no page holds
        anything. Requests start again from the tokens that are known.
        """
        self._running.lose_device()

    def known_tokens(self, key: StreamKey) -> array[int]:
        """A live stream's prompt and output as far as the host knows it; not to be changed."""
        return self._running.streams[key].tokens

    def num_known(self, key: StreamKey) -> int | None:
        """How many those are; None if the stream has ended."""
        stream = self._running.streams.get(key)
        return None if stream is None else len(stream.tokens)

    @property
    def num_decoding(self) -> int:
        """Streams that are past their prompt."""
        return len(self._running.decoding)

    def stats(self) -> Stats:
        running, free, cached = self._running, self.cache.pool.num_free, self.cache.num_cached
        return Stats(
            num_pages_free=free,
            num_pages_used=self.config.num_pages - free - cached,
            num_pages_cached=cached,
            num_waiting=running.queue.num_waiting,
            num_following=running.num_following,
            num_prefilling=len(running.prefilling),
            num_decoding=len(running.decoding),
            num_steps=self._num_steps,
            prompt_tokens=self._admission.prompt_tokens,
            hit_tokens=self._admission.hit_tokens,
            computed_tokens=self._computed_tokens,
            num_preemptions=running.num_preemptions,
            drafted_tokens=self._drafted_tokens,
            accepted_tokens=self._accepted_tokens,
        )

    def plan(
        self, now: float = 0.0, drafts: Mapping[StreamKey, int] | None = None
    ) -> StepPlan | None:
        """The next step; None when nothing can run now (if a step is out: before it comes back).
        `drafts` says for which streams how many tokens are drafted, at most.
        """
        running = self._running
        assert len(running.steps) < MAX_STEPS_OUT, f"{len(running.steps)} steps are out"
        self._end_overdue(now)
        running.num_short = 0
        step = self._step_type(self._num_steps + 1, self.token_budget)
        running.steps[step.step_id] = step
        drafting = note_drafts(running, drafts) if drafts else []
        self._plan_decode(running, step)
        num_decode_rows = len(step.rows)
        if drafting:
            plan_drafts(running, drafting, step)
        num_draft_rows = len(step.rows) - num_decode_rows
        self._admission.plan_prompts(step)
        if not step.rows:
            self._discard(step)
            return None
        self._num_steps += 1
        self._computed_tokens += self.token_budget - step.budget
        return step.close(num_decode_rows, num_draft_rows)

    def receive(
        self, step_id: int, tokens: Sequence[int], counts: Sequence[int] | None = None
    ) -> Received:
        """The tokens of the oldest step that is out: one for each sample, or as many as `counts`
        says, which steps with drafts need (the drafts accepted, and the token after them).
        """
        running = self._running
        assert step_id == next(iter(running.steps), None), f"step {step_id} is not the oldest out"
        step = running.steps.pop(step_id)
        running.received = step_id
        for stream, end in step.pieces:
            self._advance(stream, end)
        if counts is None:
            assert not step.plan.num_draft_rows, f"step {step_id} has drafts and needs counts"
            received = self._deliver(step.samples, tokens)
        else:
            received = self._deliver_counted(step, tokens, counts)
        for stream in step.leaving:
            running.leave(stream)
        running.tables.unpin(step)
        if self.config.window is not None:
            for stream in step.samples:
                running.tables.slide(stream)
        return received

    def _advance(self, stream: Stream, end: int) -> None:
        """A piece of a prompt has been computed."""
        running = self._running
        stream.prefilled = end
        if stream.state == "leaving":
            return
        running.tables.store(stream, with_last=end == stream.target)
        running.wake(running.following.reached(stream))
        if end < stream.target:
            running.following.announce(stream)
        else:
            running.following.withdraw(stream)
        running.tables.slide(stream)
        if end == stream.full_length:  # nothing was to be sampled
            self._finish_stream(stream, "length")

    def _deliver(self, samples: list[Stream], tokens: Sequence[int]) -> Received:
        """One token for each sample. After `plan_decode` the second loop whose cost counts."""
        received = Received([], [], [])
        add_key, add_token = received.keys.append, received.tokens.append
        for stream, token in zip(samples, tokens, strict=True):
            if stream.ended:
                continue
            known = stream.tokens
            known.append(token)
            add_key(stream.key)
            add_token(token)
            if token in stream.stop_ids or len(known) >= stream.full_length:
                self._finish_if_done(stream, token, received)
        return received

    def _deliver_counted(
        self, step: Step, tokens: Sequence[int], counts: Sequence[int]
    ) -> Received:
        """As many tokens for each sample as counted, less what follows its end."""
        received, start = Received([], [], []), 0
        all_drafts = step.plan.sample_drafts
        for stream, drafts, count in zip(step.samples, all_drafts, counts, strict=True):
            assert 1 <= count <= 1 + drafts, f"{count} tokens from a row with {drafts} drafts"
            for token in tokens[start : start + count]:
                if not stream.ended:
                    stream.tokens.append(token)
                    received.keys.append(stream.key)
                    received.tokens.append(token)
                    self._finish_if_done(stream, token, received)
            if drafts:
                stream.position += count - 1
                if stream.last_step == step.step_id:
                    stream.unsure = 0
                self._drafted_tokens += drafts
                self._accepted_tokens += count - 1
            start += count
        assert start == len(tokens), f"{len(tokens)} tokens came, and {start} are counted"
        return received

    def _finish_if_done(self, stream: Stream, token: int, received: Received) -> None:
        ask = stream.request.ask
        reason: FinishReason
        if token in ask.stop_ids and len(stream.tokens) - len(ask.prompt) > ask.min_tokens:
            reason = "stop"
        elif len(stream.tokens) >= stream.full_length:
            reason = "length"
        else:
            return
        received.finished.append((stream.key, reason))
        self._finish_stream(stream, reason)

    def _finish_stream(self, stream: Stream, reason: FinishReason) -> None:
        request = stream.request
        if len(request.streams) == 1:
            self._end_request(request.ask.request_id, "finished", reason)
        else:
            self._running.end(stream)

    def _end_request(self, request_id: Hashable, status: Status, reason: str) -> bool:
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        self._deadlines.discard(request_id)
        for stream in list(request.streams):
            self._running.end(stream)
        self._ended.append(End(request_id, status, reason, request.num_cached))
        return True

    def _end_overdue(self, now: float) -> None:
        for request_id in self._deadlines.passed(now):
            deadline = self._requests[request_id].ask.deadline
            self.cancel(request_id, f"its deadline of {deadline} passed")

    def _discard(self, step: Step) -> None:
        """The step has come out empty. That may only be while another is out, or nothing to do."""
        running = self._running
        del running.steps[step.step_id]
        idle = running.is_empty and running.queue.head() is None
        assert running.steps or idle, f"nothing can run, which must not be: {self.stats()}"

    def _refusal(self, ask: Ask) -> str | None:
        """Why a request can never run, or None."""
        config, length = self.config, len(ask.prompt)
        if length == 0:
            return "the prompt is empty; give at least one token"
        if ask.num_samples > config.max_batch:
            return (
                f"{ask.num_samples} samples were asked for; at most {config.max_batch} streams run "
                "at once; ask for fewer"
            )
        needed = self._running.tables.num_pages(max(length + ask.max_tokens - 1, length))
        if needed <= config.num_pages:
            return None
        return (
            f"{length} prompt and {ask.max_tokens} new tokens need {needed} pages of "
            f"{config.page_size} tokens; the cache has {config.num_pages}; shorten the prompt or "
            "lower max_tokens"
        )
