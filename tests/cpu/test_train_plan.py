"""What a training run is expected to take, through the command: memory that does not fit is refused
with a remedy that works, and MFU and memory stand in the metrics.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command_line import make_folder, refused
from packed import draw, pack
from written_text import TEXT

from ridgeline.cli import main
from ridgeline.data.loading.packing import IGNORED
from ridgeline.errors import OutOfMemoryError
from ridgeline.hardware import Ceiling, detect
from ridgeline.models.checkpoint import open_checkpoint
from ridgeline.models.families import describe
from ridgeline.models.shapes import describe_shape
from ridgeline.models.training_cost import training_flops
from ridgeline.training import prepare, run
from ridgeline.training.config import BatchOptions, DataOptions, TrainConfig
from ridgeline.training.config_file import load_config
from ridgeline.training.memory.plan import itemise
from ridgeline.training.watching.metrics import read_metrics
from ridgeline.training.watching.utilization import Utilization

Capture = pytest.CaptureFixture[str]
MIB = 2**20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"), tie_word_embeddings=True)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_text(TEXT[:40_000])
    return path


def words(model: Path, text: Path, out: Path, *more: str) -> list[str]:
    paths = [str(model), "--data", str(text), "--out", str(out), "--device", "cpu"]
    return ["train", *paths, "--sequence-length", "64", "--batch", "8", "--steps", "2", *more]


def free(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(prepare, "available_memory", lambda device: num_bytes)


def largest(model: Path) -> int:
    """Bytes that a step over the whole batch takes with everything kept."""
    config = TrainConfig(
        precision="fp32",
        recomputation="none",
        data=DataOptions(sequence_length=64),
        batch=BatchOptions(sequences=8, micro=8),
    )
    return itemise(describe(open_checkpoint(model)).config, config, "cpu", 0).used_bytes


def test_what_does_not_fit_is_refused_and_the_remedy_runs(
    model: Path, text: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    argv = words(model, text, out, "--recomputation", "none", "--micro-batch", "8",
                 "--precision", "fp32")  # fmt: skip
    needed = "needs weights moments activations loss step workspace MiB free use --"
    free(monkeypatch, largest(model) - 1)
    line = refused(capsys, OutOfMemoryError, needed, *argv)
    assert not out.exists()
    advice = re.findall(r"use (--[a-z-]+) (\S+)", line)
    assert advice
    assert main([*argv, *(word for pair in advice for word in pair), "--json"]) == 0
    assert load_config(out).recomputation != "auto"


def test_the_plan_chooses_and_a_run_that_goes_on_keeps_it(
    model: Path, text: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    free(monkeypatch, largest(model) - 1)
    assert main([*words(model, text, out), "--json"]) == 0
    chosen = load_config(out)
    assert chosen.recomputation != "none" or (chosen.batch.micro or 8) < 8
    free(monkeypatch, 1000 * MIB)
    assert main([*words(model, text, out, "--steps", "3", "--resume"), "--json"]) == 0
    assert load_config(out).batch == chosen.batch
    assert load_config(out).recomputation == chosen.recomputation


def test_mfu_and_memory_stand_in_the_metrics(
    model: Path, text: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    hardware = detect("cpu")
    rates = {"matrix_fp32": Ceiling(1e12, "FLOP/s", "datasheet")}
    measured = {"matrix_fp32": Ceiling(5e11, "FLOP/s", "measured")}
    known = replace(hardware, datasheet=rates, ceilings=measured)
    monkeypatch.setattr(run, "load_cached", lambda hardware: known)
    out = tmp_path / "run"
    assert main([*words(model, text, out, "--precision", "fp32")]) == 0
    assert re.search(r"MFU [\d.]+%, of peak [\d.]+%, memory [\d.]+ [MG]iB", capsys.readouterr().err)
    for row in (row for row in read_metrics(out) if "loss" in row):
        assert row["mfu_measured"] == pytest.approx(2 * row["mfu"])
        assert row["mfu"] > 0
        assert row["memory_bytes"] > 50 * MIB


def test_an_unknown_device_has_no_mfu() -> None:
    config = describe_shape("tiny").config
    bare = replace(detect("cpu"), ceilings={}, datasheet={})
    assert Utilization(config, bare, "bf16").shares(1e12, 1.0) == {
        "mfu": None,
        "mfu_measured": None,
    }
    other = replace(bare, datasheet={"matrix_fp32": Ceiling(1e12, "FLOP/s", "datasheet")})
    assert Utilization(config, other, "bf16").promised is None  # never another dtype's rate
    assert Utilization(config, other, "fp32").shares(5e11, 1.0)["mfu"] == 0.5


def test_only_tokens_that_change_what_is_learned_are_counted() -> None:
    """Of a document none behind its last target, of padding, which has no targets, none at all."""
    batch = pack(*draw(6, 5, 4), ignored=(3, 4, 11, 12, 13))
    assert batch.targets[5] == IGNORED  # the last of a document
    assert batch.learned == (3, 4, 0)
    assert batch.to(torch.device("cpu")).learned == (3, 4, 0)
    config = describe_shape("tiny").config
    used = Utilization(config, detect("cpu"), "fp32")
    expected = training_flops(config, (3, 4), batch.num_targets).total
    assert used.flops([batch, batch]) == 2 * expected
    frozen = Utilization(config, detect("cpu"), "fp32", is_frozen=True)
    taught = Utilization(config, detect("cpu"), "fp32", teacher=config)
    flops = training_flops(config, (3, 4), batch.num_targets)
    products = flops.layers + flops.head
    assert frozen.flops([batch]) == pytest.approx(flops.total - products / 3)
    assert taught.flops([batch]) == pytest.approx(flops.total * 4 / 3)
    nothing = replace(batch, targets=torch.full_like(batch.targets, IGNORED))
    assert used.flops([nothing]) == 0
