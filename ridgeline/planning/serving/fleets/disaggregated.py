"""Prefill and decode apart: some replicas run prompts, and make a first token; its keys and values
go over a link to others, which make the rest. Each side has a link of its own that carries one
prompt at a time; the next one waits.

    fleet = SplitFleet([fast] * 2, [setup] * 2, KvLink(50e9))
    log = fleet.run(workload)
    fleet.mean_wait_s                  # for links

Pages of a prompt are free on the side of prompts as soon as it has ended, and are taken on the
other when it has come. A stream that is preempted there computes its prompt again.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ridgeline.data.workload import Workload
from ridgeline.engine.scheduling.routing import choose
from ridgeline.engine.scheduling.state import Ask
from ridgeline.errors import UsageError
from ridgeline.planning.clusters.cluster import GpuPool
from ridgeline.planning.serving.fleets.asks import ask_of
from ridgeline.planning.serving.fleets.fleet import Fleet, Policy, replica_of
from ridgeline.planning.serving.fleets.served import RequestLog
from ridgeline.planning.serving.setup import EngineSetup
from ridgeline.planning.serving.step_times import seconds_of, ticks_of

LINK_SHARE = 0.8  # of a link's datasheet that large copies reach


@dataclass(frozen=True)
class KvLink:
    """Of one GPU, in each direction."""

    bytes_s: float
    latency_s: float = 20e-6

    def __post_init__(self) -> None:
        if not 0 < self.bytes_s < math.inf or self.latency_s < 0:
            raise UsageError(f"a link carries {self.bytes_s} bytes/s; give a positive number")


def link_between(pools: Sequence[GpuPool]) -> KvLink:
    """The scale-up link where all are in one domain of it, otherwise each GPU's share of network
    cards.
    """
    only = pools[0]
    if len(pools) == 1 and only.domain >= only.num_gpus:
        return KvLink(only.link_bytes_s * LINK_SHARE)
    slowest = min(pool.network_bytes_s for pool in pools)
    if not slowest:
        raise UsageError("pools without a network send nothing; give one, as in 8xH200@ib400")
    return KvLink(slowest * LINK_SHARE)


class _Sent(NamedTuple):
    """On its way to a replica."""

    at: int  # ticks: when all of it is there
    number: int
    place: int
    ask: Ask


class SplitFleet:
    def __init__(
        self,
        prompts: Sequence[EngineSetup],
        decodes: Sequence[EngineSetup],
        link: KvLink,
        *,
        policy: Policy = "prefix",
        jumps: bool = True,
    ) -> None:
        if not prompts or not decodes:
            raise UsageError("prompts and decoding need a replica each; give at least two replicas")
        self._prompts, self._decodes, self._link = list(prompts), list(decodes), link
        self._policy, self._jumps = policy, jumps
        self.log = RequestLog(decodes[0].times.tuning.request_s)
        self._waited, self._num_sent = 0, 0

    @property
    def mean_wait_s(self) -> float:
        """Of prompts for links that carry others."""
        return seconds_of(self._waited) / max(1, self._num_sent)

    def run(self, workload: Workload) -> RequestLog:
        """Prompts wait for nobody behind them, and so are run first."""
        fleet = Fleet(self._prompts, policy=self._policy, jumps=self._jumps)
        ends = self._ends(workload, fleet)
        self._replicas = [
            replica_of(setup, workload, self.log, self._jumps, receives=True)
            for setup in self._decodes
        ]
        self._coming: list[_Sent] = []
        self._outgoing, self._incoming = [0] * len(self._prompts), [0] * len(self._decodes)
        for end, number in ends:
            self._deliver(end)
            self._send(workload, number, end, fleet.sent[number])
        self._deliver(math.inf)
        return self.log

    def _ends(self, workload: Workload, fleet: Fleet) -> list[tuple[int, int]]:
        """When each prompt has its first token, in that order, of those that go on."""
        only_first = tuple(replace(one, num_output_tokens=1) for one in workload.requests)
        known = fleet.run(replace(workload, requests=only_first))
        log, ends = self.log, []
        behind = self._prompts[0].times.tuning.request_s
        for number, request in enumerate(workload.requests):
            log.note_arrival(number, request.arrival_s, request.num_output_tokens)
            if number in known.refused:
                log.note_refusal(number, known.refused[number])
                continue
            first = known.times[number].first - behind
            log.note_first(number, first)
            if request.num_output_tokens == 1:
                log.note_finished(number, first)
            else:
                ends.append((ticks_of(first), number))
        return sorted(ends)

    def _send(self, workload: Workload, number: int, now: int, source: int) -> None:
        loads: list[int | None] = [replica.num_requests for replica in self._replicas]
        for sent in self._coming:
            loads[sent.place] = (loads[sent.place] or 0) + 1
        place = choose([0] * len(loads), loads)
        begin = max(now, self._outgoing[source], self._incoming[place])
        setup = self._prompts[source]
        ranks = min(setup.num_gpus, self._decodes[place].num_gpus)
        size = workload.requests[number].num_prompt_tokens * setup.kv_bytes_per_token
        size *= setup.num_gpus / ranks  # of one of the links that carry it
        end = begin + ticks_of(self._link.latency_s + size / self._link.bytes_s)
        self._outgoing[source] = self._incoming[place] = end
        self._waited += begin - now
        self._num_sent += 1
        known = ask_of(workload, number, seconds_of(end))
        ask = replace(known, output=(known.prompt[0],))  # the token it has
        heapq.heappush(self._coming, _Sent(end, number, place, ask))

    def _deliver(self, until: float) -> None:
        """What is there before this time, each to a replica that has come so far."""
        while self._coming and self._coming[0].at <= until:
            sent = heapq.heappop(self._coming)
            replica = self._replicas[sent.place]
            replica.advance(sent.at)
            replica.submit(sent.ask, sent.at)
        for replica in self._replicas:
            replica.advance(until)
