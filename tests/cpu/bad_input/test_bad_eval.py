"""Texts, tasks and bounds that `ridgeline eval` cannot measure with."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from command_line import edit_json, make_folder, refused

from ridgeline.errors import (
    ContextLengthError,
    ModelNotFoundError,
    RidgelineError,
    UnsupportedError,
    UsageError,
)

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("some words to measure on, again and again")
    return path


def evaluate(model: object, *argv: object) -> tuple[str, ...]:
    return ("eval", str(model), *map(str, argv), "--device", "cpu")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b" \n ", "is empty"),
        (b"\xff\xfe\x00\x01binary", "not UTF-8"),
        (b"zero \x00 bytes", "zero bytes"),
        (b"a", "1 token at least 2"),
        (gzip.compress(b"some text" * 99, mtime=0)[:25], "broken gzip"),
        (b"\x1f\x8bnot gzip", "broken gzip"),
    ],
)
def test_texts(content: bytes, words: str, whole: Path, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "text"
    path.write_bytes(content)
    refused(capsys, UsageError, words, *evaluate(whole, "--text", path, "--window", 64))


def test_texts_that_are_not_there(whole: Path, tmp_path: Path, capsys: Capture) -> None:
    for path in (tmp_path / "none.txt", tmp_path):
        refused(capsys, UsageError, "cannot read", *evaluate(whole, "--text", path))


@pytest.mark.parametrize(
    ("argv", "kind", "words"),
    [
        (["--window", "129"], ContextLengthError, "window is 129 128"),
        ([], ContextLengthError, "window is 2048 128"),
        (["--window", "100", "--max-context", "64"], ContextLengthError, "window is 100 64"),
        (["--window", "1"], UsageError, "window is 1; at least 2"),
        (["--bytes", "0"], UsageError, "--bytes is 0 at least 1"),
        (["--max-kl", "0.1"], UsageError, "--against"),
        (["--layers"], UsageError, "--against"),
        (["--against-dtype", "fp32"], UsageError, "--against"),
        (["--max-kl", "-1", "--against", "x"], UsageError, "max_kl is -1.0"),
        (["--max-ppl-increase", "2", "--against", "x"], UsageError, "200% 0.02"),
        (["--limit", "3"], UsageError, "--limit --task hellaswag"),
        (["--task", "hellaswagg", "--data", "x"], UsageError, "'hellaswagg' did you mean"),
        (["--task", "hellaswag"], UsageError, "--data FILE"),
        (["--task", "hellaswag", "--data", "/no/file"], UsageError, "no file '/no/file'"),
        (["--task", "arc", "--data", "x", "--limit", "0"], UsageError, "limit is 0"),
        (["--task", "arc", "--data", "x", "--shots", "2"], UsageError, "no examples"),
        (["--task", "gsm8k", "--data", "x", "--examples", "x"], UsageError, "--shots"),
        (["--task", "mmlu", "--data", "x"], UsageError, "5 examples --examples --shots 0"),
        (["--task", "piqa", "--data", "x", "--shots", "-1"], UsageError, "shots is -1"),
        (["--shots", "0"], UsageError, "--shots --task"),
        (["--task", "arc", "--data", "x", "--run-code"], UsageError, "runs no code"),
        (["--task", "humaneval", "--data", "x"], UsageError, "--run-code"),
        (["--recipe", "/no/recipe.json"], UsageError, "recipe /no/recipe.json"),
        (["--window", "64", "--against", "/no/model"], ModelNotFoundError, "/no/model"),
        (["--dtype", "fp9"], UsageError, "dtype is 'fp9'"),
        (["--layers", "--against", "x", "--tensor-parallel", "2"], UnsupportedError, "--layers"),
    ],
)
def test_flags(
    argv: list[str],
    kind: type[RidgelineError],
    words: str,
    whole: Path,
    text: Path,
    capsys: Capture,
) -> None:
    refused(capsys, kind, words, *evaluate(whole, "--text", text, *argv))


def test_nothing_to_measure(whole: Path, capsys: Capture) -> None:
    refused(capsys, UsageError, "--text --task", *evaluate(whole))
    for flag in ("--layers", "--bytes=9"):
        argv = evaluate(whole, "--task", "arc", "--data", "x", "--against", "x", flag)
        refused(capsys, UsageError, "--text", *argv)


def test_another_kind_of_model(whole: Path, text: Path, tmp_path: Path, capsys: Capture) -> None:
    argv = ("--text", text, "--window", 64, "--against")
    other = make_folder(tmp_path / "other", vocab_size=1600)
    refused(capsys, UsageError, "vocabularies 1500 1600", *evaluate(whole, *argv, other))
    other = make_folder(tmp_path / "cut")
    document = json.loads((other / "tokenizer.json").read_text())
    document["model"]["merges"] = document["model"]["merges"][:50]
    (other / "tokenizer.json").write_text(json.dumps(document))
    refused(capsys, UsageError, "different tokenizers", *evaluate(whole, *argv, other))


def test_a_model_without_a_tokenizer(folder: Path, text: Path, capsys: Capture) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()
    argv = evaluate(folder, "--text", text, "--window", 64)
    refused(capsys, UsageError, "no tokenizer", *argv)


def test_questions_that_do_not_fit(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"query": "word " * 200, "choices": ["a", "b"], "gold": 0}))
    argv = evaluate(folder, "--task", "arc", "--data", rows)
    refused(capsys, ContextLengthError, "tokens context 128", *argv)
    edit_json(folder / "config.json", max_position_embeddings=4096)
    rows.write_text("{}\n")
    refused(capsys, UsageError, "line 1 question missing", *argv)
