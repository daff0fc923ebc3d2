"""Steps of `ridgeline train` that look wrong: named with their documents, run a second time,
left out or the end of the run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import make_folder, refused
from train_runs import Capture, same_bytes, single_thread, trained, words
from written_text import TEXT

from ridgeline.errors import HardwareError, NumericsError, UsageError
from ridgeline.training.config import WatchOptions
from ridgeline.training.stepping import sharing
from ridgeline.training.stepping import step as steps
from ridgeline.training.watching.metrics import read_metrics
from ridgeline.training.watching.watch import Watch, WatchState

GARBAGE = 7  # the line of the document that is no text


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with single_thread():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"), tie_word_embeddings=True)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "rows.jsonl"
    lines = [json.dumps({"text": TEXT[i * 500 : i * 500 + 500]}) for i in range(60)]
    path.write_text("\n".join(lines))
    return path


def wrong_at(
    monkeypatch: pytest.MonkeyPatch, is_wrong: Callable[[int, int], bool], value: float = math.nan
) -> None:
    """Gradient norms are `value` where `is_wrong(update, call)` says so: updates are counted by the
    optimizer, calls from 1 on.
    """
    plain, calls = sharing.norm_of, 0
    step = steps.Trainer.step
    updates = 0

    def counting(trainer: Any, *args: Any) -> Any:
        nonlocal updates
        updates = trainer.optimizer.num_steps + 1
        return step(trainer, *args)

    def norm_of(gradients: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        norm = plain(gradients)
        return norm * value if is_wrong(updates, calls) else norm

    monkeypatch.setattr(steps.Trainer, "step", counting)
    monkeypatch.setattr(sharing, "norm_of", norm_of)


def test_numbers_that_blow_up_stop_the_run(
    model: Path, text: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third step's do, twice; what the second left is saved."""
    wrong_at(monkeypatch, lambda update, call: update == 3)
    argv = words(model, text, tmp_path / "run")
    line = refused(
        capsys, NumericsError, "step 3 not numbers again the data rows.jsonl --non-finite",
        *argv, "--json",
    )  # fmt: skip
    assert "rows.jsonl line " in line
    assert [p.name for p in (tmp_path / "run/checkpoints").iterdir()] == ["step-00000002"]


def test_a_bad_step_is_left_out_as_if_it_had_never_been(
    model: Path, text: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third step: its weights and moments are those after the second, and it is named."""
    more = ("--schedule", "constant", "--warmup", "0", "--save-every", "1", "--keep", "9")
    with monkeypatch.context() as patch:
        wrong_at(patch, lambda update, call: call in (3, 4))
        argv = words(model, text, tmp_path / "run", *more, "--non-finite", "skip")
        document = trained(capsys, *argv)
    (warning,) = document["warnings"]
    assert "step 3" in warning
    assert "left out" in warning
    folder = tmp_path / "run/checkpoints"
    same_bytes(folder / "step-00000002", folder / "step-00000003")
    assert document["steps"] == 6
    rows = {row["step"]: row for row in read_metrics(tmp_path / "run") if "lr" in row}
    assert rows[3]["gradient_norm"] is None
    assert rows[3]["cause"] == "data"
    assert all("rows.jsonl line" in each for each in rows[3]["documents"])
    assert [row["step"] for row in rows.values() if "skipped" in row] == [3]


def test_what_is_right_the_second_time_is_the_hardware(
    model: Path, text: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Left alone, the run is the one without the fault, to the bit."""
    trained(capsys, *words(model, text, tmp_path / "whole"))
    with monkeypatch.context() as patch:
        wrong_at(patch, lambda update, call: call == 3)
        argv = words(model, text, tmp_path / "run", "--non-finite", "skip")
        document = trained(capsys, *argv)
    (warning,) = document["warnings"]
    assert "hardware of cpu computed wrongly" in warning
    last = "checkpoints/step-00000006"
    same_bytes(tmp_path / "run" / last, tmp_path / "whole" / last)
    with monkeypatch.context() as patch:
        wrong_at(patch, lambda update, call: call == 3)
        argv = words(model, text, tmp_path / "other")
        refused(capsys, HardwareError, "step 3 hardware --resume", *argv, "--json")


@pytest.mark.parametrize("wrong", [(3, 4), (3,)], ids=["data", "hardware"])
def test_steps_launched_behind_a_bad_one_are_launched_again(
    wrong: tuple[int, ...], model: Path, text: Path, tmp_path: Path, capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """As on a GPU, where the next step runs before the host knows: nothing of it remains."""
    last = "checkpoints/step-00000006"
    for name in ("known-at-once", "late"):
        calls = wrong
        with monkeypatch.context() as patch:
            if name == "late":  # the fourth step was the fourth call, and the third comes again
                patch.setattr(steps.StepResult, "is_ready", False)
                calls = tuple(3 if call == 3 else 5 for call in wrong)
            wrong_at(patch, lambda update, call, calls=calls: call in calls)
            argv = words(model, text, tmp_path / name, "--non-finite", "skip")
            document = trained(capsys, *argv)
        assert len(document["warnings"]) == 1
    same_bytes(tmp_path / "late" / last, tmp_path / "known-at-once" / last)


def test_a_spike_is_left_out(
    model: Path, text: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        wrong_at(patch, lambda update, call: call in (25, 26), value=1000.0)
        document = trained(capsys, *words(model, text, tmp_path / "run", "--steps", "27"))
    (warning,) = document["warnings"]
    assert "step 25: the gradient norm is" in warning
    assert "10 times the median" in warning
    with monkeypatch.context() as patch:
        wrong_at(patch, lambda update, call: call in (25, 26), value=1000.0)
        argv = words(model, text, tmp_path / "other", "--steps", "27", "--spikes", "stop")
        refused(capsys, NumericsError, "step 25 rows.jsonl", *argv, "--json")
    with monkeypatch.context() as patch:
        wrong_at(patch, lambda update, call: call == 25, value=1000.0)
        argv = words(model, text, tmp_path / "learned", "--steps", "27", "--spikes", "learn")
        assert trained(capsys, *argv)["warnings"] == []


def test_a_run_that_has_gone_wrong_stops(
    model: Path, text: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong_at(monkeypatch, lambda update, call: call > 2)
    argv = words(model, text, tmp_path / "run", "--steps", "30", "--non-finite", "skip")
    line = refused(capsys, NumericsError, "10 steps before it", *argv, "--json")
    assert "step 13" in line


def test_a_run_that_was_resumed_judges_the_same(
    model: Path, text: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right after it goes on there is a spike, which the steps before it tell."""
    constant = ("--schedule", "constant")
    trained(capsys, *words(model, text, tmp_path / "run", "--steps", "24", *constant))
    wrong_at(monkeypatch, lambda update, call: call <= 2, value=1000.0)
    argv = words(model, text, tmp_path / "run", "--steps", "26", *constant, "--resume")
    (warning,) = trained(capsys, *argv)["warnings"]
    assert "step 25" in warning


def steady(losses: list[float], norms: list[float]) -> Watch:
    watch = Watch(WatchOptions(), WatchState())
    for number, (loss, norm) in enumerate(zip(losses, norms, strict=True), 1):
        watch.add(number, loss, norm)
    return watch


def test_the_rule() -> None:
    losses = [3.0 + 0.01 * (-1) ** number for number in range(60)]
    watch = steady(losses, [2.0] * 60)
    assert watch.limits(20).norm == math.inf  # 18 steps lie behind
    assert watch.limits(62).norm == 20.0
    assert watch.limits(62).loss == pytest.approx(3.0 + 0.3)  # a tenth, more than 10 x 0.01
    wide = steady([3.0 + 0.1 * (-1) ** number for number in range(60)], [2.0] * 60)
    assert wide.limits(62).loss == pytest.approx(4.0)
    last_known = steady([*losses, 9.0], [*[2.0] * 60, 500.0])
    assert last_known.limits(62) == watch.limits(62)  # the step before it never counts
    assert watch.limits(62) == Watch(WatchOptions(), watch.state).limits(62)


def test_bad_options(model: Path, text: Path, tmp_path: Path, capsys: Capture) -> None:
    argv = words(model, text, tmp_path / "run")
    refused(capsys, UsageError, "spikes 'leave' skip", *argv, "--spikes", "leave")
    refused(capsys, UsageError, "spike_factor nan", *argv, "--spike-factor", "nan")
    refused(capsys, UsageError, "spike_factor 0.5", *argv, "--spike-factor", "0.5")
