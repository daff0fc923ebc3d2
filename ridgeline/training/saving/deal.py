"""Who writes which tensors of a checkpoint, and who sends what of them: integers alone, so that
every rank knows all of it without asking.

A checkpoint holds whole tensors, whatever the layout. Each is written by one of the ranks that have
a part of it, so that all write as many bytes; of ranks with the same part the writer itself sends
it, or else the one next to it.

    for files in deal(holdings, shapes, {"weight": 2, "first": 4}):     # round by round
        for file in files:                                              # one a rank at most
            file.owner, [(each.stored, each.sources) for each in file.tensors]

Of thousands of ranks each has to know what it sends and writes itself: who sends the parts of a
tensor is worked out where it is asked for.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapreplace
from itertools import zip_longest
from math import prod
from typing import Any, NamedTuple

from ridgeline.models.checkpoint.save import shard_name
from ridgeline.parallel.holdings import LAYER, Holdings, Region
from ridgeline.training.saving.optimizer_files import stored_name

FILE_BYTES = 1 << 30  # what a rank gathers before it writes
WEIGHT = "weight"  # the kind that makes a model; others are the optimizer's


class SentPart(NamedTuple):
    """A rank, and the part that it sends."""

    rank: int
    region: Region


class Holders:
    """The ranks that have each part of a parameter; parameters that are alike share one."""

    def __init__(self, ranks_of: Mapping[Region, list[int]]) -> None:
        self.parts = tuple(ranks_of.items())
        self._part_of = {rank: i for i, (_, ranks) in enumerate(self.parts) for rank in ranks}
        self.ranks = sorted(self._part_of)

    def part_sent_by(self, rank: int, owner: int) -> int | None:
        """Which part a rank sends to the one that writes; None: another has the same and does."""
        part = self._part_of.get(rank)
        return part if part is not None and self.sender(part, owner) == rank else None

    def sender(self, part: int, owner: int) -> int:
        """Of the ranks that have it the nearest to the owner."""
        ranks = self.parts[part][1]
        above = bisect_left(ranks, owner)
        return min(ranks[max(above - 1, 0) : above + 1], key=lambda rank: abs(rank - owner))


@dataclass(frozen=True)
class DealtTensor:
    kind: str
    parameter: str
    shape: tuple[int, ...]
    num_bytes: int
    owner: int
    holders: Holders

    @property
    def num_parts(self) -> int:
        return len(self.holders.parts)

    @property
    def sources(self) -> list[SentPart]:
        """All parts of it."""
        return [
            SentPart(self.holders.sender(part, self.owner), region)
            for part, (region, _) in enumerate(self.holders.parts)
        ]

    def sent_by(self, rank: int) -> tuple[int, Region] | None:
        """The number of the part that this rank sends, and which it is."""
        part = self.holders.part_sent_by(rank, self.owner)
        return None if part is None else (part, self.holders.parts[part][0])

    @property
    def stored(self) -> str:
        """As the optimizer's files call it; a weight may lie there in pieces of other names."""
        return stored_name(self.kind, self.parameter)


@dataclass(frozen=True)
class DealtFile:
    stem: str  # of its name: "model" or "optimizer"
    owner: int
    tensors: tuple[DealtTensor, ...]
    name: str = ""


Round = tuple[DealtFile, ...]  # that are written at the same time, by different ranks


def deal(
    holdings: Holdings,
    shapes: Mapping[str, tuple[int, ...]],
    kinds: Mapping[str, int],
    file_bytes: int = FILE_BYTES,
) -> list[Round]:
    """`shapes` are those of the whole model's parameters; each is stored once for every kind, with
    so many bytes an element.
    """
    owned: dict[int, list[DealtTensor]] = defaultdict(list)
    for each in _owned(holdings, shapes, kinds):
        owned[each.owner].append(each)
    lists = [_files(owner, tensors, file_bytes) for owner, tensors in sorted(owned.items())]
    names = _names([file for files in lists for file in files])
    named = [[replace(file, name=names[id(file)]) for file in files] for files in lists]
    return [tuple(file for file in row if file is not None) for row in zip_longest(*named)]


def _owned(
    holdings: Holdings, shapes: Mapping[str, tuple[int, ...]], kinds: Mapping[str, int]
) -> list[DealtTensor]:
    """In the order of `kinds` and `shapes`. The largest are dealt out first, each to the rank that
    has the fewest bytes to write so far.
    """
    holders = _all_holders(holdings, shapes)
    wanted = [(kind, name) for kind in kinds for name in shapes]
    sizes = {(kind, name): kinds[kind] * prod(shapes[name]) for kind, name in wanted}
    writers = Writers()
    owners = {
        key: writers.next_of(holders[key[1]], sizes[key])
        for key in sorted(wanted, key=lambda key: -sizes[key])
    }
    return [
        DealtTensor(
            kind,
            name,
            shapes[name],
            sizes[kind, name],
            owners[kind, name],
            holders[name],
        )
        for kind, name in wanted
    ]


class Writers:
    """Of some ranks the one that has the fewest bytes to write so far, the first of these."""

    def __init__(self) -> None:
        self._num_bytes: dict[int, int] = defaultdict(int)
        self._heaps: dict[int, list[tuple[int, int]]] = {}  # by the holders: bytes, rank

    def next_of(self, holders: Holders, num_bytes: int) -> int:
        """Who is to write so many more."""
        heap = self._heaps.get(id(holders))
        if heap is None:
            heap = self._heaps[id(holders)] = [(0, rank) for rank in holders.ranks]
        while heap[0][0] != self._num_bytes[heap[0][1]]:  # it has got more from another heap
            heapreplace(heap, (self._num_bytes[heap[0][1]], heap[0][1]))
        before, rank = heap[0]
        self._num_bytes[rank] = before + num_bytes
        heapreplace(heap, (before + num_bytes, rank))
        return rank


def _all_holders(holdings: Holdings, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Holders]:
    """Layers of a stage are alike: thousands of ranks are asked for one of them."""
    known: dict[Any, Holders] = {}
    holders = {}
    last = holdings.layout.num_stages - 1
    for name, shape in shapes.items():
        alike = (LAYER.sub("", name), shape, holdings.stages_with(name, last))
        if alike not in known:
            known[alike] = _holders(holdings, name, shape)
        holders[name] = known[alike]
    return holders


def _holders(holdings: Holdings, name: str, shape: Sequence[int]) -> Holders:
    """Ranks that differ in what cuts no weight (`replicate`, `context`) have the same."""
    layout, is_expert = holdings.layout, holdings.is_expert(name)
    ranks_of: dict[Region, list[int]] = defaultdict(list)
    known: dict[tuple[int, ...], Region | None] = {}
    for rank in range(layout.size):
        place = layout.coordinates(rank)
        own = layout.index(rank, "expert") if is_expert else place.shard
        key = (place.pipeline, own, place.tensor)
        if key not in known:
            part = holdings.of(name, shape, rank)
            is_there = part is not None and prod(part.region.shape) > 0
            known[key] = part.region if part is not None and is_there else None
        region = known[key]
        if region is not None:
            ranks_of[region].append(rank)
    assert ranks_of, f"no rank has {name}"
    return Holders(ranks_of)


def _files(owner: int, tensors: Sequence[DealtTensor], file_bytes: int) -> list[DealtFile]:
    """A tensor above the limit has a file of its own."""
    files: list[DealtFile] = []
    size = 0
    for each in tensors:
        stem = "model" if each.kind == WEIGHT else "optimizer"
        if not files or files[-1].stem != stem or size + each.num_bytes > file_bytes:
            files.append(DealtFile(stem, owner, ()))
            size = 0
        files[-1] = replace(files[-1], tensors=(*files[-1].tensors, each))
        size += each.num_bytes
    return files


def _names(files: Sequence[DealtFile]) -> dict[int, str]:
    names: dict[int, str] = {}
    for stem in ("model", "optimizer"):
        alike = [file for file in files if file.stem == stem]
        names |= {id(file): shard_name(stem, i, len(alike)) for i, file in enumerate(alike)}
    return names
