"""`ridgeline tune` as a user calls it: a search that is killed goes on to the same study, processes
decide as one does, bad input gets one line; the range test; scaling laws of finished runs.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import make_folder, refused
from train_runs import Capture, make_text, same_bytes, single_thread, trained

from ridgeline.cli import main
from ridgeline.errors import (
    CHECK_FAILED_EXIT_CODE,
    CheckpointError,
    NumericsError,
    UsageError,
)
from ridgeline.training.config import (
    BatchOptions,
    DataOptions,
    EvaluationOptions,
    OptimizerOptions,
    RunLength,
    ScheduleOptions,
    TrainConfig,
)
from ridgeline.training.config_file import load_config
from ridgeline.training.run import train
from ridgeline.tuning.searching.journal import JOURNAL


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with single_thread():
        yield


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text(tmp_path_factory.mktemp("text"))


def model_and_data(tokenizer: Path, text: Path) -> list[str]:
    shape = ["--shape", "tiny:layers=1,width=32,heads=2,mlp=64", "--tokenizer", str(tokenizer)]
    data = ["--data", str(text), "--sequence-length", "32", "--batch", "2", "--device", "cpu"]
    return [*shape, *data]


def usual(tokenizer: Path, text: Path) -> list[str]:
    run = ["--steps", "9", "--warmup", "1", "--eval-sequences", "2"]
    return [*model_and_data(tokenizer, text), *run]


def searched(tokenizer: Path, text: Path, out: Path, *more: str) -> list[str]:
    over = ["--over", "lr=1e-4..1e-1", "--over", "batch=2,4"]
    runs = [] if {"--runs", "--budget"} & set(more) else ["--runs", "3"]
    return ["tune", "search", *usual(tokenizer, text), *over, *runs, "--out", str(out), *more]


def outline(document: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Of a study, without its times."""
    return [(each["point"], each["losses"], each["problem"]) for each in document["trials"]]


@pytest.fixture(scope="module")
def study(
    tokenizer: Path, text: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("studies") / "study"
    done = subprocess.run(
        [sys.executable, "-m", "ridgeline", *searched(tokenizer, text, out), "--json"],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return out, document


def test_a_study_leaves_an_answer(study: tuple[Path, dict[str, Any]], capsys: Capture) -> None:
    out, document = study
    first = document["trials"][0]["point"]
    assert first == {"lr": 1e-4, "batch": 2}  # the user's own settings
    assert document["used_runs"] <= 3.0 + 1e-6
    best = document["best"]
    whole = [t["losses"][-1] for t in document["trials"] if len(t["losses"]) == 3]
    assert best["losses"][-1] == min(whole)
    config = load_config(out / "train.json")
    assert (config.optimizer.lr, config.batch.size) == (best["point"]["lr"], best["point"]["batch"])
    page = (out / "report.html").read_text()
    assert f"held-out loss {best['losses'][-1]:.4f}" in page
    run = trained(capsys, "train", str(out / "train.json"), "--out", str(out.parent / "run"))
    assert run["held_out_loss"] == pytest.approx(best["losses"][-1], rel=1e-6)


@pytest.mark.slow
def test_a_killed_search_goes_on_to_the_same_study(
    study: tuple[Path, dict[str, Any]], tokenizer: Path, text: Path, tmp_path: Path, capsys: Capture
) -> None:
    _, undisturbed = study
    out = tmp_path / "study"
    process = subprocess.Popen(
        [sys.executable, "-m", "ridgeline", *searched(tokenizer, text, out), "--json"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    journal, end = out / JOURNAL, time.monotonic() + 120
    while time.monotonic() < end and not (journal.is_file() and b"rung-1" in journal.read_bytes()):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    capsys.readouterr()
    assert main(["tune", "search", "--out", str(out), "--resume", "--runs", "3", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert outline(document) == outline(undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("more", [["--parallel", "2"], ["--ray", "--parallel", "2"]])
def test_processes_decide_as_one_does(
    study: tuple[Path, dict[str, Any]],
    tokenizer: Path,
    text: Path,
    tmp_path: Path,
    more: list[str],
) -> None:
    command = searched(tokenizer, text, tmp_path / "study", *more)
    done = subprocess.run(
        [sys.executable, "-m", "ridgeline", *command, "--json"],
        capture_output=True, text=True, timeout=600, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert outline(json.loads(done.stdout)) == outline(study[1])


def test_a_run_that_pauses_is_the_run_that_does_not(
    tokenizer: Path, text: Path, tmp_path: Path
) -> None:
    config = TrainConfig(
        shape="tiny:layers=1,width=32,heads=2,mlp=64",
        tokenizer=str(tokenizer),
        data=DataOptions(str(text), 32),
        batch=BatchOptions(2, 2),
        optimizer=OptimizerOptions(lr=1e-2),
        schedule=ScheduleOptions("cosine", 1),
        end=RunLength(steps=9),
        evaluation=EvaluationOptions(sequences=2),
    )
    whole = train(config, tmp_path / "whole", device="cpu")
    for number, share in enumerate((1 / 9, 1 / 3, 1.0)):
        part = train(config, tmp_path / "parts", device="cpu", resume=number > 0, until=share)
        assert part.counters.steps == (1, 3, 9)[number]
        assert part.held_out_after is not None
        assert not part.interrupted
    assert part.held_out_after == whole.held_out_after
    same_bytes(whole.checkpoint, part.checkpoint)


# Bad input


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--over", "lr"], "--over 'lr' has no values"),
        (["--over", "lrr=1,2"], "--lrr did you mean 'lr'"),
        (["--over", "data=a,b"], "--data in common"),
        (["--over", "schedule=cosine,banana"], "banana cosine"),
        (["--runs", "0.5"], "--runs is 0.5 too small for one trial"),
        (["--budget", "5"], "--budget '5' 90s"),
        (["--budget", "5s", "--runs", "3"], "--budget TIME or --runs N"),
        (["--held-out", "0"], "--held-out is 0"),
        (["--minutes", "3"], "--steps and --minutes"),
        (["--equal", "flops"], "--equal --over layers"),
        (["--parallel", "0"], "--parallel is 0"),
        (["--one-in", "1"], "--one-in is 1"),
        (["--rungs", "0"], "--rungs is 0"),
        (["--over", "layers=2,3", "--shape", "tiny", "--over", "width=7"], "width divisible"),
    ],
)
def test_searches_that_make_no_sense(
    tokenizer: Path, text: Path, tmp_path: Path, capsys: Capture, more: list[str], words: str
) -> None:
    out = tmp_path / "study"
    refused(capsys, UsageError, words, *searched(tokenizer, text, out, *more))
    assert not (out / JOURNAL).exists() or not (out / "trials").exists()


def test_missing_data_leaves_no_study(
    tokenizer: Path, text: Path, tmp_path: Path, capsys: Capture
) -> None:
    argv = searched(tokenizer, tmp_path / "nothing.txt", tmp_path / "study")
    refused(capsys, UsageError, "nothing.txt does not exist", *argv)
    assert not (tmp_path / "study").exists()
    unused = ["tune", "lr", *model_and_data(tokenizer, text), "--steps", "3"]
    refused(capsys, UsageError, "--steps does nothing here", *unused)


def test_a_study_of_something_else(
    study: tuple[Path, dict[str, Any]], tokenizer: Path, text: Path, capsys: Capture
) -> None:
    out, _ = study
    argv = searched(tokenizer, text, out, "--resume", "--seed", "3", "--over", "warmup=0,2")
    refused(capsys, UsageError, "study of something else: over.warmup train.seed 3, was 0", *argv)
    refused(
        capsys, UsageError, "has a study already; add --resume", *searched(tokenizer, text, out)
    )
    refused(
        capsys, UsageError, "no study to resume",
        "tune", "search", "--out", str(out.parent / "none"), "--resume", "--runs", "3",
    )  # fmt: skip


def test_everything_diverges(tokenizer: Path, text: Path, tmp_path: Path, capsys: Capture) -> None:
    argv = ["tune", "search", *usual(tokenizer, text), "--over", "lr=500,1000", "--runs", "2"]
    argv += ["--max-norm", "1e20", "--out", str(tmp_path / "study")]
    code = main(argv)
    shown = capsys.readouterr()
    if code == NumericsError.exit_code:
        assert "trials were given up" in shown.err
    else:
        assert code == 0, shown.err


def test_a_broken_study(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "study.json").write_text("{")
    argv = ["tune", "search", "--out", str(tmp_path), "--resume", "--runs", "3"]
    refused(capsys, CheckpointError, "study.json cannot be read", *argv)


# The range test


def test_a_range_test_suggests_a_rate(
    tokenizer: Path, text: Path, tmp_path: Path, capsys: Capture
) -> None:
    argv = [
        "tune",
        "lr",
        *model_and_data(tokenizer, text),
        "--range",
        "1e-5..30",
        "--range-steps",
        "60",
    ]
    argv += ["--seeds", "2", "--out", str(tmp_path / "rates"), "--json"]
    assert main(argv) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["low"] <= document["suggested"] <= document["high"]
    for seed in document["seeds"]:
        assert seed["falls_from"] <= seed["flattens_at"] <= seed["diverges_at"]
    page = (tmp_path / "rates" / "report.html").read_text()
    assert f"a learning rate of {document['suggested']:.2g}" in page


def test_a_range_without_a_fall(
    tokenizer: Path, text: Path, tmp_path: Path, capsys: Capture
) -> None:
    argv = [
        "tune",
        "lr",
        *model_and_data(tokenizer, text),
        "--range",
        "1e-12..1e-10",
        "--seeds",
        "2",
    ]
    argv += ["--range-steps", "10", "--out", str(tmp_path / "rates"), "--json"]
    assert main(argv) == CHECK_FAILED_EXIT_CODE
    assert "does not fall" in json.loads(capsys.readouterr().out)["problem"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--range", "1"], "--range is '1'"),
        (["--range", "1..0.1"], "--range smaller one first"),
        (["--seeds", "1"], "--seeds is 1 interval"),
        (["--range-steps", "2"], "--range-steps is 2"),
    ],
)
def test_range_tests_that_make_no_sense(
    tokenizer: Path, text: Path, tmp_path: Path, capsys: Capture, more: list[str], words: str
) -> None:
    argv = ["tune", "lr", *model_and_data(tokenizer, text), "--out", str(tmp_path / "rates"), *more]
    refused(capsys, UsageError, words, *argv)
