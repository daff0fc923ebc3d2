"""Multiple choice by log-likelihood: which ending does the model find most likely after a context?

Each ending is scored with its context before it; the engine computes a context once for all of its
endings. `acc` takes the sum over an ending's tokens; `acc_norm` divides it by the ending's length
in characters, so that long endings have the same chance. What rows look like is in layouts.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from torch import Tensor

from ridgeline.data import Tokenizer
from ridgeline.engine import Engine
from ridgeline.progress import Progress
from ridgeline.quality.perplexity import check_numbers, chosen_logprobs
from ridgeline.quality.tasks.score import TaskScore, tokenizer_for

ChoiceMetric = Literal["acc", "acc_norm"]


class ChoiceQuestion(NamedTuple):
    """One question."""

    contexts: tuple[str, ...]  # of each ending; mostly the same
    endings: tuple[str, ...]  # with the space before them
    right: int


def after_context(context: str, endings: Sequence[str], right: int) -> ChoiceQuestion:
    """A question with one context for all endings, which are given without the space."""
    spaced = tuple(f" {ending}" for ending in endings)
    return ChoiceQuestion((context,) * len(spaced), spaced, right)


def score_choices(
    engine: Engine,
    questions: Sequence[ChoiceQuestion],
    metric: ChoiceMetric,
    progress: Progress | None = None,
) -> TaskScore:
    tokenizer = tokenizer_for(engine)
    prompts, firsts = [], []
    for question in questions:
        for context, ending in zip(question.contexts, question.endings, strict=True):
            tokens, first = with_ending(tokenizer, context, ending)
            prompts.append(tokens)
            firsts.append(first)
    scores = engine.score(prompts, chosen_logprobs, firsts, progress)
    check_numbers(scores)
    return judged(questions, scores, metric)


def with_ending(tokenizer: Tokenizer, context: str, ending: str) -> tuple[list[int], int]:
    """Tokens of both as one text, with the model's BOS, and the number of the ending's first.
    Spaces at the end of the context belong to the ending, for tokens begin with their space.
    """
    before = tokenizer.encode(context.rstrip(), add_special_tokens=False)
    whole = tokenizer.encode(context + ending, add_special_tokens=False)
    bos = tokenizer.bos_id if tokenizer.add_bos else None
    start = [] if bos is None or whole[:1] == [bos] else [bos]
    return start + whole, max(1, min(len(start) + len(before), len(start) + len(whole) - 1))


def judged(
    questions: Sequence[ChoiceQuestion], scores: Sequence[Tensor], metric: ChoiceMetric
) -> TaskScore:
    """`scores` has the log-probabilities of every ending's tokens, question after question."""
    rest = iter(scores)
    normalized, plain = [], []
    for question in questions:
        sums = np.array([float(next(rest).double().sum()) for _ in question.endings])
        lengths = np.array([len(ending) - 1 for ending in question.endings])  # without the space
        normalized.append(float(np.argmax(sums / np.maximum(lengths, 1)) == question.right))
        plain.append(float(np.argmax(sums) == question.right))
    if metric == "acc":
        return TaskScore("acc", np.array(plain))
    return TaskScore("acc_norm", np.array(normalized), {"acc": float(np.mean(plain))})
