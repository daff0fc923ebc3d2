"""How long a tile of the fixed product should take on sm_90, in clocks: a rough model that orders
the tiles where none was timed. Timed choices (tune_space.py) come first.

An SM does programs one after the other, or a few at once which then share it. A step of a program
waits for the slowest of three: the matrix unit, shared memory (it is read for every instruction, so
narrow tiles are bound by it), and the bytes that come from L2. No product ends before its weights
are read, and few programs with few bytes under way read slowly.
"""

from __future__ import annotations

from math import ceil

from ridgeline.kernels.fixed_linear.tile import Tile
from ridgeline.kernels.targets import Target

DENSE = 2048  # multiply-adds of an SM in a clock, bf16
SHARED_BYTES = 128  # an SM reads from shared memory in a clock
L2_BYTES = 32  # and gets from L2 when all ask: what 600 TFLOP/s need with tiles of 128 x 256
MOST_L2_BYTES = 48  # and when few do
READ_BYTES = 2400  # the chip reads from memory: 4.25 TB/s at 1.75 GHz
LATENCY = 1200  # clocks from asking memory to having, under load
AROUND = 3500  # clocks of a program before its first and after its last step
ELEMENT = 2  # bytes


def expected_clocks(
    tile: Tile,
    num_rows: int,
    num_outputs: int,
    depth: int,
    num_pieces: int,
    gated: bool,
    sm: Target,
) -> float:
    blocks = 2 if gated or tile.wide else 1  # blocks of weights beside each block of rows
    width = tile.block_o * blocks
    num_tiles = ceil(num_rows / tile.block_m) * ceil(num_outputs / tile.across)
    apart = num_tiles < sm.num_units
    num_programs = num_tiles * (num_pieces if apart else 1)
    num_steps = ceil(depth / (num_pieces if apart else 1) / tile.block_k)
    room = (tile.block_m + width) * tile.block_k * ELEMENT
    at_once = max(1, sm.shared_bytes // (room * tile.num_stages))
    step_bytes = (min(num_rows, tile.block_m) + width) * tile.block_k * ELEMENT
    busy = min(num_programs, sm.num_units)
    from_l2 = min(MOST_L2_BYTES, L2_BYTES * sm.num_units / busy)
    step = max(_matrix_clocks(tile, blocks), step_bytes / from_l2)
    rounds = ceil(num_programs / sm.num_units)
    working = rounds * num_steps * step + ceil(rounds / at_once) * AROUND
    active = min(num_programs, sm.num_units * at_once)
    under_way = active * (tile.num_stages - 1) * width * tile.block_k * ELEMENT
    weights = num_outputs * (2 if gated else 1) * depth * ELEMENT
    reading = weights / min(READ_BYTES, under_way / LATENCY) + AROUND
    return max(working, reading) + _sharing_clocks(tile, num_tiles, num_pieces, gated, sm)


def _matrix_clocks(tile: Tile, blocks: int) -> float:
    """wgmma takes 64 rows of x and a block of weights from shared memory for 16 columns."""
    multiplying = 64 * tile.block_o * 16 / DENSE
    reading = (64 + tile.block_o) * 16 * ELEMENT / SHARED_BYTES
    return tile.block_m / 64 * blocks * tile.block_k / 16 * max(multiplying, reading)


def _sharing_clocks(tile: Tile, num_tiles: int, num_pieces: int, gated: bool, sm: Target) -> float:
    """Sums of pieces are written and read again, in fp32."""
    if num_pieces == 1:
        return 0.0
    return 2 * num_pieces * num_tiles * tile.num_sums(gated) * 4 / (sm.num_units * L2_BYTES)
