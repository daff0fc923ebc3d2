"""A look at the steps of a state that is loaded: how many of which kind its workload has, what one
takes in the median of its rounds, and how that divides. Predictions of the rungs that come next are
made from it, so it must not cost much nor change what is measured behind it.

    result = looked_at(runs.phases(workload), rounds, stepping)
    result.phases, result.slowed
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

from ridgeline.engine import Engine
from ridgeline.ladder.measuring.running import Round
from ridgeline.models import Transformer
from ridgeline.profiling.dividing import Divided, divided
from ridgeline.profiling.predicting.prediction import PhaseTime
from ridgeline.profiling.tracing.plain_stepping import NaiveSteps
from ridgeline.profiling.tracing.stepping import EngineSteps, ProfiledSteps
from ridgeline.recipe import Recipe

log = logging.getLogger(__name__)

LEAST_ROUNDS = 3  # of which a median says more than one look
Steps = Callable[[], ProfiledSteps]


def engine_steps(engine: Engine) -> Steps | None:
    """None where steps cannot be run by themselves: several devices, tokens that are drafted."""
    recipe = engine.recipe
    if recipe.parallel.num_ranks > 1 or recipe.speculation.method != "none":
        return None
    return lambda: EngineSteps(engine)


def naive_steps(model: Transformer, filled: Recipe) -> Steps:
    return lambda: NaiveSteps(model, filled)


def looked_at(
    phases: Sequence[PhaseTime], rounds: Sequence[Round], steps: Steps | None, alone: bool
) -> Divided:
    """`alone`: requests ran one after the other, so that a step is a token."""
    result = tuple(phases)
    if alone and steps is not None:
        result = steadied(result, rounds)
    if steps is None:
        log.info("steps are not divided: they cannot be run by themselves")
        return Divided(result)
    try:
        return divided(steps(), result)
    except Exception:  # whatever it is: predictions do without, and the climb goes on
        log.warning("steps are not divided", exc_info=True)
        return Divided(result)


def steadied(phases: Sequence[PhaseTime], rounds: Sequence[Round]) -> tuple[PhaseTime, ...]:
    """With the times of the rounds' middle: a host that launches steps one by one is now slow, now
    quick, and one look would see either.
    """
    names = {"prefill": "first_token_s", "decode": "per_output_token_s"}
    result = []
    for phase in phases:
        times = [getattr(each, names[phase.phase]) for each in rounds]
        known = [seconds for seconds in times if seconds is not None]
        step_s = median(known) if len(known) >= LEAST_ROUNDS else phase.step_s
        result.append(replace(phase, step_s=step_s))
    return tuple(result)
