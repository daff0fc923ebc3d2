"""A plan of some of another plan's rows: what is run again when a step fails, and what is judged
alone.

part, samples = cut(plan, [(0, 0, plan.num_tokens[0])])   # the first row, whole
"""

from __future__ import annotations

from dataclasses import replace

from ridgeline.engine.scheduling.step_plan import StepPlan

RowPiece = tuple[int, int, int]  # a row, and which of its tokens: from, to


def cut(plan: StepPlan, pieces: list[RowPiece]) -> tuple[StepPlan, list[int]]:
    """The plan of some rows, each from one of its tokens to another, in the order of the rows; and
    which of the whole plan's samples it has: those whose token is in it.
    """
    starts = [0]
    for count in plan.num_tokens:
        starts.append(starts[-1] + count)
    tokens = [
        token
        for row, first, end in pieces
        for token in range(starts[row] + first, starts[row] + end)
    ]
    place = {token: index for index, token in enumerate(tokens)}
    samples = [index for index, token in enumerate(plan.logit_tokens) if token in place]
    from_device = [index for index, token in enumerate(plan.device_tokens) if token in place]
    moved = [index for index, token in enumerate(plan.moved_tokens) if token in place]
    rows = [row for row, _, _ in pieces]
    part = replace(
        plan,
        num_decode_rows=sum(row < plan.num_decode_rows for row in rows),
        num_draft_rows=sum(0 <= row - plan.num_decode_rows < plan.num_draft_rows for row in rows),
        keys=[plan.keys[row] for row in rows],
        seats=[plan.seats[row] for row in rows],
        first_positions=[plan.first_positions[row] + first for row, first, _ in pieces],
        num_tokens=[end - first for _, first, end in pieces],
        token_ids=[plan.token_ids[token] for token in tokens],
        positions=[plan.positions[token] for token in tokens],
        slots=[plan.slots[token] for token in tokens],
        device_tokens=[place[plan.device_tokens[index]] for index in from_device],
        device_samples=[plan.device_samples[index] for index in from_device],
        moved_tokens=[place[plan.moved_tokens[index]] for index in moved],
        moved_samples=[plan.moved_samples[index] for index in moved],
        sample_keys=[plan.sample_keys[index] for index in samples],
        sample_seats=[plan.sample_seats[index] for index in samples],
        sample_drafts=[plan.sample_drafts[index] for index in samples],
        logit_tokens=[place[plan.logit_tokens[index]] for index in samples],
    )
    return part, samples
