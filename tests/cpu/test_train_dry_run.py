"""`ridgeline train --dry-run`: the memory plan, the predicted speed and duration; nothing is
started, and what the run refuses is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import make_folder, refused
from train_runs import Capture, make_text, single_thread, words

from ridgeline.cli import main, train
from ridgeline.errors import HardwareError, OutOfMemoryError, UsageError
from ridgeline.hardware import Ceiling, Hardware, detect
from ridgeline.profiling.tracing.training_trace import TRAINING_TIMES
from ridgeline.training import prepare
from ridgeline.training.watching.metrics import read_metrics

SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}  # groups of 32 fit
RATES = ("matrix_fp32", "matrix_bf16", "matrix_fp16")
MEASURED = {"read_bandwidth": 2e10} | dict.fromkeys(RATES, 4e10)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with single_thread():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"), tie_word_embeddings=True, **SIZES)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text(tmp_path_factory.mktemp("text"))


def with_rates(hardware: Hardware, promised: float | None = None) -> Hardware:
    ceilings = {key: Ceiling(value, "B/s", "measured") for key, value in MEASURED.items()}
    sheet = {} if promised is None else {"matrix_fp32": Ceiling(promised, "FLOP/s", "datasheet")}
    return replace(hardware, ceilings=ceilings, datasheet=sheet)


@pytest.fixture(autouse=True)
def known_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ceilings are not measured in these tests."""
    monkeypatch.setattr(train, "measure", lambda hardware, only, progress: with_rates(hardware))
    monkeypatch.setattr(train, "load_cached", with_rates)


def planned(capsys: Capture, *argv: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*argv, "--dry-run", "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def files(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


def test_people_see_memory_speed_and_duration(
    model: Path, text: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = files(tmp_path)
    known = with_rates(detect("cpu"), promised=8e10)
    monkeypatch.setattr(train, "measure", lambda *_: known)
    assert main([*words(model, text, Path("run"), "--precision", "fp32"), "--dry-run"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for word in ("weights", "moments", "activations", "in all", "free; the peak is during",
                 "predicted step", "products", "attention", "optimizer", "likely",
                 "ceilings measured", "a step is bound by", "tokens/s, MFU",
                 "of the datasheet's peak", "of the measured peak", "run: 6 steps",
                 "nothing was started"):  # fmt: skip
        assert word in out, word
    assert files(tmp_path) == before


METHODS: dict[str, tuple[str, ...]] = {
    "all weights": ("--precision", "fp32"),
    "bf16": ("--precision", "bf16"),
    "fp16": ("--precision", "fp16"),
    "stochastic": ("--precision", "bf16-stochastic", "--moments", "8-bit"),
    "blocks": ("--precision", "fp32", "--recomputation", "blocks"),
    "adapters": ("--precision", "bf16", "--lora", "4"),
    "rounded": ("--precision", "fp32", "--qat", "int4-g32"),
    "taught": ("--precision", "fp32", "--distill", "MODEL", "--distill-weight", "0.5"),
}


@pytest.mark.parametrize("name", METHODS)
def test_every_way_of_training_is_predicted(
    name: str, model: Path, text: Path, tmp_path: Path, capsys: Capture
) -> None:
    more = [str(model) if word == "MODEL" else word for word in METHODS[name]]
    document = planned(capsys, *words(model, text, tmp_path / "run", *more))
    prediction, memory = document["prediction"], document["memory"]
    assert sum(item["num_bytes"] for item in memory["items"]) == memory["used_bytes"]
    assert set(prediction["parts"]) == set(TRAINING_TIMES)
    assert sum(prediction["parts"].values()) == pytest.approx(prediction["step_s"])
    assert prediction["tokens_per_s"] == pytest.approx(4 * 32 / prediction["step_s"])
    assert prediction["step_s_low"] < prediction["step_s"] < prediction["step_s_high"]
    assert 0 < prediction["mfu_measured"] < 1
    assert prediction["mfu"] is None  # no datasheet has this device
    assert not (tmp_path / "run").exists()


def test_a_shape_and_a_named_run_are_predicted(
    model: Path, text: Path, tmp_path: Path, capsys: Capture
) -> None:
    shape = ("--shape", "tiny", "--tokenizer", str(model), "--sequence-length", "64")
    common = ("--data", str(text), "--out", str(tmp_path / "run"), "--device", "cpu")
    document = planned(capsys, "train", *shape, *common, "--steps", "3", "--precision", "fp32")
    assert document["prediction"]["steps"] == 3
    named = tmp_path / "runs.py"
    named.write_text(
        "from ridgeline.training.config import RunLength, TrainConfig\n\n\n"
        "def night() -> TrainConfig:\n"
        f"    return TrainConfig(model={str(model)!r}, end=RunLength(steps=7))\n"
    )
    document = planned(capsys, "train", f"{named}:night", *common, "--sequence-length", "64")
    assert document["prediction"]["steps"] == 7


def test_duration_follows_from_steps_tokens_or_minutes(
    model: Path, text: Path, tmp_path: Path, capsys: Capture
) -> None:
    def ends(*end: str) -> dict[str, Any]:
        argv = words(model, text, tmp_path / "run", "--held-out", "0", *end)
        prediction: dict[str, Any] = planned(capsys, *argv)["prediction"]
        return prediction

    by_steps = ends("--steps", "1000")
    assert by_steps["total_s"] == pytest.approx(1000 * by_steps["step_s"])
    learned = by_steps["tokens"] / 1000  # of a step: no token behind a document's end
    assert 0.9 * 128 < learned <= 128
    by_tokens = ends("--tokens", str(round(500 * learned)))
    assert by_tokens["steps"] == pytest.approx(500, abs=1)
    by_minutes = ends("--minutes", "2")
    assert by_minutes["steps"] == pytest.approx(120 / by_minutes["step_s"], abs=1)
    assert by_minutes["total_s"] == pytest.approx(120, rel=0.01)


def test_held_out_loss_takes_its_time(
    model: Path, text: Path, tmp_path: Path, capsys: Capture
) -> None:
    argv = words(model, text, tmp_path / "run", "--steps", "100", "--eval-sequences", "4")
    rare = planned(capsys, *argv, "--eval-every", "100")["prediction"]
    often = planned(capsys, *argv, "--eval-every", "10")["prediction"]
    assert rare["evaluation_s"] > 0
    assert often["evaluation_s"] == pytest.approx(rare["evaluation_s"] * 11 / 2)
    forward = rare["evaluation_s"] / 2 / rare["step_s"]  # over as many sequences as a step has
    assert 0.2 < forward < 0.5


def test_what_does_not_fit_is_refused_as_the_run_would(
    model: Path, text: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "available_memory", lambda device: 1 << 20)
    argv = words(model, text, tmp_path / "run")
    of_run = refused(capsys, OutOfMemoryError, "needs and free", *argv)
    assert refused(capsys, OutOfMemoryError, "needs and free", *argv, "--dry-run") == of_run


def test_other_refusals_are_those_of_the_run(
    model: Path, text: Path, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "run"
    refused(capsys, UsageError, "--merge alone", "train", "--merge", str(out), "--out", str(out),
            "--dry-run")  # fmt: skip
    refused(capsys, UsageError, "no text --data", "train", str(model), "--steps", "1", "--dry-run",
            "--device", "cpu")  # fmt: skip
    refused(capsys, UsageError, "fp8 requires a GPU", *words(model, text, out, "--precision",
            "fp8"), "--dry-run")  # fmt: skip
    argv = words(model, text, out, "--dry-run")
    argv[argv.index("cpu")] = "cuda:7"
    refused(capsys, HardwareError, "GPU", *argv)


def test_a_device_of_which_nothing_is_known_gets_no_speed(
    model: Path, text: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "measure", lambda hardware, only, progress: hardware)
    argv = words(model, text, tmp_path / "run", "--precision", "fp32")
    assert planned(capsys, *argv)["prediction"] is None
    assert main([*argv, "--dry-run"]) == 0
    assert "speed: not predicted" in capsys.readouterr().out


def test_a_run_says_what_was_predicted_and_the_rest_of_it_is(
    model: Path, text: Path, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "run"
    argv = words(model, text, out, "--precision", "fp32", "--steps", "2")
    expected = planned(capsys, *argv)["prediction"]["tokens_per_s"]
    assert main(argv) == 0
    said = capsys.readouterr().out
    assert f"of the {expected:,.0f} that were predicted" in said
    assert "predicted, step 2" in (out / "report.html").read_text()
    assert len([row for row in read_metrics(out) if "loss" in row]) == 2
    before = files(out)
    more = words(model, text, out, "--precision", "fp32", "--steps", "5", "--resume")
    assert planned(capsys, *more)["prediction"]["steps"] == 3
    assert files(out) == before


def test_minutes_choose_by_the_predicted_pace(
    model: Path, text: Path, tmp_path: Path, capsys: Capture
) -> None:
    """What the run leaves open it chooses by its pace: a slow machine gets a smaller batch."""
    usual = ["--sequence-length", "32", "--precision", "fp32", "--device", "cpu"]
    argv = ["train", str(model), "--data", str(text), "--out", str(tmp_path / "run"), *usual]
    long = planned(capsys, *argv, "--minutes", "30")
    short = planned(capsys, *argv, "--minutes", "0.005")
    assert long["config"]["batch"]["sequences"] == 8
    assert short["config"]["batch"]["sequences"] < 8
    assert None not in (short["config"]["schedule"]["warmup"], short["config"]["evaluation"])
