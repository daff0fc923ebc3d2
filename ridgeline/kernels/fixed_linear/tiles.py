"""How the fixed product is cut into tiles. The rule: an output's sum must not depend on the choice.

On sm_90 every tile of 64 rows or more is made of the same instruction, wgmma m64nNk16: an output is
a chain of them over the depth, 16 columns at a time, whatever N and the tile. So tiles may follow
the number of rows there. A tile of fewer rows would go to another instruction (mma.sync), which
need not round alike: few rows take a tile of 64, mostly empty, which costs nothing while the
weights' bytes are what is waited for. On sm_80 and its like there is one instruction for all sizes.
Elsewhere one tile serves all.

`keeps_bits` is that rule; agreement.py holds the chip to it, and tests/gpu compare every tile.
Which tile is best is timed (tune_space.py), and until then worked out (expected.py).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import ceil

import torch

from ridgeline.kernels.fixed_linear.expected import expected_clocks
from ridgeline.kernels.fixed_linear.tile import Tile
from ridgeline.kernels.targets import TARGETS, Target

FP32 = 4
PIECE = 4096  # columns of the depth that are summed in one go
FEW_ROWS = 64
FULL = 0.9  # tiles for each SM from which on a program takes all pieces of its tiles
ENOUGH = 0.45  # programs for each SM below which smaller tiles are better (sm_80)

FEW = Tile(64, 32, 128, 4, 4)
# On sm_90, for up to 64 rows: the weights' bytes are what counts, and how many are under way.
HOPPER_FEW = (
    FEW,
    Tile(64, 32, 64, 4, 6),
    Tile(64, 64, 64, 4, 6),
    Tile(64, 64, 128, 4, 4),
    Tile(64, 16, 128, 4, 4),
    Tile(64, 128, 64, 4, 5),
)
# And for more. Wide ones read least again; narrow ones make programs enough of few rows.
HOPPER = (
    Tile(128, 128, 64, 8, 3, wide=True),
    Tile(128, 128, 64, 8, 4),
    Tile(128, 64, 64, 4, 4),
    Tile(128, 128, 64, 8, 4, wide=True),
    Tile(256, 128, 64, 8, 4),
    Tile(128, 128, 64, 8, 3),
    Tile(128, 128, 128, 8, 3),
    Tile(128, 64, 64, 4, 6),
    Tile(128, 32, 128, 4, 4),
    Tile(64, 128, 64, 4, 5),
    Tile(64, 64, 64, 4, 6),
    Tile(256, 64, 64, 8, 4),
)
AMPERE = (Tile(128, 128, 32, 8, 3), Tile(64, 64, 64, 4, 3))
AMPERE_FEW = Tile(16, 64, 128, 4, 3)
ONE = Tile(128, 128, 64, 8, 2)
AMD = Tile(64, 128, 64, 4, 2)
EXACT = Tile(32, 32, 32, 4, 2)  # fp32, which has no matrix unit that keeps its bits
KNOWN = ("sm_90", "sm_80", "sm_86", "sm_89")  # chips whose tiles give the same bits


def choose(
    num_rows: int,
    num_outputs: int,
    num_pieces: int,
    gated: bool,
    dtype: torch.dtype,
    target: Target,
    one_tile: bool = False,
) -> Tile:
    """The tile for this many rows; by `one_tile`, and on chips that are not known well enough, the
    same one for any.
    """
    if target.backend == "interpreter":
        return Tile(16, 16 if num_rows <= 16 else 32, 32, 4, 2)
    if dtype == torch.float32:
        return EXACT
    if one_tile or target.name not in KNOWN:
        return _paired(ONE if target.backend == "cuda" else AMD, gated)
    if target.name == "sm_90":
        return ranked(num_rows, num_outputs, num_pieces * PIECE, num_pieces, gated, target)[0]
    if num_rows <= AMPERE_FEW.block_m:
        return AMPERE_FEW
    for tile in (_paired(tile, gated) for tile in AMPERE):
        if num_programs(tile, num_rows, num_outputs) * num_pieces >= ENOUGH * target.num_units:
            return tile
    return _paired(AMPERE[-1], gated)


@lru_cache(maxsize=4096)
def ranked(
    num_rows: int, num_outputs: int, depth: int, num_pieces: int, gated: bool, target: Target
) -> tuple[Tile, ...]:
    """sm_90's tiles for this product, those first that should be fastest; of equals the deepest."""
    tiles = [*HOPPER_FEW]
    if num_rows > FEW_ROWS:  # 256 rows of several pieces spill
        usable = (tile for tile in HOPPER if tile.block_m < 256 or num_pieces == 1)
        tiles = [_paired(tile, gated) for tile in usable]

    def expected(tile: Tile) -> tuple[float, int]:
        clocks = expected_clocks(tile, num_rows, num_outputs, depth, num_pieces, gated, target)
        return clocks, -tile.num_stages

    return tuple(sorted(set(tiles), key=expected))


def keeps_bits(tile: Tile, target: Target) -> bool:
    """Whether this tile's sums are those of all others on this chip: by the rule above, one kind of
    instruction and whole steps of it.
    """
    if target.name == "sm_90":
        whole = tile.block_m % 64 == 0 and tile.num_warps % 4 == 0 and tile.block_o % 8 == 0
        return whole and tile.block_k % 16 == 0 and PIECE % tile.block_k == 0
    return False


def _paired(tile: Tile, gated: bool) -> Tile:
    """A gated product holds two sums: half as many outputs each."""
    if not gated:
        return tile
    return replace(tile, wide=False) if tile.wide else replace(tile, block_o=tile.block_o // 2)


def num_programs(tile: Tile, num_rows: int, num_outputs: int) -> int:
    return ceil(num_rows / tile.block_m) * ceil(num_outputs / tile.across)


def most_kept_bytes(num_outputs: int, depth: int, num_rows: int) -> int:
    """What is kept of pieces until they are summed, at most on any chip and with any tile."""
    num_pieces = ceil(depth / PIECE)
    if num_pieces == 1:
        return 0
    own = (*HOPPER_FEW, *HOPPER, *AMPERE, AMPERE_FEW, ONE, EXACT)
    tiles = {"cuda": own, "hip": (AMD, EXACT)}
    most = 0
    for target in TARGETS.values():
        for tile in tiles.get(target.backend, ()):
            programs = num_programs(tile, num_rows, num_outputs)
            apart = min(programs, ceil(FULL * target.num_units))
            most = max(most, num_pieces * apart * tile.num_sums(gated=False) * FP32)
    return most
