"""A plan with drafts as the device computes it: nothing but rows and samples.

Each row of logits becomes a sample of its own, and the ids of drafts are taken from where the
drafts lie on the device, as those of tokens are that have not reached the host. A row with drafts
either stays one (a CPU attends to its tokens in one product), or becomes decode rows of the same
seat, each one token longer than the last: keys and values of a step are written before attention,
so the kernels and graphs of decode steps serve them as they are.

    flat = flattened(plan, DraftSlots(first=512, per_seat=5), one_token_rows=True)
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from ridgeline.engine.scheduling.partial_plan import cut
from ridgeline.engine.scheduling.step_plan import NOT_WRITTEN, Axis, StepPlan, names_of


class DraftSlots(NamedTuple):
    """Where drafted tokens lie on the device, behind the last step's samples."""

    first: int  # the first draft of seat 0
    per_seat: int


def first_rows(plan: StepPlan) -> list[int]:
    """The first row of logits of each sample."""
    if not plan.num_draft_rows:
        return list(range(len(plan.sample_drafts)))
    ends = accumulate(1 + drafts for drafts in plan.sample_drafts)
    return [end - 1 - drafts for end, drafts in zip(ends, plan.sample_drafts, strict=True)]


def sample_words(plan: StepPlan) -> np.ndarray:
    """Each sample's seat, first row of logits, drafts, and the position of its token [4, N]."""
    rows = first_rows(plan)
    positions = [plan.positions[plan.logit_tokens[row]] + 1 for row in rows]
    return np.array((plan.sample_seats, rows, plan.sample_drafts, positions), dtype=np.int32)


def flattened(plan: StepPlan, slots: DraftSlots, one_token_rows: bool) -> StepPlan:
    """The same step without drafts; the plan itself if it has none."""
    if not plan.num_draft_rows:
        return plan
    device_tokens, device_samples = list(plan.device_tokens), list(plan.device_samples)
    token = plan.num_decode_rows
    for row in _draft_rows(plan):
        count = plan.num_tokens[row]
        first = slots.first + plan.seats[row] * slots.per_seat
        device_tokens.extend(range(token + 1, token + count))
        device_samples.extend(range(first, first + count - 1))
        token += count
    times = [1 + drafts for drafts in plan.sample_drafts]
    changes = _all_repeated(plan, "sample", times) | {
        "num_draft_rows": 0,
        "device_tokens": device_tokens,
        "device_samples": device_samples,
        "sample_drafts": [0] * len(plan.logit_tokens),
    }
    flat = plan._replace(**changes)
    return _with_one_token_rows(plan, flat) if one_token_rows else flat


def of_own_sequences(plan: StepPlan) -> bool:
    """Whether each decode row is of another sequence: not where drafts have become rows."""
    seats = plan.seats[: plan.num_decode_rows]
    return len(set(seats)) == len(seats)


def of_fresh_prompts(plan: StepPlan) -> bool:
    """Whether the step is the beginnings of prompts and nothing else, all of one length."""
    fresh = not plan.num_decode_rows and not any(plan.first_positions)
    return fresh and len(set(plan.num_tokens)) == 1


def without_drafts(plan: StepPlan) -> StepPlan:
    """The same step with nothing drafted."""
    flat = flattened(plan, DraftSlots(0, 0), one_token_rows=True)
    heads = list(range(plan.num_decode_rows))
    row = len(heads)
    for draft_row in _draft_rows(plan):
        heads.append(row)
        row += plan.num_tokens[draft_row]
    heads.extend(range(row, len(flat.seats)))
    return cut(flat, [(row, 0, flat.num_tokens[row]) for row in heads])[0]


def with_decode_rows(plan: StepPlan, count: int, seat: int) -> StepPlan:
    """The same step with so many decode rows before its prompts: those it lacks are of no length,
    in a seat that is nobody's. Its samples are the same.
    """
    decode = plan.num_decode_rows
    more = count - decode

    def filled(values: Sequence[int], value: int) -> list[int]:
        return [*values[:decode], *[value] * more, *values[decode:]]

    def moved_on(tokens: Sequence[int]) -> list[int]:
        return [token if token < decode else token + more for token in tokens]

    return plan._replace(
        num_decode_rows=count,
        seats=filled(plan.seats, seat),
        first_positions=filled(plan.first_positions, -1),
        num_tokens=filled(plan.num_tokens, 1),
        token_ids=filled(plan.token_ids, 0),
        positions=filled(plan.positions, 0),
        slots=filled(plan.slots, NOT_WRITTEN),
        device_tokens=moved_on(plan.device_tokens),
        moved_tokens=moved_on(plan.moved_tokens),
        logit_tokens=moved_on(plan.logit_tokens),
    )


def _with_one_token_rows(plan: StepPlan, flat: StepPlan) -> StepPlan:
    times = [1] * len(plan.seats)
    first_positions: list[int] = []
    for row in _draft_rows(plan):
        times[row] = plan.num_tokens[row]
    for first, count in zip(plan.first_positions, times, strict=True):
        first_positions.extend(range(first, first + count))
    num_split = sum(times[row] for row in _draft_rows(plan))
    behind = plan.num_decode_rows + plan.num_draft_rows
    changes = _all_repeated(plan, "row", times) | {
        "num_decode_rows": plan.num_decode_rows + num_split,
        "first_positions": first_positions,
        "num_tokens": [1] * (plan.num_decode_rows + num_split) + [*plan.num_tokens[behind:]],
    }
    return flat._replace(**changes)


def _draft_rows(plan: StepPlan) -> range:
    return range(plan.num_decode_rows, plan.num_decode_rows + plan.num_draft_rows)


def _all_repeated(plan: StepPlan, axis: Axis, times: list[int]) -> dict[str, Any]:
    """All fields with entries for each of these, each entry so many times."""
    return {
        name: [
            entry
            for entry, count in zip(getattr(plan, name), times, strict=True)
            for _ in range(count)
        ]
        for name in names_of(axis)
    }
