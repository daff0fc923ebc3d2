"""The engine in its own process: the process itself, and the handle its starter holds. Commands go
in; tokens, not texts, come out.

A failed device stays failed for the process that uses it, so only that process is lost, and
supervisor.py starts another. One thread reads commands all the time, so that neither side blocks
on the other.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Protocol

import numpy as np

from ridgeline.engine.backend import EngineFacts
from ridgeline.engine.execution.ahead import Ahead
from ridgeline.engine.execution.faults import reason_of
from ridgeline.engine.execution.work import CostBase, StepMeter
from ridgeline.engine.grammars.library import in_own_process
from ridgeline.engine.local.local_backend import LocalBackend
from ridgeline.engine.local.loop import Loop
from ridgeline.engine.process.heartbeat import Heartbeat, WatchedRunner
from ridgeline.engine.requests.request import FinishReason
from ridgeline.engine.sampling.choosing import TokenLogprob
from ridgeline.engine.sampling.extras import DeviceJob, EmbeddingPart, PromptPart
from ridgeline.engine.sampling.live import LiveRequest
from ridgeline.engine.scheduling.state import Ask, End
from ridgeline.errors import HardwareError, RidgelineError
from ridgeline.recipe import Recipe

LOST_EXIT_CODE = 3
END_S = 5.0  # that a process is given to end by itself
QUIET_S = 0.5  # without a request, before time is taken for a graph


Setup = Callable[[LocalBackend], None]  # called in the process before its first step


@dataclass(frozen=True)
class EngineOrder:
    """How the engine is made there."""

    model: Path
    recipe: Recipe | None
    device: str
    num_pages: int | None
    setup: Setup | None = None  # a function of a module: it is sent by its name


class WaitingProcess(Protocol):
    """A process that waits for an order (cli/early.py), and the channels to it."""

    @property
    def process(self) -> Any: ...

    @property
    def connection(self) -> Connection: ...

    @property
    def memory(self) -> Any: ...


EarlyStart = Callable[[], WaitingProcess]


class Ready(NamedTuple):
    """The engine is loaded."""

    facts: EngineFacts
    costs: CostBase | None = None  # of a step's work on its device


class Refused(NamedTuple):
    """It cannot be loaded."""

    error: RidgelineError


class Lost(NamedTuple):
    """It cannot go on."""

    reason: str


class Token(NamedTuple):
    number: int  # of the request: its id there
    sample: int
    token: int
    logprob: TokenLogprob | None
    reason: FinishReason | None
    first_s: float | None = None  # of a request's first: since it was submitted


class EmbeddingState(NamedTuple):
    """An EmbeddingPart, without torch's machinery for sending tensors."""

    number: int
    first: int
    num_tokens: int
    values: np.ndarray


class Add(NamedTuple):
    ask: Ask
    job: DeviceJob


class Cancel(NamedTuple):
    number: int


class Finish(NamedTuple):
    """A stop string has ended an output."""

    number: int
    sample: int


WorkerMessage = Ready | Refused | Lost | Token | PromptPart | EmbeddingState | End
Command = Add | Cancel | Finish


class Relay(LiveRequest):
    """Stands for a request where it is computed: what comes is passed on as it is."""

    def __init__(
        self, request_id: Hashable, job: DeviceJob, outbox: list[WorkerMessage], meter: StepMeter
    ) -> None:
        assert isinstance(request_id, int), "supervisor.py numbers requests"
        self.request_id, self.job, self.outbox = request_id, job, outbox
        self.number, self.meter = request_id, meter

    def push(
        self, sample: int, token: int, logprob: TokenLogprob | None, reason: FinishReason | None
    ) -> bool:
        first_s = self.meter.answered(self.number)
        self.outbox.append(Token(self.number, sample, token, logprob, reason, first_s))
        return False

    def take_prompt(self, part: PromptPart) -> None:
        self.outbox.append(part)

    def take_embedding(self, part: EmbeddingPart) -> None:
        self.outbox.append(
            EmbeddingState(self.number, part.first, part.num_tokens, part.state.numpy())
        )

    def end(self, end: End) -> None:
        self.meter.left(self.number)
        self.outbox.append(end)


def run_worker(connection: Connection, heartbeat: Heartbeat, order: EngineOrder) -> None:
    """The process. It ends with the one that started it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the other one to act upon
    try:
        local = LocalBackend(
            order.model, order.recipe, device=order.device, num_pages=order.num_pages
        )
        if order.setup is not None:
            order.setup(local)
    except Exception as error:
        known = error if isinstance(error, RidgelineError) else HardwareError(reason_of(error))
        connection.send([Refused(known)])
        return
    heartbeat.note(local.progress, local.stats)
    try:
        connection.send([Ready(local.wait_until_ready(), local.costs)])
    except BrokenPipeError:
        return  # nobody is there any more
    inbox: SimpleQueue[Command] = SimpleQueue()
    threading.Thread(target=_read, args=(connection, inbox), daemon=True).start()
    loop = local.loop
    meter, ahead = StepMeter(local.runner.device), Ahead(local.runner)
    loop.runner = WatchedRunner(loop.runner, heartbeat, meter)  # type: ignore[assignment]
    _serve(loop, connection, heartbeat, inbox, meter, ahead)


def run_own(connection: Connection, heartbeat: Heartbeat, order: EngineOrder) -> None:
    """The process, where it is one of ours alone."""
    in_own_process()
    run_worker(connection, heartbeat, order)


def run_early(connection: Connection, memory: Any) -> None:
    """The same, where it was started before it was known what to load."""
    try:
        order: EngineOrder = connection.recv()
    except (EOFError, OSError):
        return  # nothing: the other one has ended
    run_own(connection, Heartbeat(memory=memory), order)


def _read(connection: Connection, inbox: SimpleQueue[Command]) -> None:
    try:
        while True:
            inbox.put(connection.recv())
    except (EOFError, OSError):
        os._exit(0)  # nobody is there any more


def _serve(
    loop: Loop,
    connection: Connection,
    heartbeat: Heartbeat,
    inbox: SimpleQueue[Command],
    meter: StepMeter,
    ahead: Ahead,
) -> None:
    outbox: list[WorkerMessage] = []
    while True:
        _obey_all(loop, inbox, outbox, meter, ahead)
        try:
            loop.advance()
        except Exception as error:  # what concerns one request is dealt with inside
            outbox.append(Lost(reason_of(error)))
            connection.send(outbox)
            os._exit(LOST_EXIT_CODE)  # a device in this state may not let a process end in order
        work = meter.news(at_once=not loop.has_work)
        heartbeat.note(loop.progress, loop.scheduler.stats(), work)
        if outbox:
            connection.send(outbox)
            outbox.clear()


def _obey_all(
    loop: Loop,
    inbox: SimpleQueue[Command],
    outbox: list[WorkerMessage],
    meter: StepMeter,
    ahead: Ahead,
) -> None:
    """Obey every command that has come, so that none waits longer than the step that runs; where
    there is nothing to run or to tell, wait for one.
    """
    while not (loop.has_work or outbox):
        meter.rest()
        _obey(loop, _next(inbox, ahead), outbox, meter)
    for _ in range(inbox.qsize()):
        if not loop.has_work:
            meter.rest()
        _obey(loop, inbox.get(), outbox, meter)


def _next(inbox: SimpleQueue[Command], ahead: Ahead) -> Command:
    """The next command. Nobody is served: where none comes, the time is used meanwhile."""
    has_more = True
    while has_more:
        try:
            return inbox.get(timeout=QUIET_S)
        except Empty:
            has_more = ahead.one()
    return inbox.get()


def _obey(loop: Loop, command: Command, outbox: list[WorkerMessage], meter: StepMeter) -> None:
    match command:
        case Add(ask, job):
            if not ask.output:  # those with output have run before
                meter.arrived(ask.request_id, ask.arrival)
            try:
                loop.submit(ask, Relay(ask.request_id, job, outbox, meter))
            except RidgelineError as error:
                meter.left(ask.request_id)
                outbox.append(End(ask.request_id, "failed", str(error)))
        case Cancel(number):
            loop.cancel(number)
        case Finish(number, sample):
            loop.finish(number, sample)


class Worker:
    """The handle of such a process, from its start to its end."""

    def __init__(self, order: EngineOrder, early: WaitingProcess | None = None) -> None:
        """`early` is a process that has begun already."""
        if early is None:
            self._start(order)
        else:
            self.heartbeat = Heartbeat(memory=early.memory)
            self._connection, self._process = early.connection, early.process
            with suppress(OSError):  # it has died, as `receive` tells
                self._connection.send(order)
        self.is_ready = False
        self.has_answered = False  # with a token, or the end of a request
        self._reason = ""

    def _start(self, order: EngineOrder) -> None:
        context = get_context("spawn")  # a fork would share the device, and locks that others hold
        self.heartbeat = Heartbeat(context)
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=run_own,
            args=(theirs, self.heartbeat, order),
            name="ridgeline-engine",
            daemon=True,
        )
        self._process.start()
        theirs.close()

    def send(self, command: Command) -> None:
        with suppress(OSError):  # it has died, as `receive` tells: all is sent again then
            self._connection.send(command)

    def wait(self, others: Sequence[int], seconds: float) -> None:
        """Until it has news, has died, or one of these file descriptors can be read."""
        wait([self._connection, *others], seconds)

    def receive(self, seconds: float) -> list[WorkerMessage] | None:
        """What has come, waited for up to so long; None when it has died."""
        try:
            if not self._connection.poll(seconds):
                return []
            messages: list[WorkerMessage] = self._connection.recv()
        except (EOFError, OSError):
            return None
        for message in messages:
            if isinstance(message, (Token, End)):
                self.has_answered = True
                continue
            self.is_ready = self.is_ready or isinstance(message, Ready)
            if isinstance(message, Lost):
                self._reason = message.reason
            if isinstance(message, Refused):
                self._reason = str(message.error)
        return messages

    def kill(self) -> None:
        self._process.kill()

    def bury(self) -> str:
        """Clean up after its death, and return the cause as far as it is known."""
        self.close()
        code = self._process.exitcode
        if self._reason or code is None:
            return self._reason or "its process did not end"
        if code < 0:
            return f"its process was killed by {signal.Signals(-code).name}"
        return f"its process ended with code {code}"

    def close(self) -> None:
        deadline = time.monotonic() + END_S
        self._connection.close()
        self._process.join(max(0.0, deadline - time.monotonic()))
        if self._process.is_alive():
            self._process.kill()
            self._process.join(END_S)
