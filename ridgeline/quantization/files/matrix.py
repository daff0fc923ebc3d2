"""One quantized matrix of a checkpoint: its codes and their scheme. Rows can be cut out and joined,
since every scale belongs to rows: that is how the pieces of a fused weight become one matrix and
are split again. Columns can be cut out where the scales of groups or blocks allow it: that is how
ranks share a matrix.

Letters: O outputs, D depth, G groups of the depth.

    fused = join([q, k, v])
    k = cut(fused, slice(num_q, num_q + num_k))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.errors import UnsupportedError
from ridgeline.formats.gguf_blocks import block_size, dequantize
from ridgeline.quantization.block_scheme import BlockScheme, block_scheme
from ridgeline.quantization.scheme import (
    BLOCK,
    FP8,
    GROUPS,
    Codes,
    Grid,
    Scheme,
    decode,
    parse_scheme,
)


class StoredMatrix(NamedTuple):
    codes: Codes
    scheme: Scheme

    @property
    def shape(self) -> tuple[int, int]:
        """Of codes; a matrix in blocks has bytes."""
        num_outputs, depth = self.codes.values.shape
        return num_outputs, depth


def decoded_matrix(matrix: StoredMatrix) -> Tensor:
    """Its weights, in fp32."""
    if isinstance(matrix.scheme, BlockScheme):
        return decoded_blocks(matrix)
    return decode(matrix.codes, matrix.scheme)


def cut(matrix: StoredMatrix, rows: slice) -> StoredMatrix:
    """These rows as a separate matrix."""
    (values, grid), scheme = matrix
    start, stop, _ = rows.indices(values.shape[0])
    if scheme.spread == "block" and (start % BLOCK or stop % BLOCK):
        raise UnsupportedError(
            f"rows {start} to {stop} cannot be cut out of blocks of {BLOCK} rows; use scheme fp8"
        )
    of_scale = _scale_rows(scheme, start, stop)
    zero = None if grid.zero is None else grid.zero[of_scale]
    return StoredMatrix(Codes(values[start:stop], Grid(grid.scale[of_scale], zero)), scheme)


def cut_columns(matrix: StoredMatrix, columns: slice) -> StoredMatrix:
    """These columns as a separate matrix, in memory of their own: with the scales that they have in
    the whole one, so that no code changes.
    """
    (values, grid), scheme = matrix
    start, stop, _ = columns.indices(values.shape[1])
    width = shared_columns(scheme)
    assert start % width == 0, (scheme.name, start)
    assert stop % width == 0, (scheme.name, stop)
    of_scale = slice(start // width, stop // width) if width > 1 else slice(None)
    zero = None if grid.zero is None else grid.zero[:, of_scale].contiguous()
    grid = Grid(grid.scale[:, of_scale].contiguous(), zero)
    return StoredMatrix(Codes(values[:, start:stop].contiguous(), grid), scheme)


def shared_columns(scheme: Scheme) -> int:
    """How many columns share a scale with each other and not with all: where they may be cut."""
    return {"group": scheme.group, "block": BLOCK}.get(scheme.spread, 1)


def shared_rows(scheme: Scheme) -> int:
    """The same of rows."""
    return BLOCK if scheme.spread == "block" else 1


def _scale_rows(scheme: Scheme, start: int, stop: int) -> slice:
    if scheme.spread == "tensor":
        return slice(None)
    return slice(start // BLOCK, stop // BLOCK) if scheme.spread == "block" else slice(start, stop)


def join(matrices: Sequence[StoredMatrix]) -> StoredMatrix | None:
    """Stacked by rows, without changing a weight; None where their schemes differ."""
    if len(matrices) == 1:
        return matrices[0]
    if any(isinstance(matrix.scheme, BlockScheme) for matrix in matrices):
        return _joined_blocks(matrices)
    matrices = alike([by_rows(matrix) for matrix in matrices])
    if len({matrix.scheme for matrix in matrices}) > 1:
        return None
    zeros = [matrix.codes.grid.zero for matrix in matrices]
    zero = torch.cat([zero for zero in zeros if zero is not None]) if zeros[0] is not None else None
    grid = Grid(torch.cat([matrix.codes.grid.scale for matrix in matrices]), zero)
    return StoredMatrix(Codes(_stacked(matrices), grid), matrices[0].scheme)


def joined_scheme(schemes: Sequence[Scheme]) -> Scheme | None:
    """The scheme that `join` gives matrices with these schemes."""
    if len(schemes) == 1:
        return schemes[0]
    if any(isinstance(scheme, BlockScheme) for scheme in schemes):
        return _joined_block_scheme(schemes)
    by_row = [_row_scheme(scheme) for scheme in schemes]
    if not all(scheme.symmetric for scheme in by_row):
        by_row = [_zeros_scheme(scheme) for scheme in by_row]
    return by_row[0] if len(set(by_row)) == 1 else None


def _joined_blocks(matrices: Sequence[StoredMatrix]) -> StoredMatrix | None:
    """Bytes one after the other, which are rows no longer where their types differ."""
    scheme = _joined_block_scheme([matrix.scheme for matrix in matrices])
    if scheme is None:
        return None
    values = torch.cat([matrix.codes.values.flatten() for matrix in matrices])
    return StoredMatrix(Codes(values, matrices[0].codes.grid), scheme)


def _joined_block_scheme(schemes: Sequence[Scheme]) -> BlockScheme | None:
    blocks = [scheme for scheme in schemes if isinstance(scheme, BlockScheme)]
    if len(blocks) < len(schemes):
        return None
    return block_scheme([part for scheme in blocks for part in scheme.rows])


def decoded_blocks(matrix: StoredMatrix) -> Tensor:
    """The numbers that a matrix in blocks of one type stands for."""
    assert isinstance(matrix.scheme, BlockScheme), matrix.scheme.name
    (kind, count), *others = matrix.scheme.rows
    assert not others, "decoded before it is joined"
    values = matrix.codes.values.contiguous()
    elements, num_bytes = block_size(kind)
    depth = values.numel() // count // num_bytes * elements
    return dequantize(values.numpy(), kind, (count, depth))


def _row_scheme(scheme: Scheme) -> Scheme:
    if scheme.spread != "tensor":
        return scheme
    return replace(parse_scheme("fp8"), inputs=scheme.inputs)


def _zeros_scheme(scheme: Scheme) -> Scheme:
    if scheme.weight != "int4" or not scheme.symmetric:
        return scheme
    return parse_scheme(f"int4-g{scheme.group}-asym")


def _stacked(matrices: Sequence[StoredMatrix]) -> Tensor:
    parts = [matrix.codes.values for matrix in matrices]
    if parts[0].dtype == FP8:  # fp8 tensors move as bytes
        return torch.cat([part.view(torch.uint8) for part in parts]).view(FP8)
    return torch.cat(parts)


def by_rows(matrix: StoredMatrix) -> StoredMatrix:
    """A per-tensor scale repeated for each row, so that other matrices can be joined."""
    if matrix.scheme.spread != "tensor":
        return matrix
    values, grid = matrix.codes
    scale = grid.scale.expand(values.shape[0], 1).contiguous()
    return StoredMatrix(Codes(values, Grid(scale)), _row_scheme(matrix.scheme))


def alike(matrices: list[StoredMatrix]) -> list[StoredMatrix]:
    """Where one of several 4-bit matrices has zero points, all get them."""
    if all(matrix.scheme.symmetric for matrix in matrices):
        return matrices
    return [with_zeros(matrix) if matrix.scheme.symmetric else matrix for matrix in matrices]


def with_zeros(matrix: StoredMatrix) -> StoredMatrix:
    (values, grid), scheme = matrix
    if scheme.weight != "int4":
        return matrix
    zero = torch.full(grid.scale.shape, 8, dtype=torch.uint8)
    return StoredMatrix(Codes(values, Grid(grid.scale, zero)), _zeros_scheme(scheme))


def int4_matrix(codes_OD: Tensor, scale_OG: Tensor, zero_OG: Tensor | None) -> StoredMatrix | None:
    """4-bit codes with groups of any length in one of our schemes, if its groups divide them; zero
    points that are all 8 are left out.
    """
    length = codes_OD.shape[1] // scale_OG.shape[1]
    group = longest_group(length)
    if not group:
        return None
    repeats = length // group
    scale = scale_OG.float().repeat_interleave(repeats, 1)
    if zero_OG is None or bool((zero_OG == 8).all()):
        return StoredMatrix(Codes(codes_OD, Grid(scale)), parse_scheme(f"int4-g{group}"))
    zero = zero_OG.to(torch.uint8).repeat_interleave(repeats, 1)
    return StoredMatrix(Codes(codes_OD, Grid(scale, zero)), parse_scheme(f"int4-g{group}-asym"))


def longest_group(length: int) -> int:
    """The longest of our group sizes that divides this length; 0: none does."""
    return max((size for size in GROUPS if length % size == 0), default=0)


def expanded(
    codes_OD: Tensor, scale: Tensor, part: tuple[int, int], zero: Tensor | float = 0.0
) -> Tensor:
    """The weights of codes that match none of our schemes. `part` says how many rows and columns
    share a scale and a zero point; the last ones may be fewer.
    """
    if isinstance(zero, Tensor):
        zero = _spread(zero.float(), part, codes_OD.shape)
    return (codes_OD.float() - zero) * _spread(scale.float(), part, codes_OD.shape)


def _spread(scale: Tensor, part: tuple[int, int], shape: torch.Size) -> Tensor:
    rows, columns = part
    return scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: shape[0], : shape[1]]
