"""When a step fails: which requests cause it, and how the others go on.

A step that raises is run again in halves until the rows that raise stand alone; writing the same
keys and values twice does no harm. What runs out of memory is run in halves too, down to pieces of
one row, and names nobody as long as that is enough.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence

import torch

from ridgeline.engine.scheduling.partial_plan import RowPiece, cut
from ridgeline.engine.scheduling.step_plan import StepPlan
from ridgeline.errors import HardwareError, RidgelineError

log = logging.getLogger(__name__)

Run = Callable[[StepPlan, Sequence[int]], None]  # a part, and which samples of the step it has


def run_in_parts(plan: StepPlan, run: Run, failed: dict[Hashable, str]) -> bool:
    """Run a step, whole if possible, without the requests in `failed`, to which those are added
    that fail now. Whether memory was short.
    """
    return _run_part(
        plan, [(row, 0, count) for row, count in enumerate(plan.num_tokens)], run, failed
    )


def _run_part(
    plan: StepPlan, pieces: list[RowPiece], run: Run, failed: dict[Hashable, str]
) -> bool:
    kept = [piece for piece in pieces if plan.keys[piece[0]][0] not in failed]
    if not kept:
        return False
    is_whole = len(kept) == len(plan.keys) and len(plan.token_ids) == sum(
        end - start for _, start, end in kept
    )
    samples: Sequence[int] = range(len(plan.sample_keys))
    part = plan
    if not is_whole:
        part, samples = cut(plan, kept)
    pieces = kept
    try:
        run(part, samples)
        return False
    except Exception as error:
        raise_if_lost(error)
        log.warning("step %d failed and is run again in parts: %s", plan.step_id, reason_of(error))
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


def _halves(pieces: list[RowPiece]) -> tuple[list[RowPiece], list[RowPiece]]:
    """Half of the rows each; of one row half of its tokens, the first ones first."""
    middle = len(pieces) // 2
    if middle:
        return pieces[:middle], pieces[middle:]
    row, start, end = pieces[0]
    center = (start + end) // 2
    return ([(row, start, center)] if center > start else []), [(row, center, end)]


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
