"""`ridgeline train` as a user calls it: loss falls, the result loads everywhere, a run that was
killed goes on bit for bit, bad input gets one line.
"""

from __future__ import annotations

import json
import math
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from command_line import make_folder, refused, run_process
from train_runs import Capture, make_text, same_bytes, single_thread, trained, words
from written_text import TEXT

from ridgeline.cli import main
from ridgeline.data import Tokenizer
from ridgeline.engine import Sampling, generate_tokens
from ridgeline.errors import CheckpointError, UsageError
from ridgeline.quantization import load_model
from ridgeline.training.config_file import load_config
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
def finished(
    model: Path, text: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A run of six steps that saved after every second, and its last checkpoint."""
    out = tmp_path_factory.mktemp("runs") / "run"
    more = ("--save-every", "2", "--keep", "2", "--eval-every", "3")
    assert main([*words(model, text, out, *more), "--json"]) == 0
    return out, out / "checkpoints" / "step-00000006"


def test_a_run_leaves_what_it_promises(finished: tuple[Path, Path]) -> None:
    out, last = finished
    rows = read_metrics(out)
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5, 6]
    held_out = {row["step"]: row["held_out_loss"] for row in rows if "held_out_loss" in row}
    assert list(held_out) == [0, 3, 6]
    assert held_out[6] < held_out[0] - 0.3
    assert rows[1]["lr"] == pytest.approx(5e-3)  # the warm-up's first half
    names = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert names == ["step-00000004", last.name]
    assert load_config(out).optimizer.lr == 1e-2
    page = (out / "report.html").read_text()
    assert f"from {held_out[0]:.4f} to {held_out[6]:.4f} in 6 steps" in page
    for heading in ("Loss", "Speed", "Gradient norm", "Learning rate", "Checkpoints"):
        assert f">{heading}" in page, heading
    (last_loss,) = [row["loss"] for row in rows if row["step"] == 6 and "loss" in row]
    assert f"of steps, step 6: {last_loss:.3f}" in page


def test_every_engine_loads_a_checkpoint(finished: tuple[Path, Path], capsys: Capture) -> None:
    _, last = finished
    peer = transformers.AutoModelForCausalLM.from_pretrained(last).eval()
    ours = load_model(last, dtype="fp32", device="cpu")
    prompt = list(range(50, 60))
    expected = peer.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=5)
    got = list(generate_tokens(ours, prompt, Sampling(max_tokens=5)))
    assert expected[0, len(prompt) :].tolist()[:5] == got
    assert main(["generate", str(last), "hello", "--max-tokens", "2", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.strip()


def test_the_first_loss_is_that_of_transformers(
    model: Path, tmp_path: Path, capsys: Capture
) -> None:
    """Text that is one sequence long, all of it in the batch: labels, positions and the mean."""
    ids = Tokenizer.load(model).encode(TEXT[:400])[:64]
    sentence = Tokenizer.load(model).decode(ids)
    path = tmp_path / "short.txt"
    path.write_text(sentence)
    tokens = [*Tokenizer.load(model).encode(sentence), 0]  # the end of the text is learned too
    length = str(len(tokens))
    flags = ["--sequence-length", length, "--batch", "1", "--held-out", "0", "--steps", "1"]
    out = str(tmp_path / "run")
    main(["train", str(model), "--data", str(path), "--out", out, "--device", "cpu", *flags])
    peer = transformers.AutoModelForCausalLM.from_pretrained(model)
    batch = torch.tensor([tokens])
    expected = peer(batch, labels=batch).loss
    row, _ = read_metrics(tmp_path / "run")
    assert row["loss"] == pytest.approx(expected.item(), abs=1e-5)
    assert row["tokens"] == len(tokens) - 1
    expected.backward()
    norm = torch.nn.utils.get_total_norm([each.grad for each in peer.parameters()])
    assert row["gradient_norm"] == pytest.approx(norm.item(), rel=1e-4)


def test_a_run_in_bf16_goes_on_bit_for_bit(
    model: Path, text: Path, tmp_path: Path, capsys: Capture
) -> None:
    more = ("--precision", "bf16", "--schedule", "constant", "--save-every", "3")
    both = [tmp_path / "whole", tmp_path / "parts"]
    trained(capsys, *words(model, text, both[0], *more))
    half = [*words(model, text, both[1], *more)]
    half[half.index("--steps") + 1] = "3"
    trained(capsys, *half)
    trained(capsys, *words(model, text, both[1], *more, "--resume"))
    folders = [each / "checkpoints/step-00000006" for each in both]
    same_bytes(*folders)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folders[0])
    assert loaded.dtype == torch.bfloat16


@pytest.mark.slow
def test_ctrl_c_writes_a_checkpoint(model: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    argv = words(model, text, out, "--minutes", "10")
    command = [sys.executable, "-m", "ridgeline", *argv]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    while not any("loss" in row for row in read_metrics(out)):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate()
    assert process.returncode == 130, stderr
    assert "--resume" in stdout
    (folder,) = (out / "checkpoints").iterdir()
    steps = [row["step"] for row in read_metrics(out) if "loss" in row]
    assert folder.name == f"step-{steps[-1]:08d}"


def test_a_run_ends_by_tokens_or_minutes(
    model: Path, text: Path, tmp_path: Path, capsys: Capture
) -> None:
    document = trained(capsys, *words(model, text, tmp_path / "a", "--tokens", "300"))
    assert 300 <= document["tokens"] < 300 + 128
    document = trained(capsys, *words(model, text, tmp_path / "b", "--minutes", "0.001"))
    assert document["steps"] >= 1


def test_a_finished_run_that_is_resumed_stays(
    model: Path, text: Path, tmp_path: Path, capsys: Capture
) -> None:
    """And with more steps it goes on; before the first checkpoint it begins again."""
    out = tmp_path / "run"
    first = trained(capsys, *words(model, text, out, "--schedule", "constant"))
    rows = read_metrics(out)
    resumed = ("train", "--out", str(out), "--resume", "--device", "cpu")
    again = trained(capsys, *resumed)
    assert read_metrics(out) == rows
    for name in ("checkpoint", "steps", "held_out_loss", "held_out_loss_before"):
        assert again[name] == first[name], name
    assert trained(capsys, *resumed, "--steps", "7")["steps"] == 7
    shutil.rmtree(out / "checkpoints")
    trained(capsys, *resumed, "--steps", "1")
    assert [row["step"] for row in read_metrics(out)] == [0, 1, 1, 1]


def test_a_shape_learns_from_nothing(
    model: Path, text: Path, tmp_path: Path, capsys: Capture
) -> None:
    argv = words(model, text, tmp_path / "run")[2:]
    document = trained(
        capsys, "train", "--shape", "tiny", "--tokenizer", str(model), *argv,
        "--recomputation", "blocks",
    )  # fmt: skip
    assert document["held_out_loss_before"] == pytest.approx(math.log(1536), abs=0.3)
    assert document["held_out_loss"] < document["held_out_loss_before"] - 0.3
    peer = transformers.AutoModelForCausalLM.from_pretrained(document["checkpoint"])
    assert peer.config.vocab_size == 1536  # the tokenizer's 1,500, rounded up


def test_a_named_run_of_a_file(model: Path, text: Path, tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "runs.py"
    file.write_text(
        "from ridgeline.training.config import *\n\n\ndef night():\n"
        f"    return TrainConfig(model={str(model)!r}, data=DataOptions({str(text)!r}, 32),\n"
        "        batch=BatchOptions(2), end=RunLength(minutes=9))\n"
    )
    out = tmp_path / "run"
    more = ["--device", "cpu", "--out", str(out), "--steps", "1"]
    trained(capsys, "train", f"{file}:night", *more, "--lr", "3e-3")
    config = load_config(out)
    assert (config.optimizer.lr, config.batch.sequences, config.end.steps) == (3e-3, 2, 1)
    refused(capsys, UsageError, "night did you mean", "train", f"{file}:nigth", *more)
    refused(capsys, UsageError, "there is no file", "train", "none.py:night", *more)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--lr", "nan"], "lr is nan"),
        (["--lr", "1e38"], "lr 1000"),
        (["--micro-batch", "3"], "micro_batch 3 divide 4 try 2"),
        (["--steps", "0"], "steps 0 at least 1"),
        (["--minutes", "1"], "--steps and --minutes"),
        (["--precision", "fp7"], "precision 'fp7' fp32"),
        (["--sequence-length", "100000"], "sequence_length context 128"),
        (["--data", "nowhere.txt"], "nowhere.txt"),
        (["--tokenizer", "demo"], "--tokenizer --shape"),
    ],
)
def test_bad_flags(
    flags: list[str], problem: str, model: Path, text: Path, tmp_path: Path, capsys: Capture
) -> None:
    argv = words(model, text, tmp_path / "run")
    refused(capsys, UsageError, problem, *argv, *flags)
    assert not (tmp_path / "run").exists()


def test_bad_text(model: Path, tmp_path: Path, capsys: Capture) -> None:
    empty, short = tmp_path / "empty.txt", tmp_path / "short.txt"
    empty.write_text("")
    short.write_text("a few words")
    refused(capsys, UsageError, "no text", *words(model, empty, tmp_path / "run"))
    refused(capsys, UsageError, "--data", "train", str(model), "--steps", "1")
    argv = words(model, short, tmp_path / "run", "--held-out", "0")
    refused(capsys, UsageError, "fewer than one sequence of 32", *argv)
    refused(capsys, UsageError, "when --steps --minutes", "train", str(model), "--data", str(short))


def test_broken_lines_are_quarantined(model: Path, tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "rows.jsonl"
    lines = [json.dumps({"text": TEXT[i * 500 : i * 500 + 500]}) for i in range(40)]
    file.write_text("\n".join([*lines[:3], '{"text": ', *lines[3:]]))
    document = trained(capsys, *words(model, file, tmp_path / "run"))
    assert document["num_quarantined"] == 1
    (row,) = map(json.loads, (tmp_path / "run/quarantine.jsonl").read_text().splitlines())
    assert row["line"] == 4


def test_the_folder_of_another_run(
    model: Path, text: Path, finished: tuple[Path, Path], tmp_path: Path, capsys: Capture
) -> None:
    out, _ = finished
    argv = words(model, text, out)
    refused(capsys, UsageError, "has a run already --resume", *argv)
    line = refused(capsys, UsageError, "another config", *argv, "--resume", "--lr", "2e-2")
    assert "optimizer.lr 0.02, was 0.01" in line
    refused(capsys, UsageError, "no run to resume", *words(model, text, tmp_path, "--resume"))
    (tmp_path / "note.txt").write_text("mine")
    refused(capsys, UsageError, "not empty", *words(model, text, tmp_path))


def test_other_data_is_refused(model: Path, text: Path, tmp_path: Path, capsys: Capture) -> None:
    own, out = tmp_path / "own.txt", tmp_path / "run"
    own.write_text(text.read_text())
    trained(capsys, *words(model, own, out))
    own.write_text(text.read_text()[:30_000])
    argv = ["train", "--out", str(out), "--resume", "--steps", "8", "--device", "cpu"]
    refused(capsys, CheckpointError, "give the same data", *argv)


def test_tensorboard_reads_a_run(model: Path, text: Path, tmp_path: Path, capsys: Capture) -> None:
    """And goes on with it."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    more = ("--tensorboard", "--schedule", "constant")
    trained(capsys, *words(model, text, tmp_path / "run", "--steps", "2", *more))
    trained(capsys, *words(model, text, tmp_path / "run", "--steps", "3", *more, "--resume"))
    events = EventAccumulator(str(tmp_path / "run/tensorboard")).Reload()
    rows = [row for row in read_metrics(tmp_path / "run") if "lr" in row]
    got = [(event.step, event.value) for event in events.Scalars("loss")]
    assert got == [(row["step"], pytest.approx(row["loss"])) for row in rows]
    assert {"held_out_loss", "lr", "gradient_norm", "tokens_per_s"} <= set(events.Tags()["scalars"])


def test_help_and_lines_without_a_terminal(model: Path, text: Path, tmp_path: Path) -> None:
    process = run_process(*words(model, text, tmp_path / "run"))
    assert process.returncode == 0, process.stderr
    assert "held-out loss:" in process.stdout
    assert "serve it: ridgeline serve" in process.stdout
    assert "held-out loss" in process.stderr
