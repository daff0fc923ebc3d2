"""The step that is run, as values: one forward pass of it, what kind of pass that is, and what came
of it. The runner makes them, graphs and the sampler read them, nobody changes them.

    step = StepPass(plan, jobs, range(len(plan.sample_keys)), step=plan)      # all of a step
    kind = PassKind(shape_of(plan), max_length=1024)                          # may be a graph's key
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ridgeline.engine.sampling.extras import Jobs, Pending
from ridgeline.engine.scheduling.step_plan import StepPlan
from ridgeline.engine.steps.batch import StepShape


class PassKind(NamedTuple):
    """What a forward pass depends on besides its numbers: one graph serves all of a kind."""

    shape: StepShape
    max_length: int  # bounds the sequences of decode rows
    own_sequences: bool = True  # no two decode rows are of one sequence: see decode_rows.py
    fresh_prompts: bool = False  # all rows are the beginnings of prompts, of one length


class SamplingKind(NamedTuple):
    """What the sampling of a pass does."""

    filtered: bool  # whether a row asks for top-k, top-p or min-p
    keeps: bool  # whether it also keeps the tokens: see `StepSampler.keeps`


@dataclass(frozen=True, slots=True)
class StepPass:
    """One forward pass: a whole step, or, after a failure, some of its rows."""

    plan: StepPlan  # what is computed; drafts are rows and samples like any others
    jobs: Jobs
    samples: Sequence[int]  # the number of each of its samples in the step
    step: StepPlan | None = None  # the step, drafts included, that this is all of; None: a part

    @property
    def in_order(self) -> bool:
        """Whether its samples are the step's first ones, as they come."""
        samples = self.samples
        return isinstance(samples, range) or samples == list(range(len(samples)))


class PassResult(NamedTuple):
    pending: Pending  # to be called when the copies to the host have arrived
    kept: bool = False  # whether its tokens are already where the next step takes them from
