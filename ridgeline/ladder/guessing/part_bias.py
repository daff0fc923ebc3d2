"""What a part of a workload tells of the whole: how much faster it runs, by the model of a step. A
part that keeps lengths has more of its time in the end, when few requests are left; one that
shortens them has less attention.

    part_bias(facts, state, filled, workload, WorkloadPart(256))      # -0.02: 2% slower
"""

from __future__ import annotations

from ridgeline.data.workload import Workload
from ridgeline.ladder.guessing.first_guess import expected_situation
from ridgeline.ladder.measuring.part import WorkloadPart
from ridgeline.ladder.order import lengths_of
from ridgeline.ladder.rungs import ClimbFacts
from ridgeline.ladder.state import ClimbState
from ridgeline.recipe import Recipe

MOST = 0.05  # a part that is further off is not taken for the whole


def part_bias(
    facts: ClimbFacts, state: ClimbState, filled: Recipe, workload: Workload, part: WorkloadPart
) -> float:
    """Its rate over the whole's, less one."""
    rates = [_expected_rate(facts, state, filled, each) for each in (part.of(workload), workload)]
    return rates[0] / rates[1] - 1.0


def _expected_rate(
    facts: ClimbFacts, state: ClimbState, filled: Recipe, workload: Workload
) -> float:
    situation = expected_situation(facts, state, filled, lengths_of(workload))
    seconds = sum(phase.num_steps * phase.step_s for phase in situation.phases)
    return workload.num_output_tokens / seconds


def bias_words(biases: tuple[float, float]) -> str:
    """Of the defaults and the answer."""
    before, after = (f"{abs(bias):.0%} {'faster' if bias >= 0 else 'slower'}" for bias in biases)
    gain = (1 + biases[1]) / (1 + biases[0]) - 1.0
    return (
        f"by the model of a step they run {before} (the defaults) and {after} (the answer) than "
        f"the whole: {gain:+.1%} of the gain"
    )
