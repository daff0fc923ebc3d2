"""Drafts on several ranks: rank 0 alone looks them up or has the draft model, and the others take
its drafts and verdicts as they take its tokens, so that all make the same passes.

A lookup's drafts are shared with the step they were looked up in (`TensorRunner.end_step`). Those
of a draft model are made when they are asked for, and sent then; where that fails, the ranks hear
of it, and all run the step without drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ridgeline.engine.execution.faults import raise_if_lost
from ridgeline.engine.requests.request import Sampling
from ridgeline.engine.sampling.drafter import Drafter, KnownTokens
from ridgeline.engine.scheduling.step_plan import StepPlan
from ridgeline.parallel.inference.group import Group

FAILED, DRAFTED = 0, 1


class SentDrafts(Drafter):
    """Rank 0's, of a drafter that drafts when it is asked. `last_tokens` holds the drafts."""

    def __init__(self, drafter: Drafter, group: Group, last_tokens: Tensor) -> None:
        self.drafter, self.group, self.last_tokens = drafter, group, last_tokens

    def sit(
        self, seat: int, prompt_length: int, sampling: Sampling, seed: int, tokens: Sequence[int]
    ) -> None:
        self.drafter.sit(seat, prompt_length, sampling, seed, tokens)

    def follow(self, plan: StepPlan) -> None:
        self.drafter.follow(plan)

    def draft(self, plan: StepPlan, known_tokens: KnownTokens) -> None:
        try:
            self.drafter.draft(plan, known_tokens)
        except Exception as error:
            raise_if_lost(error)
            self.group.send([FAILED])
            raise
        self.group.send([DRAFTED])
        self.group.broadcast(self.last_tokens)

    def judge(self, plan: StepPlan, tokens_R: Tensor, counts_R: Tensor) -> Tensor:
        return self.drafter.judge(plan, tokens_R, counts_R)


class ReceivedDrafts(Drafter):
    """Another rank's. `in_graph` as rank 0's has it."""

    def __init__(self, in_graph: bool, group: Group, last_tokens: Tensor) -> None:
        self.in_graph, self.group, self.last_tokens = in_graph, group, last_tokens

    def sit(
        self, seat: int, prompt_length: int, sampling: Sampling, seed: int, tokens: Sequence[int]
    ) -> None:
        """Its tokens are rank 0's matter."""

    def follow(self, plan: StepPlan) -> None:
        """It has no pages."""

    def draft(self, plan: StepPlan, known_tokens: KnownTokens) -> None:
        if self.in_graph:
            return  # they are there since the last step
        if self.group.receive() == [FAILED]:
            raise RuntimeError("rank 0 could not draft")  # caught: a step needs no drafts
        self.group.broadcast(self.last_tokens)

    def judge(self, plan: StepPlan, tokens_R: Tensor, counts_R: Tensor) -> Tensor:
        raise AssertionError("rank 0 judges")
