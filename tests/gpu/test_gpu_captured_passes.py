"""Passes as CUDA graphs: steps with them learn what steps without them learn, for every precision
that has them, each recomputation, documents of one length and of any, one pass a step and several.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import make_folder
from packed import draw, pack, tiny
from torch import Tensor
from train_runs import make_text

from ridgeline.cli import main
from ridgeline.data.loading.packing import PackedBatch
from ridgeline.training.config import DataOptions, TrainConfig
from ridgeline.training.stepping.precision import has_fp8
from ridgeline.training.stepping.step import Trainer
from ridgeline.training.watching.metrics import read_metrics

LENGTH = 128
CONFIG = TrainConfig(precision="bf16", data=DataOptions(None, LENGTH), deterministic=True)
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256}
CUDA = torch.device("cuda")


def there(batch: PackedBatch) -> PackedBatch:
    return batch.to(CUDA)


EQUAL = [pack(*draw(128, 128, seed=seed)) for seed in range(6)]
LENGTHS = [(128, 60, 68), (1, 127, 128), (30, 30, 68, 128), (64, 64, 100, 28), (128, 5, 123)]
RAGGED = [
    pack(*draw(*lengths, seed=seed)) for seed, lengths in enumerate([*LENGTHS, (90, 38, 128)])
]


def learned(
    config: TrainConfig, steps: list[list[PackedBatch]]
) -> tuple[list[tuple[float, float]], dict[str, Tensor], Trainer]:
    trainer = Trainer(tiny("cuda", **SIZES), config)
    results = [trainer.step([there(batch) for batch in batches], 1e-3) for batches in steps]
    numbers = [(result.loss, result.gradient_norm) for result in results]
    return numbers, {name: trainer.weights.master(name) for name in trainer.weights.states}, trainer


def check(config: TrainConfig, steps: list[list[PackedBatch]], *, exact: bool) -> None:
    expected, weights, _ = learned(config, steps)
    got, own, trainer = learned(replace(config, graphs=True), steps)
    assert trainer.mode.captured is not None
    assert trainer.mode.captured.num_graphs >= 1
    if exact:
        assert got == expected
        for name, weight in weights.items():
            assert torch.equal(own[name], weight), name
        return
    for (loss, norm), (own_loss, own_norm) in zip(expected, got, strict=True):
        assert own_loss == pytest.approx(loss, rel=2e-2)
        assert own_norm == pytest.approx(norm, rel=0.1)


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("batches", [EQUAL, RAGGED], ids=["equal", "any"])
@pytest.mark.parametrize("precision", ["bf16", "bf16-stochastic", "fp8", "fp8-row"])
def test_steps_learn_the_same_to_the_bit(
    precision: Any, batches: list[PackedBatch], passes: int
) -> None:
    """With attention's gradients summed in one order nothing may differ, weights included."""
    if precision.startswith("fp8") and not has_fp8("cuda"):
        pytest.skip("no fp8 here")
    steps = [batches[i : i + passes] for i in range(0, len(batches), passes)]
    check(replace(CONFIG, precision=precision), steps, exact=True)


@pytest.mark.parametrize("recomputation", ["none", "elementwise", "attention", "blocks"])
def test_each_recomputation(recomputation: Any) -> None:
    steps = [[batch] for batch in RAGGED]
    check(replace(CONFIG, recomputation=recomputation), steps, exact=True)


@pytest.mark.parametrize("batches", [EQUAL, RAGGED], ids=["cudnn", "varlen"])
def test_attention_by_torch(batches: list[PackedBatch]) -> None:
    """Whose backward sums in any order; `varlen_attn` is given empty documents."""
    config = replace(CONFIG, deterministic=False)
    check(config, [[batch] for batch in batches], exact=False)


def test_shapes_that_take_turns_have_a_graph_each() -> None:
    steps = [[batch] for pair in zip(EQUAL, RAGGED, strict=True) for batch in pair]
    check(CONFIG, steps, exact=True)


def test_a_replayed_step_does_not_wait_for_the_device() -> None:
    trainer = Trainer(tiny("cuda", **SIZES), replace(CONFIG, graphs=True))
    batches = [there(batch) for batch in RAGGED]
    for batch in batches:  # lengths are on the host, as the loader has them
        assert batch.lengths
        assert batch.num_targets
    for batch in batches[:3]:
        trainer.step([batch], 1e-3)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = [trainer.step([batch], 1e-3) for batch in batches[3:]]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(result.loss > 0 for result in results)


def test_memory_is_that_of_a_step_without_graphs() -> None:
    """The graph's own memory instead of the cache's, not beside it."""
    peaks = []
    for graphs in (False, True):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        batches = [pack(*draw(*[128] * 64, seed=seed)) for seed in range(4)]
        config = replace(CONFIG, graphs=graphs, recomputation="none")
        _, _, trainer = learned(config, [[batch] for batch in batches])
        torch.cuda.synchronize()
        peaks.append(torch.cuda.memory_reserved())
        del trainer
    assert peaks[1] < 1.5 * peaks[0] + (64 << 20)


def test_the_command_runs_with_graphs(tmp_path: Path) -> None:
    """Documents are loaded and checkpoints written by other threads while passes are captured."""
    model = make_folder(tmp_path / "model", tie_word_embeddings=True, hidden_size=64)
    losses = []
    for graphs in ("--no-graphs", "--graphs"):
        out = tmp_path / graphs.strip("-")
        argv = ["train", str(model), "--data", str(make_text(tmp_path)), "--out", str(out)]
        argv += ["--sequence-length", "64", "--batch", "4", "--micro-batch", "2", "--steps", "8"]
        argv += ["--precision", "bf16", "--deterministic", "--lr", "1e-3", "--save-every", "3"]
        assert main([*argv, "--device", "cuda", "--eval-every", "4", graphs]) == 0
        losses.append([row["loss"] for row in read_metrics(out) if "lr" in row])
    assert losses[0] == losses[1]
