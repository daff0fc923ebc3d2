"""fp8 codes and their transposed copy in Triton: two passes over x, the values between them never
stored.

The first pass finds the largest magnitudes; for a norm it holds whole rows and leaves their
factors. The second makes the values again, a tile at a time, and writes the codes both ways.
Reading x twice is 6 bytes an element for a norm in bf16; a norm that stores its result, a search
for the largest and a conversion are 10.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.errors import UnsupportedError
from ridgeline.kernels.gated_activation.activations import activate
from ridgeline.kernels.gated_activation.reference import Activation
from ridgeline.kernels.launch import launch, target_of
from ridgeline.kernels.rms_norm.tune_space import block_of, num_walking
from ridgeline.kernels.rms_norm.tune_space import num_warps as norm_warps
from ridgeline.kernels.rows import as_rows, to_codes
from ridgeline.kernels.rows_to_fp8.reference import Fp8Rows, Norm, Scaling, scale_of
from ridgeline.kernels.targets import roomy

MAX_COLUMNS = 16384  # of a norm's rows, which are held whole
TILE_ROWS, TILE_COLUMNS = 128, 64  # a transposed row of codes is 128 bytes. Until measured


@triton.jit
def norm_sizes_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    hidden_ptr,
    factor_ptr,
    row_amax_ptr,
    column_amax_ptr,
    x_stride,
    residual_stride,
    num_rows,
    num_columns,
    eps,
    offset,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program walks every num_programs-th row and keeps the largest of each column."""
    columns = tl.arange(0, BLOCK)
    in_row = columns < num_columns
    gain = tl.load(weight_ptr + columns, mask=in_row, other=0.0).to(tl.float32) + offset
    largest = tl.zeros((BLOCK,), dtype=tl.float32)
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        place = tl.cast(row, tl.int64)  # offsets pass 2^31
        h = tl.load(x_ptr + place * x_stride + columns, mask=in_row, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:
            residual_ptrs = residual_ptr + place * residual_stride + columns
            h += tl.load(residual_ptrs, mask=in_row, other=0.0).to(tl.float32)
            rounded = h.to(hidden_ptr.dtype.element_ty)  # what later layers see is what is normed
            tl.store(hidden_ptr + place * num_columns + columns, rounded, mask=in_row)
            h = rounded.to(tl.float32)
        factor = tl.rsqrt(tl.sum(h * h) / num_columns + eps)
        size = tl.abs(h * factor * gain)
        largest = tl.maximum(largest, size)
        tl.store(factor_ptr + row, factor)
        tl.store(row_amax_ptr + row, tl.max(size, axis=0))
    own = tl.program_id(0).to(tl.int64) * num_columns
    tl.store(column_amax_ptr + own + columns, largest, mask=in_row)


@triton.jit
def tile_values(
    x_ptr,
    factor_ptr,
    weight_ptr,
    x_stride,
    num_columns,
    offset,
    rows,
    columns,
    keep,
    HAS_NORM: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """fp32 values [rows, columns]: x, its norm or its gated activation; 0 outside."""
    x_ptrs = x_ptr + rows[:, None] * x_stride + columns[None, :]
    value = tl.load(x_ptrs, mask=keep, other=0.0).to(tl.float32)
    if HAS_NORM:
        in_row = columns < num_columns
        gain = tl.load(weight_ptr + columns, mask=in_row, other=0.0).to(tl.float32) + offset
        factor = tl.load(factor_ptr + rows[:, None], mask=keep, other=0.0)
        value = value * factor * gain[None, :]
    if ACTIVATION != "":
        up = tl.load(x_ptrs + num_columns, mask=keep, other=0.0).to(tl.float32)
        value = activate(value, ACTIVATION) * up
    return value


@triton.jit
def largest_kernel(
    x_ptr,
    amax_ptr,
    x_stride,
    num_rows,
    num_columns,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The largest magnitude of a tile: all that one scale for the whole matrix takes."""
    num_tiles = tl.cdiv(num_columns, COLUMNS)
    down, across = tl.program_id(0) // num_tiles, tl.program_id(0) % num_tiles
    rows = down.to(tl.int64) * ROWS + tl.arange(0, ROWS)  # int64: offsets pass 2^31
    columns = across * COLUMNS + tl.arange(0, COLUMNS)
    keep = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    value = tile_values(
        x_ptr, x_ptr, x_ptr, x_stride, num_columns, 0.0, rows, columns, keep, False, ACTIVATION
    )
    tl.store(amax_ptr + tl.program_id(0), tl.max(tl.max(tl.abs(value), axis=1), axis=0))


@triton.jit
def tile_sizes_kernel(
    x_ptr,
    row_amax_ptr,
    column_amax_ptr,
    x_stride,
    num_rows,
    num_columns,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The largest magnitudes of a tile's rows and columns."""
    num_tiles = tl.cdiv(num_columns, COLUMNS)
    down, across = tl.program_id(0) // num_tiles, tl.program_id(0) % num_tiles
    rows = down.to(tl.int64) * ROWS + tl.arange(0, ROWS)  # int64: offsets pass 2^31
    columns = across * COLUMNS + tl.arange(0, COLUMNS)
    keep = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    value = tile_values(
        x_ptr, x_ptr, x_ptr, x_stride, num_columns, 0.0, rows, columns, keep, False, ACTIVATION
    )
    size = tl.abs(tl.where(keep, value, 0.0))
    row_ptrs = row_amax_ptr + across.to(tl.int64) * num_rows + rows
    tl.store(row_ptrs, tl.max(size, axis=1), mask=rows < num_rows)
    column_ptrs = column_amax_ptr + down.to(tl.int64) * num_columns + columns
    tl.store(column_ptrs, tl.max(size, axis=0), mask=columns < num_columns)


@triton.jit
def codes_kernel(
    x_ptr,
    factor_ptr,
    weight_ptr,
    codes_ptr,
    transposed_ptr,
    scale_ptr,
    column_scale_ptr,
    x_stride,
    num_rows,
    num_columns,
    offset,
    HAS_NORM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BY_ROW: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    num_tiles = tl.cdiv(num_columns, COLUMNS)
    down, across = tl.program_id(0) // num_tiles, tl.program_id(0) % num_tiles
    rows = down.to(tl.int64) * ROWS + tl.arange(0, ROWS)  # int64: offsets pass 2^31
    columns = across * COLUMNS + tl.arange(0, COLUMNS)
    keep = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    value = tile_values(
        x_ptr, factor_ptr, weight_ptr, x_stride, num_columns, offset, rows, columns, keep,
        HAS_NORM, ACTIVATION,
    )  # fmt: skip
    kind = codes_ptr.dtype.element_ty
    if BY_ROW:
        inverse = 1.0 / tl.load(scale_ptr + rows, mask=rows < num_rows, other=1.0)
        codes = to_codes(value * inverse[:, None], kind)
        inverse = 1.0 / tl.load(column_scale_ptr + columns, mask=columns < num_columns, other=1.0)
        column_codes = to_codes(value * inverse[None, :], kind)
    else:
        # Rounded twice, by one scale from two pointers: of codes that are written both ways ptxas
        # loses some (12.8, in Triton 3.6: it stores the stack's pointer in their place).
        codes = to_codes(value * (1.0 / tl.load(scale_ptr)), kind)
        column_codes = to_codes(value * (1.0 / tl.load(column_scale_ptr)), kind)
    tl.store(codes_ptr + rows[:, None] * num_columns + columns[None, :], codes, mask=keep)
    # Turned in shared memory, so that neighbours in a transposed row are written together.
    turned_ptrs = transposed_ptr + columns[:, None].to(tl.int64) * num_rows + rows[None, :]
    turned = (columns < num_columns)[:, None] & (rows < num_rows)[None, :]
    tl.store(turned_ptrs, tl.trans(column_codes), mask=turned)


def rows_to_fp8(
    x_TD: Tensor,
    dtype: torch.dtype,
    scaling: Scaling = "tensor",
    norm: Norm | None = None,
    activation: Activation | None = None,
) -> Fp8Rows:
    """The launcher; arguments and results are reference.py's."""
    assert norm is None or activation is None, "a norm or an activation"
    rows_TD = as_rows(x_TD)
    num_rows = rows_TD.shape[0]
    num_columns = rows_TD.shape[1] // (1 if activation is None else 2)
    factor_T = hidden_TD = None
    if norm is not None:
        row_amax, column_amax, factor_T, hidden_TD = _norm_sizes(rows_TD, norm)
        rows_TD = rows_TD if hidden_TD is None else hidden_TD
    elif scaling == "tensor":
        row_amax = column_amax = _largest(rows_TD, num_columns, activation)
    else:
        row_amax, column_amax = _tile_sizes(rows_TD, num_columns, activation)
    if scaling == "tensor":
        scale = column_scale = scale_of(row_amax.amax(), dtype)
    else:
        scale, column_scale = scale_of(row_amax, dtype), scale_of(column_amax.amax(0), dtype)
    device = x_TD.device
    codes_TD = torch.empty(num_rows, num_columns, dtype=dtype, device=device)
    transposed_DT = torch.empty(num_columns, num_rows, dtype=dtype, device=device)
    launch(
        codes_kernel,
        (_num_tiles(num_rows, num_columns),),
        (
            rows_TD,
            rows_TD if factor_T is None else factor_T,
            rows_TD if norm is None else norm.weight_D,
            codes_TD,
            transposed_DT,
            scale,
            column_scale,
            rows_TD.stride(0),
            num_rows,
            num_columns,
            0.0 if norm is None else float(norm.offset),
        ),
        HAS_NORM=norm is not None,
        ACTIVATION=activation or "",
        BY_ROW=scaling == "row",
        **_tile(x_TD),
    )
    return Fp8Rows(codes_TD, scale, transposed_DT, column_scale, hidden_TD)


def _tile_sizes(
    rows_TD: Tensor, num_columns: int, activation: Activation | None
) -> tuple[Tensor, Tensor]:
    """The largest of each row, and of each column in blocks of rows."""
    num_rows, device = rows_TD.shape[0], rows_TD.device
    across, down = triton.cdiv(num_columns, TILE_COLUMNS), triton.cdiv(num_rows, TILE_ROWS)
    row_amax = torch.empty(across, num_rows, dtype=torch.float32, device=device)
    column_amax = torch.empty(down, num_columns, dtype=torch.float32, device=device)
    launch(
        tile_sizes_kernel,
        (_num_tiles(num_rows, num_columns),),
        (rows_TD, row_amax, column_amax, rows_TD.stride(0), num_rows, num_columns),
        ACTIVATION=activation or "",
        **_tile(rows_TD),
    )
    return row_amax.amax(0), column_amax


def _largest(rows_TD: Tensor, num_columns: int, activation: Activation | None) -> Tensor:
    """The largest of each of some tiles, which are wide: rows are read, nothing is turned."""
    num_rows, tile = rows_TD.shape[0], TILE_ROWS * TILE_COLUMNS
    columns = min(1024, triton.next_power_of_2(num_columns))
    rows = tile // columns
    num_tiles = triton.cdiv(num_rows, rows) * triton.cdiv(num_columns, columns)
    amax = torch.empty(num_tiles, dtype=torch.float32, device=rows_TD.device)
    launch(
        largest_kernel,
        (num_tiles,),
        (rows_TD, amax, rows_TD.stride(0), num_rows, num_columns),
        ACTIVATION=activation or "",
        ROWS=rows,
        COLUMNS=columns,
        num_warps=tile // (32 * target_of(rows_TD).warp_size),
    )
    return amax


def _norm_sizes(rows_TD: Tensor, norm: Norm) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """As `_tile_sizes`, with each row's factor and the sum with the residual."""
    num_rows, num_columns = rows_TD.shape
    if num_columns > MAX_COLUMNS:
        raise UnsupportedError(f"rows of {num_columns} are longer than {MAX_COLUMNS}")
    target, device = target_of(rows_TD), rows_TD.device
    block = block_of(num_columns)
    num_programs = num_walking(num_rows, block, target)
    factor_T, row_amax = (
        torch.empty(num_rows, dtype=torch.float32, device=device) for _ in range(2)
    )
    column_amax = torch.empty(num_programs, num_columns, dtype=torch.float32, device=device)
    residual = hidden_TD = None
    if norm.residual_TD is not None:
        residual = as_rows(norm.residual_TD)
        hidden_TD = torch.empty(num_rows, num_columns, dtype=rows_TD.dtype, device=device)
    launch(
        norm_sizes_kernel,
        (num_programs,),
        (
            rows_TD,
            rows_TD if residual is None else residual,
            norm.weight_D,
            rows_TD if hidden_TD is None else hidden_TD,
            factor_T,
            row_amax,
            column_amax,
            rows_TD.stride(0),
            0 if residual is None else residual.stride(0),
            num_rows,
            num_columns,
            norm.eps,
            float(norm.offset),
        ),
        HAS_RESIDUAL=residual is not None,
        BLOCK=block,
        num_warps=norm_warps(block, target),
        options=roomy(target),
    )
    return row_amax, column_amax, factor_T, hidden_TD


def _num_tiles(num_rows: int, num_columns: int) -> int:
    return triton.cdiv(num_rows, TILE_ROWS) * triton.cdiv(num_columns, TILE_COLUMNS)


def _tile(x: Tensor) -> dict[str, Any]:
    warps = TILE_ROWS * TILE_COLUMNS // (32 * target_of(x).warp_size)
    return {"ROWS": TILE_ROWS, "COLUMNS": TILE_COLUMNS, "num_warps": warps}
