"""Which tile of the fixed product is fastest, by the time it took: asked by the launcher, timed by
`ridgeline kernels tune` (`bench/kernels/tune.py`). Only tiles that keep the bits are offered, and
only such a one is believed, whatever a file of choices says.

    fixed_linear(x, weight, tile=search_space(256, 4096, 14336, False, target)[0])
"""

from __future__ import annotations

from bisect import bisect_left
from math import ceil
from typing import Any

import torch

from ridgeline.formats.dtypes import dtype_name
from ridgeline.kernels.autotune import KernelConfig, chosen
from ridgeline.kernels.fixed_linear.tile import Tile
from ridgeline.kernels.fixed_linear.tiles import PIECE, keeps_bits, ranked
from ridgeline.kernels.targets import Target

ROWS = (64, 128, 256, 512, 1024, 2048, 8192)  # a choice holds for up to so many, the last for all


def tune_key(num_rows: int, num_outputs: int, depth: int, gated: bool, dtype: torch.dtype) -> str:
    upto = ROWS[min(bisect_left(ROWS, num_rows), len(ROWS) - 1)]
    return f"{dtype_name(dtype)} {upto}x{num_outputs}x{depth}{' gated' if gated else ''}"


def search_space(
    num_rows: int, num_outputs: int, depth: int, gated: bool, target: Target
) -> list[Tile]:
    """What is worth timing, the most promising first; nothing where one tile serves all."""
    if target.name != "sm_90":
        return []
    pieces = max(1, ceil(depth / PIECE))
    tiles = ranked(num_rows, num_outputs, depth, pieces, gated, target)
    return [tile for tile in tiles if keeps_bits(tile, target)]


def tuned(key: str, device: torch.device, target: Target) -> Tile | None:
    """The fastest tile that was timed for this key on this kind of device, if any was."""

    def usable(config: KernelConfig) -> bool:
        return set(config) == set(Tile.__dataclass_fields__) and keeps_bits(_tile(config), target)

    values = chosen("fixed_linear", key, device, usable)
    return None if values is None else _tile(values)


def _tile(config: KernelConfig) -> Tile:
    values: dict[str, Any] = dict(config)
    return Tile(**values)
