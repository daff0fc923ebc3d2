"""What a change to a recipe would give, end to end: the one owner of predictions.

Each kind of step that a workload had is taken apart and put together again as it would be behind
the change (changed_step.py); how many steps there are then, batches and drafted tokens say. A
change that changes nothing gives 1.

    predict(situation, {"scheme": "int8"}).speedup
    predict(situation, {"loop": "engine", "kernels": "fused"})
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args

from ridgeline.errors import UsageError
from ridgeline.formats.dtypes import dtype_bytes, parse_dtype
from ridgeline.kernels.pages import holds_codes
from ridgeline.models import ModelConfig
from ridgeline.models.cost import MeanStep
from ridgeline.profiling.predicting.accuracy import interval_factor
from ridgeline.profiling.predicting.changed_step import (
    NAMES,
    StepSeconds,
    changed_parts,
    divided,
    draft_method,
    least_s,
    of_model,
)
from ridgeline.profiling.predicting.prediction import (
    Area,
    LoopName,
    PhaseTime,
    Prediction,
    Situation,
)
from ridgeline.profiling.predicting.run_state import RunState, multiplies_blocks
from ridgeline.profiling.predicting.step_model import (
    head_bytes,
    head_share,
    modelled,
    planned_bytes_per_weight,
)
from ridgeline.recipe import Recipe, edited, edited_at_once

# How far off a prediction is taken to be while too few were compared with what came of them (see
# accuracy.py): of the gain itself, and of everything (noise of the measurement).
USUAL_ERROR, LEAST_ERROR = 0.25, 0.06
GUESSED_ERROR = 0.3  # where the gain hangs on the text: how many drafted tokens are right
# Tokens of which more than one comes from a step, beyond the first: prompt lookup gave 0.85 to
# 1.24 times the speed on `demo` (2026-11-15); a draft model is taken to be right on two of five.
ACCEPTED = {"none": 0.0, "prompt-lookup": 0.25, "draft": 1.6}
# Every field of a recipe, and "loop", in the order in which the ladder comes to them.
AREAS: dict[Area, tuple[str, ...]] = {
    "fuse": ("loop", "kernels"),
    "overhead": ("graphs", "overlap"),
    "tensor cores": ("dtype", "tf32"),
    "custom kernels": ("tuned", "tiles"),
    "quantize": ("scheme", "blocks", "head", "quantize_all", "copies", "kv.dtype"),
    "batch and memory": (
        "deterministic",
        "kv.page_size",
        "kv.prefix_cache",
        "limits.max_context",
        "limits.max_batch",
        "limits.token_budget",
        "limits.max_graph_batch",
        "limits.memory_share",
        "speculation.method",
        "speculation.max_draft_tokens",
        "speculation.max_ngram",
        "speculation.min_ngram",
        "speculation.draft_model",
        "parallel.tensor",
        "parallel.expert",
        "parallel.pipeline",
    ),
}
UNKNOWN_CONTEXT = 1024  # tokens, where no step was measured


def predict(situation: Situation, edit: Mapping[str, Any]) -> Prediction:
    """`edit` maps dotted fields of a recipe, and "loop", to their new values. Pages follow the
    model's dtype where they had it and the edit does not name them.
    """
    before, after = state_of(situation), _changed(situation, edit)
    if after == before:
        return Prediction(1.0, 1.0, 1.0, "changes nothing here")
    phases = situation.phases or (_usual_phase(situation),)
    before_s = after_s = 0.0
    worst = _Largest()
    for phase in phases:
        parts = divided(phase, before)
        factor = _fewer_steps(situation, before, after, phase)
        changed = changed_parts(phase, parts, before, after, factor)
        steps = _steps_after(situation, before, after, phase) / factor
        step_s = max(changed.total, least_s(phase, before, after, factor))
        before_s += phase.num_steps * parts.total
        after_s += steps * step_s
        worst.see(phase, phase.num_steps * parts.total, parts, changed, factor)
    speedup = before_s / max(after_s, 1e-12)
    drafts_differ = draft_method(before) != draft_method(after)
    if drafts_differ:
        tokens = _tokens_a_row(after)
        worst.text = f"about {tokens:.2f} tokens a step are expected; it hangs on the text"
    width = _width(speedup, drafts_differ, area_of(edit), situation.hardware.name)
    return with_interval(speedup, width, worst.why(before, after))


def area_of(edit: Mapping[str, Any]) -> Area:
    """The area of the ladder that an edit belongs to: of several, the first that the ladder comes
    to.
    """
    return next(area for area, names in AREAS.items() if any(name in names for name in edit))


def _width(speedup: float, drafts_differ: bool, area: str, device: str) -> float:
    """Of the interval, as a logarithm: from earlier predictions where there are enough of them."""
    known = interval_factor(area, device)
    if known.num_outcomes and not drafts_differ:
        return math.log(known.factor)
    width = GUESSED_ERROR if drafts_differ else LEAST_ERROR
    return width + USUAL_ERROR * abs(math.log(max(speedup, 1e-9)))


def with_interval(speedup: float, width: float, why: str) -> Prediction:
    return Prediction(speedup, speedup * math.exp(-width), speedup * math.exp(width), why)


def state_of(situation: Situation) -> RunState:
    return RunState(
        situation.config,
        situation.recipe,
        situation.loop,
        situation.hardware,
        situation.bytes_per_weight,
        situation.bytes_per_kv,
        situation.blocks,
    )


def _changed(situation: Situation, edit: Mapping[str, Any]) -> RunState:
    state = state_of(situation)
    loop = edit.get("loop", state.loop)
    if loop not in get_args(LoopName):
        raise UsageError(f"loop is {loop!r}; use one of {', '.join(get_args(LoopName))}")
    fields = {name: value for name, value in edit.items() if name != "loop"}
    recipe = edited_at_once(state.recipe, fields)
    if "dtype" in edit and "kv.dtype" not in edit and recipe.kv.dtype == state.recipe.dtype:
        recipe = edited(recipe, "kv.dtype", recipe.dtype)
    if "scheme" in edit and state.recipe.scheme is None and "copies" not in edit:
        recipe = edited(recipe, "copies", None)  # of weights that were plain there were none
    recipe = _filled(recipe, state.recipe)
    weight, kv = state.bytes_per_weight, state.bytes_per_kv
    if (recipe.dtype, recipe.scheme) != (state.recipe.dtype, state.recipe.scheme):
        weight = planned_bytes_per_weight(state.config, recipe)
    elif state.blocks is not None and multiplies_blocks(recipe, loop):
        plain = recipe.head == "plain"  # then it is in blocks as well
        head = state.blocks.head if plain else head_bytes(state.config, recipe)
        weight = state.blocks.mean + head_share(state.config) * (head - state.blocks.head)
    elif recipe.head != state.recipe.head:  # what is known of the other matrices stays
        weight += planned_bytes_per_weight(state.config, recipe)
        weight -= planned_bytes_per_weight(state.config, state.recipe)
    if recipe.kv.dtype != state.recipe.kv.dtype:
        kv = kv_bytes(state.config, recipe)
    return replace(state, recipe=recipe, loop=loop, bytes_per_weight=weight, bytes_per_kv=kv)


def _filled(recipe: Recipe, known: Recipe) -> Recipe:
    """What an edit leaves to "auto" is as before."""
    for name in ("dtype", "kernels"):
        if getattr(recipe, name) == "auto":
            recipe = edited(recipe, name, getattr(known, name))
    if recipe.kv.dtype == "auto":
        recipe = edited(recipe, "kv.dtype", recipe.dtype)
    for name in ("graphs", "overlap"):
        if getattr(recipe, name) is None:
            recipe = edited(recipe, name, getattr(known, name))
    return recipe


def kv_bytes(config: ModelConfig, recipe: Recipe) -> float:
    """Of one element of keys or values, with its part of a scale."""
    dtype = parse_dtype(recipe.kv.dtype)
    return dtype_bytes(dtype) + (4.0 / config.head_dim if holds_codes(dtype) else 0.0)


def _usual_phase(situation: Situation) -> PhaseTime:
    """A decode step, where none was measured: it takes what the model says."""
    rows = max(1.0, situation.concurrency if situation.loop == "engine" else 1.0)
    keys = rows * min(UNKNOWN_CONTEXT, situation.config.max_context)
    work = MeanStep(rows, rows, rows, keys, keys)
    state = state_of(situation)
    result = of_model(modelled(state, work), state)
    return PhaseTime("decode", 1.0, result.total, work, dict(zip(NAMES, result, strict=True)))


def _fewer_steps(
    situation: Situation, before: RunState, after: RunState, phase: PhaseTime
) -> float:
    """How many times the work a step has then, of which there are as many fewer."""
    factor = _room(situation, after, phase) / _room(situation, before, phase)
    return max(factor, 1.0 / max(phase.work.tokens, 1.0))


def _room(situation: Situation, state: RunState, phase: PhaseTime) -> float:
    """How much of the workload a step can take: requests of a decode step, else tokens."""
    limits, concurrency = state.recipe.limits, max(1.0, situation.concurrency)
    if phase.phase == "decode":
        return 1.0 if state.loop == "naive" else running_requests(situation, state)
    per_prompt = phase.work.tokens / max(1.0, phase.work.rows)
    if state.loop == "naive":
        return per_prompt
    return min(per_prompt * concurrency, limits.token_budget or per_prompt * concurrency)


def running_requests(situation: Situation, state: RunState) -> float:
    """That share the engine's steps: those that are there, less what limits and memory refuse."""
    most = max(1.0, situation.concurrency)
    if situation.request_tokens:
        most = min(most, state.requests_held(situation.request_tokens))
    return max(1.0, min(most, state.recipe.limits.max_batch or most))


def _steps_after(
    situation: Situation, before: RunState, after: RunState, phase: PhaseTime
) -> float:
    steps = phase.num_steps
    if phase.phase == "decode":
        return steps * _tokens_a_row(before) / _tokens_a_row(after)
    return steps * _computed(situation, after) / _computed(situation, before)


def _computed(situation: Situation, state: RunState) -> float:
    """The share of prompt tokens that no earlier prompt has left in the cache."""
    keeps = state.loop == "engine" and state.recipe.kv.prefix_cache
    return 1.0 - min(0.99, situation.prefix_share) if keeps else 1.0


def _tokens_a_row(state: RunState) -> float:
    return 1.0 + (ACCEPTED[state.recipe.speculation.method] if state.loop == "engine" else 0.0)


class _Largest:
    """The part of the work that a change moves most: what a prediction is explained with."""

    def __init__(self) -> None:
        self.moved, self.text = 0.0, ""

    def see(
        self,
        phase: PhaseTime,
        seconds: float,
        before: StepSeconds,
        after: StepSeconds,
        factor: float,
    ) -> None:
        for name in StepSeconds._fields:
            was, now = getattr(before, name), getattr(after, name) / factor
            moved = abs(was - now) / max(before.total, 1e-12) * seconds
            if moved > max(self.moved, 1e-6 * seconds):  # less is rounding
                share = was / before.total
                self.moved = moved
                name = "other kernels" if name == "other" else name
                self.text = (
                    f"{name}: {share:.0%} of a {phase.phase} step, "
                    f"{1e3 * was:.3g} to {1e3 * now:.3g} ms"
                )

    def why(self, before: RunState, after: RunState) -> str:
        if after.bytes_per_weight != before.bytes_per_weight:
            sizes = f"{before.bytes_per_weight:.2f} to {after.bytes_per_weight:.2f} bytes a weight"
            return f"{self.text}; {sizes}" if self.text else sizes
        return self.text or "no part of a step is expected to change"
