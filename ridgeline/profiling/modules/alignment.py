"""Layers whose sizes 8 does not divide: a GPU's matrix units take rows in multiples of it, and
products of other sizes run on slower kernels. Which they are, and the padding that would mend them.

    layers = odd_layers(module.named_modules())
    layers["head"]                # OddLayer(sizes=(512, 1001), padded=(512, 1008))
    advice(layers)                # "head: 512 × 1001 (pad to 512 × 1008)"
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import nn

ALIGNED = 8  # elements of 16 bits
NUM_SHOWN = 4


class OddLayer(NamedTuple):
    sizes: tuple[int, int]  # in, out
    padded: tuple[int, int]


def odd_layers(parts: Iterable[tuple[str, nn.Module]]) -> dict[str, OddLayer]:
    """Of modules with their paths: linear layers and convolutions without groups."""
    result = {}
    for path, part in parts:
        sizes = layer_sizes(part)
        if sizes is not None and any(size % ALIGNED for size in sizes):
            result[path] = OddLayer(sizes, (padded_size(sizes[0]), padded_size(sizes[1])))
    return result


def layer_sizes(part: nn.Module) -> tuple[int, int] | None:
    """In and out; None for what multiplies no matrix."""
    if isinstance(part, nn.Linear):
        return part.in_features, part.out_features
    if isinstance(part, nn.Conv2d) and part.groups == 1:
        return part.in_channels, part.out_channels
    return None


def padded_size(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def advice(layers: Mapping[str, OddLayer]) -> str:
    """In a line; layers of the same sizes are named once."""
    alike: dict[OddLayer, list[str]] = {}
    for path, layer in layers.items():
        alike.setdefault(layer, []).append(path or "the module")
    shown = [
        f"{paths[0]}{f' and {len(paths) - 1} more' if len(paths) > 1 else ''}: "
        f"{_times(layer.sizes)} (pad to {_times(layer.padded)})"
        for layer, paths in alike.items()
    ]
    rest = len(shown) - NUM_SHOWN
    return "; ".join(shown[:NUM_SHOWN]) + (f"; and {rest} other sizes" if rest > 0 else "")


def _times(sizes: tuple[int, int]) -> str:
    return f"{sizes[0]} × {sizes[1]}"
