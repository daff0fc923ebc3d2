"""SwiGLU and GeGLU in Triton: one pass over memory, forward and backward.

Rows are contiguous in their last dim; the rows' own stride is free. The plain forms are cut into
tiles of any columns. Codes need their row's largest magnitude before the first of them is written:
a program keeps the whole row's product in registers while the next rows travel to shared memory
(tune_space.py), and rows too long for that are read twice, the second time out of the L2 cache.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.formats.scaling import LARGEST, SMALLEST_AMAX
from ridgeline.kernels.gated_activation.activations import activate, gate_shares, gate_slope
from ridgeline.kernels.gated_activation.reference import Activation
from ridgeline.kernels.gated_activation.tune_space import (
    MAX_HELD,
    GatedConfig,
    choose,
    num_pieces,
    tune_key,
)
from ridgeline.kernels.launch import launch, target_of
from ridgeline.kernels.rows import as_rows, row_scale, to_codes
from ridgeline.kernels.targets import Target, roomy

TILE = 2048  # elements of the output a program of the plain forms makes


@triton.jit
def product(gate_ptrs, num_columns, keep, ACTIVATION: tl.constexpr):
    """fp32 `act(gate) · up` at these places of the gate half; zero where not kept."""
    other = None if keep is None else 0.0
    gate = tl.load(gate_ptrs, mask=keep, other=other)
    up = tl.load(gate_ptrs + num_columns, mask=keep, other=other)
    # fp32: the exponential in bf16 would lose what the product keeps
    return activate(gate.to(tl.float32), ACTIVATION) * up.to(tl.float32)


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
    REMAKES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """REMAKES: the gradient's memory gets the forward pass's result, which costs no read here."""
    rows, columns, keep = tile_places(num_rows, num_columns, ROWS, BLOCK)
    gate_ptrs = x_ptr + rows * x_stride + columns
    gate = tl.load(gate_ptrs, mask=keep, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + num_columns, mask=keep, other=0.0).to(tl.float32)
    grad_ptrs = grad_ptr + rows * num_columns + columns
    grad = tl.load(grad_ptrs, mask=keep, other=0.0).to(tl.float32)
    share, rest = gate_shares(gate, ACTIVATION)
    grad_gate = grad * up * gate_slope(gate, share, rest, ACTIVATION)
    grad_up = grad * gate * share
    out_ptrs = grad_x_ptr + rows * (2 * num_columns) + columns
    tl.store(out_ptrs, grad_gate.to(grad_x_ptr.dtype.element_ty), mask=keep)
    tl.store(out_ptrs + num_columns, grad_up.to(grad_x_ptr.dtype.element_ty), mask=keep)
    if REMAKES:
        made = activate(gate, ACTIVATION) * up
        tl.store(grad_ptrs, made.to(grad_ptr.dtype.element_ty), mask=keep)


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
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PIECES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Codes of whole rows, each in PIECES of one WIDTH. EVEN: no edge to mask.

    With STAGES = 3 the next two tiles are on their way to shared memory while one is computed.
    """
    num_tiles = tl.cdiv(num_rows, ROWS)
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), num_stages=STAGES):
        rows = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # they pass 2^31
        in_rows = rows < num_rows
        held = ()
        largest = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
        for piece in tl.static_range(PIECES):
            columns = piece * WIDTH + tl.arange(0, WIDTH)[None, :]
            keep = None if EVEN else in_rows & (columns < num_columns)
            out = product(x_ptr + rows * x_stride + columns, num_columns, keep, ACTIVATION)
            largest = tl.maximum(largest, tl.abs(out))
            held = held + (out,)  # type: ignore[assignment]  # noqa: RUF005  # no star in Triton
        amax = tl.max(largest, axis=1, keep_dims=True)
        scale = row_scale(amax, LARGEST, SMALLEST_AMAX)
        tl.store(scale_ptr + rows, scale, mask=in_rows)
        inverse = 1.0 / scale  # one division a row
        for piece in tl.static_range(PIECES):
            columns = piece * WIDTH + tl.arange(0, WIDTH)[None, :]
            keep = None if EVEN else in_rows & (columns < num_columns)
            # Eight codes a thread: left to itself the compiler would give a thread sixteen, of the
            # inputs too, and each 16-byte load of theirs would then fetch 32-byte sectors it uses
            # half of.
            place = tl.max_contiguous(rows * num_columns + columns, [1, 8])
            codes = to_codes(held[piece] * inverse, out_ptr.dtype.element_ty)
            tl.store(out_ptr + place, codes, mask=keep)


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
    gate_up_T2F: Tensor,
    activation: Activation,
    quantized: torch.dtype | None = None,
    config: GatedConfig | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The launcher; arguments and results are reference.py's. `config` is for codes."""
    if quantized is not None:
        return _to_codes(gate_up_T2F, activation, quantized, config)
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
    gate_up_T2F: Tensor, grad_TF: Tensor, activation: Activation, remakes: bool = False
) -> Tensor:
    """The gradient of the plain form for its input. With `remakes` **grad is overwritten** by what
    the forward pass made; it must be contiguous then.
    """
    assert not remakes or grad_TF.is_contiguous()
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
            REMAKES=remakes,
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


def _to_codes(
    gate_up_T2F: Tensor, activation: Activation, dtype: torch.dtype, config: GatedConfig | None
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
    if config is None:
        key = tune_key(num_rows, num_columns, gate_up_T2F.dtype, activation, dtype)
        config = choose(key, num_columns, gate_up_T2F.element_size(), out.device, target)
    pieces = num_pieces(config, num_columns)
    num_tiles = triton.cdiv(num_rows, config.rows)
    launch(
        held_rows_kernel,
        (min(num_tiles, config.per_unit * target.num_units or num_tiles),),
        (*args, num_rows, num_columns),
        **constants,
        EVEN=pieces * config.width == num_columns and num_rows % config.rows == 0,
        ROWS=config.rows,
        WIDTH=config.width,
        PIECES=pieces,
        STAGES=config.num_stages,
        num_warps=config.num_warps,
        options=roomy(target),
    )
    return out, scale_T
