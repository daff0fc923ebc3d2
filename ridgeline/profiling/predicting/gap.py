"""Why a workload is not at the hardware's limit: its steps as they were measured to divide, each
part against what the ceilings allow it.

The limit of a step counts weights, keys and values, and their products. Whichever bounds the step,
bytes or FLOPs, is what its matrices and its attention are allowed; the other parts are allowed
nothing, since a perfect step would hide them.

    parts = gap_parts(situation)
    parts[0].name, parts[0].share       # "gaps", 0.21: of the time in steps
    1.0 - sum(part.share for part in parts)     # the limit's own share
"""

from __future__ import annotations

from collections.abc import Mapping

from ridgeline.profiling.predicting.changed_step import NAMES, divided
from ridgeline.profiling.predicting.gains import state_of
from ridgeline.profiling.predicting.prediction import GapPart, PhaseTime, Situation
from ridgeline.profiling.predicting.run_state import RunState
from ridgeline.profiling.roofline import matrix_units, step_limit


def gap_parts(situation: Situation) -> list[GapPart]:
    """The largest first; nothing where a ceiling is unknown or no step was measured."""
    state = state_of(situation)
    total_s = sum(phase.num_steps * phase.step_s for phase in situation.phases)
    result = []
    for phase in situation.phases:
        allowed = _allowed(phase, state)
        if allowed is None or total_s <= 0:
            return []
        for name, step_s in zip(NAMES, divided(phase, state), strict=True):
            least_s = min(step_s, allowed.get(name, 0.0))
            share = phase.num_steps * (step_s - least_s) / total_s
            if share > 0:
                result.append(GapPart(phase.phase, name, step_s, least_s, share))
    return sorted(result, key=lambda part: -part.share)


def _allowed(phase: PhaseTime, state: RunState) -> Mapping[str, float] | None:
    """Seconds of the step's limit, by the parts that it counts."""
    cost = state.cost(phase.work)
    limit = step_limit(cost, state.hardware, matrix_units(state.recipe, state.on_gpu))
    if limit is None:
        return None
    if limit.bound == "memory":
        matrices, attention = cost.weight_bytes, cost.kv_read_bytes + cost.kv_write_bytes
    else:
        matrices, attention = cost.matrix_flops, cost.attention_flops
    per_s = (matrices + attention) / limit.seconds
    return {"matrices": matrices / per_s, "attention": attention / per_s}
