"""The course: every lesson is whole, its exercise fails as handed out and passes as solved, what is
made from it is current, and it runs; `ridgeline learn` and `ridgeline explain` as users see them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import refused

from ridgeline.cli import main
from ridgeline.errors import CHECK_FAILED_EXIT_CODE, OutputError, UsageError
from ridgeline.hardware import detect
from ridgeline.hardware.facts import MEASURED, Ceiling
from ridgeline.learn import ours, pages
from ridgeline.learn.checking import check_answer, verdict
from ridgeline.learn.glossary import FIGURES, figures, find_term, lesson_of
from ridgeline.learn.running import run_lesson
from ridgeline.learn.source import Lesson, find_lesson, lessons
from ridgeline.learn.standing import note, standing
from ridgeline.learn.terms import TERMS
from ridgeline.learn.trials import AnswerTrial, first_failure

ROOT = Path(__file__).parents[2]
QUICK = {"batching", "serving"}  # run in the first tier: arithmetic alone
Capture = pytest.CaptureFixture[str]
each_lesson = pytest.mark.parametrize("lesson", lessons(), ids=lambda lesson: lesson.name)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))


# --- lessons --------------------------------------------------------------------------------------


def test_numbers_follow_each_other() -> None:
    assert [lesson.number for lesson in lessons()] == list(range(1, len(lessons()) + 1))
    assert len(lessons()) >= 16


@each_lesson
def test_a_lesson_is_whole(lesson: Lesson) -> None:
    assert len(lesson.points) >= 3
    assert lesson.task
    kinds = [cell.kind for cell in lesson.cells]
    assert kinds[0] == "markdown"
    assert {kind: kinds.count(kind) for kind in ("picture", "exercise", "check")} == {
        "picture": 1,
        "exercise": 1,
        "check": 1,
    }
    places = re.findall(r"`((?:ridgeline|docs|tests)/[\w./-]+)`", " ".join(lesson.places))
    assert places
    assert [place for place in places if not (ROOT / place).exists()] == []
    words = sum(len(cell.text.split()) for cell in lesson.of_kind("markdown"))
    assert words < 1500  # ten minutes


@each_lesson
def test_the_starter_fails_and_the_solution_passes(lesson: Lesson, tmp_path: Path) -> None:
    starter, solution = tmp_path / "starter.py", tmp_path / "solution.py"
    starter.write_text(lesson.starter)
    solution.write_text(lesson.solution)
    handed_out = verdict(lesson, starter)
    assert handed_out["failure"] is not None
    assert "line" not in handed_out["failure"]["answer"]  # it is read, and fails a case
    solved = verdict(lesson, solution)
    assert solved["failure"] is None
    assert solved["passed"] >= 3


@pytest.mark.parametrize(
    "lesson",
    [
        lesson if lesson.name in QUICK else pytest.param(lesson, marks=pytest.mark.slow)
        for lesson in lessons()
    ],
    ids=lambda lesson: lesson.name,
)
def test_a_lesson_runs(lesson: Lesson) -> None:
    run = run_lesson(lesson)
    assert run.figures
    keys = [figure.key for figure in run.figures]
    assert len(set(keys)) == len(keys)
    assert all(figure.value >= 0 for figure in run.figures)
    if not torch.cuda.is_available():
        assert "interpreter" in run.device


@pytest.mark.slow
@each_lesson
def test_a_notebook_runs(lesson: Lesson, tmp_path: Path) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    written = json.dumps(pages.notebook(lesson, pages.drawn(lesson)))
    assert ".svg)" not in written  # nothing of its folder is needed
    notebook = nbformat.reads(written, as_version=4)
    nbformat.validate(notebook)
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute(cwd=tmp_path)
    tried = notebook.cells[-1].outputs[0]["data"]["text/plain"]
    assert tried.startswith("(0,")  # the exercise is handed out without its solution
    assert "given" in tried


def test_what_is_made_is_current() -> None:
    folder = ROOT / "docs"
    stale = [
        name
        for name, text in pages.files().items()
        if not (folder / name).exists() or (folder / name).read_text() != text
    ]
    assert stale == [], "run `make learn`"
    made = {Path(name).name for name in pages.files()}
    written = {"reading.md", "roadmap.md", "topics.md"}
    assert {path.name for path in (folder / "learn").iterdir()} <= made | written


@pytest.mark.parametrize("machine", ours.MACHINES)
def test_our_figures_are_a_records(machine: str) -> None:
    name = ours.record_of(machine)
    if name is None:
        assert ours.figures_of(machine) == {}
        return
    record = json.loads((ROOT / "results" / name).read_text())
    shown = {key: (each["value"], each["unit"]) for key, each in ours.figures_of(machine).items()}
    assert shown == {key: (each["value"], each["unit"]) for key, each in record["values"].items()}


# --- answers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def join(a, b):\n    return a", "(3, 1.5)"),
        ("def join(a, b):\n    return 1 / 0", "raised ZeroDivisionError"),
        ("def join(a, b)\n    return a", "does not parse: line 1"),
        ("x = 1\nimport nothing_like_it", "line 2 raised ModuleNotFoundError"),
        ("def joined(a, b):\n    return a", "has no function join"),
        ("join = 3", "has no function join"),
    ],
)
def test_a_wrong_answer_gets_one_case(text: str, words: str, tmp_path: Path) -> None:
    answer = tmp_path / "mine.py"
    answer.write_text(text)
    failure = verdict(find_lesson("softmax"), answer)["failure"]
    assert words in failure["answer"]
    assert "Traceback" not in str(failure)


@pytest.mark.parametrize(
    ("answer", "want", "is_right"),
    [
        (1.0000001, 1.0, True),
        (True, 1.0, False),
        (None, 1.0, False),
        ((1.0, 2), (1.0, 2), True),
        ([1.0, 2.0], (1.0, 2.0), True),
        ((1.0,), (1.0, 2.0), False),
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 2.0]), False),
        (torch.ones(3, 1), torch.ones(3), False),
        (float("nan"), 1.0, False),
    ],
)
def test_how_answers_are_compared(answer: Any, want: Any, is_right: bool) -> None:
    failure = first_failure([AnswerTrial("it", lambda: answer, want)])[1]
    assert (failure is None) is is_right


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("while True: pass", "no answer within"),
        ("import os\nos._exit(7)", "ended the process with code 7"),
        ("print('{}')\ndef join(a, b):\n    return 0", "0"),
    ],
)
def test_an_answer_that_harms_nobody(text: str, words: str, tmp_path: Path) -> None:
    answer = tmp_path / "mine.py"
    answer.write_text(text)
    failure = check_answer(find_lesson("softmax"), answer, longest_s=20)["failure"]
    assert words in failure["answer"]


# --- commands -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("own_cache")
def test_a_check_has_its_exit_code(tmp_path: Path, capsys: Capture) -> None:
    mine = tmp_path / "mine.py"
    assert main(["learn", "roofline", "--starter", str(mine)]) == 0
    assert "--check" in capsys.readouterr().out
    assert main(["learn", "2", "--check", str(mine)]) == CHECK_FAILED_EXIT_CODE
    out, err = capsys.readouterr()
    assert "first case that fails" in out
    assert "Traceback" not in out + err
    assert standing() == {}
    refused(capsys, OutputError, "exists", "learn", "2", "--starter", str(mine))


@pytest.mark.usefixtures("own_cache")
def test_a_lesson_as_json(capsys: Capture) -> None:
    assert main(["learn", "14", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["name"] == "serving"
    assert {"key", "value", "unit", "words", "ours"} <= set(document["figures"][0])
    assert main(["learn", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["lessons"]
    assert [row["ran"] for row in rows] == [row["name"] == "serving" for row in rows]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["learn", "softmaks"], "did you mean 'softmax'"),
        (["learn", "99"], "99 give 1 to"),
        (["learn", "--check", "x.py"], "for one lesson; name it"),
        (["learn", "5", "--read", "--check", "x.py"], "--read and --check are two things"),
        (["learn", "5", "--check", "/no/such.py"], "/no/such.py is no file --starter"),
        (["explain", "ocupancy"], "did you mean 'occupancy'"),
        (["explain", "banana"], "'banana' is not in the glossary"),
    ],
)
def test_what_is_refused(argv: list[str], words: str, capsys: Capture) -> None:
    refused(capsys, UsageError, words, *argv)


@pytest.mark.usefixtures("own_cache")
def test_standing_survives_a_broken_file(tmp_path: Path) -> None:
    note("softmax", "ran")
    note("softmax", "solved")
    assert standing() == {"softmax": ["ran", "solved"]}
    (tmp_path / "cache" / "learn.json").write_text("[1, 2")
    assert standing() == {}


# --- glossary -------------------------------------------------------------------------------------


@pytest.mark.parametrize("term", TERMS, ids=lambda term: term.name)
def test_every_term_is_explained(term: Any) -> None:
    assert all(find_term(name) is term for name in (term.name, *term.also))
    lesson_of(term)  # UsageError where there is no such lesson
    assert not term.figures or term.figures in FIGURES
    from dataclasses import replace

    known = {key: Ceiling(1e9, unit, "measured") for key, (_, unit) in MEASURED.items()}
    hardware = replace(detect("cpu"), ceilings=known)
    assert bool(figures(term, hardware)) is bool(term.figures)


def test_a_ceiling_that_is_missing_is_said() -> None:
    assert "not measured here" in figures(find_term("ridge"), detect("cpu"))[0]


# --- topics ---------------------------------------------------------------------------------------


def topic_rows() -> list[list[str]]:
    text = (ROOT / "docs/learn/topics.md").read_text()
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in rows[1:]]


MUST = (
    *("cuBLAS", "cuDNN", "NCCL", "rocBLAS", "MIOpen", "RCCL", "CUDA C++", "HIP", "Triton"),
    *(
        "autotuning",
        "data loading",
        "hyperparameters",
        "data parallel",
        "FSDP",
        "tensor",
        "sequence",
    ),
    *("pipeline", "context", "expert", "mixed precision", "GradScaler", "checkpoint", "Nsight"),
    *("memory arithmetic", "NVLink", "DGX", "NeMo", "fuse", "tensor cores", "overhead", "quantize"),
    *("custom kernels", "torch.compile", "ExecuTorch", "1-bit", "in-flight", "paged KV"),
    *("speculative decoding", "TTFT", "service quality", "Arrow", "cuDF", "Theseus"),
)


@pytest.mark.parametrize("topic", MUST)
def test_no_topic_is_missing(topic: str) -> None:
    assert any(topic in row[0] for row in topic_rows())


def test_topics_lead_to_what_exists() -> None:
    for name, lesson, command, file in topic_rows():
        pages_named = re.findall(r"\]\(([^)]+)\)", lesson)
        assert pages_named, name
        assert all((ROOT / "docs/learn" / page).exists() for page in pages_named), name
        assert (ROOT / file.strip("`")).exists(), f"{name}: {file}"
        assert command.startswith(("`ridgeline ", "out of ")), name
