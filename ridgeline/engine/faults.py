"""When a step fails: who is to blame, and how the others go on.

A step that raises is run again in halves until the rows that raise stand alone; writing the same
keys and values twice does no harm. What runs out of memory is run in halves too, down to pieces of
one row, and names nobody as long as that is enough. `cut` makes a plan of some of another's rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import replace

import torch

from ridgeline.engine.step_plan import StepPlan
from ridgeline.errors import HardwareError, RidgelineError

log = logging.getLogger(__name__)

Piece = tuple[int, int, int]  # a row, and which of its tokens: from, to
Run = Callable[[StepPlan, list[int]], None]


def run_in_parts(plan: StepPlan, run: Run, failed: dict[Hashable, str]) -> bool:
    """Run a step, whole if possible, without the requests in `failed`, to which those are added
    that fail now. Whether memory was short.
    """
    return _run_part(
        plan, [(row, 0, count) for row, count in enumerate(plan.num_tokens)], run, failed
    )


def _run_part(plan: StepPlan, pieces: list[Piece], run: Run, failed: dict[Hashable, str]) -> bool:
    kept = [piece for piece in pieces if plan.keys[piece[0]][0] not in failed]
    if not kept:
        return False
    is_whole = len(kept) == len(plan.keys) and len(plan.token_ids) == sum(
        end - start for _, start, end in kept
    )
    part, samples = (plan, list(range(len(plan.sample_keys)))) if is_whole else cut(plan, kept)
    pieces = kept
    try:
        run(part, samples)
        return False
    except Exception as error:
        raise_if_lost(error)
        log.warning("step %d is run in parts: %s", plan.step_id, reason_of(error))
        short = is_out_of_memory(error)
        one_row = len(pieces) == 1
        if one_row and (not short or pieces[0][2] - pieces[0][1] == 1):
            failed[plan.keys[pieces[0][0]][0]] = reason_of(error)
            return short
    if short and torch.cuda.is_available():
        torch.cuda.empty_cache()
    for half in _halves(pieces):
        short = _run_part(plan, half, run, failed) or short
    return short


def _halves(pieces: list[Piece]) -> tuple[list[Piece], list[Piece]]:
    """Half of the rows each; of one row half of its tokens, the first ones first."""
    middle = len(pieces) // 2
    if middle:
        return pieces[:middle], pieces[middle:]
    row, start, end = pieces[0]
    center = (start + end) // 2
    return ([(row, start, center)] if center > start else []), [(row, center, end)]


def cut(plan: StepPlan, pieces: list[Piece]) -> tuple[StepPlan, list[int]]:
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


def is_out_of_memory(error: Exception) -> bool:
    """torch has a class for a GPU's memory; of the host's it tells in words."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def raise_if_lost(error: Exception) -> None:
    """Errors of the device itself stay: nothing that runs on it afterwards can be trusted."""
    if isinstance(error, HardwareError):
        raise error
    text = str(error)
    if "CUDA error" in text or "HIP error" in text:
        raise HardwareError(f"the device failed: {text.splitlines()[0]}") from error


def reason_of(error: BaseException) -> str:
    """In one line; errors that users can cause speak for themselves."""
    if isinstance(error, RidgelineError):
        return str(error)
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
