"""Who writes which tensors of a checkpoint, and who sends what of them: integers alone, so that
every rank knows all of it without asking.

A checkpoint holds whole tensors, whatever the layout. Each is written by one of the ranks that have
a part of it, so that all write as many bytes; of ranks with the same part the writer itself sends
it, or else the one next to it.

    for files in deal(holdings, shapes, {"weight": 2, "first": 4}):     # round by round
        for file in files:                                              # one a rank at most
            file.owner, [(each.stored, each.sources) for each in file.tensors]
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
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


@dataclass(frozen=True)
class DealtTensor:
    kind: str
    parameter: str
    shape: tuple[int, ...]
    num_bytes: int
    owner: int
    sources: tuple[SentPart, ...]  # all parts of it

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
    ranks_of = {id(each): sorted(set(chain(*each.values()))) for each in holders.values()}
    wanted = [(kind, name) for kind in kinds for name in shapes]
    sizes = {(kind, name): kinds[kind] * prod(shapes[name]) for kind, name in wanted}
    num_bytes: dict[int, int] = defaultdict(int)
    owners = {}
    for key in sorted(wanted, key=lambda key: -sizes[key]):
        owner = min(ranks_of[id(holders[key[1]])], key=lambda rank: (num_bytes[rank], rank))
        num_bytes[owner] += sizes[key]
        owners[key] = owner
    return [
        DealtTensor(
            kind,
            name,
            shapes[name],
            sizes[kind, name],
            owners[kind, name],
            tuple(
                SentPart(_nearest(ranks, owners[kind, name]), region)
                for region, ranks in holders[name].items()
            ),
        )
        for kind, name in wanted
    ]


def _all_holders(
    holdings: Holdings, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, dict[Region, list[int]]]:
    """Layers of a stage are alike: thousands of ranks are asked for one of them."""
    known: dict[Any, dict[Region, list[int]]] = {}
    holders = {}
    last = holdings.layout.num_stages - 1
    for name, shape in shapes.items():
        alike = (LAYER.sub("", name), shape, holdings.stages_with(name, last))
        if alike not in known:
            known[alike] = _holders(holdings, name, shape)
        holders[name] = known[alike]
    return holders


def _holders(holdings: Holdings, name: str, shape: Sequence[int]) -> dict[Region, list[int]]:
    """The ranks that have each part of a parameter."""
    ranks_of: dict[Region, list[int]] = defaultdict(list)
    for rank in range(holdings.layout.size):
        part = holdings.of(name, shape, rank)
        if part is not None and prod(part.region.shape) > 0:
            ranks_of[part.region].append(rank)
    assert ranks_of, f"no rank has {name}"
    return ranks_of


def _nearest(ranks: Sequence[int], owner: int) -> int:
    return min(ranks, key=lambda rank: (abs(rank - owner), rank))


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
