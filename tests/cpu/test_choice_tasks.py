"""Multiple choice: rows as the hub has them, what is scored, errors that name line and field."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from command_line import make_folder
from task_files import (
    ARC,
    HELLASWAG,
    MMLU,
    OPENBOOKQA,
    PIQA,
    QUERY,
    WINOGRANDE,
    write_rows,
)

from ridgeline.cli import main
from ridgeline.engine import Engine
from ridgeline.engine.naive import prompt_logprobs
from ridgeline.errors import UsageError
from ridgeline.quality.tasks import CHOICE_TASKS, TaskOptions, difference, run_task
from ridgeline.quality.tasks.choices import ChoiceQuestion, judged, with_ending

LONG_CONTEXT = "A man is on a roof. " * 20


class Expected(NamedTuple):
    """What a row must become."""

    task: str
    row: dict[str, Any]
    contexts: tuple[str, ...]  # one, or one for each ending
    endings: tuple[str, ...]
    right: int


ROWS = [
    Expected(
        "hellaswag",
        HELLASWAG,
        ("Roof shingle removal: A man is on a roof. He",),
        (" starts pulling up roofing.", " is . gone.", " sings."),
        1,
    ),
    Expected("arc", ARC, ("Question: What is wet?\nAnswer:",), (" sand", " cold water"), 1),
    Expected("arc", QUERY, ("Question: What is wet?\nAnswer:",), (" sand", " water"), 1),
    Expected(
        "openbookqa",
        OPENBOOKQA,
        ("A stove makes a pot",),
        (" sing", " hot all over", " blue", " small"),
        1,
    ),
    Expected(
        "piqa",
        PIQA,
        ("Question: Dry a shirt\nAnswer:",),
        (" Hang it up.", " Put it in a pond."),
        0,
    ),
    Expected(
        "winogrande",
        WINOGRANDE,
        (
            "The cup did not fit into the box because the cup",
            "The cup did not fit into the box because the box",
        ),
        (" was too large.", " was too large."),
        0,
    ),
]
NAMES = [f"{each.task}-{number}" for number, each in enumerate(ROWS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"), max_position_embeddings=1024)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return Engine(folder, device="cpu")


def sums_of(engine: Engine, contexts: tuple[str, ...], endings: tuple[str, ...]) -> list[float]:
    """Log-likelihoods of the endings by the plain loop."""
    assert engine.tokenizer is not None
    many = contexts if len(contexts) == len(endings) else contexts * len(endings)
    sums = []
    for context, ending in zip(many, endings, strict=True):
        tokens = engine.tokenizer.encode(context + ending, add_special_tokens=False)
        before = engine.tokenizer.encode(context, add_special_tokens=False)
        assert tokens[: len(before)] == before
        rows = prompt_logprobs(engine.model, tokens)[len(before) :]
        sums.append(sum(row.logprob for row in rows if row is not None))
    return sums


@pytest.mark.parametrize("expected", ROWS, ids=NAMES)
def test_rows_as_the_hub_has_them(expected: Expected, engine: Engine) -> None:
    task, row, contexts, endings, right = expected
    question = CHOICE_TASKS[task].read(row)
    many = contexts if len(contexts) == len(endings) else contexts * len(endings)
    assert question == (many, endings, right)


@pytest.mark.parametrize("expected", ROWS, ids=NAMES)
def test_a_task_from_the_command_line(
    expected: Expected,
    folder: Path,
    engine: Engine,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    task, row, contexts, endings, right = expected
    path = write_rows(tmp_path / "rows.jsonl", row)
    argv = ["eval", str(folder), "--task", task, "--data", str(path), "--device", "cpu"]
    assert main([*argv, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)["task"]
    sums = np.array(sums_of(engine, contexts, endings))
    by_length = sums / [len(ending) - 1 for ending in endings]
    plain, normalized = float(sums.argmax() == right), float(by_length.argmax() == right)
    if task == "winogrande":
        assert (result["metric"], result["score"]["value"]) == ("acc", plain)
        assert "acc" not in result
    else:
        assert (result["metric"], result["score"]["value"]) == ("acc_norm", normalized)
        assert result["acc"] == plain


def test_an_ending_is_divided_by_its_length() -> None:
    question = ChoiceQuestion(("q", "q"), (" ab", " abcdefgh"), 1)
    scores = [torch.tensor([[-3.0]]), torch.tensor([[-2.0], [-4.0]])]  # -1.5 and -0.75 a letter
    score = judged([question], scores, "acc_norm")
    assert score.right.tolist() == [1.0]
    assert score.also == {"acc": 0.0}
    assert judged([question], scores, "acc").right.tolist() == [0.0]


def test_scores_are_the_plain_loops_with_contexts_computed_once(
    engine: Engine, tmp_path: Path
) -> None:
    rows = [HELLASWAG, {**HELLASWAG, "ctx_a": LONG_CONTEXT}]
    path = write_rows(tmp_path / "rows.jsonl.gz", *rows)
    before = engine.stats
    score = run_task("hellaswag", engine, path)
    hits = engine.stats.hit_tokens - before.hit_tokens
    questions = [CHOICE_TASKS["hellaswag"].read(row) for row in rows]
    sums = [torch.tensor([total]) for each in questions for total in sums_of(engine, *each[:2])]
    expected = judged(questions, sums, "acc_norm")
    assert score.right.tolist() == expected.right.tolist()
    assert score.also == expected.also
    assert engine.tokenizer is not None
    num_tokens = len(engine.tokenizer.encode(questions[1].contexts[0]))
    assert hits >= 2 * ((num_tokens - 1) // 64 * 64) > 100


def test_spaces_between_context_and_ending_are_the_endings(engine: Engine) -> None:
    assert engine.tokenizer is not None
    tokens, first = with_ending(engine.tokenizer, "A stove ", "makes")
    assert engine.tokenizer.decode(tokens[first:]) == " makes"
    assert (tokens, first) == with_ending(engine.tokenizer, "A stove", " makes")


def test_one_bos(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    monkeypatch.setattr(tokenizer, "bos_id", 0)
    monkeypatch.setattr(tokenizer, "add_bos", True)
    tokens, first = with_ending(tokenizer, "A stove", " makes")
    assert tokens[0] == 0
    assert tokenizer.decode(tokens[first:]) == " makes"
    assert with_ending(tokenizer, "<|endoftext|>A stove", " makes") == (tokens, first)


def test_limits_and_differences(engine: Engine, tmp_path: Path) -> None:
    odd = {**ARC, "question": "What is\u2028wet,\x85and why?"}  # lines to str.splitlines
    path = write_rows(tmp_path / "rows.jsonl", odd, "", ARC, "not read")
    score = run_task("arc", engine, path, TaskOptions(limit=2))
    assert len(score.right) == 2
    assert difference(score, score) == (0.0, 0.0, 0.0)
    assert score.to_json()["num_questions"] == 2


# --- MMLU -----------------------------------------------------------------------------------------

SPIDER = "How many legs has a spider?\nA. four\nB. six\nC. eight\nD. ten\nAnswer:"
INTRODUCTION = "The following are multiple choice questions (with answers) about "


def mmlu_files(tmp_path: Path) -> tuple[Path, Path]:
    other = {**MMLU, "subject": "anatomy", "question": "How many hands?", "answer": "B"}
    data = write_rows(tmp_path / "test.jsonl", MMLU, other, {**MMLU, "answer": "0"})
    examples = write_rows(
        tmp_path / "dev.jsonl",
        {**other, "question": "How many eyes?", "answer": 3},
        {**MMLU, "question": "How many wings?", "answer": 0},
        {**MMLU, "subject": "law", "question": "Which law?"},
        {**MMLU, "question": "How many hearts?", "answer": 1},
        {**MMLU, "question": "How many tails?", "answer": 1},
        {**other, "question": "How many ears?", "answer": 2},
    )
    return data, examples


def test_mmlu(
    folder: Path, engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, examples = mmlu_files(tmp_path)
    argv = ["eval", str(folder), "--task", "mmlu", "--data", str(data), "--device", "cpu"]
    argv += ["--shots", "2", "--examples", str(examples)]
    assert main([*argv, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)["task"]
    rest = SPIDER.partition("?")[2]
    biology = f"How many wings?{rest} A\n\nHow many hearts?{rest} B\n\n"
    anatomy = f"How many eyes?{rest} D\n\nHow many ears?{rest} C\n\n"
    letters = (" A", " B", " C", " D")
    first = sums_of(engine, (f"{INTRODUCTION}high school biology.\n\n{biology}{SPIDER}",), letters)
    second = sums_of(
        engine, (f"{INTRODUCTION}anatomy.\n\n{anatomy}How many hands?{rest}",), letters
    )
    answers = [int(np.argmax(first)), int(np.argmax(second))]
    right = [answers[0] == 2, answers[1] == 1, answers[0] == 0]
    assert result["score"]["value"] == pytest.approx(sum(right) / 3)
    assert (result["metric"], result["shots"], result["num_questions"]) == ("acc", 2, 3)
    biology_share = (right[0] + right[2]) / 2
    assert result["subjects"] == {"high_school_biology": biology_share, "anatomy": float(right[1])}
    assert main(argv) == 0
    assert "acc, 2 shots, 3 questions" in " ".join(capsys.readouterr().out.split())


def test_mmlu_without_examples(engine: Engine, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "test.jsonl", MMLU)
    score = run_task("mmlu", engine, data, TaskOptions(shots=0))
    context = f"{INTRODUCTION}high school biology.\n\n{SPIDER}"
    sums = sums_of(engine, (context,), (" A", " B", " C", " D"))
    assert score.right.tolist() == [float(np.argmax(sums) == 2)]
    assert score.also["shots"] == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "add --examples FILE, the dev split, or --shots 0"),
        ({"shots": 3}, "add --examples FILE"),
        ({"shots": 0, "examples": "dev.jsonl"}, "remove --examples"),
        ({"examples": "dev.jsonl"}, "shots is 5, and .*dev.jsonl has 3 of high_school_biology"),
        ({"shots": 1, "examples": "test.jsonl"}, "an example of .* is also a question"),
    ],
)
def test_mmlu_examples_that_do_not_fit(
    options: dict[str, Any], words: str, engine: Engine, tmp_path: Path
) -> None:
    data, _ = mmlu_files(tmp_path)
    if "examples" in options:
        options = {**options, "examples": tmp_path / options["examples"]}
    with pytest.raises(UsageError, match=words):
        run_task("mmlu", engine, data, TaskOptions(**options))


# --- rows that do not fit -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "row", "words"),
    [
        ("arc", "{", "line 2 is not JSON"),
        ("arc", "[1]", "line 2 is '[1]'; expected an object"),
        ("arc", {}, "line 2: question is missing; expected some text"),
        ("arc", {"choices": ["a", "b"], "gold": 0}, "line 2: query is missing"),
        ("arc", {**QUERY, "gold": -1}, "gold is '-1'; expected a number from 0 to 1; take a split"),
        ("arc", {**ARC, "choices": ["a", "b"]}, "choices is \"['a', 'b']\"; expected an object"),
        ("arc", {**ARC, "choices": {"label": ["A", "B"]}}, "choices.text is missing"),
        (
            "arc",
            {**ARC, "choices": {"text": ["a", "b"], "label": ["A", "B", "C"]}},
            "choices.label is \"['A', 'B', 'C']\"; expected 2 labels",
        ),
        ("arc", {**ARC, "answerKey": "E"}, "answerKey is 'E'; expected one of 1, 2"),
        ("hellaswag", {**HELLASWAG, "endings": ["a"]}, "line 2: endings is"),
        ("hellaswag", {**HELLASWAG, "endings": "ab"}, "expected a list of two texts"),
        ("hellaswag", {**HELLASWAG, "label": "3"}, "label is '3'; expected a number from 0 to 2"),
        ("hellaswag", {**HELLASWAG, "label": True}, "label is 'True'"),
        ("hellaswag", {**HELLASWAG, "label": ""}, "label is ''; expected a number from 0 to 2; "),
        ("hellaswag", {**HELLASWAG, "ctx_a": 5}, "ctx_a is '5'; expected some text"),
        ("hellaswag", PIQA, "line 2: endings is missing"),
        ("openbookqa", ARC, "line 2: question_stem is missing"),
        ("openbookqa", {**OPENBOOKQA, "answerKey": None}, "answerKey is 'None'; expected one of A"),
        ("piqa", {**PIQA, "sol2": ""}, "line 2: sol2 is ''; expected some text"),
        ("piqa", {**PIQA, "label": -1}, "label is '-1'; expected a number from 0 to 1; take a"),
        ("winogrande", {**WINOGRANDE, "answer": ""}, "answer is ''; expected one of 1, 2; take a"),
        ("winogrande", {**WINOGRANDE, "sentence": "None."}, "expected _ for the blank"),
        ("winogrande", {**WINOGRANDE, "sentence": "All _"}, "and some text after it"),
        ("winogrande", {**WINOGRANDE, "option2": 4}, "option2 is '4'; expected some text"),
        ("mmlu", {**MMLU, "choices": ["a", "b"]}, "line 2: choices has 2 texts; expected 4"),
        ("mmlu", {**MMLU, "answer": "E"}, "answer is 'E'; expected a number from 0 to 3"),
        ("mmlu", {**MMLU, "subject": ""}, "line 2: subject is ''"),
    ],
)
def test_rows_that_cannot_be_read(
    task: str, row: Any, words: str, engine: Engine, tmp_path: Path
) -> None:
    good = {each.task: each.row for each in ROWS} | {"mmlu": MMLU}
    path = write_rows(tmp_path / "rows.jsonl", good[task], row)
    with pytest.raises(UsageError) as caught:
        run_task(task, engine, path, TaskOptions(shots=0))
    assert words in str(caught.value)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


# --- Parquet --------------------------------------------------------------------------------------


def test_parquet_rows(engine: Engine, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [
        OPENBOOKQA,
        {**OPENBOOKQA, "answerKey": "A"},
        {**OPENBOOKQA, "answerKey": "F"},
    ]
    path = tmp_path / "validation-00000-of-00001.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    score = run_task("openbookqa", engine, path, TaskOptions(limit=2))
    lines = write_rows(tmp_path / "rows.jsonl", *rows[:2])
    assert score.right.tolist() == run_task("openbookqa", engine, lines).right.tolist()
    with pytest.raises(UsageError, match=r"parquet row 3: answerKey is 'F'; expected one of A"):
        run_task("openbookqa", engine, path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UsageError, match=r"is a broken Parquet file: .+") as caught:
        run_task("openbookqa", engine, path)
    assert "\n" not in str(caught.value)


def test_parquet_needs_its_package(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"PAR1 and more")
    with pytest.raises(UsageError, match=r"needs the package pyarrow.*ridgeline\[data\]"):
        run_task("piqa", engine, path)
