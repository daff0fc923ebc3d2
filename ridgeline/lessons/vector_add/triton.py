"""Adding two vectors, from naive to fast: the same sum in five kernels, slowest first.

A *program* is one run of the kernel's code; thousands run at once, each with its own `program_id`.
Adding does one operation for every twelve bytes it moves (fp32: two numbers read, one written), so
nothing counts but how well memory is used. `vector_add` uses the last step.

    vector_add(x, y, step="blocked")     # any of STEPS; docs/kernels-from-zero.md has their times
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.launch import launch, target_of
from ridgeline.lessons.vector_add.reference import STEPS


@triton.jit
def one_element_kernel(x_ptr, y_ptr, out_ptr):
    """Step 1, one element a program. This is the loop body of the CPU program, and it is right. But
    a program occupies at least one warp, 32 threads in step, and 31 of them have nothing to do;
    the memory system fetches 32 bytes where 4 are used; and starting a program costs far more than
    adding two numbers. Slow in three ways at once.
    """
    place = tl.program_id(0).to(tl.int64)  # int64: a vector may be longer than 2^31
    tl.store(out_ptr + place, tl.load(x_ptr + place) + tl.load(y_ptr + place))


@triton.jit
def strided_kernel(x_ptr, y_ptr, out_ptr, num_elements, BLOCK: tl.constexpr):
    """Step 2, a block of elements a program, spread out. Now every thread works, and there are
    1024 times fewer programs to start. But a program's elements lie `num_programs` apart, so
    neighbouring threads ask for far-apart addresses: each request of 4 bytes still fetches a
    sector of 32, and seven eighths of the bandwidth carries bytes this program does not use.
    """
    places = tl.program_id(0) + tl.arange(0, BLOCK).to(tl.int64) * tl.num_programs(0)
    keep = places < num_elements
    x = tl.load(x_ptr + places, mask=keep)
    y = tl.load(y_ptr + places, mask=keep)
    tl.store(out_ptr + places, x + y, mask=keep)


@triton.jit
def blocked_kernel(x_ptr, y_ptr, out_ptr, num_elements, BLOCK: tl.constexpr):
    """Step 3, a block of neighbouring elements a program. The only change is which elements: those
    side by side. The 32 threads of a warp now ask for one unbroken piece of memory, which the
    hardware fetches in as few pieces as it can (it *coalesces* the requests): every byte fetched
    is used. This is the step that matters most, here and in nearly every kernel.
    """
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    keep = places < num_elements
    x = tl.load(x_ptr + places, mask=keep)
    y = tl.load(y_ptr + places, mask=keep)
    tl.store(out_ptr + places, x + y, mask=keep)


@triton.jit
def persistent_kernel(x_ptr, y_ptr, out_ptr, num_elements, BLOCK: tl.constexpr):
    """Step 5, as many programs as the chip runs at once, each walking over many blocks. No program
    is started or ended while others still work, and the last ones end together; within a program
    the next block's loads can start before this block's sum is stored. For a long vector the gain
    is small; the pattern is what larger kernels build on.
    """
    start = tl.program_id(0).to(tl.int64) * BLOCK
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for first in range(start, num_elements, step):
        places = first + tl.arange(0, BLOCK)
        keep = places < num_elements
        x = tl.load(x_ptr + places, mask=keep)
        y = tl.load(y_ptr + places, mask=keep)
        tl.store(out_ptr + places, x + y, mask=keep)


def vector_add(x_N: Tensor, y_N: Tensor, step: str = "wide") -> Tensor:
    """x + y; both contiguous, of one dtype and shape."""
    x, y = x_N.contiguous(), y_N.contiguous()
    out = torch.empty_like(x)
    size = x.numel()
    if not size:
        return out
    if step == "one_element":
        launch(one_element_kernel, (size,), (x, y, out), num_warps=1)
    elif step == "strided":
        grid = (triton.cdiv(size, 1024),)
        launch(strided_kernel, grid, (x, y, out, size), BLOCK=1024, num_warps=4)
    elif step == "blocked":
        # 128 elements for 128 threads: one element a thread, one 4-byte load each.
        grid = (triton.cdiv(size, 128),)
        launch(blocked_kernel, grid, (x, y, out, size), BLOCK=128, num_warps=4)
    elif step == "wide":
        # Step 4, the same kernel with 16 elements a thread. A thread's neighbouring elements go in
        # loads of 16 bytes, the widest there are: a quarter of the instructions, and each thread
        # has several loads under way before it needs the first. Memory answers after some
        # hundreds of cycles; what hides that is having many requests in flight.
        grid = (triton.cdiv(size, 2048),)
        launch(blocked_kernel, grid, (x, y, out, size), BLOCK=2048, num_warps=4)
    else:
        assert step == "persistent", f"step {step!r} is none of {', '.join(STEPS)}"
        programs = min(8 * target_of(x).num_units, triton.cdiv(size, 2048))
        launch(persistent_kernel, (programs,), (x, y, out, size), BLOCK=2048, num_warps=4)
    return out
