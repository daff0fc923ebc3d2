"""Grade-school arithmetic in words (GSM8K): the model writes out a solution, and the number it ends
with is compared with the correct one.

Rows have question and answer, the number after `####`. Examples from another file of that form
(`shots`) may come before each question; all questions share them in the prefix cache. The answer is
the number after the first `####`, or else the last number of the text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ridgeline.engine import Engine, Sampling
from ridgeline.errors import UsageError
from ridgeline.progress import Progress
from ridgeline.quality.tasks.generation import completions
from ridgeline.quality.tasks.questions import QuestionRow, read_questions, text_of
from ridgeline.quality.tasks.score import TaskScore

MAX_TOKENS = 320
STOP = ("\nQuestion:", "Question:", "\n\n\n")
MARK = "####"
NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?|-?\$?\.\d+")


class Problem(NamedTuple):
    question: str
    solution: str  # as the file has it
    answer: Decimal


def read_problem(row: QuestionRow) -> Problem:
    solution = text_of(row, "answer")
    mark, number = solution.partition(MARK)[1:]
    answer = first_number(number)
    if not mark or answer is None:
        raise UsageError(
            f"answer is {solution[-60:]!r}; expected it to end with {MARK} and a number"
        )
    return Problem(text_of(row, "question"), solution, answer)


def run_gsm8k(
    engine: Engine,
    data: Path,
    *,
    limit: int | None = None,
    shots: int = 0,
    examples: Path | None = None,
    progress: Progress | None = None,
) -> TaskScore:
    problems = read_questions(data, read_problem, limit)
    prefix = "".join(
        f"Question: {shot.question}\nAnswer: {shot.solution}\n\n"
        for shot in _shots(data, problems, shots, examples)
    )
    prompts = [f"{prefix}Question: {problem.question}\nAnswer:" for problem in problems]
    texts = completions(engine, prompts, Sampling(max_tokens=MAX_TOKENS, stop=STOP), progress)
    pairs = zip(texts, problems, strict=True)
    right = [float(answer_in(text) == problem.answer) for text, problem in pairs]
    marked = float(np.mean([MARK in text for text in texts]))
    return TaskScore(
        "exact match", np.array(right), {"marked_share": marked, "shots": float(shots)}
    )


def _shots(
    data: Path, problems: Sequence[Problem], shots: int, examples: Path | None
) -> list[Problem]:
    if not shots:
        return []
    if examples is None:
        raise UsageError(f"shots is {shots}, but there are no examples; give --examples FILE")
    examples_shown = read_questions(examples, read_problem, shots)
    if len(examples_shown) < shots:
        raise UsageError(f"shots is {shots}, and {examples} has {len(examples_shown)} examples")
    questions = {problem.question for problem in problems}
    if any(shot.question in questions for shot in examples_shown):
        raise UsageError(f"an example of {examples} is a question of {data}; give other examples")
    return examples_shown


def answer_in(text: str) -> Decimal | None:
    """The number a solution ends with."""
    before, mark, after = text.partition(MARK)
    if mark:
        return first_number(after)
    numbers = NUMBER.findall(before)
    return _decimal(numbers[-1]) if numbers else None


def first_number(text: str) -> Decimal | None:
    match = NUMBER.search(text)
    return _decimal(match[0]) if match else None


def _decimal(number: str) -> Decimal:
    return Decimal(number.replace(",", "").replace("$", ""))
