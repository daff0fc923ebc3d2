"""`ridgeline train --layout`, as a user types it: ranks are started, prove the layout, learn what
one device learns, save, and go on under another layout.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import make_folder, refused
from train_runs import Capture, make_text, single_thread, trained, words

from ridgeline.errors import UsageError
from ridgeline.training.config_file import load_config
from ridgeline.training.watching.metrics import read_metrics


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return make_folder(folder, tie_word_embeddings=True, num_hidden_layers=2)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text(tmp_path_factory.mktemp("text"))


def on_ranks(*argv: str) -> dict[str, Any]:
    """By a command of its own, which looks after its ranks."""
    command = [sys.executable, "-P", "-m", "ridgeline", *argv, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def losses(out: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(out) if "loss" in row]


FP32 = ("--precision", "fp32", "--eval-every", "2", "--eval-sequences", "3", "--micro-batch", "1")


def check_chain(model: Path, text: Path, tmp_path: Path, capsys: Capture, *layouts: str) -> None:
    """Two steps under each layout, one after the other, beside six of one device. The learning rate
    knows nothing of a run's end, which moves.
    """
    alone, out = tmp_path / "alone", tmp_path / "run"
    usual = (*FP32, "--schedule", "constant")
    with single_thread():
        expected = trained(capsys, *words(model, text, alone, *usual))
        for number, layout in enumerate(layouts):
            steps = str(2 * (number + 1))
            if number == 0:
                argv = words(model, text, out, *usual, "--steps", steps, "--layout", layout)
            else:
                argv = ["train", "--out", str(out), "--resume", "--steps", steps]
                argv += ["--layout", layout, "--device", "cpu"]
            told = on_ranks(*argv)
            assert told["layout"] == layout
            assert told["proof"] is None or told["proof"]["worst"] < 1e-5
            assert load_config(out).layout.words() == layout
    count = len(layouts)
    assert losses(out)[: 2 * count] == pytest.approx(losses(alone)[: 2 * count], rel=1e-5)
    if count == 3:
        assert told["held_out_loss"] == pytest.approx(expected["held_out_loss"], rel=1e-5)
        assert told["tokens"] == expected["tokens"]


def test_ranks_learn_what_one_device_learns(
    model: Path, text: Path, tmp_path: Path, capsys: Capture
) -> None:
    out, alone = tmp_path / "run", tmp_path / "alone"
    with single_thread():
        told = on_ranks(
            *words(model, text, out, *FP32, "--steps", "2", "--devices", "2", "--prove")
        )
        trained(capsys, *words(model, text, alone, *FP32, "--steps", "2"))
        onward = trained(
            capsys, "train", "--out", str(out), "--resume", "--steps", "3", "--devices", "1",
            "--device", "cpu",
        )  # fmt: skip
    assert told["layout"] == "shard=2"
    assert told["proof"]["num_layers"] == 2
    check_waits(told["communication"], out)
    assert losses(out)[:2] == pytest.approx(losses(alone), rel=1e-5)
    assert (out / "logs" / "rank-1.log").is_file()
    assert onward["layout"] == "replicate=1"
    assert onward["steps"] == 3


def check_waits(waits: dict[str, Any], out: Path) -> None:
    """What ranks wait for stands in the result, in the run's metrics and on its page."""
    rows = read_metrics(out)
    (measured,) = (row for row in rows if "collectives" in row)
    assert measured == {"step": 2, **waits}
    kinds = {(each["kind"], each["over"]): each for each in waits["collectives"]}
    assert kinds.keys() >= {("all-gather", "shard"), ("reduce-scatter", "shard")}
    for each in kinds.values():
        assert 0 < each["least_s"] <= each["exposed_s"] <= each["most_s"] < waits["measured_step_s"]
    assert waits["exposed_s"] == pytest.approx(sum(e["exposed_s"] for e in kinds.values()))
    assert waits["exposed_s"] < waits["measured_step_s"]
    page = (out / "report.html").read_text()
    assert "ranks wait for each other" in page
    assert "reduce-scatter" in page
    speeds = [row["tokens_per_s"] for row in rows if "tokens_per_s" in row]
    assert max(speeds) < 1e5  # no step is read with another's time


@pytest.mark.slow
@pytest.mark.parametrize(
    "layouts",
    [
        ("tensor=2", "replicate=2", "shard=2"),
        ("context=2", "pipeline=2", "shard=2,tensor=2"),
    ],
)
def test_a_run_goes_on_under_any_layout(
    layouts: tuple[str, ...], model: Path, text: Path, tmp_path: Path, capsys: Capture
) -> None:
    check_chain(model, text, tmp_path, capsys, *layouts)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--layout", "shard=3"), "cannot be shared by the 3 ranks"),
        (("--layout", "shard=2", "--micro-batch", "4"), "2 sequences that each rank has"),
        (("--layout", "shard=2", "--devices", "3"), "--devices is 3"),
        (("--layout", "tensor=2", "--lora", "4"), "--lora with other axes than replicate and"),
        (("--layout", "tensor=2", "--qat", "int8"), "--qat or --sparsity with other axes than"),
        (("--layout", "shard=2", "--moments", "8-bit"), "--moments 8-bit"),
        (("--layout", "shrad=2"), "did you mean shard"),
        (("--layout", "shard=two"), "give a whole number"),
        (("--layout", "context=3"), "cannot be cut in 2 × 3 parts"),
        (("--layout", "tensor=3", "--sequence-length", "32"), "try 30 tokens"),
        (("--layout", "pipeline=2", "--micro-batch", "4"), "needs at least 2 micro-batches"),
        (("--prove",), "--prove proves a layout of several devices"),
    ],
)
def test_what_does_not_go_together(
    flags: tuple[str, ...], message: str, model: Path, text: Path, tmp_path: Path, capsys: Capture
) -> None:
    """Said before anything is started."""
    out = tmp_path / "run"
    plain = ["train", str(model), "--data", str(text), "--out", str(out), "--device", "cpu"]
    plain += ["--sequence-length", "32", "--batch", "4", "--steps", "2"]
    refused(capsys, UsageError, message, *plain, *flags)
    assert not out.exists()


@pytest.mark.parametrize(
    ("layout", "kinds"),
    [
        (
            "shard=2,tensor=2",
            {("all-gather", "shard"), ("reduce-scatter", "shard"), ("all-gather", "tensor")},
        ),
        ("pipeline=2", {("send", "pipeline"), ("receive", "pipeline")}),
    ],
)
def test_a_dry_run_tells_what_ranks_send(
    layout: str,
    kinds: set[tuple[str, str]],
    model: Path,
    text: Path,
    tmp_path: Path,
    capsys: Capture,
) -> None:
    argv = words(model, text, tmp_path / "run", "--layout", layout, "--micro-batch", "1")
    told = trained(capsys, *argv, "--dry-run")
    assert told["layout"] == layout
    assert {(each["kind"], each["over"]) for each in told["collectives"]} >= kinds
    assert told["prediction"] is None
    assert not (tmp_path / "run").exists()
