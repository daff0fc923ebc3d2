"""Prompts and flags that cannot be obeyed, results that cannot be written."""

from __future__ import annotations

import io
import os
import stat
import sys
from pathlib import Path

import pytest
import torch
from command_line import (
    TEMPLATE,
    check_refusal,
    edit_json,
    refused,
    run_process,
)

from ridgeline.errors import (
    ContextLengthError,
    HardwareError,
    OutOfMemoryError,
    OutputError,
    RidgelineError,
    UsageError,
)

Capture = pytest.CaptureFixture[str]


def with_prompt(folder: Path, prompt: str, *more: str) -> tuple[str, ...]:
    return ("generate", str(folder), prompt, "--device", "cpu", *more)


def test_empty_prompts(whole: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    for prompt in ("", "  \n"):
        refused(capsys, UsageError, "prompt is empty", *with_prompt(whole, prompt))
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    refused(capsys, UsageError, "prompt is empty", *with_prompt(whole, "-"))
    monkeypatch.setattr(sys, "stdin", None)
    refused(capsys, UsageError, "stdin is closed", *with_prompt(whole, "-"))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9 \xff"), "utf-8"))
    refused(capsys, UsageError, "stdin UTF-8", *with_prompt(whole, "-"))


@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_prompts_without_utf8(folder: Path, template: str | None, capsys: Capture) -> None:
    edit_json(folder / "tokenizer_config.json", chat_template=template)
    for prompt in ("half \ud83d", "\udcff"):
        refused(capsys, UsageError, "surrogate", *with_prompt(folder, prompt))


def test_prompts_that_are_too_long(
    whole: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "tokens context of 128 shorter"
    refused(capsys, ContextLengthError, words, *with_prompt(whole, "word " * 500))
    monkeypatch.setattr(sys, "stdin", io.StringIO("word " * 200_000))
    refused(capsys, ContextLengthError, words, *with_prompt(whole, "-"))


def test_a_cache_that_does_not_fit(folder: Path, capsys: Capture) -> None:
    edit_json(folder / "config.json", max_position_embeddings=10**12)
    argv = ("generate", str(folder), "hello", "--device", "cpu", "--max-tokens", str(10**11))
    refused(capsys, OutOfMemoryError, "tokens GiB free --max-tokens", *argv)


@pytest.mark.parametrize(
    ("flag", "value", "kind", "words"),
    [
        ("--temperature", "-1", UsageError, "temperature -1.0 positive"),
        ("--temperature", "nan", UsageError, "temperature nan positive"),
        ("--temperature", "inf", UsageError, "temperature inf positive"),
        ("--temperature", "abc", UsageError, "--temperature 'abc' number"),
        ("--temperature", "-abc", UsageError, "--temperature expected"),
        ("--top-p", "2", UsageError, "top_p 2.0 at most 1"),
        ("--top-p", "0", UsageError, "top_p 0.0 above 0"),
        ("--top-k", "-3", UsageError, "top_k -3"),
        ("--top-k", "1.5", UsageError, "--top-k '1.5' whole number"),
        ("--min-p", "nan", UsageError, "min_p nan"),
        ("--max-tokens", "0", UsageError, "max_tokens 0 at least 1"),
        ("--max-tokens", "1e3", UsageError, "--max-tokens '1e3' whole number"),
        ("--seed", "-1", UsageError, "seed -1"),
        ("--seed", str(2**64), UsageError, f"seed {2**64}"),
        ("--stop", "", UsageError, "stop string empty"),
        ("--dtype", "fp31", UsageError, "'fp31' fp32 did you mean"),
        ("--dtype", "", UsageError, "dtype ''"),
        ("--dtype", "int8", UsageError, "int8 bf16, fp16, fp32"),
        ("--device", "banana", UsageError, "'banana' cuda:N"),
        ("--device", "cuda:-1", UsageError, "'cuda:-1' cuda:N"),
        ("--device", "", UsageError, "device '' cuda:N"),
    ],
)
def test_flags_with_wrong_values(
    whole: Path, flag: str, value: str, kind: type[RidgelineError], words: str, capsys: Capture
) -> None:
    refused(capsys, kind, words, "generate", str(whole), "hello", flag, value)


def test_a_gpu_that_is_not_here(whole: Path, capsys: Capture) -> None:
    words = "cuda:99" if torch.cuda.is_available() else "finds no GPU --device cpu"
    for verb in (("hardware",), ("generate", str(whole), "hello")):
        refused(capsys, HardwareError, words, *verb, "--device", "cuda:99")
    if not torch.cuda.is_available():
        refused(capsys, HardwareError, words, "hardware", "--device", "cuda")


def test_results_that_cannot_be_written(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below", "/proc/nothing", "x" * 5000):
        monkeypatch.setattr("ridgeline.cli.hardware.measure", pytest.fail)  # refused before
        refused(capsys, OutputError, str(place)[:50], "hardware", "--save", str(place))

    def disk_full(descriptor: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("ridgeline.cli.hardware.measure", lambda hardware, **_: hardware)
    monkeypatch.setattr(os, "fsync", disk_full)
    words = f"{tmp_path}/results No space left on device"
    refused(capsys, OutputError, words, "hardware", "--save", str(tmp_path / "results"))
    assert list((tmp_path / "results").iterdir()) == []


def test_a_folder_that_may_not_be_written(as_nobody: Path, capsys: Capture) -> None:
    as_nobody.joinpath("closed").mkdir(mode=stat.S_IRUSR | stat.S_IXUSR)
    place = as_nobody / "closed" / "results"
    refused(capsys, OutputError, f"{place} Permission denied", "hardware", "--save", str(place))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_behind_stdout() -> None:
    with open("/dev/full", "w") as full:
        done = run_process("--help", capture_output=False, stdout=full, stderr=-1)
    words = "write the output: No space left on device"
    check_refusal(done.returncode, "", done.stderr, OutputError.exit_code, words)
