"""The backend that outlives its process: when the device fails permanently or the process dies,
another is started, and requests continue from the tokens they already have.

Requests that were in the lost steps are suspects. They are retried first, one at a time or a few
together (trials.py), for a few tokens; a request that kills the process again is failed with the
reason, and the others continue. A request that is suspected a second time runs alone until it ends.
Outputs are the same as without the failure.

    with Engine.supervised("demo") as engine:     # otherwise as Engine("demo")
        print(engine.generate("The sky is")[0].text)
        engine.progress                           # even while the process is stuck in a step
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Sequence
from itertools import count
from pathlib import Path

import torch

from ridgeline.engine.backend import EngineFacts, EngineProgress
from ridgeline.engine.execution.faults import reason_of
from ridgeline.engine.execution.work import CostBase
from ridgeline.engine.loading.saved import Beside, beside
from ridgeline.engine.process.held import Held, HeldPart
from ridgeline.engine.process.trials import SuspectTrials
from ridgeline.engine.process.worker import (
    Cancel,
    EarlyStart,
    EmbeddingState,
    EngineOrder,
    Finish,
    Ready,
    Refused,
    Setup,
    Token,
    Worker,
    WorkerMessage,
)
from ridgeline.engine.sampling.extras import EmbeddingPart, PromptPart
from ridgeline.engine.sampling.live import LiveRequest
from ridgeline.engine.scheduling.state import Ask, End, Stats, Status, duplicate_id
from ridgeline.engine.scheduling.waiting import Deadlines
from ridgeline.errors import HardwareError, RidgelineError, UsageError
from ridgeline.models.checkpoint import resolve_model
from ridgeline.progress import Progress
from ridgeline.recipe import Recipe

log = logging.getLogger(__name__)

WAIT_S, SHORT_WAIT_S = 0.1, 0.005  # that `advance` waits for news at most; while suspects wait
MAX_BARREN = 5  # processes in a row that died before they had answered anything


class Supervisor:
    """A `Backend` (backend.py) whose loop is in another process."""

    num_replicas = 1

    def __init__(self, order: EngineOrder, early: EarlyStart | None = None) -> None:
        """`early` gives processes that have begun already."""
        self.num_restarts = 0  # processes that were started after the first
        self.patience_s = WAIT_S
        self.costs: CostBase | None = None
        self._order, self._early = order, early
        self._worker = self._new_worker()
        self._numbers = count(1)
        self._held: dict[Hashable, Held] = {}  # in the order in which they came
        self._deadlines = Deadlines()  # kept here too: the process may be busy, stuck or gone
        self._parts: dict[int, HeldPart] = {}  # those in the process, by their numbers there
        self._trials = SuspectTrials()
        self._begun_at = time.monotonic()  # when the process was started
        self._num_barren = self._num_steps = 0
        self._broken: RidgelineError | None = None

    @property
    def has_work(self) -> bool:
        return bool(self._held)

    @property
    def progress(self) -> EngineProgress:
        now = self._worker.heartbeat.progress
        return now._replace(num_steps=now.num_steps + self._num_steps)

    @property
    def stats(self) -> Stats:
        """Of the process that runs now."""
        return self._worker.heartbeat.stats

    @property
    def is_up(self) -> bool:
        """Whether the process is loaded; it may have died a moment ago."""
        return self._worker.is_ready and self._broken is None

    @property
    def broken(self) -> RidgelineError | None:
        """Why no process is started any more."""
        return self._broken

    def wait(self, others: Sequence[int], seconds: float) -> None:
        """Until the process has news, or one of these file descriptors can be read."""
        if self._broken is None:
            self._worker.wait(others, SHORT_WAIT_S if self._trials else seconds)
        else:
            time.sleep(SHORT_WAIT_S)

    def revive(self) -> None:
        """Try once more after giving up; the next death without an answer gives up at once."""
        assert self._broken is not None, "an engine that runs is not revived"
        self._broken, self._num_barren = None, MAX_BARREN - 1
        self._begin_anew()

    def wait_until_ready(self) -> EngineFacts:
        """The first process must come up; why not is an error."""
        while True:
            messages = self._worker.receive(WAIT_S)
            if messages is None:
                raise HardwareError(f"the engine could not be started: {self._worker.bury()}")
            for message in messages:
                if isinstance(message, Refused):
                    self.close()
                    raise message.error
                if isinstance(message, Ready):
                    self.costs = message.costs
                    return message.facts

    def submit(self, ask: Ask, live: LiveRequest) -> None:
        if self._broken is not None:
            raise self._broken
        if ask.request_id in self._held:
            raise duplicate_id(ask.request_id)
        self._hold(Held(ask, live, []))

    def _hold(self, held: Held) -> None:
        self._held[held.ask.request_id] = held
        self._deadlines.add(held.ask.request_id, held.ask.deadline)
        self._send_next()

    def cancel(self, request_id: Hashable) -> bool:
        """End a request now; False if it has ended already."""
        held = self._held.get(request_id)
        if held is None:
            return False
        self._end(held, End(request_id, "cancelled", "cancelled"))
        return True

    def advance(self) -> None:
        """Take the process's messages, and start another process if it has died."""
        for request_id in self._deadlines.passed(time.monotonic()):
            held = self._held[request_id]
            reason = f"its deadline of {held.ask.deadline} passed"
            self._end(held, End(request_id, "cancelled", reason))
        if self._broken is not None:
            return
        shortest = SHORT_WAIT_S if self._trials else WAIT_S
        messages = self._worker.receive(min(shortest, self.patience_s))
        if messages is None:
            self._restart()
            return
        for message in messages:
            if isinstance(message, Token):  # nearly all are: thousands a second
                self._take_token(message)
            else:
                self._take(message)
        self._send_next()

    def restart(self) -> None:
        """End the process as if it had died: `advance` starts another."""
        self._worker.kill()

    def close(self) -> None:
        """End the process, and all requests."""
        self._worker.close()
        self._give_up(HardwareError("the engine was closed"), "cancelled")

    def _send_next(self) -> None:
        """Send all waiting requests; while there are suspects, only those that are tried next."""
        if self._trials.running and not self._worker.heartbeat.in_steps():
            self._trials.let_prepare()
        if self._trials.running or self._broken is not None or not self._worker.is_ready:
            return
        if self._trials:
            if self._worker.heartbeat.in_steps():
                return  # the last one's
            for held in list(self._trials.next()):
                self._send(held)
            return
        for held in self._held.values():
            if not held.numbers:
                self._send(held)

    def _send(self, held: Held) -> None:
        for part, add in held.parts(self._numbers):
            number = add.ask.request_id
            assert isinstance(number, int), "parts are numbered"
            self._parts[number] = part
            held.numbers.append(number)
            self._worker.send(add)

    def _take(self, message: WorkerMessage) -> None:
        match message:
            case PromptPart(number):
                self._guarded(number, lambda live: live.take_prompt(message))
            case EmbeddingState(number, first, num_tokens, values):
                part = EmbeddingPart(number, first, num_tokens, torch.from_numpy(values))
                self._guarded(number, lambda live: live.take_embedding(part))
            case End(number):
                self._take_end(number, message)
            case Ready():
                self._trials.start_s = time.monotonic() - self._begun_at

    def _take_token(self, message: Token) -> None:
        part = self._parts.get(message.number)
        if part is None:
            return
        try:
            if part.request.take(message, part.first_sample + message.sample):
                self._worker.send(Finish(message.number, message.sample))
        except Exception as error:
            self._fail(part.request, error)
        if self._trials.running:
            for held in self._trials.passed():
                self._take_out(held)  # its pages stay in the prefix cache for when it goes on

    def _take_end(self, number: Hashable, end: End) -> None:
        part = self._parts.pop(number, None) if isinstance(number, int) else None
        if part is None:
            return
        held = part.request
        held.numbers = [other for other in held.numbers if other != number]
        if end.status != "finished" or not held.numbers:
            self._end(held, end)

    def _guarded(self, number: Hashable, work: Callable[[LiveRequest], None]) -> None:
        """As the loop does it: what goes wrong for a request goes wrong for that one alone."""
        part = self._parts.get(number) if isinstance(number, int) else None
        if part is None:
            return
        try:
            work(part.request.live)
        except Exception as error:
            self._fail(part.request, error)

    def _fail(self, held: Held, error: Exception) -> None:
        request_id = held.ask.request_id
        log.warning("request %r failed: %s", request_id, reason_of(error))
        self._end(held, End(request_id, "failed", reason_of(error)))

    def _end(self, held: Held, end: End) -> None:
        self._take_out(held)
        self._let_go(held)
        held.ended(end)

    def _let_go(self, held: Held) -> None:
        del self._held[held.ask.request_id]
        self._deadlines.discard(held.ask.request_id)
        self._trials.discard(held)

    def _take_out(self, held: Held) -> None:
        """Remove it from the process; messages still under way for it are ignored."""
        for number in held.numbers:
            del self._parts[number]
            self._worker.send(Cancel(number))
        held.numbers.clear()

    def _restart(self) -> None:
        """The process has died: find the suspects, fail the one that was tried alone, go on."""
        worker, were_tried = self._worker, len(self._trials.running)
        reason = worker.bury()
        self._num_steps += worker.heartbeat.progress.num_steps
        suspects = self._suspected(worker.heartbeat.in_steps())
        if worker.has_answered:
            self._num_barren = 0
        elif were_tried <= 1 and (suspects or not worker.is_ready):
            self._num_barren += 1  # one that had nothing to do says nothing, nor does a group
        self._lose_all()
        tried = self._trials.died()
        if tried is not None:
            why = f"the engine died each time this request was running; the last time: {reason}"
            self._end(tried, End(tried.ask.request_id, "failed", why))
        self._trials.suspect(
            held for held in suspects if held is not tried and not self._trials.knows(held)
        )
        self._end_complete()
        log.warning("the engine died (%s); %d requests continue", reason, len(self._held))
        if self._num_barren >= MAX_BARREN:
            error = HardwareError(f"the engine died {MAX_BARREN} times in a row: {reason}")
            self._give_up(error, "failed")
            return
        self._begin_anew()

    def _begin_anew(self) -> None:
        self.num_restarts += 1
        self._begun_at = time.monotonic()
        self._worker = self._new_worker()

    def _new_worker(self) -> Worker:
        return Worker(self._order) if self._early is None else Worker(self._order, self._early())

    def _suspected(self, numbers: set[int]) -> list[Held]:
        """Requests in the lost steps; if no step was under way, all in the process."""
        suspects = [part.request for number, part in self._parts.items() if number in numbers]
        for held in suspects:
            held.was_in_lost_step = True
        suspects = suspects or [part.request for part in self._parts.values()]
        return list(dict.fromkeys(suspects))

    def _lose_all(self) -> None:
        self._parts.clear()
        for held in self._held.values():
            held.numbers.clear()

    def _end_complete(self) -> None:
        """End requests that have all their tokens and lost only the message of their end."""
        for held in list(self._held.values()):
            if held.has_begun and not held.open_samples:
                self._end(held, End(held.ask.request_id, "finished", "stop"))

    def _give_up(self, error: RidgelineError, status: Status) -> None:
        self._broken = error
        for held in list(self._held.values()):
            self._end(held, End(held.ask.request_id, status, str(error)))


def start_supervised(
    model: str | Path,
    recipe: Recipe | None,
    *,
    device: str,
    num_pages: int | None,
    progress: Progress | None,
    setup: Setup | None,
    early: EarlyStart | None,
) -> tuple[Supervisor, Beside]:
    """The supervisor of a process that has begun to load the model, and what lies beside it.
    `early` gives processes that wait for what to load (cli/early.py).
    """
    if not isinstance(model, (str, Path)):
        raise UsageError("a supervised engine loads its model itself: give its name or path")
    path = model if isinstance(model, Path) else resolve_model(model, progress=progress)
    supervisor = Supervisor(EngineOrder(path, recipe, device, num_pages, setup), early)
    try:
        return supervisor, beside(path)  # while the process loads
    except BaseException:
        supervisor.restart()
        supervisor.close()
        raise
