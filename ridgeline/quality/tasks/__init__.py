"""Task scores through the engine: `run_task("hellaswag", engine, path, limit=200)`.

A task is a function that takes an engine and a file and returns a TaskScore. The files are the
user's own; none comes with the package.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ridgeline.engine import Engine
from ridgeline.errors import UsageError, near_matches
from ridgeline.progress import Progress
from ridgeline.quality.tasks.choices import run_choices
from ridgeline.quality.tasks.gsm8k import run_gsm8k
from ridgeline.quality.tasks.humaneval import run_humaneval
from ridgeline.quality.tasks.score import TaskScore, difference

TASKS = ("arc", "gsm8k", "hellaswag", "humaneval")

__all__ = ["TASKS", "TaskOptions", "TaskScore", "check_task", "difference", "run_task"]


@dataclass(frozen=True)
class TaskOptions:
    limit: int | None = None  # only the first questions
    shots: int = 0  # examples before each question (gsm8k)
    examples: Path | None = None  # the file they are from
    run_code: bool = False  # whether generated programs may be run (humaneval)

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise UsageError(f"limit is {self.limit}; give at least 1")
        if self.shots < 0:
            raise UsageError(f"shots is {self.shots}; give 0 or a positive number")


def check_task(name: str, options: TaskOptions) -> None:
    """An error for what can be known to be wrong before a model is loaded."""
    if name not in TASKS:
        hint = near_matches(name, TASKS)
        raise UsageError(f"task {name!r} is unknown; choose from {', '.join(TASKS)}{hint}")
    if name != "gsm8k" and (options.shots or options.examples is not None):
        raise UsageError(f"task {name} takes no examples; remove --shots and --examples")
    if name == "gsm8k" and options.examples is not None and not options.shots:
        raise UsageError("--examples needs --shots N, the number of examples to show")
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
    limit = options.limit
    if name == "gsm8k":
        shown = {"shots": options.shots, "examples": options.examples}
        return run_gsm8k(engine, data, limit=limit, progress=progress, **shown)  # type: ignore[arg-type]
    if name == "humaneval":
        return run_humaneval(engine, data, limit=limit, run_code=True, progress=progress)
    return run_choices(engine, data, limit=limit, progress=progress)
