"""How long ranks take for what they do together: a curve of seconds over bytes for each collective,
group and place, measured where there are devices (`ridgeline bench collectives`), modelled
elsewhere and marked so.

Inside a scale-up domain a collective is a latency and a rate; across nodes it is hierarchical: each
node first reduces or scatters inside, then every card carries its share between nodes, then nodes
gather. Bytes are those of the whole message, before it is shared out.

    wires = Wires(link_bytes_s=450e9, network_bytes_s=50e9)
    seconds("all-reduce", 256 << 20, GroupPlace(inside=8, nodes=16), wires)
    curve = CollectiveCurve("all-reduce", 8, ((1 << 20, 4e-5), (1 << 30, 5e-3)), "NVIDIA H200")
    curve.seconds(64 << 20)
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

CollectiveName = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send"]

# Inside a node, of the link's rate one way, and the start of a call: fitted by NVIDIA's NCCL tests
# on 8 H200 (notes of 2026-11-17: 385 GB/s and 18 µs for all-reduce, about 300 for all-gather).
INSIDE_SHARE: Mapping[str, float] = {
    "all-reduce": 0.85,
    "all-gather": 0.67,
    "reduce-scatter": 0.67,
    "all-to-all": 0.6,
    "send": 0.7,
}
INSIDE_S = 18e-6
# Across nodes, of the cards' rate, and what each further node of a ring adds: messages of 16 MiB
# get an eighth of a card over 64 nodes, of 1 GiB three quarters (the same notes).
ACROSS_SHARE = 0.8
ACROSS_S = 25e-6
HOP_S = 14e-6
PCIE_SHARE = 0.6  # where there is no switch, ranks share the host's bridges


class GroupPlace(NamedTuple):
    """Where a group's ranks lie."""

    inside: int  # of them in one scale-up domain
    nodes: int  # such domains

    @property
    def size(self) -> int:
        return self.inside * self.nodes


def place_of(size: int, stride: int, domain: int) -> GroupPlace:
    """Of a group whose ranks are `stride` apart, over domains of so many ranks."""
    inside = max(1, min(size, domain // stride))
    while size % inside:
        inside -= 1
    return GroupPlace(inside, size // inside)


@dataclass(frozen=True)
class CollectiveCurve:
    """Measured: (bytes, seconds), the smallest first."""

    name: CollectiveName
    num_ranks: int
    points: tuple[tuple[int, float], ...]
    device: str

    def seconds(self, num_bytes: float) -> float:
        """Straight lines between points, both axes logarithmic; beyond the ends the nearest
        point's latency or rate.
        """
        sizes = [size for size, _ in self.points]
        if num_bytes <= sizes[0]:
            return self.points[0][1]
        if num_bytes >= sizes[-1]:
            return self.points[-1][1] * num_bytes / sizes[-1]
        right = bisect_left(sizes, num_bytes)
        (low, fast), (high, slow) = self.points[right - 1], self.points[right]
        across = math.log(num_bytes / low) / math.log(high / low)
        return fast * (slow / fast) ** across


@dataclass(frozen=True)
class Wires:
    """Of one GPU, one way."""

    link_bytes_s: float
    network_bytes_s: float
    is_switched: bool = True  # otherwise over PCIe
    curves: Sequence[CollectiveCurve] = field(default=(), hash=False)

    def curve(self, name: CollectiveName, num_ranks: int) -> CollectiveCurve | None:
        own = (each for each in self.curves if (each.name, each.num_ranks) == (name, num_ranks))
        return next(own, None)


def seconds(name: CollectiveName, num_bytes: float, place: GroupPlace, wires: Wires) -> float:
    """Of one collective of so many bytes, alone on its wires."""
    if place.size == 1 or num_bytes <= 0:
        return 0.0
    measured = wires.curve(name, place.size) if place.nodes == 1 else None
    if measured is not None:
        return measured.seconds(num_bytes)
    if name == "send":
        return _send(num_bytes, place, wires)
    if name == "all-to-all":
        return _all_to_all(num_bytes, place, wires)
    times = 2.0 if name == "all-reduce" else 1.0
    total = 0.0
    if place.inside > 1:
        within = wires.curve(name, place.inside)
        moved = num_bytes * (place.inside - 1) / place.inside
        modelled = INSIDE_S + times * moved / _inside(name, wires)
        total += modelled if within is None else within.seconds(num_bytes)
    if place.nodes > 1:
        moved = num_bytes / place.inside * (place.nodes - 1) / place.nodes
        rate = ACROSS_SHARE * max(wires.network_bytes_s, 1.0)
        hops = min(place.nodes - 1, 4 * math.log2(place.nodes))  # rings, then trees
        total += ACROSS_S + times * (HOP_S * hops + moved / rate)
    return total


def _inside(name: str, wires: Wires) -> float:
    share = INSIDE_SHARE[name] if wires.is_switched else PCIE_SHARE / 2
    return share * wires.link_bytes_s


def _send(num_bytes: float, place: GroupPlace, wires: Wires) -> float:
    if place.nodes == 1:
        return INSIDE_S + num_bytes / _inside("send", wires)
    return ACROSS_S + num_bytes / (ACROSS_SHARE * max(wires.network_bytes_s, 1.0))


def _all_to_all(num_bytes: float, place: GroupPlace, wires: Wires) -> float:
    """Each rank sends an even part of its own bytes to every other; both wires at once."""
    each = num_bytes / place.size
    inside = each * (place.inside - 1) / _inside("all-to-all", wires)
    if place.nodes == 1:
        return INSIDE_S + inside
    across = each * (place.size - place.inside)
    rate = ACROSS_SHARE * max(wires.network_bytes_s, 1.0)
    return ACROSS_S + HOP_S * math.log2(place.nodes) + max(inside, across / rate)
