"""Multiple choice by log-likelihood: which ending does the model find most likely after a context?

Each ending is scored with its context before it; the engine computes a context once for all of its
endings. Normalized, a log-likelihood is divided by the ending's length in characters, so that long
endings have the same chance; that is the figure usually reported (`acc_norm`).

HellaSwag rows have activity_label, ctx_a, ctx_b, endings and label; rows of the other form have
query, choices and gold, as in ARC.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch import Tensor

from ridgeline.data import Tokenizer
from ridgeline.engine import Engine
from ridgeline.progress import Progress
from ridgeline.quality.perplexity import check_numbers, chosen_logprobs
from ridgeline.quality.tasks.questions import (
    QuestionRow,
    index_of,
    read_questions,
    text_of,
    texts_of,
)
from ridgeline.quality.tasks.score import TaskScore, tokenizer_for


class ChoiceQuestion(NamedTuple):
    """One question."""

    context: str
    endings: tuple[str, ...]  # with the space before them
    right: int


def read_choice(row: QuestionRow) -> ChoiceQuestion:
    return _hellaswag(row) if "endings" in row or "ctx_a" in row else _query(row)


def _hellaswag(row: QuestionRow) -> ChoiceQuestion:
    endings = texts_of(row, "endings")
    label, begun = text_of(row, "activity_label"), text_of(row, "ctx_a")
    rest = row.get("ctx_b", "")
    begun = f"{begun} {str(rest).capitalize()}"
    return ChoiceQuestion(
        _cleaned(f"{label}: {begun}"),
        tuple(f" {_cleaned(ending)}" for ending in endings),
        index_of(row, "label", len(endings)),
    )


def _cleaned(text: str) -> str:
    """Without the marks that WikiHow's articles left in the texts."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def _query(row: QuestionRow) -> ChoiceQuestion:
    choices = texts_of(row, "choices")
    context = f"{text_of(row, 'query')}\nAnswer:"
    endings = tuple(f" {choice.strip()}" for choice in choices)
    return ChoiceQuestion(context, endings, index_of(row, "gold", len(choices)))


def run_choices(
    engine: Engine,
    data: Path,
    *,
    limit: int | None = None,
    progress: Progress | None = None,
) -> TaskScore:
    questions = read_questions(data, read_choice, limit)
    tokenizer = tokenizer_for(engine)
    prompts, firsts = [], []
    for question in questions:
        for ending in question.endings:
            tokens, first = with_ending(tokenizer, question.context, ending)
            prompts.append(tokens)
            firsts.append(first)
    scores = engine.score(prompts, chosen_logprobs, firsts, progress)
    check_numbers(scores)
    return judged(questions, scores)


def with_ending(tokenizer: Tokenizer, context: str, ending: str) -> tuple[list[int], int]:
    """Tokens of both as one text, with the model's BOS, and the number of the ending's first."""
    start = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    before = start + tokenizer.encode(context, add_special_tokens=False)
    whole = start + tokenizer.encode(context + ending, add_special_tokens=False)
    return whole, max(1, min(len(before), len(whole) - 1))


def judged(questions: Sequence[ChoiceQuestion], scores: Sequence[Tensor]) -> TaskScore:
    """`scores` has the log-probabilities of every ending's tokens, question after question."""
    rest = iter(scores)
    right, plain = [], []
    for question in questions:
        sums = np.array([float(next(rest).double().sum()) for _ in question.endings])
        lengths = np.array([len(ending) - 1 for ending in question.endings])  # without the space
        right.append(float(np.argmax(sums / np.maximum(lengths, 1)) == question.right))
        plain.append(float(np.argmax(sums) == question.right))
    return TaskScore("accuracy", np.array(right), {"unnormalized": float(np.mean(plain))})
