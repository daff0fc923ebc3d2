"""Knowledge in 57 subjects (MMLU): four choices, and the model says the letter after "Answer:".

Rows have question, subject, choices and answer (0 to 3, or a letter), as cais/mmlu on the hub does.
Before each question come the first examples of its own subject from another file of that form,
usually five of the dev split. All questions of a subject share them in the prefix cache.

    run_mmlu(engine, Path("test.parquet"), shots=5, examples=Path("dev.parquet"))
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ridgeline.engine import Engine
from ridgeline.errors import UsageError
from ridgeline.progress import Progress
from ridgeline.quality.tasks.choices import after_context, score_choices
from ridgeline.quality.tasks.questions import (
    QuestionRow,
    index_of,
    one_of,
    read_questions,
    text_of,
    texts_of,
)
from ridgeline.quality.tasks.score import TaskScore

LETTERS = ("A", "B", "C", "D")
USUAL_SHOTS = 5  # with which scores are usually told


class SubjectQuestion(NamedTuple):
    subject: str  # as the file has it: `high_school_physics`
    text: str  # the question and its choices, up to "Answer:"
    right: int


def read_mmlu(row: QuestionRow) -> SubjectQuestion:
    subject, question = text_of(row, "subject"), text_of(row, "question").strip()
    choices = texts_of(row, "choices")
    if len(choices) != len(LETTERS):
        raise UsageError(f"choices has {len(choices)} texts; expected {len(LETTERS)}")
    lines = [f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=True)]
    has_letter = str(row.get("answer", "")).strip() in LETTERS
    right = one_of(row, "answer", LETTERS) if has_letter else index_of(row, "answer", len(LETTERS))
    return SubjectQuestion(subject, "\n".join([question, *lines, "Answer:"]), right)


def run_mmlu(
    engine: Engine,
    data: Path,
    *,
    limit: int | None = None,
    shots: int = USUAL_SHOTS,
    examples: Path | None = None,
    progress: Progress | None = None,
) -> TaskScore:
    rows = read_questions(data, read_mmlu, limit)
    shown = _examples(rows, shots, examples)
    questions = [
        after_context(_begun(row.subject, shown[row.subject]) + row.text, LETTERS, row.right)
        for row in rows
    ]
    score = score_choices(engine, questions, "acc", progress)
    by_subject = defaultdict(list)
    for row, right in zip(rows, score.right, strict=True):
        by_subject[row.subject].append(right)
    subjects = {subject: float(np.mean(right)) for subject, right in by_subject.items()}
    return replace(score, also={"shots": float(shots), "subjects": subjects})


def _begun(subject: str, examples: Sequence[SubjectQuestion]) -> str:
    name = subject.replace("_", " ")
    begun = f"The following are multiple choice questions (with answers) about {name}.\n\n"
    return begun + "".join(f"{each.text} {LETTERS[each.right]}\n\n" for each in examples)


def _examples(
    rows: Sequence[SubjectQuestion], shots: int, examples: Path | None
) -> Mapping[str, Sequence[SubjectQuestion]]:
    """The first ones of each subject that has questions."""
    shown: dict[str, list[SubjectQuestion]] = {row.subject: [] for row in rows}
    if not shots:
        return shown
    if examples is None:
        raise UsageError(f"shots is {shots}, but there are no examples; give --examples FILE")
    for each in read_questions(examples, read_mmlu):
        if each.subject in shown and len(shown[each.subject]) < shots:
            shown[each.subject].append(each)
    for subject, few in shown.items():
        if len(few) < shots:
            raise UsageError(f"shots is {shots}, and {examples} has {len(few)} of {subject}")
    texts = {each.text for few in shown.values() for each in few}
    if any(row.text in texts for row in rows):
        raise UsageError(f"an example of {examples} is also a question; give other examples")
    return shown
