"""Holds an answer to an exercise's cases, in a process of its own: what loops, ends the process or
prints does no harm to whoever asked.

    check_answer(find_lesson("softmax"), Path("mine.py"))["failure"]     # None when all is right
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from ridgeline.errors import UsageError, near_matches
from ridgeline.learn.source import Lesson, find_lesson

LONGEST_S = 120.0  # an exercise takes a second or two


def check_answer(lesson: Lesson, answer: Path, longest_s: float = LONGEST_S) -> dict[str, Any]:
    """`{"passed": cases, "failure": None | {"given", "want", "answer", "hint"}}`"""
    if not answer.is_file():
        raise UsageError(
            f"{answer} is no file; get the exercise with "
            f"`ridgeline learn {lesson.number} --starter {answer}`"
        )
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "verdict.json"
        command = [sys.executable, "-m", "ridgeline.learn.checking", lesson.name]
        try:
            done = subprocess.run(
                [*command, str(answer.absolute()), str(out)],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=longest_s,
            )
        except subprocess.TimeoutExpired:
            words = f"no answer within {longest_s:.0f} s"
            return whole_failure(words, "is there a loop without an end?")
        if out.exists():
            return dict(json.loads(out.read_text()))
        return whole_failure(f"ended the process with code {done.returncode}", "")


def whole_failure(answer: str, hint: str, given: str = "your file") -> dict[str, Any]:
    """One that is not of a case."""
    return {
        "passed": 0,
        "failure": {"given": given, "want": "a function to call", "answer": answer, "hint": hint},
    }


def verdict(lesson: Lesson, answer: Path) -> dict[str, Any]:
    """In the process that is asked."""
    from ridgeline.learn.running import execute, fresh_namespace
    from ridgeline.learn.session import Session
    from ridgeline.learn.trials import first_failure

    Session(lesson.name)  # before the answer imports Triton
    own: dict[str, Any] = {"__name__": "answer", "__file__": str(answer)}
    try:
        exec(compile(answer.read_text(encoding="utf-8"), str(answer), "exec"), own)
    except SyntaxError as error:
        return whole_failure(f"does not parse: line {error.lineno}: {error.msg}", "")
    except Exception as error:
        line = traceback.extract_tb(error.__traceback__)[-1].lineno
        return whole_failure(f"line {line} raised {type(error).__name__}: {error}", "")
    name = lesson.function
    if not callable(own.get(name)):
        hint = near_matches(name, own) or f"it defines {name}(…)"
        return whole_failure(f"has no function {name}", hint.removeprefix("; "))
    checks = fresh_namespace(lesson)
    for cell in lesson.of_kind("check"):
        execute(cell, lesson, checks)
    passed, failure = first_failure(checks["trials"](own[name]))
    return {"passed": passed, "failure": failure}


def main() -> None:
    name, answer, out = sys.argv[1:]
    with contextlib.redirect_stdout(sys.stderr):
        result = verdict(find_lesson(name), Path(answer))
    Path(out).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
