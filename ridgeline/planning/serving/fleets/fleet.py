"""Many replicas and the traffic between them: requests arrive, the engine's own router (or a
simpler policy) chooses, replicas are brought up to each arrival's time and no further.

    fleet = Fleet([setup] * 4, policy="prefix")
    log = fleet.run(workload)
    log.report(slo).goodput

Requests come by their own clock (`run`), or as many at a time as there are clients (`run_closed`).
With `scaling` (scaling.py) replicas start and stop by the load, after the time that a start takes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from ridgeline.data.workload import Workload
from ridgeline.engine.scheduling.routing import Router, choose
from ridgeline.engine.scheduling.state import Ask, Stats
from ridgeline.errors import UsageError
from ridgeline.planning.serving.fleets.asks import ask_of
from ridgeline.planning.serving.fleets.replica import SimulatedReplica
from ridgeline.planning.serving.fleets.scaling import Places, Scaling
from ridgeline.planning.serving.fleets.served import RequestLog
from ridgeline.planning.serving.setup import EngineSetup
from ridgeline.planning.serving.step_times import seconds_of, ticks_of

Policy = Literal["prefix", "least-loaded", "round-robin"]


class Fleet:
    """`replicas` are those that were ever started, each in its place."""

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
        if scaling is not None and scaling.most > len(setups):
            raise UsageError(
                f"{scaling.most} replicas are wanted at most, and there are GPUs for {len(setups)}"
            )
        self._policy, self._jumps, self._setups = policy, jumps, list(setups)
        self._places = Places(len(setups), scaling)
        self._router = Router(len(setups))
        self._num_sent = 0
        self.replicas: dict[int, SimulatedReplica] = {}
        self.sent: list[int] = []  # where each request went, in order
        self.log = RequestLog(setups[0].times.tuning.request_s)

    @property
    def stats(self) -> list[Stats]:
        return [replica.stats for replica in self.replicas.values()]

    @property
    def replica_seconds(self) -> float:
        """For how long replicas were paid for, from when each was started to its last request."""
        return seconds_of(self._places.paid(self._end))

    def run(self, workload: Workload) -> RequestLog:
        """Every request at its time."""
        self._begin(workload)
        for index in range(len(workload.requests)):
            ask = ask_of(workload, index)
            self._arrive(ask, ticks_of(ask.arrival))
        self._finish()
        return self.log

    def run_closed(self, workload: Workload, concurrency: int) -> RequestLog:
        """As many clients, each of which sends a request when its last one has been answered."""
        if concurrency < 1:
            raise UsageError(f"the concurrency is {concurrency}; give at least 1")
        self._begin(workload)
        now = 0
        for index in range(len(workload.requests)):
            while sum(each.num_requests for each in self.replicas.values()) >= concurrency:
                now = self._next_end()
            self._arrive(ask_of(workload, index, seconds_of(now)), now)
        self._finish()
        return self.log

    def _begin(self, workload: Workload) -> None:
        self._workload = workload
        for place in self._places.first():
            self.replicas[place] = self._started(place, 0)

    def _started(self, place: int, since: int) -> SimulatedReplica:
        return replica_of(self._setups[place], self._workload, self.log, self._jumps, since)

    def _arrive(self, ask: Ask, now: int) -> None:
        for replica in self.replicas.values():
            replica.advance(now)
        loads = {place: replica.num_requests for place, replica in self.replicas.items()}
        for place, ready in self._places.scaled(loads, now):
            self.replicas[place] = self._started(place, ready)
            self._router.forget(place)
        self.log.note_arrival(ask.request_id, seconds_of(now), ask.max_tokens)
        place = self._route(ask, now)
        self.sent.append(place)
        self.replicas[place].submit(ask, now)

    def _route(self, ask: Ask, now: int) -> int:
        up = self._places.up(now)
        loads = [
            self.replicas[place].num_requests if place in up else None
            for place in range(len(self._setups))
        ]
        self._num_sent += 1
        if len(up) == 1:
            return min(up)
        if self._policy == "round-robin":
            return sorted(up)[self._num_sent % len(up)]
        if self._policy == "least-loaded":
            return choose([0] * len(loads), loads)
        return self._router.route(ask.prompt, ask.salt, loads)

    def _next_end(self) -> int:
        """The next time at which a request ends."""
        while True:
            order = sorted(self.replicas.values(), key=lambda replica: replica.next_time)
            until = order[1].next_time + 1 if len(order) > 1 else math.inf
            ended = order[0].advance_to_end(until)
            if ended is not None:
                return ended

    def _finish(self) -> None:
        for replica in self.replicas.values():
            replica.advance(math.inf)
        self._end = max(replica.now for replica in self.replicas.values())


def replica_of(
    setup: EngineSetup,
    workload: Workload,
    log: RequestLog,
    jumps: bool = True,
    since: int = 0,
    receives: bool = False,
) -> SimulatedReplica:
    """Of a setup, for these requests: no more pages than they ever take; and no prefix cache where
    prompts never begin alike: without one the times are the same, but for streams that are
    preempted, which find their own.
    """
    config = setup.scheduler
    size = config.page_size
    ever = sum(-(-request.num_tokens // size) + 1 for request in workload.requests)
    config = replace(config, num_pages=min(config.num_pages, ever))
    if all(not one.block_hashes and one.prompt is None for one in workload.requests):
        config = replace(config, prefix_cache=False)
    overlap = bool(setup.recipe.overlap)
    return SimulatedReplica(
        config, setup.times, log, overlap=overlap, jumps=jumps, since=since, receives=receives
    )
