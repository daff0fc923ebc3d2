"""The flags of a task that a model is scored on, shared by `eval` and `optimize`."""

from __future__ import annotations

import argparse
from pathlib import Path

from ridgeline.cli.arguments.parser import group
from ridgeline.errors import UsageError
from ridgeline.quality.tasks import TASKS, TaskOptions, check_task


def add_task(parser: argparse.ArgumentParser, title: str = "task") -> None:
    task = group(parser, title)
    task.add_argument("--task", metavar="NAME", help=f"score a task: {', '.join(TASKS)}")
    task.add_argument(
        "--data",
        type=Path,
        metavar="FILE",
        help="the task's questions, JSON lines or Parquet as on the Hugging Face hub",
    )
    task.add_argument("--limit", type=int, metavar="N", help="use only the first N questions")
    task.add_argument(
        "--shots", type=int, metavar="N",
        help="examples before each question (default: mmlu 5, gsm8k 0; others show none)",
    )  # fmt: skip
    task.add_argument(
        "--examples",
        type=Path,
        metavar="FILE",
        help="gsm8k, mmlu: file to take the examples from (mmlu: the dev split)",
    )
    task.add_argument(
        "--run-code", action="store_true", help="humaneval: allow running the model's programs here"
    )


def check_task_flags(args: argparse.Namespace, options: TaskOptions) -> None:
    if args.task is None:
        given = [args.data, args.limit, args.examples, args.shots, args.run_code or None]
        if any(value is not None for value in given):
            raise UsageError(
                "--data, --limit, --shots, --examples and --run-code need a task; "
                f"add --task with one of {', '.join(TASKS)}"
            )
        return
    check_task(args.task, options)
    if args.data is None:
        raise UsageError(f"--task {args.task} needs its questions; add --data FILE")
    for path in (args.data, args.examples):
        if path is not None and not path.is_file():
            raise UsageError(
                f"there is no file {str(path)!r}; give a file of JSON lines or Parquet"
            )
