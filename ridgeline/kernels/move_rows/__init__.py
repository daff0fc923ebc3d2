"""Moving rows of a step on to where they belong, when the device alone knows that: behind drafts
of which the step before has confirmed some.

`move_rows` runs where its tensors are: the reference on a CPU, the kernel on a GPU. No custom op:
nothing is traced through it.
"""

from __future__ import annotations

from torch import Tensor

from ridgeline.kernels.move_rows import reference
from ridgeline.kernels.move_rows.reference import MovingRows

__all__ = ["MovingRows", "move_rows"]


def move_rows(
    rows: MovingRows, counts_N: Tensor, judged_4R: Tensor, table_SP: Tensor, page_size: int
) -> None:
    """**Changes places and slots of `rows`, and `judged_4R`, in place.** See reference.py."""
    if rows.moved.device.type == "cpu":
        return reference.move_rows(rows, counts_N, judged_4R, table_SP, page_size)
    from ridgeline.kernels.move_rows import triton

    return triton.move_rows(rows, counts_N, judged_4R, table_SP, page_size)
