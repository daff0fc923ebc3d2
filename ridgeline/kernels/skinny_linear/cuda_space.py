"""How the CUDA C++ kernels of skinny_linear and quantized_linear can be configured: a `WorkSplit`,
or for one row of codes a `OneRow`; those worth timing, and the one used where nothing was timed.

    skinny_linear(x, weight, config=cuda_configs("plain", 1, 4096, 14336, False)[3])
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import ceil
from typing import Literal

# "fp8" and "int8 codes" take x in codes too, the others in 16 bits.
WeightKind = Literal["plain", "int8 words", "int8 rows", "int4", "fp8", "int8 codes", "fp8 weights"]
KINDS: tuple[WeightKind, ...] = (
    "plain",
    "int8 words",
    "int8 rows",
    "int4",
    "fp8",
    "int8 codes",
    "fp8 weights",
)
ONE_ROW_KINDS = ("int8 words", "int8 rows", "int4", "fp8 weights")
PIECE = {"plain": 8, "int4": 32}  # weights in 16 bytes; 16 for the rest
FEW = 4  # rows up to which the warps of a block may share the depth
STAGED_BYTES = 64 * 1024  # of x in shared memory, beside the weights on their way
SHARED_BYTES = 216 * 1024  # of an SM, for the blocks of one row
GROUPS = (32, 64, 128)  # of 4-bit codes


@dataclass(frozen=True)
class WorkSplit:
    """How the work is cut. Few rows (`splits` 0): `warps` share the depth of `tiles` of 16 weight
    rows, and a block has so many `teams` of them. More: each of 4 or 8 `warps` has 32 weight rows,
    and `splits` blocks share the depth.
    """

    tiles: int = 1
    warps: int = 8
    stages: int = 2  # steps of weights on their way
    splits: int = 0
    teams: int = 1
    blocks: int = 2  # of few rows an SM holds; they make tile after tile

    @property
    def label(self) -> str:
        few = f"t{self.tiles} w{self.warps}x{self.teams} b{self.blocks}"
        cut = f"split{self.splits} w{self.warps}" if self.splits else few
        return f"cuda {cut} s{self.stages}"


@dataclass(frozen=True)
class OneRow:
    """How one row is cut (quantized_linear/one_row.cuh): a warp has `lines` weight rows at a time,
    a block `warps`, an SM `blocks`; `stages` (4 or 8) steps of 512 bytes a line are on their way.
    """

    lines: int = 2
    warps: int = 16
    blocks: int = 1
    stages: int = 8

    @property
    def label(self) -> str:
        return f"cuda row {self.lines} w{self.warps} b{self.blocks} s{self.stages}"

    @property
    def ring_bytes(self) -> int:
        """Of a block, in shared memory."""
        return self.lines * self.warps * self.stages * 512


@dataclass(frozen=True)
class Groups:
    """Of 4-bit codes: how long they are, whether they have zero points."""

    size: int = 128
    zeros: bool = False

    def fits(
        self, config: OneRow, *, num_outputs: int, depth: int, gated: bool, num_units: int
    ) -> bool:
        """Whether a block can copy its scales: by four bytes, and all of them at once."""
        rows = config.warps * (config.lines // 2 if gated else config.lines)
        rounds = ceil(num_outputs / (rows * config.blocks * num_units))
        columns = rounds * (2 if gated else 1) * depth // self.size
        bytes_ = columns * (rows * 2 + 4) + (columns * (rows + 4) if self.zeros else 0)
        x_bytes = depth * 17 // 8  # and its sums
        room = SHARED_BYTES // config.blocks - config.ring_bytes - x_bytes
        return rows % 4 == 0 and rows <= 64 and bytes_ <= room


def fits_one_row(kind: WeightKind, num_rows: int, depth: int) -> bool:
    """Whether the kernel of one row takes it, x as a whole in shared memory."""
    x_bytes = 4 if kind == "fp8 weights" else 2
    return kind in ONE_ROW_KINDS and num_rows == 1 and depth * x_bytes <= 2 * STAGED_BYTES


def one_row_configs(kind: WeightKind, depth: int) -> list[OneRow]:
    """What is worth timing: 32 KB or more on their way to an SM, as far as x leaves room."""
    x_bytes = 4 if kind == "fp8 weights" else 2
    return [
        config
        for stages, lines in product((8, 4), (2, 4))
        for warps, blocks in ONE_ROW_BLOCKS
        for config in [OneRow(lines, warps, blocks, stages)]
        if config.ring_bytes * blocks >= 32 * 1024
        and blocks * (config.ring_bytes + depth * x_bytes) <= SHARED_BYTES
    ]


ONE_ROW_BLOCKS = (
    *((2, blocks) for blocks in (6, 8)),
    *((4, blocks) for blocks in (2, 3, 4, 5)),
    *((6, blocks) for blocks in (2, 3)),
    *((8, blocks) for blocks in (1, 2, 3)),
    *((10, blocks) for blocks in (1, 2)),
    *((12, 1), (12, 2), (14, 1), (16, 1)),
)


def fits_few(kind: WeightKind, num_rows: int, depth: int) -> bool:
    """Whether x fits in shared memory as a whole, as the kernel of few rows has it."""
    x_bytes = 1 if kind in ("fp8", "int8 codes") else 2
    return num_rows <= FEW and num_rows * depth * x_bytes <= STAGED_BYTES


@lru_cache
def default_cuda_config(
    kind: WeightKind, num_rows: int, num_outputs: int, depth: int, gated: bool
) -> WorkSplit | OneRow:
    """A guess until measured: blocks for every SM, two or three steps on their way."""
    if fits_one_row(kind, num_rows, depth):
        usual = OneRow()
        fitting = one_row_configs(kind, depth)
        return usual if usual in fitting else max(fitting, key=lambda config: config.ring_bytes)
    weight_rows = num_outputs * (2 if gated else 1)
    if fits_few(kind, num_rows, depth):
        return WorkSplit(tiles=2 if gated else 1, warps=8, blocks=2)
    blocks = ceil(weight_rows / 128)
    return WorkSplit(
        warps=4, stages=3, splits=next((s for s in (1, 2, 4, 5) if blocks * s >= 200), 8)
    )


def cuda_configs(
    kind: WeightKind, num_rows: int, num_outputs: int, depth: int, gated: bool
) -> list[WorkSplit | OneRow]:
    """What is worth timing."""
    one_row = one_row_configs(kind, depth) if fits_one_row(kind, num_rows, depth) else []
    return [*one_row, *tile_configs(kind, num_rows, num_outputs, depth, gated)]


def tile_configs(
    kind: WeightKind, num_rows: int, num_outputs: int, depth: int, gated: bool
) -> list[WorkSplit]:
    """Of the kernels with matrix units."""
    if kind == "fp8 weights":
        return []
    weight_rows = num_outputs * (2 if gated else 1)
    configs = [
        WorkSplit(warps=warps, stages=stages, splits=splits)
        for warps in (4, 8)
        for splits in (1, 2, 3, 4, 5, 8)
        for stages in (2, 3, 4)
        if 96 <= ceil(weight_rows / (32 * warps)) * splits <= 640
    ]
    if fits_few(kind, num_rows, depth):
        configs += [
            WorkSplit(tiles, warps, stages, teams=teams, blocks=blocks)
            for tiles in (1, 2)
            for warps, teams in ((1, 8), (1, 16), (2, 4), (2, 8), (4, 1), (4, 2), (8, 1), (16, 1))
            for stages in (2, 3, 4)
            for blocks in (1, 2, 3, 4)
            if 12 <= warps * teams * blocks <= 24
            and 16 <= tiles * warps * teams * stages * blocks <= 48
            and 32 * warps >= 16 * tiles * num_rows // (2 if gated else 1)
            and (tiles == 2 or not gated)
        ]
    return configs
