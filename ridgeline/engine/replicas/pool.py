"""Replicas as one: a `Backend` (backend.py) over several supervised processes.

routing.py chooses the replica of a request. When a replica dies, its requests continue on another
at once, from the tokens they have, while it restarts. A request that was present at two deaths may
be their cause: it stays and is retried alone, as a supervisor does it, so that it cannot take down
one replica after another.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Sequence
from multiprocessing.connection import wait
from typing import Any

from ridgeline.engine.backend import EngineFacts, EngineProgress
from ridgeline.engine.execution.work import CostBase, Work
from ridgeline.engine.process.held import Held
from ridgeline.engine.process.supervisor import WAIT_S, Supervisor
from ridgeline.engine.process.worker import EngineOrder, Worker
from ridgeline.engine.sampling.live import LiveRequest
from ridgeline.engine.scheduling.routing import Router
from ridgeline.engine.scheduling.state import Ask, End, Stats, Status, duplicate_id
from ridgeline.errors import RidgelineError

log = logging.getLogger(__name__)

REVIVE_S = 60.0  # before a replica that was given up is tried again
Starter = Callable[[EngineOrder], Any]  # gives a Worker, or what plays its part


class Replica(Supervisor):
    """One of several: what it holds when it dies may go elsewhere."""

    def __init__(
        self, order: EngineOrder, start: Starter, has_others: Callable[[Replica], bool]
    ) -> None:
        self._start, self._has_others = start, has_others
        self.has_died = False
        self.busy_since: float | None = None
        self.broken_since: float | None = None
        super().__init__(order)
        self.patience_s = 0.0

    @property
    def num_requests(self) -> int:
        return len(self._held)

    def holds(self, request_id: Hashable) -> bool:
        return request_id in self._held

    @property
    def worker(self) -> Worker:
        return self._worker

    def idle_s(self, now: float) -> float:
        """For how long it has had work and no step."""
        if not self._held or not self.is_up or self.busy_since is None:
            return 0.0
        return min(self.progress.idle_s, now - self.busy_since)

    def advance(self) -> None:
        super().advance()
        self.busy_since = (self.busy_since or time.monotonic()) if self._held else None

    def release(self, may_go: Callable[[Held], bool]) -> list[Held]:
        """Requests of the dead process that may continue elsewhere."""
        going = [held for held in self._held.values() if not held.numbers and may_go(held)]
        for held in going:
            self._let_go(held)
        return going

    def adopt(self, held: Held) -> None:
        self._hold(held)

    def fail_rest(self) -> None:
        """Fail the requests that stayed with a replica that was given up."""
        for held in list(self._held.values()):
            self._end(held, End(held.ask.request_id, "failed", str(self._broken)))

    def _new_worker(self) -> Worker:
        worker: Worker = self._start(self._order)
        return worker

    def _begin_anew(self) -> None:
        self.has_died = True
        self.broken_since = None
        super()._begin_anew()

    def _give_up(self, error: RidgelineError, status: Status) -> None:
        self.broken_since = time.monotonic()
        if status == "failed" and self._has_others(self):
            self._broken, self.has_died = error, True  # its requests go on elsewhere
        else:
            super()._give_up(error, status)


class Pool:
    """`starters`, one for each replica, make their processes."""

    def __init__(self, order: EngineOrder, starters: Sequence[Starter]) -> None:
        self.patience_s = WAIT_S
        self._moved: set[Hashable] = set()  # requests that have been at a replica that died
        self._at: dict[Hashable, Replica] = {}
        self._router = Router(len(starters))
        self.replicas = [Replica(order, start, self._has_others) for start in starters]

    # What every backend offers.

    @property
    def has_work(self) -> bool:
        return any(replica.has_work for replica in self.replicas)

    @property
    def num_replicas(self) -> int:
        return len(self.replicas)

    @property
    def costs(self) -> CostBase | None:
        return self.replicas[0].costs

    @property
    def num_restarts(self) -> int:
        return sum(replica.num_restarts for replica in self.replicas)

    @property
    def is_up(self) -> bool:
        return any(replica.is_up for replica in self.replicas)

    @property
    def broken(self) -> RidgelineError | None:
        """Only where none is left that could come up."""
        errors = [replica.broken for replica in self.replicas]
        return errors[0] if all(error is not None for error in errors) else None

    @property
    def stats(self) -> Stats:
        rows = [replica.stats for replica in self.replicas]
        return Stats(*(sum(column) for column in zip(*rows, strict=True)))

    @property
    def progress(self) -> EngineProgress:
        """Of all together; idle is the one that has waited longest for a step."""
        all_of = [replica.progress for replica in self.replicas]
        works = [each.work.numbers() for each in all_of]
        now = time.monotonic()
        busy = [replica.idle_s(now) for replica in self.replicas if replica.has_work]
        return EngineProgress(
            sum(each.num_steps for each in all_of),
            max(each.last_step_s for each in all_of),
            max(busy) if busy else min(each.idle_s for each in all_of),
            Work.of([sum(column) for column in zip(*works, strict=True)]),
        )

    def wait_until_ready(self) -> EngineFacts:
        """All must come up; why one does not is an error."""
        try:
            first, *_ = [replica.wait_until_ready() for replica in self.replicas]
            return first
        except BaseException:
            self.close()
            raise

    def wait(self, others: Sequence[int], seconds: float) -> None:
        """Until one has news, or one of these file descriptors can be read."""
        readable: list[Any] = [replica.worker for replica in self._living()]
        wait([*readable, *others], seconds)

    def submit(self, ask: Ask, live: LiveRequest) -> None:
        if self.broken is not None:
            raise self.broken
        if any(replica.holds(ask.request_id) for replica in self.replicas):
            raise duplicate_id(ask.request_id)
        replica = self._chosen(ask)
        self._moved.discard(ask.request_id)  # of an earlier one with the same id
        self._at[ask.request_id] = replica
        replica.submit(ask, live)

    def cancel(self, request_id: Hashable) -> bool:
        replica = self._at.pop(request_id, None)
        return replica is not None and replica.cancel(request_id)

    def advance(self) -> None:
        if self.patience_s:
            self.wait((), self.patience_s)
        for number, replica in enumerate(self.replicas):
            replica.advance()
            if replica.has_died:
                replica.has_died = False
                self._router.forget(number)
                self._scatter(replica)
        self._revive_due()
        self._forget_ended()

    def restart(self) -> None:
        """End the one that has waited longest for a step, as if it had died."""
        now = time.monotonic()
        max(self.replicas, key=lambda replica: replica.idle_s(now)).restart()

    def revive(self) -> None:
        for replica in self.replicas:
            if replica.broken is not None:
                replica.revive()

    def close(self) -> None:
        for replica in self.replicas:
            replica.close()

    # Who goes where.

    def _living(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.broken is None]

    def _has_others(self, asking: Replica) -> bool:
        return any(each is not asking and each.broken is None for each in self.replicas)

    def _chosen(self, ask: Ask, but: Replica | None = None) -> Replica:
        """Among replicas that are up; while none is, those that may come up."""
        up = [replica.is_up and replica is not but for replica in self.replicas]
        if not any(up):
            up = [replica.broken is None and replica is not but for replica in self.replicas]
        loads = [
            replica.num_requests if is_up else None
            for replica, is_up in zip(self.replicas, up, strict=True)
        ]
        return self.replicas[self._router.route(ask.prompt, ask.salt, loads)]

    def _scatter(self, dead: Replica) -> None:
        """Move its requests to other replicas, if there are any and it is their first move."""
        others_up = any(each is not dead and each.is_up for each in self.replicas)
        if others_up or (dead.broken is not None and self._has_others(dead)):
            going = dead.release(lambda held: held.ask.request_id not in self._moved)
            for held in going:
                self._moved.add(held.ask.request_id)
                replica = self._chosen(held.ask, but=dead)
                self._at[held.ask.request_id] = replica
                replica.adopt(held)
            log.warning("a replica died; %d of its requests continue on others", len(going))
        if dead.broken is not None:
            dead.fail_rest()

    def _revive_due(self) -> None:
        """Retry a replica that was given up from time to time, while others work."""
        now = time.monotonic()
        for replica in self.replicas:
            since = replica.broken_since
            is_due = since is not None and now - since > REVIVE_S
            if replica.broken is not None and is_due and self._has_others(replica):
                replica.revive()

    def _forget_ended(self) -> None:
        if len(self._at) > 1024 + 2 * sum(replica.num_requests for replica in self.replicas):
            self._at = {key: replica for key, replica in self._at.items() if replica.holds(key)}
            self._moved &= self._at.keys()
