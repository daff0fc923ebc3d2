"""One step, before and after a change: its parts as they were measured, each scaled by what the
model of step_model.py says of it after and before. gains.py makes predictions from it.

A device that is quicker than its launches waits for them, and no step is shorter than the
roofline's limit.

    parts = divided(phase, before)
    changed_parts(phase, parts, before, after, factor=1.0).total
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ridgeline.models.cost import MeanStep
from ridgeline.profiling.predicting.launching import is_replayed
from ridgeline.profiling.predicting.prediction import PhaseTime
from ridgeline.profiling.predicting.run_state import RunState
from ridgeline.profiling.predicting.step_model import StepParts, modelled
from ridgeline.profiling.roofline import matrix_units, step_limit
from ridgeline.profiling.tracing.device_division import WAITING

USUAL_DRAFTS = 5  # that a small model is asked for, where more are allowed
DRAFT_COST = {"none": 0.0, "prompt-lookup": 0.0, "draft": 0.08}  # of a step, a token drafted
# Further rows that a step verifies, in the mean.
CHECKED = {"none": 0.0, "prompt-lookup": 1.0, "draft": 5.0}
DETERMINISTIC = 1 / 0.75  # of all kernels' time: 24.5% slower on the H200 (2026-11-15)
# As phases have them, in the order of `StepSeconds`.
NAMES = ("matrices", "attention", "other kernels", "gaps", "host", "copies", "communication")


class StepSeconds(NamedTuple):
    """Seconds of one step."""

    matrices: float
    attention: float
    other: float
    gaps: float
    host: float
    copies: float
    communication: float = 0.0

    @property
    def busy(self) -> float:
        computed = self.matrices + self.attention + self.other
        return computed + self.copies + self.communication

    @property
    def total(self) -> float:
        return self.busy + self.gaps + self.host


def divided(phase: PhaseTime, state: RunState) -> StepSeconds:
    """A step as it was measured to divide, or as the model divides it. What that does not explain
    is spread over all parts; on a GPU that is launched kernel by kernel, it is waiting for that.
    """
    if phase.division:
        result = StepSeconds(*(float(phase.division.get(name, 0.0)) for name in NAMES))
        scale = phase.step_s / result.total if result.total > 0 else 1.0
        return StepSeconds(*(part * scale for part in result))
    result = of_model(modelled(state, phase.work), state)
    left = phase.step_s - result.busy - result.host
    if state.on_gpu and not is_replayed(state, phase.work) and left > result.gaps:
        return result._replace(gaps=left)
    return StepSeconds(*(part * phase.step_s / result.total for part in result))


def of_model(parts: StepParts, state: RunState) -> StepSeconds:
    """A step that was not measured."""
    busy = parts.matrices_s + parts.attention_s + parts.other_s + parts.communication_s
    gaps = max(parts.gap_s, parts.launch_s - busy) if state.on_gpu else parts.gap_s
    return StepSeconds(*parts[:3], gaps, parts.host_s, 0.0, parts.communication_s)


def changed_parts(
    phase: PhaseTime, parts: StepSeconds, before: RunState, after: RunState, factor: float
) -> StepSeconds:
    """The step's parts behind a change, with `factor` times the work in it."""
    work = times(phase.work, factor)
    drafted = _with_drafts(phase, work, before, after)
    was, now = modelled(before, phase.work), modelled(after, drafted)
    slower = DETERMINISTIC if after.recipe.deterministic else 1.0
    slower /= DETERMINISTIC if before.recipe.deterministic else 1.0
    ranks = before.recipe.parallel.tensor / after.recipe.parallel.tensor if after.on_gpu else 1.0
    matrices = parts.matrices * now.matrices_s / max(was.matrices_s, 1e-12) * slower * ranks
    attention = parts.attention * now.attention_s / max(was.attention_s, 1e-12) * slower * ranks
    other = parts.other * now.other_s / max(was.other_s, 1e-12) * slower
    if phase.phase == "decode" and draft_method(after) != draft_method(before):
        drafts = min(after.recipe.speculation.max_draft_tokens, USUAL_DRAFTS)
        other += (matrices + attention) * DRAFT_COST[draft_method(after)] * drafts
    host = now.host_s  # of another loop nothing is known from this one
    if before.loop == after.loop:
        host = parts.host * now.host_s / max(was.host_s, 1e-12)
    communication = now.communication_s  # where there was none, nothing else is known of it
    if was.communication_s:
        communication *= parts.communication / was.communication_s
    copies = parts.copies * factor
    changed = StepSeconds(matrices, attention, other, 0.0, host, copies, communication)
    fewer = parts.gaps * now.gap_s / was.gap_s  # as many for each kernel as now
    if not after.on_gpu:
        return changed._replace(gaps=fewer)
    replayed = is_replayed(before, phase.work), is_replayed(after, drafted)
    return changed._replace(gaps=_gaps(parts, changed, was, now, replayed))


def _gaps(
    parts: StepSeconds,
    changed: StepSeconds,
    was: StepParts,
    now: StepParts,
    replayed: tuple[bool, bool],
) -> float:
    """A device that is quicker than its launches waits for them: what a step takes at least then is
    what launching took before, by the kernels and the way of launching. A host that launches has
    no time to hide its other work in: what leaves the host's part is then waited for here. Where it
    seldom waited, launching took less than the step did: what the model says.
    """
    fewer = parts.gaps * now.gap_s / was.gap_s
    if all(replayed):
        return fewer
    if replayed[1]:
        return min(fewer, now.gap_s)
    hidden = max(0.0, parts.host - changed.host)
    if replayed[0]:
        return max(fewer, now.launch_s + hidden - changed.busy)
    waits = parts.gaps > max(2 * was.gap_s, WAITING * parts.busy)
    launching = (parts.busy + parts.gaps) if waits else min(was.launch_s, parts.busy)
    launching = launching * now.launch_s / was.launch_s + hidden
    return max(min(fewer, now.gap_s) if waits else fewer, launching - changed.busy)


def least_s(phase: PhaseTime, before: RunState, after: RunState, factor: float) -> float:
    """The roofline's limit for the new step; where the old one was below its own (a ceiling that
    was measured on a bad day), as far below.
    """
    units = matrix_units(after.recipe, after.on_gpu)
    now = step_limit(after.cost(times(phase.work, factor)), after.hardware, units)
    earlier = matrix_units(before.recipe, before.on_gpu)
    was = step_limit(before.cost(phase.work), before.hardware, earlier)
    if now is None or was is None:
        return 0.0
    ranks = before.recipe.parallel.tensor / after.recipe.parallel.tensor
    return now.seconds * min(1.0, phase.step_s / was.seconds) * min(1.0, ranks)


def _with_drafts(phase: PhaseTime, work: MeanStep, before: RunState, after: RunState) -> MeanStep:
    """A step with the tokens that are drafted, which are verified as rows of their own."""
    if phase.phase != "decode":
        return work
    rows = (1.0 + CHECKED[draft_method(after)]) / (1.0 + CHECKED[draft_method(before)])
    grown = replace(work, tokens=work.tokens * rows, logit_rows=work.logit_rows * rows)
    return replace(grown, pairs=work.pairs * rows)


def draft_method(state: RunState) -> str:
    """Who drafts tokens."""
    return state.recipe.speculation.method if state.loop == "engine" else "none"


def times(work: MeanStep, factor: float) -> MeanStep:
    """So many times the work."""
    fields = ("rows", "tokens", "logit_rows", "pairs", "keys")
    return MeanStep(*(getattr(work, name) * factor for name in fields))
