"""Moving rows on in Triton: a thread a row, and a thread a sample. Small work at the start of a
step, where torch's own gathers and sums would cost a launch each.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.launch import launch, target_of
from ridgeline.kernels.move_rows.reference import MovingRows

BLOCK = 128  # rows, or samples, a program


@triton.jit
def move_rows_kernel(
    moved_ptr,
    counts_ptr,
    positions_ptr,
    lengths_ptr,
    totals_ptr,
    draws_ptr,
    slots_ptr,
    judged_ptr,
    seats_ptr,
    table_ptr,
    judged_stride,
    table_stride,
    num_rows,
    num_samples,
    page_size,
    BLOCK: tl.constexpr,
):
    """Programs of rows come first, those of samples behind them."""
    row_programs = tl.cdiv(num_rows, BLOCK)
    program = tl.program_id(0)
    if program < row_programs:
        rows = program * BLOCK + tl.arange(0, BLOCK)
        moved = tl.load(moved_ptr + rows, mask=rows < num_rows, other=-1)  # [BLOCK]
        moves = moved >= 0
        by = tl.load(counts_ptr + moved, mask=moves, other=1) - 1
        position = tl.load(positions_ptr + rows, mask=moves, other=0) + by
        tl.store(positions_ptr + rows, position, mask=moves)
        length = tl.load(lengths_ptr + rows, mask=moves, other=0) + by
        tl.store(lengths_ptr + rows, length, mask=moves)
        total = tl.load(totals_ptr + rows, mask=moves, other=0) + by
        tl.store(totals_ptr + rows, total, mask=moves)
        draw = tl.load(draws_ptr + rows, mask=moves, other=0) + by
        tl.store(draws_ptr + rows, draw, mask=moves)
        seat = tl.load(seats_ptr + rows, mask=moves, other=0).to(tl.int64)  # int64: past 2^31
        page = tl.load(table_ptr + seat * table_stride + position // page_size, mask=moves, other=0)
        tl.store(slots_ptr + rows, page * page_size + position % page_size, mask=moves)
    else:
        samples = (program - row_programs) * BLOCK + tl.arange(0, BLOCK)
        inside = samples < num_samples
        row = tl.load(judged_ptr + judged_stride + samples, mask=inside, other=0)
        moved = tl.load(moved_ptr + row, mask=inside & (row < num_rows), other=-1)
        moves = moved >= 0
        by = tl.load(counts_ptr + moved, mask=moves, other=1) - 1
        places = judged_ptr + 3 * judged_stride + samples
        tl.store(places, tl.load(places, mask=moves, other=0) + by, mask=moves)


def move_rows(
    rows: MovingRows, counts_N: Tensor, judged_4R: Tensor, table_SP: Tensor, page_size: int
) -> None:
    """The launcher; arguments are reference.py's. Lines of `judged_4R` and of the table may lie
    apart.
    """
    for name, tensor in (("judged samples", judged_4R), ("pages", table_SP)):
        assert tensor.stride(1) == 1, f"{name} lie side by side"
    moved_T, places_4T, slots_T, seats_T = rows
    num_rows, num_samples = len(moved_T), judged_4R.shape[1]
    if not num_rows:
        return
    launch(
        move_rows_kernel,
        (triton.cdiv(num_rows, BLOCK) + triton.cdiv(num_samples, BLOCK),),
        (
            *(moved_T, counts_N, *places_4T, slots_T, judged_4R, seats_T, table_SP),
            *(judged_4R.stride(0), table_SP.stride(0), num_rows, num_samples, page_size),
        ),
        BLOCK=BLOCK,
        num_warps=BLOCK // target_of(moved_T).warp_size,
    )
