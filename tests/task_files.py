"""Files of task questions, written by hand: a row of each task as the Hugging Face hub has it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

HELLASWAG = {
    "ind": 24,
    "activity_label": "Roof shingle removal",
    "ctx_a": "A man is on a roof.",
    "ctx_b": "he",
    "ctx": "A man is on a roof. he",
    "endings": ["starts [substeps] pulling up roofing.", "is  [title] gone.", "sings."],
    "label": "1",
}
ARC = {
    "id": "one",
    "question": "What is wet?",
    "choices": {"text": ["sand", "cold water"], "label": ["1", "2"]},
    "answerKey": "2",
}
OPENBOOKQA = {
    "id": "7-980",
    "question_stem": "A stove makes a pot",
    "choices": {"text": ["sing", "hot all over", "blue", "small"], "label": list("ABCD")},
    "answerKey": "B",
}
PIQA = {"goal": "Dry a shirt", "sol1": "Hang it up.", "sol2": "Put it in a pond.", "label": 0}
WINOGRANDE = {
    "sentence": "The cup did not fit into the box because _ was too large.",
    "option1": "the cup",
    "option2": "the box",
    "answer": "1",
}
MMLU = {
    "question": " How many legs has a spider? ",
    "subject": "high_school_biology",
    "choices": ["four", "six", "eight", "ten"],
    "answer": 2,
}
QUERY = {"query": "Question: What is wet?", "choices": ["sand", "water "], "gold": 1}


def write_rows(path: Path, *rows: Any) -> Path:
    text = "\n".join(
        row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows
    )
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path
