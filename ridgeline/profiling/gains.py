"""What a change to a recipe would give, end to end: the one owner of predictions.

Each kind of step is taken apart: matrices, attention, other kernels, gaps, host, copies, as it was
measured, or as counted work says where it was not. A change scales each part by what the model of
step_model.py says of it after and before; the device then waits for launches where those take
longer than its kernels. No step is predicted below the roofline's limit, and a change that changes
nothing gives 1.

    predict(situation, {"scheme": "int8"}).speedup
    predict(situation, {"loop": "engine", "kernels": "fused"})
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple, get_args

from ridgeline.errors import UsageError
from ridgeline.formats.dtypes import dtype_bytes, parse_dtype
from ridgeline.kernels.pages import holds_codes
from ridgeline.models import ModelConfig
from ridgeline.models.cost import MeanStep
from ridgeline.profiling.prediction import Loop, PhaseTime, Prediction, Situation
from ridgeline.profiling.roofline import step_limit
from ridgeline.profiling.step_model import Parts, State, modelled, planned_bytes_per_weight
from ridgeline.recipe import Recipe, edited, edited_at_once

# How far off a prediction is taken to be before any was compared with what came of it: of the gain
# itself, and of everything (noise of the measurement).
USUAL_ERROR, LEAST_ERROR = 0.25, 0.06
GUESSED_ERROR = 0.3  # where the gain hangs on the text: how many guessed tokens are right
# Tokens of which more than one comes from a step, beyond the first: prompt lookup gave 0.85 to
# 1.24 times the speed on `demo` (2026-11-15); a draft model is taken to be right on two of five.
ACCEPTED = {"none": 0.0, "prompt-lookup": 0.25, "draft": 1.6}
DRAFT_COST = {"none": 0.0, "prompt-lookup": 0.0, "draft": 0.08}  # of a step, for each token guessed
CHECKED = {
    "none": 0.0,
    "prompt-lookup": 1.0,
    "draft": 5.0,
}  # rows that a step verifies, in the mean
DETERMINISTIC = 1 / 0.75  # of all kernels' time: 24.5% slower on the H200 (2026-11-15)
UNKNOWN_CONTEXT = 1024  # tokens, where no step was measured


class Divided(NamedTuple):
    """Seconds of one step."""

    matrices: float
    attention: float
    other: float
    gaps: float
    host: float
    copies: float

    @property
    def busy(self) -> float:
        return self.matrices + self.attention + self.other + self.copies

    @property
    def total(self) -> float:
        return self.busy + self.gaps + self.host


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
        changed = _after(phase, parts, before, after, factor)
        steps = _steps_after(situation, before, after, phase) / factor
        step_s = max(changed.total, _floor(phase, before, after, factor))
        before_s += phase.num_steps * parts.total
        after_s += steps * step_s
        worst.see(phase, phase.num_steps * parts.total, parts, changed, factor)
    speedup = before_s / max(after_s, 1e-12)
    guessed = _method(before) != _method(after)
    return with_interval(speedup, worst.why(before, after), guessed)


def with_interval(speedup: float, why: str, guessed: bool = False) -> Prediction:
    """The usual interval around a speedup: wider where more is promised."""
    width = GUESSED_ERROR if guessed else LEAST_ERROR
    width += USUAL_ERROR * abs(math.log(max(speedup, 1e-9)))
    return Prediction(speedup, speedup * math.exp(-width), speedup * math.exp(width), why)


def state_of(situation: Situation) -> State:
    return State(
        situation.config,
        situation.recipe,
        situation.loop,
        situation.hardware,
        situation.bytes_per_weight,
        situation.bytes_per_kv,
    )


def divided(phase: PhaseTime, state: State) -> Divided:
    """A step as it was measured to divide, or as the model divides it: what that does not explain
    is waiting for the host.
    """
    if phase.division:
        names = ("matrices", "attention", "other kernels", "gaps", "host", "copies")
        found = Divided(*(float(phase.division.get(name, 0.0)) for name in names))
        scale = phase.step_s / found.total if found.total > 0 else 1.0
        return Divided(*(part * scale for part in found))
    parts = modelled(state, phase.work)
    kernels = parts.matrices_s + parts.attention_s + parts.other_s
    scale = min(1.0, phase.step_s / max(kernels, 1e-12))
    busy = (parts.matrices_s * scale, parts.attention_s * scale, parts.other_s * scale)
    left = max(0.0, phase.step_s - sum(busy))
    host = min(left, parts.host_s)
    return Divided(*busy, left - host, host, 0.0)


def _changed(situation: Situation, edit: Mapping[str, Any]) -> State:
    state = state_of(situation)
    loop = edit.get("loop", state.loop)
    if loop not in get_args(Loop):
        raise UsageError(f"loop is {loop!r}; use one of {', '.join(get_args(Loop))}")
    fields = {name: value for name, value in edit.items() if name != "loop"}
    recipe = edited_at_once(state.recipe, fields)
    if "dtype" in edit and "kv.dtype" not in edit and recipe.kv.dtype == state.recipe.dtype:
        recipe = edited(recipe, "kv.dtype", recipe.dtype)
    recipe = _filled(recipe, state.recipe)
    weight, kv = state.bytes_per_weight, state.bytes_per_kv
    if (recipe.dtype, recipe.scheme) != (state.recipe.dtype, state.recipe.scheme):
        weight = planned_bytes_per_weight(state.config, recipe)
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
    return edited(recipe, "graphs", known.graphs) if recipe.graphs is None else recipe


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
    found = _of_model(modelled(state, work), state)
    names = ("matrices", "attention", "other kernels", "gaps", "host", "copies")
    return PhaseTime("decode", 1.0, found.total, work, dict(zip(names, found, strict=True)))


def _of_model(parts: Parts, state: State) -> Divided:
    busy = parts.matrices_s + parts.attention_s + parts.other_s
    gaps = max(parts.gap_s, parts.launch_s - busy) if state.on_gpu else parts.gap_s
    return Divided(*parts[:3], gaps, parts.host_s, 0.0)


def _after(phase: PhaseTime, parts: Divided, before: State, after: State, factor: float) -> Divided:
    """The step's parts behind a change, with `factor` times the work in it."""
    work = _scaled(phase.work, factor)
    drafted = _with_drafts(phase, work, before, after)
    was, now = modelled(before, phase.work), modelled(after, drafted)
    slower = DETERMINISTIC if after.recipe.deterministic else 1.0
    slower /= DETERMINISTIC if before.recipe.deterministic else 1.0
    ranks = before.recipe.parallel.tensor / after.recipe.parallel.tensor if after.on_gpu else 1.0
    matrices = parts.matrices * now.matrices_s / max(was.matrices_s, 1e-12) * slower * ranks
    attention = parts.attention * now.attention_s / max(was.attention_s, 1e-12) * slower * ranks
    other = parts.other * now.other_s / max(was.other_s, 1e-12) * slower
    if phase.phase == "decode" and _method(after) != _method(before):
        drafts = after.recipe.speculation.max_draft_tokens
        other += (matrices + attention) * DRAFT_COST[_method(after)] * drafts
    host = parts.host * now.host_s / max(was.host_s, 1e-12)
    changed = Divided(matrices, attention, other, 0.0, host, parts.copies * factor)
    return changed._replace(gaps=_gaps(parts, changed, was, now, before, after))


def _gaps(
    parts: Divided, changed: Divided, was: Parts, now: Parts, before: State, after: State
) -> float:
    """A device that is quicker than its launches waits for them: what a step takes at least then is
    what launching took before, by the number of kernels and the way of launching.
    """
    fewer = parts.gaps * now.gap_s / was.gap_s  # as many for each kernel as now
    if not after.on_gpu or (after.uses_graphs and before.uses_graphs):
        return fewer
    if after.uses_graphs:
        return min(fewer, now.gap_s)
    if before.uses_graphs:
        return max(fewer, now.launch_s - changed.busy)
    waits = parts.gaps > 2 * was.gap_s
    launching = (parts.busy + parts.gaps) if waits else min(was.launch_s, parts.busy)
    launching *= now.launch_s / was.launch_s
    return max(min(fewer, now.gap_s) if waits else fewer, launching - changed.busy)


def _floor(phase: PhaseTime, before: State, after: State, factor: float) -> float:
    """The roofline's limit for the new step; where the old one was below its own (a ceiling that
    was measured on a bad day), as far below.
    """
    dtype = _roof_dtype(after)
    now = step_limit(after.cost(_scaled(phase.work, factor)), after.hardware, dtype)
    was = step_limit(before.cost(phase.work), before.hardware, _roof_dtype(before))
    if now is None or was is None:
        return 0.0
    ranks = before.recipe.parallel.tensor / after.recipe.parallel.tensor
    return now.seconds * min(1.0, phase.step_s / was.seconds) * min(1.0, ranks)


def _roof_dtype(state: State) -> str:
    scheme = state.recipe.scheme or ""
    if scheme.startswith("w8a8"):
        return "int8"
    return "fp8" if scheme.startswith("fp8") else state.recipe.dtype


def _fewer_steps(situation: Situation, before: State, after: State, phase: PhaseTime) -> float:
    """How many times the work a step has then, of which there are as many fewer."""
    factor = _room(situation, after, phase) / _room(situation, before, phase)
    return max(factor, 1.0 / max(phase.work.tokens, 1.0))


def _room(situation: Situation, state: State, phase: PhaseTime) -> float:
    """How much of the workload a step can take: requests of a decode step, else tokens."""
    limits, concurrency = state.recipe.limits, max(1.0, situation.concurrency)
    if phase.phase == "decode":
        return 1.0 if state.loop == "naive" else min(concurrency, limits.max_batch or concurrency)
    per_prompt = phase.work.tokens / max(1.0, phase.work.rows)
    if state.loop == "naive":
        return per_prompt
    return min(per_prompt * concurrency, limits.token_budget or per_prompt * concurrency)


def _steps_after(situation: Situation, before: State, after: State, phase: PhaseTime) -> float:
    steps = phase.num_steps
    if phase.phase == "decode":
        return steps * _tokens_a_row(before) / _tokens_a_row(after)
    return steps * _computed(situation, after) / _computed(situation, before)


def _computed(situation: Situation, state: State) -> float:
    """The share of prompt tokens that no earlier prompt has left in the cache."""
    keeps = state.loop == "engine" and state.recipe.kv.prefix_cache
    return 1.0 - min(0.99, situation.prefix_share) if keeps else 1.0


def _tokens_a_row(state: State) -> float:
    return 1.0 + (ACCEPTED[state.recipe.speculation.method] if state.loop == "engine" else 0.0)


def _with_drafts(phase: PhaseTime, work: MeanStep, before: State, after: State) -> MeanStep:
    """A step with the tokens that are guessed, which are verified as rows of their own."""
    if phase.phase != "decode":
        return work
    rows = (1.0 + CHECKED[_method(after)]) / (1.0 + CHECKED[_method(before)])
    grown = replace(work, tokens=work.tokens * rows, logit_rows=work.logit_rows * rows)
    return replace(grown, pairs=work.pairs * rows)


def _method(state: State) -> str:
    return state.recipe.speculation.method if state.loop == "engine" else "none"


def _scaled(work: MeanStep, factor: float) -> MeanStep:
    fields = ("rows", "tokens", "logit_rows", "pairs", "keys")
    return MeanStep(*(getattr(work, name) * factor for name in fields))


class _Largest:
    """The part of the work that a change moves most: what a prediction is explained with."""

    def __init__(self) -> None:
        self.moved, self.text = 0.0, ""

    def see(
        self, phase: PhaseTime, seconds: float, before: Divided, after: Divided, factor: float
    ) -> None:
        for name in Divided._fields:
            was, now = getattr(before, name), getattr(after, name) / factor
            moved = abs(was - now) / max(before.total, 1e-12) * seconds
            if moved > self.moved:
                share = was / before.total
                self.moved = moved
                self.text = (
                    f"{name} are {share:.0%} of a {phase.phase} step: "
                    f"{1e3 * was:.3g} to {1e3 * now:.3g} ms"
                )

    def why(self, before: State, after: State) -> str:
        if after.bytes_per_weight != before.bytes_per_weight:
            sizes = f"{before.bytes_per_weight:.2f} to {after.bytes_per_weight:.2f} bytes a weight"
            return f"{self.text}; {sizes}" if self.text else sizes
        return self.text or "no part of a step is expected to change"
