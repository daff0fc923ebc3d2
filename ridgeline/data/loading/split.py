"""What is trained on and what is held out: a pure function of the corpus and the seed of the split.

Conversations and completions are held out whole. Texts are held out in sections, so that one long
text can be judged on what was not trained on; sections depend on the corpus alone, so runs with
other sequence lengths are judged on the same tokens. No target crosses from one side to the other.

    data = split_data(store, sequence_length=1024, held_out=0.01, vocab_size=49152)
    data.train.num_windows, data.held_out.num_windows
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ridgeline.data.loading.permutation import Permutation, key_of
from ridgeline.data.loading.store import TokenStore
from ridgeline.data.loading.windows import (
    Spans,
    TokenWindows,
    cut_windows,
    joined_windows,
    whole_windows,
)
from ridgeline.errors import UsageError, near_matches

SECTION = 4096  # tokens that are held out together, less in a small corpus
LEAST_SECTION = 64
NUM_SECTIONS = 200  # that a corpus is cut into at least, if they have LEAST_SECTION tokens
SPLIT_SEED = 24  # the same in every run, unless a user wants another split

Packing = Literal["auto", "cut", "whole"]


@dataclass(frozen=True)
class SplitData:
    train: TokenWindows
    held_out: TokenWindows | None


def split_data(
    store: TokenStore,
    *,
    sequence_length: int,
    vocab_size: int,
    held_out: float = 0.0,
    split_seed: int = SPLIT_SEED,
    packing: Packing = "auto",
) -> SplitData:
    """Windows to train on, and those held out, which are a share `held_out` of the tokens.

    `vocab_size` is the model's. `packing`: `whole` keeps documents in one window where they fit,
    `cut` fills every window; `auto` is `whole` where only a part of the tokens is learned.
    """
    _check(store, sequence_length, vocab_size, held_out, packing)
    is_whole = packing == "whole" or (packing == "auto" and store.is_marked)
    sides = _sides(store, held_out, split_seed, cut=not store.is_marked)
    make = whole_windows if is_whole else cut_windows
    learned, held = sides
    train = _train_windows(store, learned, sequence_length, make)
    judged = make(store, held, sequence_length) if len(held.first) else None
    if train.num_tokens < sequence_length:
        behind = " after the held-out part is taken" if judged is not None else ""
        raise UsageError(
            f"the data has {train.num_tokens} tokens{behind}, fewer than one sequence of "
            f"{sequence_length}; give more text or a shorter sequence length"
        )
    if train.num_targets() == 0:
        raise UsageError(
            "every target of the data is ignored, so there is no loss; give documents of two "
            "tokens or more, with words of the assistant"
        )
    if judged is not None and judged.num_targets() == 0:
        raise UsageError(
            f"held_out is {held_out:g}, and every target in that part is ignored; hold out more"
        )
    return SplitData(train, judged)


def _train_windows(
    store: TokenStore,
    spans: Spans,
    length: int,
    make: Callable[[TokenStore, Spans, int], TokenWindows],
) -> TokenWindows:
    """Of each corpus of a mixture by itself, so that none has tokens of two."""
    if store.mixed is None:
        return make(store, spans, length)
    parts = []
    bounds = store.corpus_bounds().tolist()
    for corpus, begin, end in zip(store.mixed.mixture.corpora, bounds, bounds[1:], strict=False):
        own = (spans.first >= begin) & (spans.first < end)
        if not own.any():
            raise UsageError(f"{corpus.corpus} has nothing left to train on; hold out less")
        parts.append(
            make(store, Spans(spans.first[own], spans.last[own], spans.limit[own]), length)
        )
    return joined_windows(parts)


def _check(
    store: TokenStore, sequence_length: int, vocab_size: int, held_out: float, packing: str
) -> None:
    if sequence_length < 2:
        raise UsageError(f"sequence_length is {sequence_length}; give at least 2")
    if not 0 <= held_out < 1:
        raise UsageError(f"held_out is {held_out!r}; give a share from 0 to less than 1")
    if packing not in get_args(Packing):
        hint = near_matches(packing, get_args(Packing))
        raise UsageError(f"packing is {packing!r}; give one of auto, cut, whole{hint}")
    if store.vocab_size > vocab_size:
        largest = max(int(shard.tokens.max()) for shard in store.shards)
        if largest >= vocab_size:
            raise UsageError(
                f"the data has token {largest} and the model a vocabulary of {vocab_size}; "
                "tokenize with the model's own tokenizer"
            )


def _sides(store: TokenStore, held_out: float, seed: int, *, cut: bool) -> tuple[Spans, Spans]:
    """Spans to train on and spans held out."""
    sections = _sections(store.offsets, cut=cut)
    is_held = np.zeros(len(sections) - 1, dtype=np.bool_)
    if held_out:
        if len(is_held) < 2:
            raise UsageError(
                f"held_out is {held_out:g}, and the data has one short document that cannot be "
                "divided; give more text, or held_out 0"
            )
        count = min(max(1, round(held_out * len(is_held))), len(is_held) - 1)
        is_held[Permutation(len(is_held), key_of(seed))(np.arange(count))] = True
    return _runs(sections, store.offsets, ~is_held), _runs(sections, store.offsets, is_held)


def _sections(offsets: NDArray[np.int64], *, cut: bool) -> NDArray[np.int64]:
    """Where sections begin, the end of the last one included; every document begins one."""
    if not cut:
        return offsets
    length = min(SECTION, max(LEAST_SECTION, int(offsets[-1]) // NUM_SECTIONS))
    counts = -(-np.diff(offsets) // length)
    numbers = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    begins = np.repeat(offsets[:-1], counts) + numbers * length
    return np.append(begins, offsets[-1])


def _runs(
    sections: NDArray[np.int64], offsets: NDArray[np.int64], is_chosen: NDArray[np.bool_]
) -> Spans:
    """Chosen sections of one document that follow each other, joined."""
    begins_document = np.isin(sections[:-1], offsets, assume_unique=False)
    before = np.concatenate(([False], is_chosen[:-1]))
    behind = np.concatenate((is_chosen[1:], [False]))
    ends_document = np.append(begins_document[1:], True)
    first = sections[:-1][is_chosen & (begins_document | ~before)]
    last = sections[1:][is_chosen & (ends_document | ~behind)]
    return Spans(first, last, last)
