"""Where a climb begins: with the engine's defaults, and a guess at what is fastest.

starts = default_states()
FirstAnswer(job).together(starts[0], observation)       # of what is known once they have run
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from math import prod

from ridgeline.engine.loading.sources import keeps_blocks
from ridgeline.engine.loading.supported import with_host_kernels
from ridgeline.formats.dtypes import parse_dtype
from ridgeline.ladder.guessing.earlier import EarlierAnswer, known_answers, nearest_answer
from ridgeline.ladder.guessing.first_guess import first_guess, joint, parts_of
from ridgeline.ladder.guessing.timed_products import time_products
from ridgeline.ladder.measuring.observation import Observation
from ridgeline.ladder.order import ClimbJob, lengths_of
from ridgeline.ladder.outcome import RungOutcome
from ridgeline.ladder.rungs import Rung
from ridgeline.ladder.searching.progress import ClimbProgress
from ridgeline.ladder.searching.together import GUESS, Together
from ridgeline.ladder.state import ClimbState, applied, digest
from ridgeline.models.cost import kv_bytes_per_token
from ridgeline.profiling.predicting.gains import kv_bytes
from ridgeline.quantization.load import pick_dtype
from ridgeline.quantization.scheme import parse_scheme
from ridgeline.quantization.sizes import weight_bytes
from ridgeline.recipe import Recipe, dotted_values, usual_memory_share, with_auto


def default_states() -> Sequence[ClimbState]:
    """What `serve` does without a flag; and smaller ones, for where that does not fit."""
    plain = ClimbState(Recipe(), "engine")
    return [plain, *(applied(plain, {"scheme": name}) for name in ("int8", "int4-g128"))]


def expected_recipe(job: ClimbJob, start: ClimbState) -> Recipe:
    """The start's with nothing left open, before it is loaded."""
    config, device = job.subject.config, job.subject.device
    dtype = pick_dtype(start.recipe.dtype, config, job.hardware)
    filled = with_auto(start.recipe, config, dtype, device)
    filled = with_host_kernels(start.recipe, filled, config, device, None)
    has_blocks = job.facts.blocks is not None and keeps_blocks(start.recipe, device)
    return replace(filled, blocks=True) if has_blocks else filled


class FirstAnswer:
    """What a climb tries before all else: what an earlier one on this machine came to, where there
    was one of this model on a like workload; otherwise what is predicted to be fastest.
    """

    def __init__(self, job: ClimbJob) -> None:
        self.job = job
        self.notes: list[str] = []
        self._is_earlier = False

    def expected(self, start: ClimbState) -> ClimbState:
        """What will be tried, as far as can be told before anything has run."""
        together = self._together(start, expected_recipe(self.job, start))
        return applied(start, joint(together.parts))

    def together(self, start: ClimbState, observation: Observation) -> Together:
        filled, lengths = observation.filled, lengths_of(self.job.workload)
        time_products(self.job.facts, start, filled, lengths)
        together = self._together(start, filled)
        if together.note is not None:
            self._is_earlier = True
            self.notes.append(together.note)
        return together

    def _together(self, start: ClimbState, filled: Recipe) -> Together:
        job, lengths = self.job, lengths_of(self.job.workload)
        earlier = nearest_answer(known_answers(), self.like)
        if earlier is not None and earlier.edit:
            fits = partial(fits_memory, job)  # its answers were judged, and are again
            parts = parts_of(earlier.edit, job.facts, start, filled, fits)
            if parts:
                words = f"what an earlier climb here came to ({earlier.created[:10]})"
                return Together(parts, words, f"it began with {words}")
        allows = partial(may_be_guessed, job)
        return Together(first_guess(job.facts, lengths, start, filled, allows).parts)

    @property
    def like(self) -> EarlierAnswer:
        """This climb, as far as it is known before it."""
        facts, lengths = self.job.facts, lengths_of(self.job.workload)
        return EarlierAnswer(
            facts.hardware.name,
            digest(asdict(facts.config)),
            facts.goal,
            self.job.order.quality,
            sum(prompt for prompt, _ in lengths) / len(lengths),
            sum(output for _, output in lengths) / len(lengths),
            float(facts.concurrency),
            edit={},
            speedup=1.0,
            first_was_last=True,
            first_share=1.0,
        )

    def came_to(self, progress: ClimbProgress) -> EarlierAnswer:
        """For the climbs after it."""
        kept = [each for each in progress.outcomes if each.status == "kept"]
        edit = {name: value for each in kept for name, value in each.edit.items()}
        defaults = dotted_values(progress.start_observation.filled)
        later = [_gain(each) for each in kept if each.name != GUESS]
        return replace(
            self.like,
            edit={n: v for n, v in edit.items() if n in defaults and v != defaults[n]},
            speedup=prod(map(_gain, kept)),
            first_was_last=not later,
            first_share=1.0 / prod(later),
            from_earlier=self._is_earlier,
        )


def _gain(outcome: RungOutcome) -> float:
    return 1.0 if outcome.achieved is None else outcome.achieved.value


def may_be_guessed(job: ClimbJob, rung: Rung, after: Recipe) -> bool:
    """Not what the memory does not hold, nor what may well change answers that are to be kept. What
    seldom does is judged, all of it at once.
    """
    risky = job.order.quality and rung.changes_answers and rung.chance < 1.0
    return not risky and fits_memory(job, rung, after)


def fits_memory(job: ClimbJob, _: Rung, after: Recipe) -> bool:
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
