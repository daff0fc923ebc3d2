"""Parts of tensors from all ranks put together again.

whole = gathered_tensors(gradients, trainer.local.parts, shapes, mesh)      # on every rank
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, product
from typing import Any

import torch
from torch import Tensor, distributed

from ridgeline.parallel.holdings import Part, Ranges, Region
from ridgeline.parallel.mesh import Mesh

dist: Any = distributed


def gathered_tensors(
    tensors: Mapping[str, Tensor],
    parts: Mapping[str, Part],
    shapes: Mapping[str, tuple[int, ...]],
    mesh: Mesh,
) -> dict[str, Tensor]:
    """The whole of each, on every rank: for small models and proofs. What no rank has is NaN.
    `shapes` are those of the whole model's parameters.
    """
    own = {
        name: (parts[name].region, tensor[: parts[name].region.shape[0]].cpu())
        for name, tensor in tensors.items()
    }
    parts_of_all: list[Any] = [own]
    if mesh.control is not None:
        parts_of_all = [None] * mesh.layout.size
        dist.all_gather_object(parts_of_all, own, group=mesh.control.group)
    whole: dict[str, Tensor] = {}
    for held in parts_of_all:
        for name, (region, tensor) in held.items():
            if name not in whole:
                whole[name] = torch.full(shapes[name], torch.nan, dtype=tensor.dtype)
            place(whole[name], region, tensor)
    return whole


def place(whole: Tensor, region: Region, tensor: Tensor) -> None:
    """Write a part where it lies in the whole."""
    for corner in product(*(located(ranges) for ranges in region.dims)):
        there = tuple(slice(each.start, each.stop) for each, _ in corner)
        here = tuple(slice(start, start + len(each)) for each, start in corner)
        whole[there] = tensor[here]


def located(ranges: Ranges) -> list[tuple[range, int]]:
    """Each with where it begins when they lie one behind the other."""
    starts = accumulate(map(len, ranges), initial=0)
    return list(zip(ranges, starts, strict=False))
