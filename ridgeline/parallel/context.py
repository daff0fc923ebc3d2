"""Which keys a rank needs whose tokens are some of each sequence (`Layout.context`), from whom it
gets them and whom it gives its own: integers alone. Every rank of a group works this out for
itself, so that nobody has to ask.

A query sees its document's tokens up to itself, as far as a window goes. What no query of a rank
sees is not sent to it: without windows three quarters of a long document's keys, of short
documents and behind windows almost none.

    parts = [layout.tokens(rank, length) for rank in group]         # of a row of one sequence
    needs = key_needs(parts, document_lengths, window=None, index=1)
    needs.sent[0]                       # rows of this rank that the first one gets
    needs.key_rows, needs.key_lengths   # of each piece of a document, among own and received rows
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ridgeline.errors import UsageError
from ridgeline.parallel.layout import Layout

Integers = NDArray[np.int64]
Parts = Sequence[range]  # of a row of tokens, in their order


class Piece(NamedTuple):
    """Neighbouring tokens of one document on one rank, and the keys that they see."""

    tokens: range
    keys: range


@dataclass(frozen=True)
class KeyNeeds:
    sent: tuple[Integers, ...]  # rows of this rank, for each rank of its group
    received: tuple[int, ...]  # how many come from each
    key_rows: Integers  # of all pieces, one piece behind the other
    key_lengths: tuple[int, ...]  # of each piece
    are_any_sent: bool  # by whomever: else nobody has to wait


def joined_parts(parts: Parts) -> list[range]:
    """Those that lie end to end as one."""
    whole: list[range] = []
    for part in parts:
        if whole and whole[-1].stop == part.start:
            whole[-1] = range(whole[-1].start, part.stop)
        else:
            whole.append(part)
    return whole


def pieces(parts: Parts, lengths: Sequence[int], window: int | None = None) -> Iterator[Piece]:
    """What a rank has of documents of these lengths."""
    ends = list(accumulate(lengths))
    document = 0
    for part in joined_parts(parts):
        first = part.start
        while first < part.stop:
            while ends[document] <= first:
                document += 1
            last = min(part.stop, ends[document])
            begin = ends[document] - lengths[document]
            if window is not None:
                begin = max(begin, first - window + 1)
            yield Piece(range(first, last), range(begin, last))
            first = last


def key_needs(
    parts: Sequence[Parts], lengths: Sequence[int], window: int | None, index: int
) -> KeyNeeds:
    """`parts` of each rank of a group, of which this one is `index`."""
    num_tokens = sum(lengths)
    held = [positions(each) for each in parts]
    needed = np.zeros((len(parts), num_tokens), dtype=np.bool_)
    for rank, own in enumerate(parts):
        for piece in pieces(own, lengths, window):
            needed[rank, piece.keys.start : piece.keys.stop] = True
        needed[rank, held[rank]] = False
    nothing = np.empty(0, dtype=np.int64)
    sent = [np.flatnonzero(needed[rank, held[index]]) for rank in range(len(parts))]
    sent[index] = nothing
    received = [own[needed[index, own]] for own in held]
    places = np.full(num_tokens, -1, dtype=np.int64)
    rows = np.concatenate([held[index], *received])
    places[rows] = np.arange(len(rows))
    keys = [piece.keys for piece in pieces(parts[index], lengths, window)]
    key_rows = np.concatenate([places[each.start : each.stop] for each in keys])
    assert (key_rows >= 0).all(), "a key is nobody's"
    return KeyNeeds(
        tuple(sent),
        tuple(map(len, received)),
        key_rows,
        tuple(map(len, keys)),
        bool(needed.any()),
    )


def positions(parts: Parts) -> Integers:
    """Of every token of some parts."""
    return np.concatenate([np.arange(part.start, part.stop) for part in parts])


def check_sequence(layout: Layout, sequence_length: int) -> None:
    """That every rank gets whole tokens of it."""
    layout.tokens(0, sequence_length)
    share, tensor = sequence_length // layout.context, layout.tensor
    if layout.sequence and share % tensor:
        step = 2 * layout.context * tensor
        near = max(step, sequence_length // step * step)
        raise UsageError(
            f"a rank has {share} tokens of a sequence of {sequence_length}, which tensor={tensor} "
            f"cannot share; try {near} tokens, or sequence=false"
        )
