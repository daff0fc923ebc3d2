"""Task scores through the engine: `run_task("hellaswag", engine, path, TaskOptions(limit=200))`.

A task is a function that takes an engine and a file and returns a TaskScore. The files are the
user's own; none comes with the package.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ridgeline.engine import Engine
from ridgeline.errors import UsageError, near_matches
from ridgeline.progress import Progress
from ridgeline.quality.tasks.choices import ChoiceMetric, ChoiceQuestion, score_choices
from ridgeline.quality.tasks.gsm8k import run_gsm8k
from ridgeline.quality.tasks.humaneval import run_humaneval
from ridgeline.quality.tasks.layouts import (
    read_arc,
    read_hellaswag,
    read_openbookqa,
    read_piqa,
    read_winogrande,
)
from ridgeline.quality.tasks.mmlu import USUAL_SHOTS, run_mmlu
from ridgeline.quality.tasks.questions import QuestionRow, read_questions
from ridgeline.quality.tasks.score import TaskScore, difference


class ChoiceTask(NamedTuple):
    read: Callable[[QuestionRow], ChoiceQuestion]
    metric: ChoiceMetric


CHOICE_TASKS = {
    "arc": ChoiceTask(read_arc, "acc_norm"),
    "hellaswag": ChoiceTask(read_hellaswag, "acc_norm"),
    "openbookqa": ChoiceTask(read_openbookqa, "acc_norm"),
    "piqa": ChoiceTask(read_piqa, "acc_norm"),
    "winogrande": ChoiceTask(read_winogrande, "acc"),
}
WITH_EXAMPLES = ("gsm8k", "mmlu")
TASKS = tuple(sorted([*CHOICE_TASKS, *WITH_EXAMPLES, "humaneval"]))

__all__ = ["TASKS", "TaskOptions", "TaskScore", "check_task", "difference", "run_task"]


@dataclass(frozen=True)
class TaskOptions:
    limit: int | None = None  # only the first questions
    shots: int | None = None  # examples before each question (gsm8k, mmlu); None: the usual number
    examples: Path | None = None  # the file they are from
    run_code: bool = False  # whether generated programs may be run (humaneval)

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise UsageError(f"limit is {self.limit}; give at least 1")
        if self.shots is not None and self.shots < 0:
            raise UsageError(f"shots is {self.shots}; give 0 or a positive number")


def check_task(name: str, options: TaskOptions) -> None:
    """An error for what can be known to be wrong before a model is loaded."""
    if name not in TASKS:
        hint = near_matches(name, TASKS)
        raise UsageError(f"task {name!r} is unknown; choose from {', '.join(TASKS)}{hint}")
    has_examples = options.examples is not None
    if name not in WITH_EXAMPLES and (options.shots or has_examples):
        raise UsageError(f"task {name} takes no examples; remove --shots and --examples")
    if name == "gsm8k" and has_examples and not options.shots:
        raise UsageError("--examples needs --shots N, the number of examples to show")
    if name == "mmlu" and options.shots != 0 and not has_examples:
        raise UsageError(
            f"task mmlu shows {USUAL_SHOTS} examples of the question's subject; add --examples "
            "FILE, the dev split, or --shots 0 for none"
        )
    if name == "mmlu" and options.shots == 0 and has_examples:
        raise UsageError("--shots 0 shows no examples; remove --examples, or give another number")
    if name == "humaneval" and not options.run_code:
        raise UsageError(
            "task humaneval runs code that the model writes, on this machine; "
            "say --run-code if it may"
        )
    if name != "humaneval" and options.run_code:
        raise UsageError(f"task {name} runs no code; remove --run-code")


def run_task(
    name: str,
    engine: Engine,
    data: Path,
    options: TaskOptions | None = None,
    progress: Progress | None = None,
) -> TaskScore:
    options = options or TaskOptions()
    check_task(name, options)
    limit, shots, examples = options.limit, options.shots, options.examples
    if name == "gsm8k":
        return run_gsm8k(
            engine, data, limit=limit, shots=shots or 0, examples=examples, progress=progress
        )
    if name == "mmlu":
        shots = USUAL_SHOTS if shots is None else shots
        return run_mmlu(
            engine, data, limit=limit, shots=shots, examples=examples, progress=progress
        )
    if name == "humaneval":
        return run_humaneval(engine, data, limit=limit, run_code=True, progress=progress)
    task = CHOICE_TASKS[name]
    return score_choices(engine, read_questions(data, task.read, limit), task.metric, progress)
