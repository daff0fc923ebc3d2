"""Moving rows of a step on to where they belong, when the device alone knows that: behind drafts
of which the step before has confirmed some.

`move_rows` runs where its tensors are: the reference on a CPU, the kernel on a GPU. No custom op:
nothing is traced through it.
"""

from __future__ import annotations

from torch import Tensor

from ridgeline.kernels.move_rows import reference

__all__ = ["move_rows"]


def move_rows(
    moved_T: Tensor,
    counts_N: Tensor,
    places_4T: tuple[Tensor, Tensor, Tensor, Tensor],
    slots_T: Tensor,
    judged_4R: Tensor,
    seats_T: Tensor,
    table_SP: Tensor,
    page_size: int,
) -> None:
    """**Changes `places_4T`, `slots_T` and `judged_4R` in place.** See reference.py."""
    if moved_T.device.type == "cpu":
        return reference.move_rows(
            moved_T, counts_N, places_4T, slots_T, judged_4R, seats_T, table_SP, page_size
        )
    from ridgeline.kernels.move_rows import triton

    return triton.move_rows(
        moved_T, counts_N, places_4T, slots_T, judged_4R, seats_T, table_SP, page_size
    )
