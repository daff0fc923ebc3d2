"""Many replicas and the traffic between them: requests arrive, the engine's own router (or a
simpler policy) chooses, replicas are brought up to each arrival's time and no further.

    fleet = Fleet([setup] * 4, policy="prefix")
    log = fleet.run(workload)
    log.report(slo).goodput

Requests come by their own clock (`run`), or as many at a time as there are clients (`run_closed`).
With `scaling` replicas start and stop by the load, after the time that a start takes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ridgeline.data.workload import Workload
from ridgeline.engine.scheduling.routing import Router, choose
from ridgeline.engine.scheduling.state import Ask, Stats
from ridgeline.errors import UsageError
from ridgeline.planning.serving.asks import ask_of
from ridgeline.planning.serving.replica import SimulatedReplica
from ridgeline.planning.serving.served import RequestLog
from ridgeline.planning.serving.setup import EngineSetup

Policy = Literal["prefix", "least-loaded", "round-robin"]


@dataclass(frozen=True)
class Scaling:
    """Replicas by load: another one when requests a replica are above `high`, one less below `low`.
    A start takes as long as it was measured to.
    """

    most: int  # replicas
    high: float  # requests a replica
    low: float
    start_s: float
    least: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise UsageError(
                f"replicas go from {self.least} to {self.most}; give 1 <= least <= most"
            )
        if not 0 <= self.low < self.high or self.start_s < 0:
            raise UsageError(
                f"replicas are added above {self.high} requests and taken below {self.low}, "
                f"{self.start_s} s later; give 0 <= low < high, and no negative time"
            )


class Fleet:
    def __init__(
        self,
        setups: Sequence[EngineSetup],
        *,
        policy: Policy = "prefix",
        jumps: bool = True,
        scaling: Scaling | None = None,
    ) -> None:
        if not setups:
            raise UsageError("a fleet has no replicas; give at least one")
        self._policy, self._jumps, self._scaling = policy, jumps, scaling
        self._setups = list(setups)
        self.replicas: list[SimulatedReplica] = []
        self._ready: list[float] = []  # when each can be sent requests
        self._retired: list[float | None] = []  # since when it is sent no more
        self._num_sent = 0
        self.log = RequestLog(setups[0].times.tuning.request_s)

    @property
    def stats(self) -> list[Stats]:
        return [replica.stats for replica in self.replicas]

    def replica_seconds(self, end: float) -> float:
        """For how long replicas were paid for, from when each was started."""
        scaling = self._scaling
        began = [
            ready - (scaling.start_s if scaling is not None and ready > 0 else 0.0)
            for ready in self._ready
        ]
        return sum(
            max(0.0, (end if until is None else until) - since)
            for since, until in zip(began, self._retired, strict=True)
        )

    def run(self, workload: Workload) -> RequestLog:
        """Every request at its time."""
        self._begin(workload)
        for index in range(len(workload.requests)):
            ask = ask_of(workload, index)
            self._arrive(ask, ask.arrival)
        self._finish()
        return self.log

    def run_closed(self, workload: Workload, concurrency: int) -> RequestLog:
        """As many clients, each of which sends a request when its last one has been answered."""
        if concurrency < 1:
            raise UsageError(f"the concurrency is {concurrency}; give at least 1")
        self._begin(workload)
        now = 0.0
        for index in range(len(workload.requests)):
            while sum(replica.num_requests for replica in self.replicas) >= concurrency:
                now = self._next_end()
            self._arrive(ask_of(workload, index, now), now)
        self._finish()
        return self.log

    def _begin(self, workload: Workload) -> None:
        """Prompts that never begin alike find nothing in a prefix cache: without one the times are
        the same, but for streams that are preempted, which find their own.
        """
        own = all(not one.block_hashes and one.prompt is None for one in workload.requests)
        self._keeps, self._workload = not own, workload
        num_first = len(self._setups) if self._scaling is None else self._scaling.least
        for index in range(num_first):
            self._start(0.0, index)

    def _start(self, ready: float, number: int) -> None:
        setup = self._setups[number % len(self._setups)]
        config = setup.scheduler
        size = config.page_size
        ever = sum(-(-request.num_tokens // size) + 1 for request in self._workload.requests)
        config = replace(config, num_pages=min(config.num_pages, ever))  # more are never taken
        if not self._keeps:
            config = replace(config, prefix_cache=False)
        self.replicas.append(
            SimulatedReplica(
                config,
                setup.times,
                self.log,
                overlap=bool(setup.recipe.overlap),
                jumps=self._jumps,
                since=ready,
            )
        )
        self._ready.append(ready)
        self._retired.append(None)
        self._router = Router(len(self.replicas))

    def _arrive(self, ask: Ask, now: float) -> None:
        for replica in self.replicas:
            replica.advance(now)
        self._scale(now)
        self.log.note_arrival(ask.request_id, now, ask.max_tokens)
        self.replicas[self._route(ask, now)].submit(ask, now)

    def _route(self, ask: Ask, now: float) -> int:
        loads = self._loads(now)
        self._num_sent += 1
        up = [index for index, load in enumerate(loads) if load is not None]
        if len(up) == 1:
            return up[0]
        if self._policy == "round-robin":
            return up[self._num_sent % len(up)]
        if self._policy == "least-loaded":
            return choose([0] * len(loads), loads)
        return self._router.route(ask.prompt, ask.salt, loads)

    def _loads(self, now: float) -> list[int | None]:
        """Requests at each replica; None for one that is not there yet, or no more."""
        return [
            replica.num_requests if ready <= now and retired is None else None
            for replica, ready, retired in zip(
                self.replicas, self._ready, self._retired, strict=True
            )
        ]

    def _scale(self, now: float) -> None:
        scaling = self._scaling
        if scaling is None:
            return
        coming = [i for i, until in enumerate(self._retired) if until is None]
        up = [i for i in coming if self._ready[i] <= now]
        mean = sum(self.replicas[i].num_requests for i in up) / len(up)
        if mean > scaling.high and len(coming) < scaling.most and len(coming) == len(up):
            self._start(now + scaling.start_s, len(self.replicas))
        elif mean < scaling.low and len(up) > scaling.least:
            last = min(up, key=lambda i: (self.replicas[i].num_requests, -i))
            self._retired[last] = now

    def _next_end(self) -> float:
        """The next time at which a request ends."""
        while True:
            order = sorted(self.replicas, key=lambda replica: replica.next_time)
            until = order[1].next_time if len(order) > 1 else math.inf
            ended = order[0].advance_to_end(math.nextafter(until, math.inf))
            if ended is not None:
                return ended

    def _finish(self) -> None:
        for replica in self.replicas:
            replica.advance(math.inf)
