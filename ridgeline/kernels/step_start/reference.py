"""The definition of a step's start: what the first layer needs of each token, and attention of each
row.

Letters: T tokens, N tokens of the last step, V vocabulary, D hidden size, L positions, A angles, B
rows, S seats, P pages of a sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def step_start(
    ids_T: Tensor,
    sources_T: Tensor,
    last_N: Tensor,
    weight_VD: Tensor,
    positions_T: Tensor,
    seats_B: Tensor,
    table_SP: Tensor,
    scale: float = 1.0,
    cos_LA: Tensor | None = None,
    sin_LA: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """A token is `ids_T`'s, or where `sources_T` is not negative the last step's of that number.

    Returns its line of `weight_VD`, times `scale` (rounded once, to the weight's dtype); each row's
    line of the page table `table_SP`; and, where tables of angles are given, each position's
    cosines and sines. All numbers of tokens, places and pages are int32.
    """
    sampled_T = last_N.index_select(0, sources_T.clamp(min=0))
    tokens_T = torch.where(sources_T >= 0, sampled_T, ids_T)
    x_TD = functional.embedding(tokens_T, weight_VD)
    if scale != 1.0:
        x_TD = x_TD * scale
    rows = (x_TD, table_SP.index_select(0, seats_B))
    if cos_LA is None or sin_LA is None:
        return rows
    return (*rows, cos_LA.index_select(0, positions_T), sin_LA.index_select(0, positions_T))
