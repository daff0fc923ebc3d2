"""Who drafts tokens ahead, and how drafts are judged. This file has the lookup in the text so
far; draft_model.py has the small model.

**Why verification is exact.** The step makes, at every position, the very choice that plain
decoding would make there: the same logits, the same settings, and for a draw the noise that belongs
to the request's seed and that position (kernels/sampling). A draft is accepted when it equals that
choice, as long as all before it were. So the output is plain decoding's token by token, greedy or
seeded, for whatever drafts; its distribution is the target's because it is the same draw.
Rejection sampling would accept a sampled draft a little more often, but would make another output
of the same seed. For a draft that is no draw (the lookup) both accept with the same probability;
a draft model draws with the same noise, so that it mostly agrees where the two models do.

Letters: S seats, L tokens of the longest stream, K drafts, N samples.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ridgeline.engine.requests.request import Sampling
from ridgeline.engine.scheduling.state import StreamKey
from ridgeline.engine.scheduling.step_plan import StepPlan
from ridgeline.engine.steps.flat_plan import first_rows, sample_words
from ridgeline.engine.steps.transfer import to_device
from ridgeline.kernels.prompt_lookup import LookupResults, Streams, accepted, prompt_lookup
from ridgeline.recipe import Speculation

KnownTokens = Callable[[StreamKey], Sequence[int]]


class Drafter(ABC):
    """Fills the device's table of the draft tokens that may come next, one line a seat."""

    in_graph = False  # whether a graph can do its part after a step: it has `judge_rows`

    @abstractmethod
    def sit(
        self, seat: int, prompt_length: int, sampling: Sampling, seed: int, tokens: Sequence[int]
    ) -> None:
        """A stream takes a seat, with the tokens it has so far."""

    @abstractmethod
    def follow(self, plan: StepPlan) -> None:
        """A step is about to run, which changes pages and their tables."""

    @abstractmethod
    def draft(self, plan: StepPlan, known_tokens: KnownTokens) -> None:
        """Before a step runs: its drafts must be in the table now."""

    @abstractmethod
    def judge(self, plan: StepPlan, tokens_R: Tensor, counts_R: Tensor) -> Tensor:
        """After a step has chosen `tokens_R`, one for each row of logits; samples of the step
        before brought `counts_R`. For each sample [3, N]: how many tokens it brings, whether the
        first draft was right, and whether there are drafts for the next step: the length of the
        run they rest on, or 1.
        """


class PromptLookup(Drafter):
    """All streams' tokens are in a table on the device, where the lookup happens after each step:
    nobody waits for the host to know what to draft.
    """

    in_graph = True

    def __init__(self, drafts_SK: Tensor, max_context: int, recipe: Speculation) -> None:
        self.device = drafts_SK.device
        shape = (len(drafts_SK), max_context + 1)
        history_SL = torch.zeros(shape, dtype=torch.int32, device=self.device)
        self.streams = Streams(history_SL, drafts_SK, recipe.min_ngram, recipe.max_ngram)

    def sit(
        self, seat: int, prompt_length: int, sampling: Sampling, seed: int, tokens: Sequence[int]
    ) -> None:
        line = np.asarray(tokens, dtype=np.int32)
        self.streams.history[seat, : len(line)] = to_device(line, self.device)

    def follow(self, plan: StepPlan) -> None:
        """It has no pages."""

    def draft(self, plan: StepPlan, known_tokens: KnownTokens) -> None:
        """They are there since the last step."""

    def judge(self, plan: StepPlan, tokens_R: Tensor, counts_R: Tensor) -> Tensor:
        samples_4N = samples_of(plan, self.device)
        if plan.moved_tokens:
            _move_samples(samples_4N, plan, counts_R)
        return prompt_lookup(self.streams, tokens_R, samples_4N)

    def judge_rows(
        self, samples_4R: Tensor, tokens_R: Tensor, out_3R: Tensor, last_R: Tensor
    ) -> None:
        """The same from what the device has, and each sample's last token where the next step looks
        for it. Samples of the padding's seat harm nobody.
        """
        prompt_lookup(self.streams, tokens_R, samples_4R, LookupResults(out_3R, last_R))


def judged(plan: StepPlan, tokens_R: Tensor, drafts_SK: Tensor) -> Tensor:
    """`Drafter.judge` for drafts that are made when they are asked for, and so always there."""
    if not plan.num_draft_rows:
        shape = (3, len(plan.sample_keys))
        return torch.ones(shape, dtype=torch.int32, device=drafts_SK.device)
    seats_N, rows_N, verified_N, _ = samples_of(plan, drafts_SK.device).long()
    right_N, first_N = accepted(tokens_R, drafts_SK[seats_N], rows_N, verified_N)
    return torch.stack((right_N + 1, first_N.long(), torch.ones_like(right_N))).int()


def _move_samples(samples_4N: Tensor, plan: StepPlan, counts_R: Tensor) -> None:
    """Samples behind drafts of the step before begin as much further on as those were right."""
    behind = dict(zip(plan.moved_tokens, plan.moved_samples, strict=True))
    tokens = [plan.logit_tokens[row] for row in first_rows(plan)]
    moved = [index for index, token in enumerate(tokens) if token in behind]
    whose = to_device([behind[tokens[index]] for index in moved], samples_4N.device)
    samples_4N[3, to_device(moved, samples_4N.device)] += counts_R[whose] - 1


def samples_of(plan: StepPlan, device: torch.device) -> Tensor:
    return to_device(sample_words(plan), device)
