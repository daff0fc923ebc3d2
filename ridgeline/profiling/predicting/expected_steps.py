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
    prompt_tokens = computed * sum(prompt for prompt, _ in lengths)
    later = [output - 1 for _, output in lengths]  # the first comes with its prompt
    span = _steps_of(later, batch)
    rows = sum(later) / span if span else 0.0
    if batch == 1:
        num_prefills, decoding = float(len(lengths)), 0.0
    else:  # running requests go on beside the prompts of others
        decoding = min(rows, budget - 1.0)
        num_prefills = math.ceil(prompt_tokens / (budget - decoding))
    tokens = prompt_tokens / num_prefills
    result = [_phase(state, "prefill", num_prefills, _prefill(lengths, tokens, decoding))]
    num_decodes = span if batch == 1 else max(0.0, span - num_prefills)
    if num_decodes:
        result.append(_phase(state, "decode", num_decodes, _decode(lengths, rows)))
    return tuple(result)


def _room(state: RunState, lengths: Lengths, at_once: bool) -> tuple[int, float]:
    """How many requests, and how many tokens, a step takes."""
    if state.loop == "naive" or not at_once:
        return 1, math.inf
    limits, held = state.recipe.limits.filled(), state.requests_held(mean_context(lengths))
    return max(1, int(min(limits.max_batch, len(lengths), held))), float(limits.token_budget)


def _steps_of(lengths: Sequence[int], batch: int) -> float:
    """Until all are done, if the next one begins where one ends."""
    ends = [0] * min(batch, len(lengths))
    for length in lengths:
        heapq.heapreplace(ends, ends[0] + length)
    return float(max(ends))


def _prefill(lengths: Lengths, tokens: float, decoding: float) -> MeanStep:
    """A step with so many tokens of prompts, and rows of requests that run already."""
    prompts = [prompt for prompt, _ in lengths]
    mean = sum(prompts) / len(prompts)
    before = sum(prompt * prompt for prompt in prompts) / sum(prompts) / 2  # of a prompt's token
    rows, keys = max(1.0, tokens / mean), decoding * mean_context(lengths)
    return MeanStep(
        rows + decoding, tokens + decoding, rows + decoding, tokens * before + keys, tokens + keys
    )


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
