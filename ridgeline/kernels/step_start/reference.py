"""The definition of a step's start: what the first layer needs of each token, and attention of each
row.

Letters: T tokens, N tokens of the last step, V vocabulary, D hidden size, L positions, A angles, B
rows, S seats, P pages of a sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ridgeline.kernels.rotary.reference import Angles


class StepTokens(NamedTuple):
    """Which tokens a step has, int32. One is `ids`', or where `sources` is not negative the last
    step's of that number.
    """

    ids: Tensor  # [T]
    sources: Tensor  # [T]
    last: Tensor  # [N], the last step's
    positions: Tensor  # [T]


class EmbeddingTable(NamedTuple):
    weight: Tensor  # [V, D]
    scale: float = 1.0  # lines are times this, rounded once, to the weight's dtype


class TableRows(NamedTuple):
    """Which lines of the page table the rows of a step have, int32."""

    seats: Tensor  # [B]
    table: Tensor  # [S, P]


def step_start(
    tokens: StepTokens, embedding: EmbeddingTable, rows: TableRows, angles: Angles | None = None
) -> tuple[Tensor, ...]:
    """Each token's line of the embedding; each row's line of the page table; and, where `angles`
    are given, [L, A] each, each position's cosines and sines.
    """
    sampled_T = tokens.last.index_select(0, tokens.sources.clamp(min=0))
    tokens_T = torch.where(tokens.sources >= 0, sampled_T, tokens.ids)
    x_TD = functional.embedding(tokens_T, embedding.weight)
    if embedding.scale != 1.0:
        x_TD = x_TD * embedding.scale
    found = (x_TD, rows.table.index_select(0, rows.seats))
    if angles is None:
        return found
    return (*found, *(table_LA.index_select(0, tokens.positions) for table_LA in angles))
