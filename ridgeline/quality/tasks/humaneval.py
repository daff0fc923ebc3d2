"""Programs from their descriptions (HumanEval): the model completes a function, and the tests that
come with it decide whether it is right (pass@1, greedy).

Rows have task_id, prompt, entry_point and test. The generated program is run (sandbox.py) only with
`run_code`.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ridgeline.engine import Engine, Sampling
from ridgeline.errors import UsageError
from ridgeline.progress import Progress
from ridgeline.quality.tasks.generation import completions
from ridgeline.quality.tasks.questions import QuestionRow, read_questions, text_of
from ridgeline.quality.tasks.sandbox import run_programs
from ridgeline.quality.tasks.score import AlsoKnown, TaskScore

MAX_TOKENS = 384
# What can follow a function's body.
STOP = ("\ndef ", "\nclass ", "\nif ", "\nprint", "\nassert ", "\n#", "\n@", "\n```")


class Exercise(NamedTuple):
    prompt: str
    entry_point: str
    test: str


def read_exercise(row: QuestionRow) -> Exercise:
    entry_point = text_of(row, "entry_point")
    if not entry_point.isidentifier():
        raise UsageError(f"entry_point is {entry_point[:60]!r}; expected a function's name")
    return Exercise(text_of(row, "prompt"), entry_point, text_of(row, "test"))


def program_of(exercise: Exercise, completion: str) -> str:
    written = exercise.prompt + completion
    return f"{written}\n\n{exercise.test}\n\ncheck({exercise.entry_point})\n"


def run_humaneval(
    engine: Engine,
    data: Path,
    *,
    limit: int | None = None,
    run_code: bool = False,
    progress: Progress | None = None,
) -> TaskScore:
    if not run_code:
        raise UsageError(
            "this task runs code that the model writes, on this machine; add --run-code to allow it"
        )
    exercises = read_questions(data, read_exercise, limit)
    prompts = [exercise.prompt for exercise in exercises]
    texts = completions(engine, prompts, Sampling(max_tokens=MAX_TOKENS, stop=STOP), progress)
    verdicts = run_programs([program_of(*pair) for pair in zip(exercises, texts, strict=True)])
    problems = Counter(
        (verdict.problem or "").partition(":")[0] for verdict in verdicts if not verdict.passed
    )
    also: dict[str, AlsoKnown] = {
        "problems": ", ".join(f"{name} {count}" for name, count in problems.most_common()),
        "isolation": "own network, limits, audit hook"
        if all(verdict.own_network is not False for verdict in verdicts)
        else "limits, audit hook",
    }
    return TaskScore("pass@1", np.array([float(each.passed) for each in verdicts]), also)
