"""Which steps share a captured graph: sizes are padded up, so that few graphs serve all of them.

Three sorts of steps are captured: decode rows alone; prompts, or pieces of them, alone; and prompts
beside as many decode rows as there may be, or almost. With fewer rows such steps are of too many
sizes: each stalls a server once, and its padding costs what launching would. A graph with prompts
has a row more than there are prompts at most, which holds the tokens that fill it up.

    kind = graph_kind(plan, GraphLimits(2048, 131072, 512), max_length=300)    # None: no graph
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from ridgeline.engine.execution.step_pass import PassKind
from ridgeline.engine.memory.footprint import FEWEST_DRAFTED
from ridgeline.engine.scheduling.step_plan import StepPlan
from ridgeline.engine.steps.batch import StepShape, shape_of
from ridgeline.engine.steps.flat_plan import of_own_sequences

# From 128 on, sizes that cuBLAS is good at, since padding costs less than a bad size: on the H200 a
# layer of an 8B model takes 205 µs with 304 rows and 217 with 320, 270 with 432 and 402 with 448.
DECODE_SIZES = (
    *(1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 208, 256, 304, 384, 432, 512),
    *(640, 768, 896, 1024, 1280, 1536, 1792, 2048),
)
LARGE_SIZES = (640, 768, 896, 1024, 1152, 1280, 1408, 1536, 1664, 1792, 1920, 2048)
PROMPT_SIZES = (16, 32, 64, 128, 192, 256, 384, 512, *LARGE_SIZES)  # tokens
FULL = 0.9  # of the rows that may decode: from here on steps with prompts have graphs
MIXED_SIZES = (32, 64, 128, 192, 256, 384, 512, *LARGE_SIZES)
SMALL = 512  # tokens of prompts that are seldom of more than a few
FEW_PROMPTS, MANY_PROMPTS = 8, 32  # in one graph, one of them to hold the padding
LENGTH_STEP = 4  # decode graphs are made for sequences up to 1024, 4096, … tokens
SHORTEST_LENGTH = 1024
SHORTEST_MIXED = 4096  # splits are no shorter for sequences up to here: one graph does for them


class GraphLimits(NamedTuple):
    max_tokens: int  # of a step
    max_context: int  # of a sequence
    max_batch: int  # streams that decode at once


def graph_kind(plan: StepPlan, limits: GraphLimits, max_length: int) -> PassKind | None:
    """The graph that can serve a step, or None: the step is too large, or of too many prompts."""
    shape = shape_of(plan)
    if not shape.num_samples:
        return None
    if shape.num_prompt_rows == 0:
        return _decode_kind(plan, shape, limits, max_length)
    if shape.num_decode_rows:
        return _mixed_kind(shape, limits, max_length)
    return _prompt_kind(shape, limits)


def _decode_kind(
    plan: StepPlan, shape: StepShape, limits: GraphLimits, max_length: int
) -> PassKind | None:
    own_sequences = of_own_sequences(plan)
    fewest = shape.num_tokens if own_sequences else min(FEWEST_DRAFTED, limits.max_tokens)
    size = padded(max(shape.num_tokens, fewest), up_to(DECODE_SIZES, limits.max_tokens))
    if size is None or shape.num_samples != shape.num_tokens:
        return None
    shape = StepShape(size, size, 0, size)
    return PassKind(shape, min(length_bound(max_length), limits.max_context), own_sequences)


def _prompt_kind(shape: StepShape, limits: GraphLimits) -> PassKind | None:
    size = padded(shape.num_tokens, up_to(PROMPT_SIZES, limits.max_tokens))
    if size is None:
        return None
    rows = _prompt_rows(size)
    if not _has_room(shape, size, rows, limits) or shape.num_samples > rows:
        return None
    return PassKind(StepShape(size, 0, rows, rows), limits.max_context)


def _mixed_kind(shape: StepShape, limits: GraphLimits, max_length: int) -> PassKind | None:
    decode_rows = limits.max_batch
    if not is_full(shape.num_decode_rows, decode_rows):
        return None
    num_prompt_tokens = shape.num_tokens - shape.num_decode_rows
    size = padded(decode_rows + num_prompt_tokens, up_to(MIXED_SIZES, limits.max_tokens))
    if size is None:
        return None
    rows = _prompt_rows(size - decode_rows)
    filled = shape._replace(num_tokens=decode_rows + num_prompt_tokens)
    if not _has_room(filled, size, rows, limits) or shape.num_samples > decode_rows:
        return None
    length = min(max(length_bound(max_length), SHORTEST_MIXED), limits.max_context)
    return PassKind(StepShape(size, decode_rows, rows, decode_rows), length)


def _prompt_rows(num_tokens: int) -> int:
    return FEW_PROMPTS if num_tokens <= SMALL else MANY_PROMPTS


def _has_room(shape: StepShape, size: int, rows: int, limits: GraphLimits) -> bool:
    """For the prompts and the padding, which is a sequence too."""
    return shape.num_prompt_rows < rows and size - shape.num_tokens <= limits.max_context


def is_full(num_rows: float, max_batch: int) -> bool:
    """Whether a step with prompts beside so many decode rows has a graph: a small batch is full
    with all rows but that of the prompt.
    """
    return min(FULL * max_batch, max_batch - 1) <= num_rows <= max_batch


def is_mixed(kind: PassKind) -> bool:
    return bool(kind.shape.num_prompt_rows and kind.shape.num_decode_rows)


def padded(size: int, sizes: tuple[int, ...]) -> int | None:
    """The smallest of `sizes` that holds this many."""
    index = bisect_left(sizes, size)
    return sizes[index] if index < len(sizes) else None


@cache
def up_to(sizes: tuple[int, ...], limit: int) -> tuple[int, ...]:
    """The sizes that are allowed, the limit itself the last."""
    return (*(size for size in sizes if size < limit), limit)


def length_bound(length: int) -> int:
    """Of the decode graphs that serve a sequence of this length."""
    bound = SHORTEST_LENGTH
    while bound < length:
        bound *= LENGTH_STEP
    return bound


def bounds_below(length: int) -> Iterator[int]:
    """The bounds that sequences of up to this length pass, each of which needs another graph."""
    bound = SHORTEST_LENGTH
    while bound < length:
        yield bound
        bound *= LENGTH_STEP
