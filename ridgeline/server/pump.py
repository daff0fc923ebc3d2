"""The one thread that touches the engine: it takes requests from the event loop, runs the engine,
and hands what came back over in batches.

While the event loop is busy batches pile up into one; a thread that is stuck with the engine keeps
nobody from being answered, and a deadline that passes meanwhile is told by the event loop. The
engine's process may die: its requests go on in another one (see supervisor.py). When none stays
alive, it is tried again after growing pauses.

    pump = Pump(engine, meters)
    pump.start(asyncio.get_running_loop())
    pump.submit(ticket)                 # its mailbox gets the events
    pump.release(ticket)                # cancels what has not ended
    pump.close()
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from ridgeline.engine import Delta, Engine, Output
from ridgeline.engine.execution.faults import reason_of
from ridgeline.engine.sampling.outputs import Event
from ridgeline.errors import RidgelineError
from ridgeline.server.door.refusals import RefusalError
from ridgeline.server.mailbox import Mailbox
from ridgeline.server.metrics.metrics import Meters
from ridgeline.server.protocol import ApiError, ParsedPrompt, refusal

log = logging.getLogger(__name__)

WAIT_S = 0.1  # without anything to do
SAMPLE_S = 1.0  # between two looks at where the engine stands
DOWN_S = 10.0  # that new requests wait for an engine which is being started
LATE_S = 0.05  # that the engine has to tell of a deadline itself, with the tokens it has
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0  # before an engine that was given up is tried again


@dataclass(eq=False)
class Ticket:
    """One HTTP request in the engine: an engine request for each of its prompts."""

    request_id: str
    prompts: Sequence[ParsedPrompt]
    mailbox: Mailbox
    priority: int = 0
    due: float | None = None  # when it is to be given up, by the monotonic clock
    salt: str = ""
    tenant: str = ""
    arrived: float = field(default_factory=time.monotonic)
    number: int = 0  # given by the pump: ids may come again, while the engine still ends the last
    timer: asyncio.TimerHandle | None = None  # the pump's, for its deadline

    def overdue(self, prompt: int) -> Output:
        """What is told of a prompt when the engine did not tell of its deadline in time."""
        parsed = self.prompts[prompt]
        return Output(
            request_id=RequestKey(self.number, prompt, self.request_id),
            status="cancelled",
            reason="its deadline passed while the engine was busy",
            num_prompt_tokens=len(parsed.ids),
            seed=parsed.sampling.seed or 0,
            completions=(),
            prompt_logprobs=None,
            embedding=None,
            first_token_s=None,
            total_s=time.monotonic() - self.arrived,
        )


class RequestKey(NamedTuple):
    """The engine's id of a request: of which ticket, which prompt, and for the log its name."""

    number: int
    prompt: int
    name: str


class Failed(NamedTuple):
    """A request that the engine did not take."""

    number: int
    error: ApiError


class Pump:
    def __init__(self, engine: Engine, meters: Meters) -> None:
        self.engine, self._meters = engine, meters
        self.busy_since = self.down_since = self.up_since = None  # type: float | None
        self._commands: deque[Callable[[], None]] = deque()
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        self._tickets: dict[int, Ticket] = {}  # the event loop's, by their numbers
        self._numbers = count(1)
        self._lock = threading.Lock()
        self._out: list[Event | Failed] = []  # to be handed over
        self._is_closing = False
        self._sampled = 0.0
        self._pause_s, self._revive_at = FIRST_PAUSE_S, None  # type: float, float | None
        self._thread = threading.Thread(target=self._run, name="pump", daemon=True)
        engine.be_patient(0.0)

    # The event loop's side.

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread.start()

    def check_up(self) -> None:
        """Refuse what would have to wait for an engine for long."""
        down, error = self.down_since, self.engine.broken
        if down is None or (error is None and time.monotonic() - down < DOWN_S):
            return
        why = "is being started again" if error is None else f"could not be started: {error}"
        message = f"the engine {why}; try again later"
        raise RefusalError(503, message, code="engine_down", retry_after_s=5)

    def submit(self, ticket: Ticket) -> None:
        ticket.number = next(self._numbers)
        self._tickets[ticket.number] = ticket
        if ticket.due is not None:  # asyncio's clock is the monotonic one
            ticket.timer = self._loop.call_at(ticket.due + LATE_S, self._give_up, ticket)
        self._command(lambda: self._add(ticket))

    def release(self, ticket: Ticket) -> None:
        """Nobody waits for it any more."""
        self._tickets.pop(ticket.number, None)
        if ticket.timer is not None:
            ticket.timer.cancel()
        if not ticket.mailbox.has_all:
            self._command(lambda: self._cancel(ticket))

    def _give_up(self, ticket: Ticket) -> None:
        """Its deadline has passed, and the engine has not said so."""
        for prompt in ticket.mailbox.missing:
            ticket.mailbox.put(prompt, ticket.overdue(prompt))
        ticket.mailbox.flush()
        self._command(lambda: self._cancel(ticket))

    def cancel(self, request_id: str) -> bool:
        """End a request as if it had failed; False if there is none."""
        ticket = self._named(request_id)
        if ticket is None:
            return False
        self._command(lambda: self._cancel(ticket))
        return True

    def _named(self, request_id: str) -> Ticket | None:
        tickets = self._tickets.values()
        return next((ticket for ticket in tickets if ticket.request_id == request_id), None)

    def fail_all(self, error: ApiError) -> None:
        for ticket in self._tickets.values():
            ticket.mailbox.fail(error)

    def holds(self, request_id: str) -> bool:
        return self._named(request_id) is not None

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        """End the thread, and the engine with it. Blocking."""
        self._command(self._stop)
        self._thread.join()
        os.close(self._reader)
        os.close(self._writer)

    @property
    def stalled_s(self) -> float:
        """For how long there has been work and no step."""
        busy, up = self.busy_since, self.up_since
        if busy is None or up is None or not self.engine.is_up:
            return 0.0
        since = time.monotonic() - max(busy, up)
        return max(0.0, min(since, self.engine.progress.idle_s))

    def _command(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        with suppress(BlockingIOError):  # full: it will wake up
            os.write(self._writer, b"!")

    def _deliver(self) -> None:
        with self._lock:
            events, self._out = self._out, []
        mailboxes: dict[int, Mailbox] = {}  # with news, by the numbers of their tickets
        for event in events:
            if isinstance(event, Failed):
                ticket = self._tickets.get(event.number)
                if ticket is not None:
                    ticket.mailbox.fail(event.error)
                continue
            key = _key_of(event)
            ticket = self._tickets.get(key.number)
            if ticket is not None:  # else nobody waits for it any more
                mailboxes[key.number] = ticket.mailbox
                ticket.mailbox.put(key.prompt, event)
        for mailbox in mailboxes.values():
            mailbox.flush()

    # The thread's side.

    def _run(self) -> None:
        while not self._is_closing:
            try:
                self._turn()
            except Exception:  # ours alone: another process may have what this one lost
                log.exception("the engine's thread failed, and goes on with another process")
                self.engine.restart()
                time.sleep(WAIT_S)
        self.engine.close()
        self._hand_over(self.engine.step())

    def _turn(self) -> None:
        self.engine.wait((self._reader,), WAIT_S)
        with suppress(BlockingIOError):
            os.read(self._reader, 4096)
        while self._commands:
            self._commands.popleft()()
        self._look()
        self._hand_over(self.engine.step())

    def _stop(self) -> None:
        self._is_closing = True

    def _add(self, ticket: Ticket) -> None:
        left = None if ticket.due is None else max(0.0, ticket.due - time.monotonic())
        try:
            for index, prompt in enumerate(ticket.prompts):
                self.engine.add(
                    prompt.ids,
                    prompt.sampling,
                    request_id=RequestKey(ticket.number, index, ticket.request_id),
                    priority=ticket.priority,
                    timeout_s=left,
                    salt=ticket.salt,
                    tenant=ticket.tenant,
                    pooling=prompt.pooling,
                )
        except Exception as error:
            if not isinstance(error, RidgelineError):
                log.exception("request %s could not be added", ticket.request_id)
                failure = ApiError(503, f"the engine failed: {reason_of(error)}", "server_error")
            else:
                failure = refusal(error)
            self._cancel(ticket)
            self._hand_over([Failed(ticket.number, failure)])

    def _cancel(self, ticket: Ticket) -> None:
        for index in range(len(ticket.prompts)):
            self.engine.cancel(RequestKey(ticket.number, index, ticket.request_id))

    def _look(self) -> None:
        """See how the engine is getting on."""
        now, engine = time.monotonic(), self.engine
        self.busy_since = (self.busy_since or now) if engine.has_work else None
        if engine.is_up != (self.down_since is None) or self.up_since is None:
            self._note_turn(engine.is_up, now)
        if engine.broken is not None:
            self._revive_later(now)
        if now - self._sampled >= SAMPLE_S:
            self._sampled = now
            self._meters.sample(engine.stats, engine.progress, engine.num_restarts)

    def _note_turn(self, is_up: bool, now: float) -> None:
        if is_up and self.down_since is not None:
            log.warning("engine up again after %.1f s", now - self.down_since)
        self.up_since, self.down_since = (now, None) if is_up else (None, self.down_since or now)

    def _revive_later(self, now: float) -> None:
        if self._revive_at is None:
            log.error("restarting the engine in %.0f s: %s", self._pause_s, self.engine.broken)
            self._revive_at = now + self._pause_s
            self._pause_s = min(LONGEST_PAUSE_S, self._pause_s * 2)
        elif now >= self._revive_at:
            self._revive_at = None
            self.engine.revive()

    def _hand_over(self, events: Sequence[Event | Failed]) -> None:
        if not events:
            return
        self._count(events)
        with self._lock:
            is_first = not self._out
            self._out.extend(events)
        if is_first:
            with suppress(RuntimeError):  # the event loop has ended: nobody is there
                self._loop.call_soon_threadsafe(self._deliver)

    def _count(self, events: Sequence[Event | Failed]) -> None:
        counts: dict[str, int] = {}
        for event in events:
            if isinstance(event, Delta):
                name = _key_of(event).name
                counts[name] = counts.get(name, 0) + len(event.tokens)
        if counts:
            self._meters.tokens(counts, time.monotonic())
            self._pause_s = FIRST_PAUSE_S  # it works


def _key_of(event: Event) -> RequestKey:
    key = event.request_id
    assert isinstance(key, RequestKey), f"only the pump adds requests, not who added {key!r}"
    return key
