"""Learning rates by width: exponents that made the losses come back, the sweep and its coordinate
check through the command line, and input that makes no sense.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import make_folder, refused
from train_runs import Capture, make_text, single_thread

from ridgeline.cli import main
from ridgeline.cli.tune.width import DOCUMENT
from ridgeline.data.loading.packing import PackedBatch
from ridgeline.errors import CHECK_FAILED_EXIT_CODE, UsageError
from ridgeline.models.shapes import describe_shape, random_model
from ridgeline.tuning.scaling.coordinates import activations
from ridgeline.tuning.scaling.sweep_runs import RUNS
from ridgeline.tuning.scaling.transfer import SweepRun, lowest_rate, transfer_of
from ridgeline.tuning.scaling.widths import WidthOptions, wider

RATES = WidthOptions((64, 128), low=1e-4, high=1e-1, num_rates=9).rates


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with single_thread():
        yield


def made_runs(
    p: float, q: float, batches: tuple[int, ...] = (8,), noise: float = 0.0, at: float = 3e-3
) -> list[SweepRun]:
    """Parabolas around a rate that moves with width and batch."""
    draw, runs = np.random.default_rng(0), []
    for width in (64, 128):
        for batch in batches:
            best = at * (width / 64) ** p * (batch / 8) ** q
            for lr in RATES:
                for seed in range(3):
                    loss = 3.0 + 0.1 * math.log(lr / best) ** 2 + 0.01 * batch
                    loss += float(draw.normal(0.0, noise))
                    runs.append(SweepRun(width, batch, lr, seed, loss if lr < 0.09 else math.inf))
    return runs


@pytest.mark.parametrize(("p", "q"), [(-1.0, 0.5), (-0.5, 0.0), (0.0, 0.25)])
def test_exponents_come_back(p: float, q: float) -> None:
    transfer = transfer_of(made_runs(p, q, batches=(4, 16)))
    assert transfer.batch_exponent is not None
    assert transfer.width_exponent.value == pytest.approx(p, abs=1e-6)
    assert transfer.batch_exponent.value == pytest.approx(q, abs=1e-6)
    expected = 3e-3 * 8**p * (32 / 8) ** q
    assert transfer.rate_at(512, 32).value == pytest.approx(expected, rel=1e-6)
    assert transfer.best_batch(128) == 4
    assert not any(best.is_at_end for best in transfer.best)


def test_noise_is_in_the_interval() -> None:
    transfer = transfer_of(made_runs(-1.0, 0.0, noise=0.01))
    exponent = transfer.width_exponent
    assert transfer.batch_exponent is None
    assert exponent.low < -1.0 < exponent.high
    assert exponent.high - exponent.low > 0.01
    near, far = transfer.rate_at(128, 8), transfer.rate_at(4096, 8)
    assert far.high / far.low > near.high / near.low


def test_a_best_rate_at_the_end_is_said() -> None:
    transfer = transfer_of(made_runs(-1.0, 0.0, at=1e-4))
    assert [best.is_at_end for best in transfer.best] == [True, True]
    assert lowest_rate({1e-3: 2.0, 1e-2: 1.0, 1e-1: math.inf}) == 1e-2
    with pytest.raises(UsageError, match="every rate diverged"):
        transfer_of([SweepRun(64, 8, lr, seed, math.inf) for lr in RATES for seed in (0, 1)])


def test_wider_shapes_keep_the_size_of_heads() -> None:
    base = describe_shape("tiny").config
    for width in (64, 256):
        config = describe_shape(wider("tiny", width)).config
        assert config.hidden_size == width
        assert config.head_dim == base.head_dim
        assert config.mlp_size / width == base.mlp_size / base.hidden_size
    with pytest.raises(UsageError, match="multiples of 32"):
        wider("tiny", 80)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("widths")
    text, tokenizer = make_text(folder), make_folder(folder / "tokenizer")
    words = ["tune", "width", "--shape", "tiny:layers=1,width=32,heads=2,mlp=64", "--device", "cpu"]
    words += ["--tokenizer", str(tokenizer), "--data", str(text), "--sequence-length", "32"]
    words += ["--batch", "2", "--steps", "10", "--warmup", "1", "--eval-sequences", "4"]
    return [*words, "--widths", "16,32", "--rates", "4", "--seeds", "2", "--range", "1e-3..1e-1"]


@pytest.fixture(scope="module")
def swept(
    sweep: list[str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """A sweep that nothing disturbed, and what it says."""
    out = tmp_path_factory.mktemp("swept") / "widths"
    code = main([*sweep, "--to", "64", "--out", str(out)])
    document: dict[str, Any] = json.loads((out / DOCUMENT).read_text())
    assert code == (
        0 if document["is_safe"] and not document["problems"] else CHECK_FAILED_EXIT_CODE
    )
    return out, document


def test_a_sweep_carries_a_rate_on(swept: tuple[Path, dict[str, Any]]) -> None:
    out, document = swept
    assert len(document["runs"]) == 2 * 4 * 2
    rates = {best["width"]: best["rate"]["value"] for best in document["best"]}
    p = document["width_exponent"]["value"]
    assert rates[32] / rates[16] == pytest.approx(2**p, rel=1e-6)
    assert document["target"]["rate"]["value"] == pytest.approx(rates[32] * 2**p, rel=1e-6)
    assert [row["place"] for row in document["coordinates"]] == ["embedding", "block 1", "logits"]
    for row in document["coordinates"]:
        assert all(size > 0 for size in row["sizes"])
    page = (out / "report.html").read_text()
    assert "Coordinate check" in page
    assert f"{document['target']['rate']['value']:.2g}" in page


@pytest.mark.slow
def test_a_killed_sweep_goes_on_behind_its_last_run(
    sweep: list[str], swept: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "widths"
    command = [*sweep, "--to", "64", "--out", str(out)]
    process = subprocess.Popen(
        [sys.executable, "-m", "ridgeline", *command],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    runs, end = out / RUNS, time.monotonic() + 300
    while time.monotonic() < end and not (runs.is_file() and runs.read_bytes().count(b"\n") > 2):
        time.sleep(0.01)
    process.kill()
    process.wait()
    before = runs.read_bytes()
    assert before.count(b"\n") < 16
    runs.write_bytes(before + b"[16, 2, 0.0")  # half a line
    refused(capsys, UsageError, "has a sweep already --resume", *command)
    refused(capsys, UsageError, "something else", *command, "--resume", "--batch", "1")
    main([*command, "--resume"])
    assert runs.read_bytes().startswith(before[: before.rindex(b"\n") + 1])
    assert runs.read_bytes().count(b"\n") == 16
    document = json.loads((out / DOCUMENT).read_text())
    assert document == swept[1] | {"out": str(out)}
    # one seed more: half as many runs, and what is known of the others
    main([*command, "--resume", "--seeds", "3"])
    assert runs.read_bytes().count(b"\n") == 24


def test_activations_are_those_of_the_model() -> None:
    """Heard, not computed again: the last block's is what the last norm takes."""
    model = random_model("tiny:layers=2,width=32,heads=2,mlp=64", torch.float32, "cpu")
    ids = torch.arange(1, 9)
    starts = torch.tensor([0, 8], dtype=torch.int32)
    batch = PackedBatch.of(ids, ids, torch.arange(8), starts)
    found = activations(model, batch)
    assert torch.allclose(model.logits(model.norm(found["block 2"])).float(), found["logits"])
    assert torch.equal(found["embedding"], model.embed(ids))
    assert not model.embed._forward_hooks


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--widths", "64"], "--widths is 64 two or more"),
        (["--widths", "64,64"], "--widths two or more"),
        (["--widths", "64,x"], "--widths '64,x' whole numbers"),
        (["--widths", "16,24"], "width of 24 multiples of 16"),
        (["--to", "65"], "width of 65 multiples"),
        (["--range", "1..0.1"], "--range smaller one first"),
        (["--rates", "2"], "--rates is 2"),
        (["--seeds", "1"], "--seeds is 1 interval"),
        (["--held-out", "0"], "--held-out is 0"),
        (["--lr", "1e-3"], "--lr does nothing here"),
        (["--save-every", "3"], "--save-every does nothing here"),
    ],
)
def test_sweeps_that_make_no_sense(
    sweep: list[str], tmp_path: Path, capsys: Capture, more: list[str], words: str
) -> None:
    refused(capsys, UsageError, words, *sweep, "--out", str(tmp_path / "widths"), *more)
    assert not (tmp_path / "widths").exists()
