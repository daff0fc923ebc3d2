"""Runs a lesson on this machine, cell by cell, in a namespace of its own.

run = run_lesson(find_lesson("machine"))
run.figures, run.missing, run.seconds
"""

from __future__ import annotations

import contextlib
import io
import time
from dataclasses import dataclass
from typing import Any

from ridgeline.learn.source import Lesson, LessonCell


@dataclass(frozen=True)
class LessonRun:
    lesson: Lesson
    figures: tuple[Any, ...]  # session.ReportedFigure
    missing: tuple[Any, ...]  # session.MissingPart
    device: str  # of torch, and how kernels ran
    printed: str
    seconds: float


def run_lesson(lesson: Lesson) -> LessonRun:
    namespace = fresh_namespace(lesson)
    printed = io.StringIO()
    began = time.perf_counter()
    with contextlib.redirect_stdout(printed):
        for cell in lesson.code:
            execute(cell, lesson, namespace)
    here = namespace["here"]
    kind = "the GPU" if here.is_gpu else "the CPU, kernels under Triton's interpreter"
    return LessonRun(
        lesson,
        tuple(here.figures),
        tuple(here.missing_parts),
        f"{here.hardware.name}: {kind}",
        printed.getvalue(),
        time.perf_counter() - began,
    )


def fresh_namespace(lesson: Lesson) -> dict[str, Any]:
    return {"__name__": f"ridgeline.learn.lessons.{lesson.path.stem}", "__file__": lesson.path.name}


def execute(cell: LessonCell, lesson: Lesson, namespace: dict[str, Any]) -> None:
    """Under the file's own lines, where Triton and torch.compile look for a function's source."""
    text = "\n" * (cell.line - 1) + cell.text
    exec(compile(text, str(lesson.path), "exec"), namespace)
