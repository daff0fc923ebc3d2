"""Checkpoints of `ridgeline train`: written beside the steps, with the values of their moment,
whole or not there, whatever happens meanwhile.
"""

from __future__ import annotations

import json
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import make_folder, refused
from train_runs import STEPS, Capture, make_text, same_bytes, single_thread, trained, words

from ridgeline.cli import main
from ridgeline.errors import CheckpointError, OutputError
from ridgeline.training.saving import checkpoint as checkpoints
from ridgeline.training.saving import saver as saving
from ridgeline.training.watching.metrics import read_metrics


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with single_thread():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"), tie_word_embeddings=True)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def whole(model: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run whose writer had all the time there is, with each of its checkpoints."""
    out = tmp_path_factory.mktemp("runs") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "available_memory", lambda device: 0)  # so that steps wait for it
        argv = words(model, text, out, "--save-every", "2", "--keep", "9", "--eval-every", "3")
        assert main([*argv, "--json"]) == 0
    return out


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_values_are_those_of_the_moment_of_the_save(
    model: Path, text: Path, whole: Path, tmp_path: Path, capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The first checkpoint is written when two more steps have changed the weights."""
    out, plain = tmp_path / "run", saving.write_checkpoint
    fourth = threading.Event()

    def late(*args: Any) -> Path:
        assert fourth.wait(60)
        return plain(*args)

    monkeypatch.setattr(saving, "write_checkpoint", late)
    step = saving.Trainer.step

    def counting(trainer: Any, *args: Any, **options: Any) -> Any:
        result = step(trainer, *args, **options)
        if trainer.optimizer.num_steps == 4:
            fourth.set()
        return result

    monkeypatch.setattr(saving.Trainer, "step", counting)
    more = ("--save-every", "2", "--keep", "9", "--eval-every", "3")
    document = trained(capsys, *words(model, text, out, *more))
    for name in ("step-00000002", "step-00000004", "step-00000006"):
        same_bytes(out / "checkpoints" / name, whole / "checkpoints" / name)
    assert document["num_saves"] == 2
    assert document["stall_s"] > 0
    rows = {row["step"]: row for row in read_metrics(out) if "checkpoint" in row}
    assert list(rows) == [2, 4, 6]
    assert rows[2]["save_bytes"] > 100_000


def test_where_the_host_has_no_room_for_copies_steps_wait(whole: Path) -> None:
    assert names(whole) == ["step-00000002", "step-00000004", "step-00000006"]


KILLED = """
import os, signal, sys
from ridgeline.cli import main
from ridgeline.training.saving import checkpoint
from ridgeline.training.stepping import step
owner, name, count = {target}
plain = getattr(owner, name)
calls = 0
def counting(*args, **options):
    global calls
    calls += 1
    if calls == count:
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(*args, **options)
setattr(owner, name, counting)
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("target", "left"),
    [
        ("checkpoint, 'save_file', 2", ["step-00000002"]),
        pytest.param("step.Optimizer, 'step', 5", None, marks=pytest.mark.slow),
        pytest.param("checkpoint, 'write_file', 4", ["step-00000002"], marks=pytest.mark.slow),
        pytest.param("checkpoint.Path, 'rename', 6", ["step-00000002"], marks=pytest.mark.slow),
    ],
    ids=["while-saving", "in-an-update", "at-the-last-file", "at-the-rename"],
)
def test_a_killed_run_goes_on_bit_for_bit(
    target: str, left: list[str] | None, model: Path, text: Path, whole: Path, tmp_path: Path,
    capsys: Capture,
) -> None:  # fmt: skip
    """N + M steps equal N, kill -9, M: every weight and every moment, to the bit."""
    out = tmp_path / "run"
    argv = words(model, text, out, "--save-every", "2", "--eval-every", "3")
    code = KILLED.format(target=target)
    process = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True)
    assert process.returncode == -signal.SIGKILL, process.stderr
    if left is not None:
        assert [name for name in names(out) if not name.startswith(".")] == left
    document = trained(capsys, "train", "--out", str(out), "--resume", "--device", "cpu")
    assert document["steps"] == STEPS
    same_bytes(out / "checkpoints/step-00000006", whole / "checkpoints/step-00000006")
    kept = ("step", "loss", "lr", "gradient_norm", "tokens", "held_out_loss")
    rows, expected = (
        [
            {key: row[key] for key in kept if key in row}
            for row in read_metrics(each)
            if "checkpoint" not in row
        ]
        for each in (out, whole)
    )
    assert rows == expected
    assert not [name for name in names(out) if name.startswith(".")]


@pytest.mark.slow
def test_killed_again_and_again(
    model: Path, text: Path, whole: Path, tmp_path: Path, capsys: Capture
) -> None:
    """At moments that nobody chose."""
    out, moments = tmp_path / "run", random.Random(24)
    argv = words(model, text, out, "--save-every", "1", "--eval-every", "3")
    num_killed = 0
    for _ in range(8):
        process = subprocess.Popen([sys.executable, "-m", "ridgeline", *argv])
        while process.poll() is None and not any("loss" in row for row in read_metrics(out)):
            pass
        try:
            process.wait(moments.uniform(0.0, 0.3))
        except subprocess.TimeoutExpired:
            process.kill()
            num_killed += process.wait() == -signal.SIGKILL
        argv = ["train", "--out", str(out), "--resume", "--device", "cpu"]
    assert num_killed
    trained(capsys, *argv)
    same_bytes(out / "checkpoints/step-00000006", whole / "checkpoints/step-00000006")


FILES = (
    "model.safetensors", "config.json", "tokenizer.json", "training/optimizer.safetensors",
    "training/state.json", "training/files.json",
)  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_of_checkpoints_cut_short_the_one_before_is_taken(
    name: str, whole: Path, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    file = out / "checkpoints/step-00000006" / name
    file.write_bytes(file.read_bytes()[:-20])
    argv = ["train", "--out", str(out), "--resume", "--device", "cpu"]
    document = trained(capsys, *argv)
    (warning,) = document["warnings"]
    assert str(file) in warning
    assert "cut short" in warning
    assert "going on from" in warning
    assert "step-00000004" in warning
    same_bytes(file.parents[name.count("/")], whole / "checkpoints/step-00000006")


def test_where_no_checkpoint_is_whole(whole: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    for folder in (out / "checkpoints").iterdir():
        file = folder / "training/optimizer.safetensors"
        file.unlink()
    argv = ["train", "--out", str(out), "--resume", "--steps", "8", "--device", "cpu"]
    refused(capsys, CheckpointError, "optimizer.safetensors missing no other checkpoint", *argv)
    assert names(out) == names(whole)


def full_disk(*args: Any, **options: Any) -> None:
    raise OSError(28, "No space left on device")


def test_a_full_disk_stops_or_not(
    model: Path, text: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, plain = tmp_path / "run", checkpoints.save_file
    failures = iter([plain, full_disk, full_disk])
    monkeypatch.setattr(
        checkpoints, "save_file", lambda *args, **more: next(failures, plain)(*args, **more)
    )
    refused(
        capsys, OutputError, "step-00000004 No space left",
        *words(model, text, out, "--save-every", "2"), "--json",
    )  # fmt: skip
    assert names(out) == ["step-00000002"]
    other = words(model, text, tmp_path / "other", "--save-every", "4")
    assert main([*other, "--save-failure", "continue"]) == 0
    assert "warning: cannot write" in capsys.readouterr().err
    assert names(tmp_path / "other") == ["step-00000006"]


@pytest.mark.slow
@pytest.mark.parametrize("limit", [50_000, 2500], ids=["checkpoints", "metrics-too"])
def test_a_disk_that_takes_nothing_more(
    limit: int, model: Path, text: Path, tmp_path: Path
) -> None:
    """The system itself refuses to write more than some kilobytes into a file. The run goes on to
    its last save.
    """
    argv = words(model, text, tmp_path / "run", "--save-every", "2", "--steps", "20")
    process = subprocess.run(
        [sys.executable, "-m", "ridgeline", *argv, "--save-failure", "continue"],
        capture_output=True, text=True, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )  # fmt: skip
    assert process.returncode == OutputError.exit_code, process.stderr
    *lines, last = process.stderr.splitlines()
    assert last.startswith("ridgeline: error: cannot write")
    warned = [line for line in lines if line.startswith("warning: cannot write")]
    assert sum("metrics.jsonl" in line for line in warned) == (limit < 10_000)
    assert sum("step-" in line for line in warned) >= 5
    assert any("step 20" in line for line in lines)
    assert names(tmp_path / "run") == []


def test_sizes_are_written(whole: Path) -> None:
    folder = whole / "checkpoints/step-00000006"
    sizes = json.loads((folder / "training/files.json").read_text())
    assert sizes["model.safetensors"] == (folder / "model.safetensors").stat().st_size
    assert "training/files.json" not in sizes
