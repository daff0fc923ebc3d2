"""A rank's part of a batch whose sequences are shared out over the ranks of `context`: all of them
load the same row and cut it.

    cut = context_cut(config, layout, rank, sequence_length)
    trainer.step([cut(batch)], lr)

Without `context` a batch stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import numpy as np
import torch

from ridgeline.data.loading.packing import PackedBatch
from ridgeline.models import ModelConfig
from ridgeline.parallel.context import KeyNeeds, check_sequence, key_needs, pieces, positions
from ridgeline.parallel.layout import Layout
from ridgeline.training.stepping.context import CutBatch, KeyPlan

Cut = Callable[[PackedBatch], PackedBatch]


def context_cut(config: ModelConfig, layout: Layout, rank: int, sequence_length: int) -> Cut:
    """Of a rank. It is called where batches are made, on the host."""
    check_sequence(layout, sequence_length)
    if layout.context == 1:
        return lambda batch: batch
    windows = list(dict.fromkeys(layer.window for layer in config.layers))

    def cut(batch: PackedBatch) -> PackedBatch:
        return cut_batch(batch, layout, rank, sequence_length, windows)

    return cut


def cut_batch(
    batch: PackedBatch,
    layout: Layout,
    rank: int,
    sequence_length: int,
    windows: list[int | None],
) -> CutBatch:
    """A row of several sequences is cut sequence by sequence."""
    num_tokens, lengths = len(batch.ids), batch.lengths
    assert not batch.is_padded, "lengths of documents are on the host"
    assert num_tokens % sequence_length == 0, (num_tokens, sequence_length)
    group = layout.group(rank, "context")
    parts = [row_parts(layout, each, sequence_length, num_tokens) for each in group]
    index = group.index(rank)
    own = torch.from_numpy(positions(parts[index]))
    whole = torch.from_numpy(np.repeat(lengths, lengths))
    plans = {window: key_plan(key_needs(parts, lengths, window, index)) for window in windows}
    return CutBatch(
        batch.ids[own],
        batch.targets[own],
        batch.positions[own],
        starts_of([len(piece.tokens) for piece in pieces(parts[index], lengths)]),
        document_lengths=whole[own],
        key_plans=plans,
    )


def row_parts(layout: Layout, rank: int, sequence_length: int, num_tokens: int) -> list[range]:
    """What a rank has of a row of sequences."""
    return [
        range(first + part.start, first + part.stop)
        for first in range(0, num_tokens, sequence_length)
        for part in layout.tokens(rank, sequence_length)
    ]


def key_plan(needs: KeyNeeds) -> KeyPlan:
    return KeyPlan(
        torch.from_numpy(np.concatenate(needs.sent)),
        torch.from_numpy(needs.key_rows),
        starts_of(needs.key_lengths),
        needs.key_lengths,
        tuple(map(len, needs.sent)),
        needs.received,
        needs.are_any_sent,
    )


def starts_of(lengths: tuple[int, ...] | list[int]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
