"""Parts of tensors sent between the hosts of ranks, and whole where they arrive.

whole = exchanged(files, held, hosts, rank)     # every rank calls it, with the same files
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from ridgeline.parallel.agreeing import lost_ranks
from ridgeline.parallel.holdings import Region
from ridgeline.parallel.mesh import Axis
from ridgeline.training.ranks.weights.gathering import place
from ridgeline.training.saving.deal import DealtTensor, Round

dist: Any = distributed


class _Arriving(NamedTuple):
    work: Any
    part: Tensor
    whole: Tensor
    region: Region


def exchanged(
    files: Round, held: Mapping[str, Tensor], hosts: Axis | None, rank: int
) -> list[tuple[DealtTensor, Tensor]]:
    """The tensors of this rank's file. `held` has what this rank sends, by stored name."""
    whole = {
        each.stored: torch.empty(each.shape, dtype=held[each.stored].dtype)
        for file in files
        for each in file.tensors
        if each.owner == rank
    }
    arriving: list[_Arriving] = []
    sending: list[tuple[Any, Tensor]] = []  # the memory has to live as long
    with lost_ranks():
        for tag, tensor, source, region in _own_parts(files, rank):
            if source == rank:
                part = held[tensor.stored].cpu().contiguous()
                if tensor.owner == rank:
                    place(whole[tensor.stored], region, part)
                else:
                    work = dist.isend(_bytes(part), tensor.owner, group=_group(hosts), tag=tag)
                    sending.append((work, part))
            else:
                part = torch.empty(region.shape, dtype=held[tensor.stored].dtype)
                work = dist.irecv(_bytes(part), source, group=_group(hosts), tag=tag)
                arriving.append(_Arriving(work, part, whole[tensor.stored], region))
        while arriving:
            work, part, target, region = arriving.pop(0)
            work.wait()
            place(target, region, part)
        for work, _ in sending:
            work.wait()
    owned = [each for file in files for each in file.tensors if each.owner == rank]
    return [(each, whole[each.stored]) for each in owned]


def _own_parts(files: Round, rank: int) -> Iterator[tuple[int, DealtTensor, int, Region]]:
    """What this rank sends or gets, and from whom, with a number that is the part's on every
    rank.
    """
    first = 0
    for file in files:
        for tensor in file.tensors:
            if tensor.owner == rank:
                for number, source in enumerate(tensor.sources):
                    yield first + number, tensor, source.rank, source.region
            elif (sent := tensor.sent_by(rank)) is not None:
                yield first + sent[0], tensor, rank, sent[1]
            first += tensor.num_parts


def _group(hosts: Axis | None) -> Any:
    assert hosts is not None, "alone there is nobody to send to"
    return hosts.group


def _bytes(tensor: Tensor) -> Tensor:
    """The same memory, which gloo takes whatever its type is."""
    return tensor.view(-1).view(torch.uint8)
