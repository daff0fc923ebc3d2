"""Task scores by generation: finding answers, running programs. Choices: test_choice_tasks.py."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from command_line import make_folder
from task_files import write_rows

from ridgeline.engine import Engine
from ridgeline.errors import UsageError
from ridgeline.quality.tasks import gsm8k, humaneval, run_task
from ridgeline.quality.tasks.generation import continued
from ridgeline.quality.tasks.gsm8k import answer_in, run_gsm8k
from ridgeline.quality.tasks.humaneval import run_humaneval
from ridgeline.quality.tasks.sandbox import run_program

PROBLEM = {"question": "Two and two?", "answer": "It is 2+2=4.\n#### 4"}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = make_folder(tmp_path_factory.mktemp("model"), max_position_embeddings=1024)
    return Engine(folder, device="cpu")


# --- arithmetic -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 3 + 4 = 7.\n#### 7", "7"),
        ("#### $1,234.50 and then #### 9", "1234.5"),
        ("#### -12", "-12"),
        ("He has 3 apples and 18.0 pears.", "18"),
        ("It costs $ 5, or 1,000.", "1000"),
        ("nothing", None),
        ("5 #### none", None),
    ],
)
def test_answers_are_found(text: str, number: str | None) -> None:
    assert answer_in(text) == (None if number is None else Decimal(number))


def test_gsm8k(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_rows(tmp_path / "test.jsonl", PROBLEM, {**PROBLEM, "question": "Twice two?"})
    shown = write_rows(tmp_path / "train.jsonl", {"question": "One?", "answer": "#### 1"})
    prompts_given: list[str] = []

    def answers(_: Engine, prompts: list[str], *__: Any) -> list[str]:
        prompts_given.extend(prompts)
        return [" It is #### 4.0", " 5"]

    monkeypatch.setattr(gsm8k, "completions", answers)
    score = run_gsm8k(engine, data, shots=1, examples=shown)
    assert score.right.tolist() == [1.0, 0.0]
    assert score.also == {"marked_share": 0.5, "shots": 1.0}
    start = "Question: One?\nAnswer: #### 1\n\nQuestion: "
    assert prompts_given == [f"{start}Two and two?\nAnswer:", f"{start}Twice two?\nAnswer:"]
    for options, says in (
        ({"shots": 1}, "--examples"),
        ({"shots": 2, "examples": shown}, "has 1 examples"),
        ({"shots": 1, "examples": data}, "is a question of"),
    ):
        with pytest.raises(UsageError, match=says):
            run_gsm8k(engine, data, **options)  # type: ignore[arg-type]
    broken = write_rows(tmp_path / "broken.jsonl", {**PROBLEM, "answer": "four"})
    with pytest.raises(UsageError, match="line 1: answer is 'four'; expected it to end with ####"):
        run_gsm8k(engine, broken)


def test_gsm8k_through_the_engine(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gsm8k, "MAX_TOKENS", 4)
    score = run_task("gsm8k", engine, write_rows(tmp_path / "test.jsonl", PROBLEM, PROBLEM))
    assert len(score.right) == 2


# --- programs -------------------------------------------------------------------------------------

EXERCISE = {
    "task_id": "one",
    "prompt": 'def double(x):\n    """Twice x."""\n',
    "entry_point": "double",
    "test": "def check(candidate):\n    assert candidate(4) == 8\n",
}


def test_humaneval(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_rows(tmp_path / "rows.jsonl", EXERCISE, EXERCISE, EXERCISE)
    written = ["    return 2 * x", "    return x + 2", "    return ("]
    monkeypatch.setattr(humaneval, "completions", lambda *_: written)
    score = run_humaneval(engine, data, run_code=True)
    assert score.right.tolist() == [1.0, 0.0, 0.0]
    assert score.also["problems"] == "AssertionError 1, SyntaxError 1"
    assert "audit hook" in str(score.also["isolation"])


def test_the_first_space_counts(engine: Engine) -> None:
    assert engine.tokenizer is not None
    tokens = engine.tokenizer.encode("    return 1\n\ndef other", add_special_tokens=False)
    stops = [("\ndef ",), ("zzz",), ("1", "return")]
    texts = [continued(engine.tokenizer, tokens, stop) for stop in stops]
    assert texts == ["    return 1\n", "    return 1\n\ndef other", "    "]


def test_no_code_is_run_without_being_told(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_rows(tmp_path / "rows.jsonl", EXERCISE)
    monkeypatch.setattr(humaneval, "run_programs", lambda *_: pytest.fail("it was run"))
    with pytest.raises(UsageError, match="--run-code"):
        run_humaneval(engine, data)
    with pytest.raises(UsageError, match="--run-code"):
        run_task("humaneval", engine, data)


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        ("import math, re, typing, collections, hashlib\nassert math.floor(2.5) == 2", None),
        ("open('own.txt', 'w').write('x')\nassert open('own.txt').read() == 'x'", None),
        ("print('x' * 200_000)", None),
        ("assert False", "AssertionError"),
        ("import sys; sys.exit(0)", "SystemExit"),
        ("import os; os._exit(0)", "ended early"),
        ("import socket; socket.socket()", "PermissionError: socket"),
        ("import subprocess; subprocess.run(['true'])", "PermissionError: subprocess"),
        ("import os; os.fork()", "PermissionError: os.fork"),
        ("import os; os.kill(os.getppid(), 0)", "PermissionError: os.kill"),
        ("import os; os.system('true')", "PermissionError: os.system"),
        ("open('../outside.txt', 'w')", "PermissionError: open"),
        ("import os; os.remove('/etc/hostname')", "PermissionError: os.remove"),
        ("import ctypes; ctypes.CDLL(None)", "PermissionError: ctypes"),
        ("open('big', 'w').write('x' * 2**22)", "File too large"),
        ("x = bytearray(2**31)", "MemoryError"),
    ],
)
def test_what_a_program_may_do(program: str, problem: str | None) -> None:
    verdict = run_program(program)
    assert verdict.passed == (problem is None), verdict
    if problem is not None:
        assert problem in str(verdict.problem)


def test_a_program_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ridgeline.quality.tasks.sandbox.START_S", 0.5)
    verdict = run_program("import time; time.sleep(60)", seconds=1)
    assert verdict == (False, "took longer than 1 s", None)


def test_a_program_does_not_see_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "x")
    assert run_program("import os; assert 'A_SECRET' not in os.environ").passed
    assert run_program("import os; assert os.listdir('.') == []").passed
