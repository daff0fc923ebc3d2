"""Schemes: what quantized weights look like. methods/ finds good codes.

A scheme has a name that users type: `int8`, `int4-g128`, `int4-g64-asym`, `w8a8-int8`, `fp8`,
`fp8-tensor`, `fp8-block`. Codes have one form here, whatever a kernel or a file needs:

| | codes | scale | zero |
|---|---|---|---|
| int8 | int8 [O, D] | [O, 1] | – |
| int4 | uint8 [O, D], 0 … 15 | [O, G] | uint8 [O, G], or 8 for all |
| fp8 | e4m3 [O, D] | [O, 1], [1, 1], or [O / 128, D / 128] | – |

Letters: O outputs, D depth, G groups of the depth.

    scheme = parse_scheme("int4-g128")
    codes = encode(weight_OD, find_grid(weight_OD, scheme), scheme)
    decode(codes, scheme)                                 # fp32, near weight_OD
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ridgeline.errors import UsageError
from ridgeline.formats.packing import ZERO
from ridgeline.formats.scaling import LARGEST, SMALLEST_AMAX

BLOCK = 128
GROUPS = (32, 64, 128)
FP8 = torch.float8_e4m3fn
CODE_DTYPES = {"int8": torch.int8, "int4": torch.uint8, "fp8": FP8}
NAMES = "int8, int4-g32/-g64/-g128 (with -asym too), w8a8-int8, fp8, fp8-tensor, fp8-block"

WeightFormat = Literal["int8", "int4", "fp8", "blocks"]  # blocks: see block_scheme.py
InputFormat = Literal["16-bit", "int8", "fp8"]  # what a product multiplies the codes with
Spread = Literal["row", "tensor", "group", "block"]  # what shares a scale


@dataclass(frozen=True)
class Scheme:
    name: str
    weight: WeightFormat
    inputs: InputFormat = "16-bit"
    spread: Spread = "row"
    group: int = 0  # columns of a group; 0: all
    symmetric: bool = True

    @property
    def bits(self) -> int:
        return 4 if self.weight == "int4" else 8

    @property
    def input_dtype(self) -> torch.dtype | None:
        """What inputs are rounded to; None where they stay in 16 bits."""
        return {"16-bit": None, "int8": torch.int8, "fp8": FP8}[self.inputs]

    def fits(self, num_outputs: int, depth: int) -> bool:
        """Whether a matrix of this size can be stored in this scheme."""
        if self.spread == "group":
            return depth % self.group == 0
        if self.spread == "block":
            return num_outputs % BLOCK == 0 and depth % BLOCK == 0
        return True


class Grid(NamedTuple):
    """The values that codes stand for: `(code - zero) * scale`."""

    scale: Tensor  # fp32
    zero: Tensor | None = None


class Codes(NamedTuple):
    values: Tensor
    grid: Grid


def parse_scheme(name: str) -> Scheme:
    match = re.fullmatch(r"int4(?:-g(\d+))?(-asym)?", name)
    if match:
        group = int(match[1] or BLOCK)
        if group not in GROUPS:
            raise UsageError(f"scheme {name!r} has groups of {group}; use 32, 64 or 128")
        return Scheme(name, "int4", "16-bit", "group", group, match[2] is None)
    known = {
        "int8": Scheme(name, "int8"),
        "w8a8-int8": Scheme(name, "int8", "int8"),
        "fp8": Scheme(name, "fp8", "fp8"),
        "fp8-tensor": Scheme(name, "fp8", "fp8", "tensor"),
        "fp8-block": Scheme(name, "fp8", "fp8", "block"),
    }
    if name not in known:
        raise UsageError(f"scheme {name!r} is unknown; choose from {NAMES}")
    return known[name]


def find_grid(weight_OD: Tensor, scheme: Scheme) -> Grid:
    """The grid whose range just holds the largest weights of each row, group or block. Scales are
    multiplied by reciprocals, not divided: a GPU does so with constants anyway, and the weights of
    16-bit models fall on ties between codes often enough for the last bit to matter.
    """
    parts = in_parts(weight_OD.float(), scheme)
    if not scheme.symmetric:
        low, high = parts.amin((1, 3)).clamp(max=0.0), parts.amax((1, 3)).clamp(min=0.0)
        scale = ((high - low) * (1.0 / 15.0)).clamp(min=SMALLEST_AMAX)
        return Grid(scale, torch.floor(-low / scale + 0.5).clamp(0, 15).to(torch.uint8))
    largest = {"int8": LARGEST[torch.int8], "int4": 7.5, "fp8": LARGEST[FP8]}[scheme.weight]
    return Grid(parts.abs().amax((1, 3)).clamp(min=SMALLEST_AMAX) * (1.0 / largest))


def encode(weight_OD: Tensor, grid: Grid, scheme: Scheme) -> Codes:
    """Each weight's nearest code."""
    scaled = weight_OD.float() / spread(grid.scale, weight_OD.shape)
    zero = None if grid.zero is None else spread(grid.zero.float(), weight_OD.shape)
    return Codes(nearest(scaled, zero, scheme).to(CODE_DTYPES[scheme.weight]), grid)


def nearest(scaled: Tensor, zero: Tensor | None, scheme: Scheme) -> Tensor:
    """The nearest codes of weights that were divided by their scales, as fp32 numbers."""
    if scheme.weight == "fp8":
        limit = LARGEST[FP8]
        return scaled.clamp(-limit, limit).to(FP8).float()
    rounded = (scaled + 0.5).floor_()  # in place, and all that follows: weights are large
    if scheme.weight == "int8":
        return rounded.clamp_(-127, 127)
    return rounded.add_(ZERO[4] if zero is None else zero).clamp_(0, 15)


def decode(codes: Codes, scheme: Scheme) -> Tensor:
    """The values of the codes, in fp32."""
    values, grid = codes.values.float(), codes.grid
    if scheme.weight == "int4":
        zero = ZERO[4] if grid.zero is None else spread(grid.zero.float(), values.shape)
        values = values - zero
    return values * spread(grid.scale, values.shape)


def spread(scale: Tensor, shape: torch.Size) -> Tensor:
    """A scale per row, group or block, repeated for every weight it applies to."""
    rows, columns = shape[0] // scale.shape[0], shape[1] // scale.shape[1]
    return scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)


def in_parts(weight_OD: Tensor, scheme: Scheme) -> Tensor:
    """[parts down, rows of a part, parts across, columns of a part]: a part shares a scale."""
    num_outputs, depth = weight_OD.shape
    rows = {"tensor": num_outputs, "block": BLOCK}.get(scheme.spread, 1)
    columns = {"group": scheme.group, "block": BLOCK}.get(scheme.spread, depth)
    if num_outputs % rows or depth % columns:
        raise UsageError(
            f"a matrix of {num_outputs} x {depth} does not divide into parts of {rows} x "
            f"{columns}, which "
            f"scheme {scheme.name} needs"
        )
    return weight_OD.view(num_outputs // rows, rows, depth // columns, columns)
