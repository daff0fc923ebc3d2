"""From a StepPlan to tensors: here they begin.

All numbers of a step lie in one buffer of 32-bit words, section after section: written on the host
with numpy, sent in one copy, and seen on the device as named views (`StepInputs`). Where they lie
follows from the step's `StepShape` alone, so that a captured graph finds them in place; a step
smaller than its shape is padded behind its decode rows and at the end of each section. Of each
stream the host keeps a line in `SeatTable`, from which a step takes what its rows need: nothing of
it lives on the device.
Letters: T tokens, B rows (decode rows first), R samples.

Each sample has one row of logits; drafts, which need more, are for speculation to add.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ridgeline.engine.requests.request import Sampling
from ridgeline.engine.scheduling.step_plan import NOT_WRITTEN, StepPlan
from ridgeline.engine.steps.flat_plan import sample_words, with_decode_rows

ON_HOST = -1  # a token's source: its id is known, and not to be taken from the last step's samples
STAYS = -1  # a token that is where it belongs
NO_CHANGES = np.zeros((2, 0), dtype=np.int32)
MAX_WRITTEN = 64  # sets of seats whose sections are kept
ALIGNMENT = 4  # words: sections begin on 16 bytes, so that seeds can be read as 64-bit numbers


class StepShape(NamedTuple):
    """Sizes of a step's sections."""

    num_tokens: int
    num_decode_rows: int
    num_prompt_rows: int  # those with more than one token, and pieces of prompts
    num_samples: int


class StepInputs(NamedTuple):
    """A step's numbers on the device; int32 unless said otherwise."""

    # One a token.
    ids: Tensor
    sources: Tensor  # which of the last step's samples the token is; ON_HOST: see its id
    positions: Tensor
    lengths: Tensor  # picks the rotary frequencies, see models/rope.py
    slots: Tensor
    moved: Tensor  # behind which of the last step's samples it goes on, if behind drafts
    # One a row.
    seats: Tensor
    totals: Tensor  # tokens of the sequence, the row's included
    # One more than there are rows that are no decode rows.
    starts: Tensor  # the first token of each, counted behind the decode rows, and the end
    # One a decode row.
    order: Tensor  # the rows' numbers, those of the longest sequences first
    # One a sample.
    logit_tokens: Tensor
    draw_positions: Tensor  # of the token that is sampled
    top_k: Tensor
    temperature: Tensor  # fp32
    top_p: Tensor  # fp32
    min_p: Tensor  # fp32
    seeds: Tensor  # int64
    # [4, R], where a graph judges drafts: the samples of the step, of which each may have several
    # rows. Seat, first row of logits, drafts, position of the token.
    judged: Tensor


OF_TOKENS = ("ids", "sources", "positions", "lengths", "slots", "moved")
OF_ROWS = ("seats", "totals")
FLOATS = ("temperature", "top_p", "min_p")


class SeatTable:
    """What the host knows of the stream in each seat."""

    def __init__(self, max_batch: int) -> None:
        self.padding = max_batch  # the seat of rows that are there to fill up a shape
        size = max_batch + 1
        self.prompt_length = np.ones(size, dtype=np.int32)
        self.temperature = np.zeros(size, dtype=np.float32)
        self.top_k = np.zeros(size, dtype=np.int32)
        self.top_p = np.ones(size, dtype=np.float32)
        self.min_p = np.zeros(size, dtype=np.float32)
        self.seed = np.zeros(size, dtype=np.uint64)
        self.drawn = np.zeros(size, dtype=bool)  # whether the temperature is not 0
        self.filtered = np.zeros(size, dtype=bool)  # whether top-k, top-p or min-p is asked for
        self._written: dict[tuple[StepShape, tuple[int, ...]], np.ndarray] = {}

    def sit(self, seat: int, prompt_length: int, sampling: Sampling, seed: int) -> None:
        self.prompt_length[seat] = prompt_length
        self.temperature[seat] = sampling.temperature
        self.top_k[seat] = sampling.top_k
        self.top_p[seat] = sampling.top_p
        self.min_p[seat] = sampling.min_p
        self.seed[seat] = seed
        self.drawn[seat] = sampling.temperature > 0
        self.filtered[seat] = sampling.top_k > 0 or sampling.min_p > 0 or sampling.top_p < 1
        self._written.clear()

    def sampling_words(self, shape: StepShape, sample_seats: tuple[int, ...]) -> np.ndarray:
        """The sections that say how these seats sample. They stay the same from step to step, until
        somebody else sits down.
        """
        key = (shape, sample_seats)
        if key not in self._written:
            if len(self._written) == MAX_WRITTEN:
                self._written.clear()
            self._written[key] = self._sampling_words(shape, list(sample_seats))
        return self._written[key]

    def _sampling_words(self, shape: StepShape, sample_seats: list[int]) -> np.ndarray:
        where = sections(shape)
        whole = _of_sampling(where)
        words = np.zeros(whole.stop - whole.start, dtype=np.int32)
        names = {"top_k": "top_k", **{name: name for name in FLOATS}, "seeds": "seed"}
        padded = sample_seats + [self.padding] * (shape.num_samples - len(sample_seats))
        for name, column in names.items():
            values = getattr(self, column)[padded]
            start = where[name].start - whole.start
            words[start : start + values.nbytes // 4] = values.view(np.int32)
        return words


def shape_of(plan: StepPlan) -> StepShape:
    num_decode = plan.num_decode_rows
    return StepShape(
        len(plan.token_ids), num_decode, len(plan.seats) - num_decode, len(plan.sample_seats)
    )


@lru_cache(maxsize=4096)
def sections(shape: StepShape) -> dict[str, slice]:
    """Where each section of `StepInputs` lies, in words."""
    where, start = {}, 0
    for name, size in _sizes(shape):
        where[name] = slice(start, start + size)
        start += -(-size // ALIGNMENT) * ALIGNMENT
    return where


def _of_sampling(where: dict[str, slice]) -> slice:
    """The sections from `top_k` to `seeds`, which lie side by side."""
    return slice(where["top_k"].start, where["seeds"].stop)


@lru_cache(maxsize=4096)
def num_words(shape: StepShape) -> int:
    return max(section.stop for section in sections(shape).values())


def _sizes(shape: StepShape) -> Iterator[tuple[str, int]]:
    num_rows = shape.num_decode_rows + shape.num_prompt_rows
    known = dict.fromkeys(OF_TOKENS, shape.num_tokens) | dict.fromkeys(OF_ROWS, num_rows)
    known |= {"starts": shape.num_prompt_rows + 1, "seeds": 2 * shape.num_samples}
    known |= {"order": shape.num_decode_rows, "judged": 4 * shape.num_samples}
    for name in StepInputs._fields:
        yield name, known.get(name, shape.num_samples)


def views(words: Tensor, shape: StepShape) -> StepInputs:
    """The sections of a buffer, as what they mean."""
    named = {name: words[where] for name, where in sections(shape).items()}
    for name in FLOATS:
        named[name] = named[name].view(torch.float32)
    named["seeds"] = named["seeds"].view(torch.int64)
    named["judged"] = named["judged"].view(4, shape.num_samples)
    return StepInputs(**named)


def write(
    words: np.ndarray,
    plan: StepPlan,
    shape: StepShape,
    seats: SeatTable,
    judged: StepPlan | None = None,
) -> None:
    """Put a plan's numbers where its shape says, padded with what does no harm: tokens that are
    written nowhere, in a row of no length. `judged` is the plan with the drafts that this one has
    as rows, where a graph judges them.
    """
    where = sections(shape)
    if shape.num_prompt_rows and plan.num_decode_rows < shape.num_decode_rows:
        plan = with_decode_rows(plan, shape.num_decode_rows, seats.padding)
    _put(words[where["ids"]], plan.token_ids)
    sources = words[where["sources"]]
    sources[:] = ON_HOST
    if plan.device_tokens:
        sources[plan.device_tokens] = plan.device_samples
    positions = words[where["positions"]]
    _put(positions, plan.positions)
    _put(words[where["seats"]], plan.seats, seats.padding)
    _put(words[where["slots"]], plan.slots, NOT_WRITTEN)
    if shape.num_prompt_rows:
        _write_rows(words, where, plan, shape, seats)
    else:
        _write_decode(words, where, len(plan.seats), seats)
    logit_tokens = words[where["logit_tokens"]]
    _put(logit_tokens, plan.logit_tokens)
    count = len(plan.logit_tokens)
    _put(words[where["draw_positions"]], positions[logit_tokens[:count]] + 1)
    words[_of_sampling(where)] = seats.sampling_words(shape, tuple(plan.sample_seats))
    if judged is not None:
        _write_judged(words, where, judged, seats.padding)
    if plan.moved_tokens:  # nobody looks for them otherwise
        moved = words[where["moved"]]
        moved[:] = STAYS
        moved[plan.moved_tokens] = plan.moved_samples


def _put(section: np.ndarray, values: Any, padding: int = 0) -> None:
    count = len(values)
    section[:count] = values
    if count < len(section):
        section[count:] = padding


def _write_decode(
    words: np.ndarray, where: dict[str, slice], num_rows: int, seats: SeatTable
) -> None:
    """Of rows that are one token each, as in nearly all steps."""
    ends = words[where["positions"]][:num_rows] + 1
    prompts = seats.prompt_length[words[where["seats"]][:num_rows]]
    _put(words[where["lengths"]], np.maximum(ends, prompts), 1)
    totals = words[where["totals"]]
    _put(totals, ends)
    words[where["order"]] = np.argsort(-totals, kind="stable") if len(totals) > 1 else 0
    words[where["starts"]] = 0


def _write_rows(
    words: np.ndarray,
    where: dict[str, slice],
    plan: StepPlan,
    shape: StepShape,
    seats: SeatTable,
) -> None:
    counts = np.asarray(plan.num_tokens, dtype=np.int32)
    prompts = np.repeat(seats.prompt_length[plan.seats], counts)
    ends = words[where["positions"]][: len(prompts)] + 1
    _put(words[where["lengths"]], np.maximum(ends, prompts), 1)
    totals = words[where["totals"]]
    _put(totals, np.asarray(plan.first_positions, dtype=np.int32) + counts)
    words[where["order"]] = np.argsort(-totals[: shape.num_decode_rows], kind="stable")
    starts = words[where["starts"]]
    num_padding = _write_starts(starts, counts[plan.num_decode_rows :], shape)
    if num_padding:
        assert len(counts) < len(totals), f"{num_padding} tokens fill {shape}, and no row is left"
        totals[-1] = num_padding


def _write_judged(
    words: np.ndarray, where: dict[str, slice], plan: StepPlan, padding_seat: int
) -> None:
    """Without drafts, as nearly always, from what is written already: each sample has one row."""
    section, positions = words[where["judged"]], words[where["draw_positions"]]
    size, count = len(positions), len(plan.sample_seats)
    section[:] = _of_nobody(size, padding_seat)
    if plan.num_draft_rows:
        section.reshape(4, size)[:, :count] = sample_words(plan)
    else:
        section[:count] = plan.sample_seats
        section[3 * size :] = positions


@lru_cache(maxsize=256)
def _of_nobody(size: int, padding_seat: int) -> np.ndarray:
    """Samples of the padding's seat; the row of each is its own number, and it has no drafts."""
    nobody_4R = np.zeros((4, size), dtype=np.int32)
    nobody_4R[0], nobody_4R[1] = padding_seat, np.arange(size)
    return nobody_4R.ravel()


def _write_starts(starts: np.ndarray, counts: np.ndarray, shape: StepShape) -> int:
    """Rows that only fill up have no tokens, but for the last one, which takes all that do; how
    many those are.
    """
    starts[0] = 0
    np.cumsum(counts, out=starts[1 : len(counts) + 1])
    end = int(starts[len(counts)])
    starts[len(counts) + 1 :] = end
    num_padding = shape.num_tokens - shape.num_decode_rows - end
    starts[-1] += num_padding
    return num_padding


def table_changes(plan: StepPlan, num_columns: int) -> np.ndarray:
    """The plan's changes of the page table [2, n]: place in the flattened table, and page."""
    if not plan.table_seats:
        return NO_CHANGES
    lines = np.asarray(plan.table_seats, dtype=np.int32) * num_columns
    entries = lines + np.asarray(plan.table_indexes, dtype=np.int32)
    return np.stack((entries, np.asarray(plan.table_pages, dtype=np.int32)))
