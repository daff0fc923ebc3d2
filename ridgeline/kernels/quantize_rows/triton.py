"""8-bit codes of rows in Triton: a program holds whole rows in registers, so that x is read once.

Rows are contiguous in their last dim; the rows' own stride is free.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.errors import UnsupportedError
from ridgeline.formats.scaling import LARGEST, SMALLEST_AMAX
from ridgeline.kernels.launch import launch, target_of
from ridgeline.kernels.rows import as_rows, row_scale, to_codes
from ridgeline.kernels.targets import can_wait

MAX_COLUMNS = 65536
TILE = 4096  # elements a program holds at least: short rows share one
EACH = 16  # elements a thread holds, up to 16 warps


@triton.jit
def quantize_rows_kernel(
    x_ptr,
    codes_ptr,
    scale_ptr,
    x_stride,
    num_rows,
    num_columns,
    LARGEST: tl.constexpr,
    SMALLEST_AMAX: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # int64: offsets pass 2^31
    columns = tl.arange(0, BLOCK)
    keep = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    # Without the hint each thread takes 16 neighbours for the sake of the codes, and each 16-byte
    # load then uses half of the sectors it touches.
    columns_8 = tl.max_contiguous(columns[None, :], [1, 8])
    x = tl.load(x_ptr + rows[:, None] * x_stride + columns_8, mask=keep, other=0.0).to(tl.float32)
    scales = row_scale(tl.max(tl.abs(x), axis=1), LARGEST, SMALLEST_AMAX)
    tl.store(scale_ptr + rows, scales, mask=rows < num_rows)
    codes = to_codes(x * (1.0 / scales)[:, None], codes_ptr.dtype.element_ty)
    tl.store(codes_ptr + rows[:, None] * num_columns + columns_8, codes, mask=keep)


def quantize_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The launcher; arguments and results are reference.py's."""
    rows_TD = as_rows(x)
    num_rows, num_columns = rows_TD.shape
    if num_columns > MAX_COLUMNS:
        raise UnsupportedError(f"rows of {num_columns} are longer than {MAX_COLUMNS}")
    codes = torch.empty(x.shape, dtype=dtype, device=x.device)
    scale = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(num_columns)
    rows = max(1, TILE // block)
    target = target_of(x)
    waits = can_wait(target)
    if num_rows:
        launch(
            quantize_rows_kernel,
            (triton.cdiv(num_rows, rows),),
            (rows_TD, codes, scale, rows_TD.stride(0), num_rows, num_columns),
            LARGEST=LARGEST[dtype],
            SMALLEST_AMAX=SMALLEST_AMAX,
            ROWS=rows,
            BLOCK=block,
            PDL=waits,
            num_warps=min(16, max(1, rows * block // (EACH * target.warp_size))),
            options={"launch_pdl": True} if waits else {},
        )
    return codes, scale
