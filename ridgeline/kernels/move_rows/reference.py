"""The definition of moving rows on.

A step was sent to the device before it was known how many tokens some of its streams have: each
sample of the step before has brought one token, and one more for every draft that it confirmed. The
step's numbers are those of one token; here they become right.

Letters: T tokens that are rows of their own, N samples of the step before, R samples of this one,
S seats, P pages of the longest sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class MovingRows(NamedTuple):
    """Rows of a step, those that do not move included; int32, [T] each."""

    moved: Tensor  # behind which sample of the step before a row goes on; -1: it stays
    # Positions, lengths of the rotary frequencies, lengths of the sequences, positions of what is
    # drawn.
    places: tuple[Tensor, Tensor, Tensor, Tensor]
    slots: Tensor
    seats: Tensor


def move_rows(
    rows: MovingRows, counts_N: Tensor, judged_4R: Tensor, table_SP: Tensor, page_size: int
) -> None:
    """`counts_N` says how many tokens each sample has brought. All tensors are int32.

    **Changes in place**, for rows that move: their four places, which move on by the confirmed
    drafts; their slots, found anew in the seat's line of the page table; and the last line of
    `judged_4R` (seat, first row, drafts, position of each sample) where that first row moves.
    """
    moved_T, places_4T, slots_T, seats_T = rows
    moves_T = moved_T >= 0
    by_T = torch.where(moves_T, counts_N[moved_T.clamp(min=0).long()] - 1, 0)
    for places_T in places_4T:
        places_T += by_T
    positions_T = places_4T[0]
    pages_T = table_SP[seats_T.long(), (positions_T // page_size).clamp(max=table_SP.shape[1] - 1)]
    found_T = pages_T * page_size + positions_T % page_size
    slots_T.copy_(torch.where(moves_T, found_T, slots_T))
    rows_R = judged_4R[1].long()
    judged_4R[3] += torch.where(rows_R < len(by_T), by_T[rows_R.clamp(max=len(by_T) - 1)], 0)
