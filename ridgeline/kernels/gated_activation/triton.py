"""SwiGLU and GeGLU in Triton: one pass over memory, forward and backward.

Rows are contiguous in their last dim; the rows' own stride is free. The plain forms are cut into
tiles of any columns. Codes need their row's largest magnitude before the first of them is written:
a program keeps the whole row's product in registers while the next rows travel to shared memory,
and rows too long for that are read twice, the second time out of the L2 cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.formats.scaling import LARGEST, SMALLEST_AMAX
from ridgeline.kernels.gated_activation.reference import Activation
from ridgeline.kernels.launch import launch, target_of
from ridgeline.kernels.rows import as_rows, roomy, row_scale, to_codes
from ridgeline.kernels.targets import Target

TILE = 2048  # elements of the output a program of the plain forms makes
MAX_HELD = 32768  # longest row whose product stays in registers: 64 elements a thread of 16 warps


@triton.jit
def gate_share(gate, ACTIVATION: tl.constexpr):
    """`act(gate) / gate`: what share of the gate goes through. fp32 in and out.

    tanh is not in Triton's own language, and (1 + tanh(u)) / 2 is the sigmoid of 2u.
    """
    if ACTIVATION == "silu":
        share = tl.sigmoid(gate)
    elif ACTIVATION == "gelu":
        share = 0.5 + 0.5 * tl.erf(gate * 0.7071067811865476)  # x / sqrt(2)
    else:
        share = tl.sigmoid(gate * (1.5957691216057308 + 0.0713548162726002 * gate * gate))
    return share


@triton.jit
def gate_slope(gate, share, ACTIVATION: tl.constexpr):
    """The derivative of `act` at gate, where `share` is `gate_share`'s result."""
    if ACTIVATION == "silu":
        slope = share * (1.0 + gate * (1.0 - share))
    elif ACTIVATION == "gelu":
        slope = share + gate * tl.exp(-0.5 * gate * gate) * 0.3989422804014327  # 1 / sqrt(2 pi)
    else:
        inner = 1.5957691216057308 + 3 * 0.0713548162726002 * gate * gate
        slope = share * (1.0 + gate * (1.0 - share) * inner)
    return slope


@triton.jit
def product(gate_ptrs, num_columns, keep, ACTIVATION: tl.constexpr):
    """fp32 `act(gate) · up` at these places of the gate half; zero where not kept."""
    gate = tl.load(gate_ptrs, mask=keep, other=0.0)
    up = tl.load(gate_ptrs + num_columns, mask=keep, other=0.0)
    gate = gate.to(tl.float32)  # the exponential in bf16 would lose what the product keeps
    if ACTIVATION == "silu":
        activated = gate / (1.0 + tl.exp(-gate))  # one multiplication less than by its share
    else:
        activated = gate * gate_share(gate, ACTIVATION)
    return activated * up.to(tl.float32)


@triton.jit
def tile_places(num_rows, num_columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Rows and columns of this program's tile; column blocks of the same rows are neighbours."""
    blocks = tl.cdiv(num_columns, BLOCK)
    row_block, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    rows = row_block.to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # int64: they pass 2^31
    columns = block * BLOCK + tl.arange(0, BLOCK)[None, :]
    return rows, columns, (rows < num_rows) & (columns < num_columns)


@triton.jit
def gated_activation_kernel(
    x_ptr,
    out_ptr,
    x_stride,
    num_rows,
    num_columns,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows, columns, keep = tile_places(num_rows, num_columns, ROWS, BLOCK)
    out = product(x_ptr + rows * x_stride + columns, num_columns, keep, ACTIVATION)
    place = rows * num_columns + columns
    tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=keep)


@triton.jit
def backward_kernel(
    x_ptr,
    grad_ptr,
    grad_x_ptr,
    x_stride,
    num_rows,
    num_columns,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows, columns, keep = tile_places(num_rows, num_columns, ROWS, BLOCK)
    gate_ptrs = x_ptr + rows * x_stride + columns
    gate = tl.load(gate_ptrs, mask=keep, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + num_columns, mask=keep, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + rows * num_columns + columns, mask=keep, other=0.0).to(tl.float32)
    share = gate_share(gate, ACTIVATION)
    grad_gate = grad * up * gate_slope(gate, share, ACTIVATION)
    grad_up = grad * gate * share
    out_ptrs = grad_x_ptr + rows * (2 * num_columns) + columns
    tl.store(out_ptrs, grad_gate.to(grad_x_ptr.dtype.element_ty), mask=keep)
    tl.store(out_ptrs + num_columns, grad_up.to(grad_x_ptr.dtype.element_ty), mask=keep)


@triton.jit
def largest_magnitude(out, ROWS: tl.constexpr):
    """Of each row; of the one row as a number, which has no layout that pieces could differ in."""
    if ROWS == 1:
        largest = tl.max(tl.abs(out))
    else:
        largest = tl.max(tl.abs(out), axis=1, keep_dims=True)
    return largest


@triton.jit
def store_codes(out_ptr, rows, columns, num_columns, out, scale, keep):
    # Eight codes a thread: left to itself the compiler would give a thread sixteen, of the inputs
    # too, and each 16-byte load of theirs would then fetch 32-byte sectors it uses half of.
    place = tl.max_contiguous(rows * num_columns + columns, [1, 8])
    codes = to_codes(out * (1.0 / scale), out_ptr.dtype.element_ty)  # one division a row
    tl.store(out_ptr + place, codes, mask=keep)


@triton.jit
def held_rows_kernel(
    x_ptr,
    out_ptr,
    scale_ptr,
    x_stride,
    num_rows,
    num_columns,
    ACTIVATION: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST_AMAX: tl.constexpr,
    ROWS: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    THIRD: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Codes of whole rows, each in up to three pieces whose widths are powers of two.

    With STAGES = 3 the next two tiles are on their way to shared memory while one is computed.
    """
    columns = tl.arange(0, FIRST)[None, :]
    columns2 = FIRST + tl.arange(0, SECOND)[None, :]
    columns3 = FIRST + SECOND + tl.arange(0, THIRD)[None, :]
    num_tiles = tl.cdiv(num_rows, ROWS)
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), num_stages=STAGES):
        rows = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # they pass 2^31
        in_rows = rows < num_rows
        row_ptr = x_ptr + rows * x_stride
        keep = in_rows & (columns < num_columns)
        out = product(row_ptr + columns, num_columns, keep, ACTIVATION)
        amax = largest_magnitude(out, ROWS)
        if SECOND > 1:
            keep2 = in_rows & (columns2 < num_columns)
            out2 = product(row_ptr + columns2, num_columns, keep2, ACTIVATION)
            amax = tl.maximum(amax, largest_magnitude(out2, ROWS))
        if THIRD > 1:
            keep3 = in_rows & (columns3 < num_columns)
            out3 = product(row_ptr + columns3, num_columns, keep3, ACTIVATION)
            amax = tl.maximum(amax, largest_magnitude(out3, ROWS))
        scale = row_scale(amax, LARGEST, SMALLEST_AMAX)
        tl.store(scale_ptr + rows, scale, mask=in_rows)
        store_codes(out_ptr, rows, columns, num_columns, out, scale, keep)
        if SECOND > 1:
            store_codes(out_ptr, rows, columns2, num_columns, out2, scale, keep2)
        if THIRD > 1:
            store_codes(out_ptr, rows, columns3, num_columns, out3, scale, keep3)


@triton.jit
def long_rows_kernel(
    x_ptr,
    out_ptr,
    scale_ptr,
    x_stride,
    num_columns,
    ACTIVATION: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST_AMAX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Codes of one row, read twice; backwards the second time, so that the freshest come first."""
    row = tl.program_id(0).to(tl.int64)  # int64: offsets pass 2^31
    row_ptr = x_ptr + row * x_stride
    largest = tl.zeros((BLOCK,), dtype=tl.float32)
    num_blocks = tl.cdiv(num_columns, BLOCK)
    for block in range(num_blocks):
        columns = block * BLOCK + tl.arange(0, BLOCK)
        out = product(row_ptr + columns, num_columns, columns < num_columns, ACTIVATION)
        largest = tl.maximum(largest, tl.abs(out))
    scale = row_scale(tl.max(largest, axis=0), LARGEST, SMALLEST_AMAX)
    for block in range(num_blocks):
        columns = (num_blocks - 1 - block) * BLOCK + tl.arange(0, BLOCK)
        keep = columns < num_columns
        out = product(row_ptr + columns, num_columns, keep, ACTIVATION)
        codes = to_codes(out * (1.0 / scale), out_ptr.dtype.element_ty)
        tl.store(out_ptr + row * num_columns + columns, codes, mask=keep)
    tl.store(scale_ptr + row, scale)


def gated_activation(
    gate_up_T2F: Tensor, activation: Activation, quantized: torch.dtype | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """The launcher; arguments and results are reference.py's."""
    if quantized is not None:
        return _to_codes(gate_up_T2F, activation, quantized)
    rows_T2F = as_rows(gate_up_T2F)
    num_rows, num_columns = rows_T2F.shape[0], rows_T2F.shape[1] // 2
    shape = (*gate_up_T2F.shape[:-1], num_columns)
    out = torch.empty(shape, dtype=gate_up_T2F.dtype, device=gate_up_T2F.device)
    rows, block = _tile(num_columns)
    num_programs = triton.cdiv(num_rows, rows) * triton.cdiv(num_columns, block)
    if num_programs:
        launch(
            gated_activation_kernel,
            (num_programs,),
            (rows_T2F, out, rows_T2F.stride(0), num_rows, num_columns),
            ACTIVATION=activation,
            ROWS=rows,
            BLOCK=block,
            num_warps=_num_warps(rows * block, target_of(out)),
        )
    return out


def gated_activation_backward(
    gate_up_T2F: Tensor, grad_TF: Tensor, activation: Activation
) -> Tensor:
    """The gradient of the plain form for its input."""
    rows_T2F, grad_rows = as_rows(gate_up_T2F), as_rows(grad_TF).contiguous()
    num_rows, num_columns = grad_rows.shape
    out = torch.empty(gate_up_T2F.shape, dtype=gate_up_T2F.dtype, device=gate_up_T2F.device)
    rows, block = _tile(num_columns)
    num_programs = triton.cdiv(num_rows, rows) * triton.cdiv(num_columns, block)
    if num_programs:
        launch(
            backward_kernel,
            (num_programs,),
            (rows_T2F, grad_rows, out, rows_T2F.stride(0), num_rows, num_columns),
            ACTIVATION=activation,
            ROWS=rows,
            BLOCK=block,
            num_warps=_num_warps(rows * block, target_of(out)),
        )
    return out


def _tile(num_columns: int) -> tuple[int, int]:
    """Rows and columns of a program's tile: part of one row, or several short rows."""
    block = min(TILE, triton.next_power_of_2(max(1, num_columns)))
    return TILE // block, block


def _num_warps(num_elements: int, target: Target) -> int:
    """Sixteen elements a thread of each half: four 16-byte loads of bf16 in flight."""
    return max(1, min(8, num_elements // (16 * target.warp_size)))


@dataclass(frozen=True)
class HeldRows:
    """How rows are held while their codes are made. A heuristic until measured."""

    rows: int  # of one program at a time
    pieces: tuple[int, int, int]  # widths that cover a row; 1 for a piece there is none of
    num_warps: int
    stages: int  # 3: two tiles travel while one is computed; 1: none do
    programs_per_unit: int  # programs an SM or CU is given; each walks every n-th tile


def choose(num_columns: int, element_bytes: int, target: Target) -> HeldRows:
    pieces = _pieces(num_columns)
    width = sum(piece for piece in pieces if piece > 1)
    rows = max(1, 4096 // pieces[0]) if width == pieces[0] else 1
    # 32 elements of the product in a thread's registers, or up to 64 of the longest rows.
    num_warps = max(1, min(16, triton.next_power_of_2(rows * width) // (32 * target.warp_size)))
    fetched_bytes = 2 * 2 * rows * width * element_bytes + 1024  # two tiles, gate and up
    if target.backend == "hip" or fetched_bytes > target.shared_bytes:
        # One program a tile, overlapped by the hardware: there is no room for the next ones.
        return HeldRows(rows, pieces, num_warps, 1, 1 << 20)
    per_unit = min(8, target.shared_bytes // fetched_bytes, 32 // num_warps)
    return HeldRows(rows, pieces, num_warps, 3, max(1, per_unit))


def _pieces(num_columns: int) -> tuple[int, int, int]:
    """Powers of two that cover a row with little beyond it: 28672 = 16384 + 8192 + 4096."""
    pieces: list[int] = []
    left = max(num_columns, 64)
    while left > 0:
        below = 1 << (left.bit_length() - 1)
        is_last = len(pieces) == 2 or below < 1024 or 4 * left > 7 * below
        # Not narrower than two elements a thread: such copies are too small to be made ahead.
        narrowest = pieces[0] // 8 if pieces else 1
        pieces.append(max(triton.next_power_of_2(left) if is_last else below, narrowest))
        left -= pieces[-1]
    first, second, third = [*pieces, 1, 1][:3]
    return first, second, third


def _to_codes(
    gate_up_T2F: Tensor, activation: Activation, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    rows_T2F = as_rows(gate_up_T2F)
    num_rows, num_columns = rows_T2F.shape[0], rows_T2F.shape[1] // 2
    shape = (*gate_up_T2F.shape[:-1], num_columns)
    out = torch.empty(shape, dtype=dtype, device=gate_up_T2F.device)
    scale_T = torch.empty(shape[:-1], dtype=torch.float32, device=gate_up_T2F.device)
    args = (rows_T2F, out, scale_T, rows_T2F.stride(0))
    constants: dict[str, Any] = {
        "ACTIVATION": activation,
        "LARGEST": LARGEST[dtype],
        "SMALLEST_AMAX": SMALLEST_AMAX,
    }
    if not num_rows:
        return out, scale_T
    target = target_of(out)
    if num_columns > MAX_HELD:
        launch(
            long_rows_kernel,
            (num_rows,),
            (*args, num_columns),
            **constants,
            BLOCK=8192,
            num_warps=8,
        )
        return out, scale_T
    held = choose(num_columns, gate_up_T2F.element_size(), target)
    launch(
        held_rows_kernel,
        (min(triton.cdiv(num_rows, held.rows), held.programs_per_unit * target.num_units),),
        (*args, num_rows, num_columns),
        **constants,
        ROWS=held.rows,
        FIRST=held.pieces[0],
        SECOND=held.pieces[1],
        THIRD=held.pieces[2],
        STAGES=held.stages,
        num_warps=held.num_warps,
        # The error function needs registers of its own.
        options=roomy(target) if activation == "gelu" else None,
    )
    return out, scale_T
