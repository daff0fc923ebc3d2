"""The steps that a workload is expected to have, before anything has run: how many of which kind,
of what work, and what the model of a step says that one takes. Predictions can be made from them as
from measured ones.

    phases = expected_phases(state, [(128, 256)] * 64, at_once=True)
    predict(Situation(..., phases=phases), {"scheme": "fp8"})
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

from ridgeline.models.cost import MeanStep
from ridgeline.profiling.predicting.changed_step import NAMES, of_model
from ridgeline.profiling.predicting.prediction import Phase, PhaseTime
from ridgeline.profiling.predicting.run_state import RunState
from ridgeline.profiling.predicting.step_model import modelled

Lengths = Sequence[tuple[int, int]]  # of each request: prompt and output tokens


def expected_phases(
    state: RunState, lengths: Lengths, *, at_once: bool, prefix_share: float = 0.0
) -> tuple[PhaseTime, ...]:
    """`at_once`: all requests are there from the beginning; otherwise one follows the other."""
    batch, budget = _room(state, lengths, at_once)
    keeps = state.loop == "engine" and state.recipe.kv.prefix_cache
    computed = 1.0 - min(0.99, prefix_share) if keeps else 1.0
    later = [output - 1 for _, output in lengths]  # the first comes with its prompt
    span, num_starts = _steps_of(later, batch)
    if batch == 1:
        tokens = computed * sum(prompt for prompt, _ in lengths) / len(lengths)
        prefills = [PromptSteps(float(len(lengths)), 1.0, tokens, 0.0)]
    else:
        prefills = _beside_others(lengths, batch, budget, computed, num_starts)
    result = [
        _phase(state, "prefill", each.num_steps, _prefill(lengths, each)) for each in prefills
    ]
    rows = sum(later) / span if span else 0.0
    made = sum(each.num_steps * each.decoding for each in prefills)
    if sum(later) > made:
        result.append(_phase(state, "decode", (sum(later) - made) / rows, _decode(lengths, rows)))
    return tuple(result)


class PromptSteps(NamedTuple):
    """Steps with prompts."""

    num_steps: float
    prompts: float  # in one
    tokens: float  # of those
    decoding: float  # rows of requests that run already


def _beside_others(
    lengths: Lengths, batch: int, budget: float, computed: float, num_starts: int
) -> list[PromptSteps]:
    """First those that fill the batch, so that half of it decodes beside them in the mean; then
    those of requests that begin where others end, beside all the others.
    """
    first, rest = lengths[:batch], lengths[batch:]
    tokens, decoding = computed * sum(prompt for prompt, _ in first), min(batch, budget - 1.0) / 2
    if all(output == 1 for _, output in first):
        decoding = 0.0
    count = math.ceil(tokens / (budget - decoding))
    result = [PromptSteps(count, max(1.0, len(first) / count), tokens / count, decoding)]
    if rest:
        tokens = computed * sum(prompt for prompt, _ in rest)
        most = min(batch - max(1.0, len(rest) / num_starts), budget - 1.0)
        decoding = most if any(output > 1 for _, output in lengths) else 0.0
        count = max(num_starts, math.ceil(tokens / (budget - decoding)))
        prompts = max(1.0, len(rest) / count)
        result.append(PromptSteps(count, prompts, tokens / count, decoding))
    return result


def _room(state: RunState, lengths: Lengths, at_once: bool) -> tuple[int, float]:
    """How many requests, and how many tokens, a step takes."""
    if state.loop == "naive" or not at_once:
        return 1, math.inf
    limits, held = state.recipe.limits.filled(), state.requests_held(mean_context(lengths))
    return max(1, int(min(limits.max_batch, len(lengths), held))), float(limits.token_budget)


def _steps_of(lengths: Sequence[int], batch: int) -> tuple[float, int]:
    """Until all are done, if the next one begins where one ends; and in how many of them one
    begins, those aside that are there from the beginning.
    """
    ends, starts = [0] * min(batch, len(lengths)), set()
    for number, length in enumerate(lengths):
        if number >= batch:
            starts.add(ends[0])
        heapq.heapreplace(ends, ends[0] + length)
    return float(max(ends)), len(starts)


def _prefill(lengths: Lengths, steps: PromptSteps) -> MeanStep:
    prompts = [prompt for prompt, _ in lengths]
    before = sum(prompt * prompt for prompt in prompts) / sum(prompts) / 2  # of a prompt's token
    rows, tokens = steps.prompts + steps.decoding, steps.tokens + steps.decoding
    keys = steps.decoding * mean_context(lengths)
    return MeanStep(rows, tokens, rows, steps.tokens * before + keys, steps.tokens + keys)


def _decode(lengths: Lengths, rows: float) -> MeanStep:
    keys = rows * mean_context(lengths)
    return MeanStep(rows, rows, rows, keys, keys)


def mean_context(lengths: Lengths) -> float:
    """Tokens before one that is decoded, in the mean over all that are."""
    total = sum(output for _, output in lengths)
    return sum(output * (prompt + output / 2) for prompt, output in lengths) / total


def _phase(state: RunState, name: Phase, num_steps: float, work: MeanStep) -> PhaseTime:
    parts = of_model(modelled(state, work), state)
    return PhaseTime(name, num_steps, parts.total, work, dict(zip(NAMES, parts, strict=True)))
