"""Softmax of each row, from naive to fast: the same result in five kernels, slowest first.

A row needs its largest value (so that no exponential overflows), then the sum of the exponentials,
then each exponential over that sum: three looks at the row. The fewest bytes are one read and one
write. What separates the steps is how often the row is really read from memory, and how many
threads read it. `softmax` uses the last step.

    softmax(x, step="online")     # any of STEPS; docs/kernels-from-zero.md has their times
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.errors import UnsupportedError
from ridgeline.kernels.launch import launch, target_of
from ridgeline.lessons.softmax.reference import STEPS

CHUNK = 1024  # columns the walking kernels take at a time
MAX_COLUMNS = 65536  # longer rows do not fit into a program's registers


@triton.jit
def column_walk_kernel(x_ptr, out_ptr, x_stride, num_rows, num_columns, ROWS: tl.constexpr):
    """Step 1, one thread a row. Each thread walks along a row of its own, column by column, three
    times. It is the loop a CPU would run, with a row for each thread; but at any moment
    neighbouring threads are at neighbouring rows, thousands of bytes apart, so no two requests can
    be served by one fetch (nothing coalesces), and a thread waits for each value before the next.
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # int64: offsets pass 2^31
    keep = rows < num_rows
    x_rows, out_rows = x_ptr + rows * x_stride, out_ptr + rows * num_columns
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    for column in range(num_columns):
        x = tl.load(x_rows + column, mask=keep, other=0.0)
        largest = tl.maximum(largest, x.to(tl.float32))
    total = tl.zeros((ROWS,), tl.float32)
    for column in range(num_columns):
        x = tl.load(x_rows + column, mask=keep, other=0.0)
        total += tl.exp(x.to(tl.float32) - largest)
    for column in range(num_columns):
        x = tl.load(x_rows + column, mask=keep, other=0.0)
        out = tl.exp(x.to(tl.float32) - largest) / total
        tl.store(out_rows + column, out.to(out_ptr.dtype.element_ty), mask=keep)


@triton.jit
def three_pass_kernel(x_ptr, out_ptr, x_stride, num_columns, CHUNK: tl.constexpr):
    """Step 2, one program a row. All threads of a program walk along the same row, a chunk of
    neighbouring columns at a time, so every fetch is full. Each chunk is reduced to one number by
    the threads together. But the row is still read three times: for the largest value, for the sum
    and for the result. Cache catches some of that; what it cannot hold comes from memory again.
    """
    row = tl.program_id(0).to(tl.int64)  # int64: offsets pass 2^31
    x_row, out_row = x_ptr + row * x_stride, out_ptr + row * num_columns
    largest = tl.full((), float("-inf"), tl.float32)
    for start in range(0, num_columns, CHUNK):
        columns = start + tl.arange(0, CHUNK)
        x = tl.load(x_row + columns, mask=columns < num_columns, other=float("-inf"))
        largest = tl.maximum(largest, tl.max(x.to(tl.float32), axis=0))
    total = tl.full((), 0.0, tl.float32)
    for start in range(0, num_columns, CHUNK):
        columns = start + tl.arange(0, CHUNK)
        x = tl.load(x_row + columns, mask=columns < num_columns, other=float("-inf"))
        total += tl.sum(tl.exp(x.to(tl.float32) - largest), axis=0)
    for start in range(0, num_columns, CHUNK):
        columns = start + tl.arange(0, CHUNK)
        keep = columns < num_columns
        x = tl.load(x_row + columns, mask=keep, other=float("-inf"))
        out = tl.exp(x.to(tl.float32) - largest) / total
        tl.store(out_row + columns, out.to(out_ptr.dtype.element_ty), mask=keep)


@triton.jit
def online_kernel(x_ptr, out_ptr, x_stride, num_columns, CHUNK: tl.constexpr):
    """Step 3, the largest value and the sum in one walk. When a chunk brings a larger value, the
    sum so far was made with too small a one; multiplying it by exp(old - new) mends it. So two
    reads of the row do instead of three. This small trick, the *online* softmax, is what makes
    flash attention possible: there the row of scores is never stored at all. A thread keeps a
    largest value and a sum of its own, so that threads only talk to each other once, at the end.
    """
    row = tl.program_id(0).to(tl.int64)  # int64: offsets pass 2^31
    x_row, out_row = x_ptr + row * x_stride, out_ptr + row * num_columns
    # Not -inf: -inf - -inf is no number.
    largest = tl.full((CHUNK,), -3.0e38, tl.float32)
    total = tl.zeros((CHUNK,), tl.float32)
    for start in range(0, num_columns, CHUNK):
        columns = start + tl.arange(0, CHUNK)
        x = tl.load(x_row + columns, mask=columns < num_columns, other=float("-inf"))
        x = x.to(tl.float32)
        larger = tl.maximum(largest, x)
        total = total * tl.exp(largest - larger) + tl.exp(x - larger)
        largest = larger
    row_largest = tl.max(largest, axis=0)
    row_total = tl.sum(total * tl.exp(largest - row_largest), axis=0)
    for start in range(0, num_columns, CHUNK):
        columns = start + tl.arange(0, CHUNK)
        keep = columns < num_columns
        x = tl.load(x_row + columns, mask=keep, other=float("-inf"))
        out = tl.exp(x.to(tl.float32) - row_largest) / row_total
        tl.store(out_row + columns, out.to(out_ptr.dtype.element_ty), mask=keep)


@triton.jit
def held_kernel(
    x_ptr, out_ptr, x_stride, num_rows, num_columns, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Step 4, the row held in registers (ROWS is 1): read once, looked at three times where it is,
    written once. An SM has 256 KB of registers, more than it has of cache; a row of 4096 numbers
    is 16 KB spread over the program's threads. Now the bytes moved are the fewest there can be.

    Step 5, several short rows in a program. A row of 512 gives four warps four numbers a thread:
    too little under way to hide the wait for memory, and starting a program costs as much as its
    work. With ROWS rows a program each thread again has enough to do. Long rows keep a program to
    themselves.
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # int64: offsets pass 2^31
    columns = tl.arange(0, BLOCK)
    keep = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    place = rows[:, None] * x_stride + columns[None, :]
    x = tl.load(x_ptr + place, mask=keep, other=float("-inf")).to(tl.float32)  # [ROWS, BLOCK]
    # A row past the end is all -inf; -inf - -inf is no number, though it is never stored.
    largest = tl.maximum(tl.max(x, axis=1), -3.0e38)
    weight = tl.exp(x - largest[:, None])
    out = weight / tl.sum(weight, axis=1)[:, None]
    place = rows[:, None] * num_columns + columns[None, :]
    tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=keep)


def softmax(x_TD: Tensor, step: str = "many_rows") -> Tensor:
    """Rows of a matrix whose last dim is contiguous; the rows' own stride is free."""
    x = x_TD if x_TD.stride(-1) == 1 else x_TD.contiguous()
    num_rows, num_columns = x.shape
    out = torch.empty((num_rows, num_columns), dtype=x.dtype, device=x.device)
    if not x.numel():
        return out
    assert step in STEPS, f"step {step!r} is none of {', '.join(STEPS)}"
    strides = x.stride(0)
    if step == "column_walk":
        grid = (triton.cdiv(num_rows, 32),)
        args = (x, out, strides, num_rows, num_columns)
        launch(column_walk_kernel, grid, args, ROWS=32, num_warps=1)
        return out
    if step in ("three_pass", "online"):
        kernel = three_pass_kernel if step == "three_pass" else online_kernel
        launch(kernel, (num_rows,), (x, out, strides, num_columns), CHUNK=CHUNK, num_warps=4)
        return out
    if num_columns > MAX_COLUMNS:
        raise UnsupportedError(f"rows of {num_columns} are longer than {MAX_COLUMNS}")
    block = triton.next_power_of_2(num_columns)
    rows = 1 if step == "one_pass" else max(1, min(16, 4096 // block))
    # Sixteen elements a thread, as in vector_add; never fewer than one warp.
    num_warps = max(1, min(16, rows * block // (16 * target_of(x).warp_size)))
    grid = (triton.cdiv(num_rows, rows),)
    args = (x, out, strides, num_rows, num_columns)
    launch(held_kernel, grid, args, ROWS=rows, BLOCK=block, num_warps=num_warps)
    return out
