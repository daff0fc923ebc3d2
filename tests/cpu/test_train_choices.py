"""What `--minutes` leaves open is chosen by how long a sequence takes: enough steps, a bounded
share of the time for measuring, and an end in time.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from clock import check_elapsed
from command_line import make_folder
from train_runs import Capture, make_text, trained

from ridgeline.cli import main
from ridgeline.training.choices import TrainingPace, fitted, with_usual
from ridgeline.training.config import (
    BatchOptions,
    DataOptions,
    EvaluationOptions,
    RunLength,
    ScheduleOptions,
    TrainConfig,
)
from ridgeline.training.config_file import load_config
from ridgeline.training.run import TrainLoop

MINUTES = TrainConfig(model="demo", data=DataOptions("book.txt"), end=RunLength(minutes=3))
SLOW = TrainingPace(measuring_s=3.0, learning_s=9.0)


def test_few_minutes_on_a_slow_machine_give_small_steps() -> None:
    config = fitted(MINUTES, SLOW, left_s=170)
    assert config.batch.sequences == 1
    assert config.evaluation.sequences == 2  # 12 of 170 s at both ends
    assert config.schedule.warmup == 2  # of 17 steps
    assert config.checkpoints.every == 66  # ten minutes


def test_a_fast_machine_gets_the_usual_values() -> None:
    config = fitted(MINUTES, TrainingPace(0.001, 0.003), left_s=170)
    assert config == with_usual(MINUTES)
    assert (config.batch.sequences, config.evaluation.sequences) == (8, 32)
    assert (config.schedule.warmup, config.checkpoints.every) == (10, 500)


def test_a_batch_has_as_many_sequences_as_leave_enough_steps() -> None:
    sizes = [
        fitted(MINUTES, TrainingPace(0.01, seconds), left_s=170).batch.sequences
        for seconds in (0.1, 0.3, 0.6, 1.2, 30.0)
    ]
    assert sizes == [8, 4, 2, 1, 1]


def test_what_is_given_stays() -> None:
    given = replace(
        MINUTES,
        batch=BatchOptions(16),
        schedule=ScheduleOptions(warmup=0),
        evaluation=EvaluationOptions(sequences=7),
    )
    config = fitted(given, SLOW, left_s=170)
    assert (config.batch, config.schedule) == (given.batch, given.schedule)
    assert config.evaluation == given.evaluation
    by_two = fitted(replace(MINUTES, batch=BatchOptions(micro=2)), SLOW, left_s=170)
    assert by_two.batch == BatchOptions(2, 2)
    planned = fitted(MINUTES, SLOW, left_s=170, micro=4)  # what the memory plan allows
    assert planned.batch == BatchOptions(1, 1)


def flags(model: Path, text: Path, out: Path, *more: str) -> list[str]:
    paths = [str(model), "--data", str(text), "--out", str(out), "--device", "cpu"]
    return ["train", *paths, "--sequence-length", "32", "--lr", "1e-2", *more]


def test_minutes_count_from_the_command_and_choices_are_written(
    tmp_path: Path, capsys: Capture
) -> None:
    """Shorter than the opening: one step all the same."""
    model, text, out = make_folder(tmp_path / "model"), make_text(tmp_path), tmp_path / "run"
    result = trained(capsys, *flags(model, text, out, "--minutes", "0.002"))
    assert result["steps"] >= 1
    assert result["wall_s"] >= result["seconds"]
    config = load_config(out)
    assert None not in (config.batch.sequences, config.batch.micro, config.schedule.warmup)
    assert None not in (config.evaluation.sequences, config.checkpoints.every)
    (note,) = result["notes"]
    assert f"batch {config.batch.sequences}" in note
    again = trained(capsys, "train", "--out", str(out), "--resume", "--device", "cpu")
    assert again["steps"] == result["steps"]  # its minutes are over, whatever was left of them
    assert again["notes"] == []
    assert load_config(out) == config


def test_what_was_left_of_a_run_that_ended_is_not_trained_later(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last seconds were too few for a step, as where steps are long."""
    model, text, out = make_folder(tmp_path / "model"), make_text(tmp_path), tmp_path / "run"
    with monkeypatch.context() as patched:
        patched.setattr(TrainLoop, "_is_over", lambda self, clock: self.counters.steps >= 1)
        result = trained(capsys, *flags(model, text, out, "--minutes", "0.2"))
    assert result["steps"] == 1
    again = trained(capsys, "train", "--out", str(out), "--resume", "--device", "cpu")
    assert again["steps"] == 1


def test_a_measurement_that_ends_a_run_spends_its_minutes(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a checkpoint is due too: no step comes after it, and none when it is resumed."""
    model, text, out = make_folder(tmp_path / "model"), make_text(tmp_path), tmp_path / "run"
    every = ["--eval-every", "1", "--save-every", "1"]
    measure = TrainLoop._measure

    def long(self: TrainLoop, log: Any) -> float | None:
        loss = measure(self, log)
        self._measuring_s = 60.0 if self.counters.steps else 0.0
        return loss

    with monkeypatch.context() as patched:
        patched.setattr(TrainLoop, "_measure", long)
        result = trained(capsys, *flags(model, text, out, "--minutes", "0.2", *every))
    assert result["steps"] == 1
    again = trained(capsys, "train", "--out", str(out), "--resume", "--device", "cpu")
    assert again["steps"] == 1


def test_a_run_of_steps_has_the_usual_values(tmp_path: Path, capsys: Capture) -> None:
    """They depend on no clock, so that it can be run again."""
    model, text, out = make_folder(tmp_path / "model"), make_text(tmp_path), tmp_path / "run"
    result = trained(capsys, *flags(model, text, out, "--steps", "1"))
    assert result["notes"] == []
    assert load_config(out).batch.sequences == 8


@pytest.mark.slow
def test_minutes_alone_lower_the_loss_and_the_result_serves(
    tmp_path: Path, capsys: Capture
) -> None:
    """The chain a user pulls: nothing given but the text and the time."""
    model = make_folder(tmp_path / "model", tie_word_embeddings=True)
    text, out = make_text(tmp_path), tmp_path / "run"
    result = trained(capsys, *flags(model, text, out, "--minutes", "0.1"))
    assert result["held_out_loss"] < result["held_out_loss_before"] - 0.3
    check_elapsed(result["wall_s"], 6 + 2, at_least=5)
    last = result["checkpoint"]
    assert main(["generate", last, "hello", "--max-tokens", "2", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.strip()
    with served(last) as url:
        body = {"model": Path(last).name, "prompt": "hello", "max_tokens": 3}
        answer = httpx.post(f"{url}/v1/completions", json=body)
        assert answer.json()["usage"]["completion_tokens"] == 3


@contextmanager
def served(folder: str) -> Iterator[str]:
    """The address of `ridgeline serve`."""
    flags = ["--port", "0", "--device", "cpu", "--memory-share", "0.05"]
    process = subprocess.Popen(
        [sys.executable, "-m", "ridgeline", "serve", folder, *flags],
        text=True,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[0]
    finally:
        process.terminate()
        process.wait(20)
