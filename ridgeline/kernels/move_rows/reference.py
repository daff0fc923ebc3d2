"""The definition of moving rows on.

A step was sent to the device before it was known how many tokens some of its streams have: each
sample of the step before has brought one token, and one more for every draft that it confirmed. The
step's numbers are those of one token; here they become right.

Letters: T tokens that are rows of their own, N samples of the step before, R samples of this one,
S seats, P pages of the longest sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
    """`moved_T` says behind which sample of the step before a row goes on, -1 for those that are
    where they belong; `counts_N` how many tokens each sample has brought. All tensors are int32.

    **Changes in place**, for rows that move: the four of `places_4T` (positions, lengths of the
    rotary frequencies, lengths of the sequences, positions of what is drawn), which move on by the
    confirmed drafts; `slots_T`, found anew in the seat's line of the page table; and the last line
    of `judged_4R` (seat, first row, drafts, position of each sample) where that first row moves.
    """
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
