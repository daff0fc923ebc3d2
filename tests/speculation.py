"""Engines that draft tokens as a test wants it, and drafts that are right as often as it wants."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from engines import engine_for, naive_outputs
from torch import Tensor

from ridgeline.engine import Engine, Sampling
from ridgeline.engine.sampling.drafter import Drafter, KnownTokens, judged
from ridgeline.engine.scheduling.state import StreamKey
from ridgeline.engine.scheduling.step_plan import StepPlan
from ridgeline.models import Transformer
from ridgeline.recipe import Speculation

GREEDY = Sampling(max_tokens=14)
DRAWN = Sampling(max_tokens=12, temperature=0.9, seed=5)
LOOKUP = Speculation("prompt-lookup", max_draft_tokens=4, min_ngram=1)


def force_drafts(engine: Engine, count: Callable[[StreamKey], int] = lambda key: 4) -> None:
    """Drafts for every stream in every step, whatever they cost."""
    drafting = engine.local.loop.drafting
    assert drafting is not None
    policy = drafting.policy

    def wanted(num_rows: int) -> dict[StreamKey, int]:
        return {
            key: count(key)
            for key, record in policy.streams.items()
            if policy.ahead or not record.num_drafting
        }

    policy.wanted = wanted  # type: ignore[method-assign]
    drafting.pace.allows = lambda num_rows: True  # type: ignore[method-assign]


class Oracle(Drafter):
    """Knows what comes, and is wrong about a share of it."""

    def __init__(
        self, drafts_SK: Tensor, vocab_size: int, wrong_share: float, seed: int = 0
    ) -> None:
        self.drafts_SK, self.vocab_size, self.wrong_share = drafts_SK, vocab_size, wrong_share
        self.sequences: dict[StreamKey, list[int]] = {}
        self.draw = random.Random(seed)

    def sit(self, seat: int, prompt_length: int, *rest: Any) -> None: ...

    def follow(self, plan: StepPlan) -> None: ...

    def draft(self, plan: StepPlan, known_tokens: KnownTokens) -> None:
        for row in range(plan.num_decode_rows, plan.num_decode_rows + plan.num_draft_rows):
            key, position = plan.keys[row], plan.first_positions[row]
            for number in range(plan.num_tokens[row] - 1):
                token = self.sequences[key][position + 1 + number]
                if self.draw.random() < self.wrong_share:
                    token = (token + 1) % self.vocab_size  # wrong, but a token
                self.drafts_SK[plan.seats[row], number] = token

    def judge(self, plan: StepPlan, tokens_R: Tensor, counts_R: Tensor) -> Tensor:
        return judged(plan, tokens_R, self.drafts_SK)


def steps_without_drafts(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the log says of steps that failed with their drafts and were run again without them,
    which no output shows.
    """
    messages = (record.getMessage() for record in caplog.get_records("call"))
    return [message for message in messages if "is run without drafts" in message]


def oracle_engine(
    model: Transformer, wrong_share: float = 0.3, seed: int = 0, **changes: Any
) -> Engine:
    engine = engine_for(model, speculation=LOOKUP, **changes)
    vocab_size = model.config.vocab_size
    engine.runner.drafter = Oracle(engine.runner.buffers.drafts_SK, vocab_size, wrong_share, seed)
    force_drafts(engine)
    return engine


def assert_drafted_exact(
    engine: Engine, prompts: list[list[int]], samplings: Sequence[Sampling]
) -> None:
    """All requests at once give the plain loop's tokens, some of which were drafted."""
    oracle, before = engine.runner.drafter, engine.stats
    outputs = [naive_outputs(engine.model, *pair) for pair in zip(prompts, samplings, strict=True)]
    jobs = [engine.job(*pair) for pair in zip(prompts, samplings, strict=True)]
    if isinstance(oracle, Oracle):
        number = engine._numbers.__reduce__()[1][0]  # the next request's
        for index, (prompt, own) in enumerate(zip(prompts, outputs, strict=True)):
            for sample, tokens in enumerate(own):
                oracle.sequences[f"request-{number + index}", sample] = [*prompt, *tokens]
    found = engine._run_all(jobs)
    for expected, output in zip(outputs, found, strict=True):
        assert output.status == "finished", output.reason
        assert [completion.tokens for completion in output.completions] == expected
    assert engine.stats.num_pages_used == 0
    assert engine.stats.accepted_tokens > before.accepted_tokens


def markov(model: Transformer) -> Transformer:
    """The same model with attention switched off: each token follows from the one before it, so
    that a greedy output goes round in circles.
    """
    with torch.no_grad():
        for layer in model.layers:
            layer.attn.out.weight.zero_()
    return model
