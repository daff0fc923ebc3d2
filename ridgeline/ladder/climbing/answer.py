"""Where a climb begins: with the engine's defaults, and a guess at what is fastest.

starts = default_states()
guess = partial(guessed_parts, job, starts[0])      # of what is known once they have run
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ridgeline.formats.dtypes import parse_dtype
from ridgeline.ladder.climbing.first_guess import first_guess
from ridgeline.ladder.climbing.order import ClimbJob, lengths_of
from ridgeline.ladder.climbing.search import GuessedPart
from ridgeline.ladder.measuring.observation import Observation
from ridgeline.ladder.rungs import Rung
from ridgeline.ladder.state import ClimbState, applied
from ridgeline.models.cost import kv_bytes_per_token
from ridgeline.profiling.predicting.gains import kv_bytes
from ridgeline.quantization.scheme import parse_scheme
from ridgeline.quantization.sizes import weight_bytes
from ridgeline.recipe import Recipe, usual_memory_share


def default_states() -> Sequence[ClimbState]:
    """What `serve` does without a flag; and smaller ones, for where that does not fit."""
    plain = ClimbState(Recipe(), "engine")
    return [plain, *(applied(plain, {"scheme": name}) for name in ("int8", "int4-g128"))]


def guessed_parts(
    job: ClimbJob, start: ClimbState, observation: Observation
) -> Sequence[GuessedPart]:
    """The changes of the defaults that are predicted to be fastest together."""
    allows = partial(may_be_guessed, job)
    return first_guess(job.facts, lengths_of(job.workload), start, observation.filled, allows).parts


def may_be_guessed(job: ClimbJob, rung: Rung, after: Recipe) -> bool:
    """Not what could change answers that are to be kept, nor what the memory does not hold."""
    if job.order.quality and rung.changes_answers:
        return False
    return needed_bytes(job, after) <= usual_memory_share(not job.facts.on_cpu) * (
        job.hardware.memory_bytes
    )


def needed_bytes(job: ClimbJob, recipe: Recipe) -> float:
    """At least: weights, and the pages of the longest request."""
    config = job.facts.config
    scheme, head = (
        None if name in (None, "plain") else parse_scheme(name)
        for name in (recipe.scheme, recipe.head)
    )
    weights = weight_bytes(config, parse_dtype(recipe.dtype), scheme, head=head)
    longest = max(request.num_tokens for request in job.workload.requests)
    return weights + longest * kv_bytes_per_token(config, kv_bytes(config, recipe))
