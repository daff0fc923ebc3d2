"""Sees that a run has hung, and which rank it hangs on, from what the ranks write about themselves
every second (pulse.py) into the store that they all reach.

A rank that waits says for what. When nothing has moved anywhere for long, the one that all wait for
is the one that does not wait itself: it stands somewhere in its own work, or gives no sign of life.

    watch = HangWatch(size=4, hang_after=None)
    hang = watch.look(beats, ended=[])      # None, or a Hang: which ranks, and all in one line
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

FIRST_S = 900.0  # until every rank has ended its first step: loading, compiling
LEAST_S = 300.0
SLOWER = 10  # times the slowest step so far
SILENT_S = 20.0  # a rank beats every second; without a beat for so long it cannot run


@dataclass(frozen=True)
class Beat:
    """What a rank writes about itself."""

    number: int = 0  # of beats: it grows while the process can run at all
    count: int = 0  # of steps, waits and phases that have ended: it grows while the rank gets on
    step: int = 0  # the last that it has ended
    slowest_s: float = 0.0
    doing: str = ""  # between steps: loading, saving
    waiting: str | None = None
    line: str = ""  # of code, where its main thread stands


def write_beat(store: Any, rank: int, beat: Beat) -> None:
    store.set(_key(rank), json.dumps(asdict(beat)))


def read_beats(store: Any, size: int) -> dict[int, Beat]:
    """The last of each rank that has begun."""
    ranks = [rank for rank in range(size) if store.check([_key(rank)])]
    return {rank: Beat(**json.loads(store.get(_key(rank)))) for rank in ranks}


def _key(rank: int) -> str:
    return f"pulse of rank {rank}"


class Hang(NamedTuple):
    ranks: tuple[int, ...]  # which it hangs on; none where all wait for the same
    message: str


class HangWatch:
    """Of one start of all ranks."""

    def __init__(
        self,
        size: int,
        hang_after: float | None,
        later: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`later`: times as long as usual it waits."""
        self._size = size
        self._later = later
        self._hang_after = hang_after
        self._clock = clock
        self._moved_at = clock()
        self._counts: dict[int, int] = {}
        self._beaten: dict[int, tuple[int, float]] = {}  # each rank's last beat, and when

    def look(self, beats: Mapping[int, Beat], ended: Collection[int] = ()) -> Hang | None:
        """What every rank wrote last, and which have ended their work and gone."""
        now = self._clock()
        counts = {rank: beat.count for rank, beat in beats.items()}
        if counts != self._counts:
            self._counts, self._moved_at = counts, now
        for rank, beat in beats.items():
            if self._beaten.get(rank, (None, now))[0] != beat.number:
                self._beaten[rank] = (beat.number, now)
        if now - self._moved_at < self._later * self.limit_s(beats):
            return None
        return self._hang(beats, ended, now)

    def limit_s(self, beats: Mapping[int, Beat]) -> float:
        """How long nothing may move."""
        if len(beats) < self._size:  # not all have begun: they are imported and started
            return FIRST_S
        if self._hang_after is not None:
            return self._hang_after
        if min(beat.step for beat in beats.values()) == 0:
            return FIRST_S
        return max(LEAST_S, SLOWER * max(beat.slowest_s for beat in beats.values()))

    def _hang(self, beats: Mapping[int, Beat], ended: Collection[int], now: float) -> Hang:
        still = f"no progress for {now - self._moved_at:.0f} s"
        missing = [rank for rank in range(self._size) if rank not in beats and rank not in ended]
        if missing:
            return Hang(tuple(missing), f"{still}: {name_ranks(missing)} did not begin")
        silent = [
            rank
            for rank, (_, at) in sorted(self._beaten.items())
            if now - at > SILENT_S and rank not in ended
        ]
        working = [rank for rank in sorted(beats) if beats[rank].waiting is None]
        left = [rank for rank in sorted(beats) if rank in ended]
        culprits = silent or left or working or _behind(beats)
        if not culprits:
            return Hang((), f"{still}: all {_waits(beats)}; the network or a device is stuck")
        others = {rank: beat for rank, beat in beats.items() if rank not in culprits}
        words = f"{name_ranks(culprits)} {_standing(culprits, beats, ended, bool(silent))}"
        return Hang(tuple(culprits), "; ".join(filter(None, [f"{still}: {words}", _waits(others)])))


def _standing(
    culprits: Sequence[int], beats: Mapping[int, Beat], ended: Collection[int], silent: bool
) -> str:
    """What the ranks do that a run hangs on: of several the first speaks for all."""
    beat, is_one = beats[culprits[0]], len(culprits) == 1
    have, own = ("has", "its") if is_one else ("have", "their")
    if silent:
        gives = "gives" if is_one else "give"
        return f"{gives} no sign of life since step {beat.step}, and stood in {beat.line}"
    if culprits[0] in ended:
        return f"{have} ended {own} work after step {beat.step}"
    where = f"it stands in {beat.line}" if is_one else f"the first in {beat.line}"
    what = f" ({beat.doing})" if beat.doing else ""
    if beat.waiting is not None:
        where = f"waiting in {beat.waiting}"
    return f"{have} not moved since step {beat.step}{what}, {where}"


def _waits(beats: Mapping[int, Beat]) -> str:
    """`ranks 0, 2 wait in all_reduce over tensor with ranks 0, 1`, for each that is waited for."""
    ranks: dict[str | None, list[int]] = {}
    for rank in sorted(beats):
        ranks.setdefault(beats[rank].waiting, []).append(rank)
    parts = []
    for waiting, group in ranks.items():
        verb = "waits" if len(group) == 1 else "wait"
        doing = "has not moved" if waiting is None else f"{verb} in {waiting}"
        parts.append(f"{name_ranks(group)} {doing}")
    return "; ".join(parts)


def _behind(beats: Mapping[int, Beat]) -> list[int]:
    """Where all wait: those that wait for something else than most, or than whoever came furthest.
    None where all wait alike.
    """
    waits = Counter(beat.waiting for beat in beats.values())
    if len(waits) == 1:
        return []
    usual = max(beats.values(), key=lambda beat: (waits[beat.waiting], beat.count)).waiting
    return sorted(rank for rank, beat in beats.items() if beat.waiting != usual)


def name_ranks(ranks: Sequence[int]) -> str:
    words = ", ".join(map(str, ranks))
    return f"rank {words}" if len(ranks) == 1 else f"ranks {words}"
