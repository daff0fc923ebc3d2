"""Rows of tasks as the Hugging Face hub has them, each as a question with its choices.

| task | dataset | fields |
|---|---|---|
| arc | allenai/ai2_arc | question, choices (text, label), answerKey |
| hellaswag | Rowan/hellaswag | activity_label, ctx_a, ctx_b, endings, label |
| openbookqa | allenai/openbookqa | question_stem, choices (text, label), answerKey |
| piqa | ybisk/piqa | goal, sol1, sol2, label |
| winogrande | allenai/winogrande | sentence, option1, option2, answer |

Rows of ARC and HellaSwag may also have query, choices and gold, as other tools write them. MMLU,
whose questions come with examples, is in mmlu.py.
"""

from __future__ import annotations

import re

from ridgeline.errors import UsageError
from ridgeline.quality.tasks.choices import ChoiceQuestion, after_context
from ridgeline.quality.tasks.questions import (
    QuestionRow,
    index_of,
    labelled_choices,
    one_of,
    text_of,
    texts_of,
)

BLANK = "_"  # where an option belongs in a sentence of WinoGrande


def read_hellaswag(row: QuestionRow) -> ChoiceQuestion:
    if _is_query(row):
        return _query(row)
    endings = texts_of(row, "endings")
    label, begun = text_of(row, "activity_label"), text_of(row, "ctx_a")
    rest = str(row.get("ctx_b") or "").capitalize()
    return after_context(
        _cleaned(f"{label}: {begun} {rest}"),
        [_cleaned(ending) for ending in endings],
        index_of(row, "label", len(endings)),
    )


def _cleaned(text: str) -> str:
    """Without the marks that WikiHow's articles left in the texts."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def read_arc(row: QuestionRow) -> ChoiceQuestion:
    if _is_query(row):
        return _query(row)
    context = f"Question: {text_of(row, 'question')}\nAnswer:"
    texts, labels = labelled_choices(row, "choices")
    return after_context(context, texts, one_of(row, "answerKey", labels))


def read_openbookqa(row: QuestionRow) -> ChoiceQuestion:
    context = text_of(row, "question_stem")
    texts, labels = labelled_choices(row, "choices")
    return after_context(context, texts, one_of(row, "answerKey", labels))


def read_piqa(row: QuestionRow) -> ChoiceQuestion:
    context = f"Question: {text_of(row, 'goal')}\nAnswer:"
    solutions = (text_of(row, "sol1"), text_of(row, "sol2"))
    return after_context(context, solutions, index_of(row, "label", 2))


def read_winogrande(row: QuestionRow) -> ChoiceQuestion:
    """What follows the blank is scored after each option put into it: only then are the tokens
    that are scored the same for both.
    """
    begun, blank, rest = text_of(row, "sentence").partition(BLANK)
    if not blank or not rest.strip():
        raise UsageError(
            f"sentence is {str(row['sentence'])[:60]!r}; expected {BLANK} for the blank, and some "
            "text after it"
        )
    options = (text_of(row, "option1"), text_of(row, "option2"))
    ending = f" {rest.strip()}"
    return ChoiceQuestion(
        tuple(begun + option for option in options),
        (ending, ending),
        one_of(row, "answer", ("1", "2")),
    )


def _is_query(row: QuestionRow) -> bool:
    return "query" in row or "gold" in row


def _query(row: QuestionRow) -> ChoiceQuestion:
    choices = texts_of(row, "choices")
    context = f"{text_of(row, 'query')}\nAnswer:"
    endings = [choice.strip() for choice in choices]
    return after_context(context, endings, index_of(row, "gold", len(choices)))
