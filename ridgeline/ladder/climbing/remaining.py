"""What a climb leaves: where the answer's steps take longer than the hardware's limit, and what was
not tried and is predicted to help.

    left = remaining(facts, observation, "engine", progress.outcomes)
    left.gap[0].name, left.next_steps
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ridgeline.errors import RidgelineError
from ridgeline.ladder.measuring.observation import Observation
from ridgeline.ladder.outcome import NextStep, RungOutcome
from ridgeline.ladder.rungs import ClimbFacts
from ridgeline.profiling.predicting.gap import gap_parts
from ridgeline.profiling.predicting.next_steps import what_next
from ridgeline.profiling.predicting.prediction import GapPart, LoopName

log = logging.getLogger(__name__)

MOST = 3  # steps that are named
# The rung that tries a field of a recipe; of others it is called as the value.
RUNGS = {"head": "head-{}", "kv.dtype": "kv-{}", "kernels": "fused", "loop": "fused"}
SWITCHES = ("graphs", "overlap", "copies", "tf32")


class Remaining(NamedTuple):
    gap: tuple[GapPart, ...]
    next_steps: tuple[NextStep, ...]


def remaining(
    facts: ClimbFacts, observed: Observation, loop: LoopName, outcomes: Sequence[RungOutcome]
) -> Remaining:
    """Of the answer as it was observed. The report has what became of each rung, reached or not:
    that is not named again.
    """
    situation = observed.situation(
        facts.config,
        loop,
        facts.hardware,
        float(facts.concurrency),
        facts.prefix_share,
        facts.request_tokens,
        facts.blocks,
    )
    listed = {outcome.name for outcome in outcomes}
    try:
        gap = gap_parts(situation)
        advice = [each for each in what_next(situation) if not rungs_of(each.edit) & listed]
    except RidgelineError as error:  # a report without it is still one
        log.warning("what is left to gain is not known: %s", error)
        return Remaining((), ())
    steps = [NextStep(each.title, each.flags, each.prediction) for each in advice]
    return Remaining(tuple(gap), tuple(steps[:MOST]))


def rungs_of(edit: Mapping[str, Any]) -> set[str]:
    """The names of the rungs that would make this edit."""
    return {
        name if name in SWITCHES else RUNGS.get(name, "{}").format(value)
        for name, value in edit.items()
    }
