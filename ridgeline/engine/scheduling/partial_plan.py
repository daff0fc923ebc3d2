"""A plan of some of another plan's rows: what is run again when a step fails.

part, samples = cut(plan, [(0, 0, plan.num_tokens[0])])   # the first row, whole
"""

from __future__ import annotations

from typing import Any

from ridgeline.engine.scheduling.step_plan import LISTS, StepPlan

RowPiece = tuple[int, int, int]  # a row, and which of its tokens: from, to


def cut(plan: StepPlan, pieces: list[RowPiece]) -> tuple[StepPlan, list[int]]:
    """The plan of some rows, each from one of its tokens to another, in the order of the rows; and
    which of the whole plan's samples it has: those whose token is in it. Each sample of the plan
    has one row of logits.
    """
    starts = [0]
    for count in plan.num_tokens:
        starts.append(starts[-1] + count)
    tokens = [
        token
        for row, first, end in pieces
        for token in range(starts[row] + first, starts[row] + end)
    ]
    new_numbers = {token: index for index, token in enumerate(tokens)}
    rows = [row for row, _, _ in pieces]
    kept = {"row": rows, "token": tokens}  # entries, by what they are for
    for field in LISTS:
        if field.entries.are_tokens:
            entries = enumerate(getattr(plan, field.name))
            kept[field.entries.axis] = [i for i, token in entries if token in new_numbers]
    samples = kept["sample"] = kept["logit row"]
    changes: dict[str, Any] = {}
    for field in LISTS:
        if field.entries.axis != "step":
            entries = getattr(plan, field.name)
            part = [entries[index] for index in kept[field.entries.axis]]
            are_tokens = field.entries.are_tokens
            changes[field.name] = [new_numbers[token] for token in part] if are_tokens else part
    changes |= {
        "num_decode_rows": sum(row < plan.num_decode_rows for row in rows),
        "num_draft_rows": sum(
            0 <= row - plan.num_decode_rows < plan.num_draft_rows for row in rows
        ),
        "first_positions": [plan.first_positions[row] + first for row, first, _ in pieces],
        "num_tokens": [end - first for _, first, end in pieces],
    }
    return plan._replace(**changes), samples
