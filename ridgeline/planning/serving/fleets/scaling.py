"""Replicas by the load, as an autoscaler would have them: so many that each has no more than its
share of the requests that are there; a start takes its time, a stop waits until fewer have been
enough for a while, and a replica that stops first answers what it has.

    fleet = Fleet([setup] * 8, scaling=Scaling(least=1, most=8, target=32, start_s=9.6))
    fleet.run(workload)
    fleet.replica_seconds
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ridgeline.errors import UsageError
from ridgeline.planning.serving.setup import EngineSetup
from ridgeline.planning.serving.step_times import ticks_of

# `ridgeline serve` with 8B in bf16 was ready 9.5 to 9.7 s after its start (H200, 2026-11-17, files
# in memory). More weights a GPU than those 16 GB are read at a disk's rate, which is a guess.
MEASURED_START_S, MEASURED_BYTES, DISK_BYTES_S = 9.6, 16e9, 2e9


@dataclass(frozen=True)
class Scaling:
    most: int  # replicas
    target: float  # requests a replica
    start_s: float  # from the decision to the first request that it takes
    least: int = 1
    patience_s: float = 60.0  # for which fewer must have been enough before one stops

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise UsageError(
                f"replicas go from {self.least} to {self.most}; give 1 <= least <= most"
            )
        if not self.target > 0 or self.start_s < 0 or self.patience_s < 0:
            raise UsageError(
                f"replicas are for {self.target} requests each, start in {self.start_s} s and stop "
                f"after {self.patience_s} s; give a positive target and no negative time"
            )

    def wanted(self, num_requests: int) -> int:
        return min(self.most, max(self.least, int(-(-num_requests // self.target))))


def usual_start_s(setup: EngineSetup) -> float:
    """Until `ridgeline serve` is ready, where nobody has measured it."""
    weights = setup.memory.bytes_of("weights")
    return MEASURED_START_S + max(0.0, weights - MEASURED_BYTES) / DISK_BYTES_S


class Places:
    """Which replicas there are: places for as many as GPUs allow, all of them taken without
    `scaling`. Times are ticks.
    """

    def __init__(self, count: int, scaling: Scaling | None) -> None:
        self._count, self._scaling = count, scaling
        self._ready: dict[int, int] = {}  # of those that are wanted: when each takes requests
        self._begun: dict[int, int] = {}  # of those that are paid for: since when
        self._enough_since: int | None = None  # since when fewer would do
        self._paid = 0  # for those that are gone

    def first(self) -> list[int]:
        count = self._count if self._scaling is None else self._scaling.least
        for place in range(count):
            self._ready[place] = self._begun[place] = 0
        return list(range(count))

    def up(self, now: int) -> set[int]:
        """Those that take requests."""
        return {place for place, ready in self._ready.items() if ready <= now}

    def paid(self, end: int) -> int:
        """Ticks of all, where nothing happens after `end`."""
        return self._paid + sum(end - begun for begun in self._begun.values())

    def scaled(self, loads: Mapping[int, int], now: int) -> Iterator[tuple[int, int]]:
        """Those that are started now, each with the time at which it is ready."""
        scaling = self._scaling
        if scaling is None:
            return
        self._let_go(loads, now)
        wanted = scaling.wanted(sum(loads.values()) + 1)
        if wanted < len(self._ready):
            self._stop_one(loads, now, ticks_of(scaling.patience_s))
            return
        self._enough_since = None
        while len(self._ready) < wanted:
            yield from self._start(now, now + ticks_of(scaling.start_s))

    def _start(self, now: int, ready: int) -> Iterator[tuple[int, int]]:
        """One that is stopping takes requests again; else another is started."""
        stopping = min((place for place in self._begun if place not in self._ready), default=None)
        if stopping is not None:
            self._ready[stopping] = now
            return
        place = min(place for place in range(self._count) if place not in self._begun)
        self._ready[place], self._begun[place] = ready, now
        yield place, ready

    def _stop_one(self, loads: Mapping[int, int], now: int, patience: int) -> None:
        if self._enough_since is None:
            self._enough_since = now
        up = self.up(now)
        if now - self._enough_since < patience or len(up) < 2:
            return
        self._enough_since = now
        del self._ready[min(up, key=lambda place: (loads[place], -place))]

    def _let_go(self, loads: Mapping[int, int], now: int) -> None:
        """Of those that stop, who has answered all."""
        for place in [place for place in self._begun if place not in self._ready]:
            if not loads[place]:
                self._paid += now - self._begun.pop(place)
