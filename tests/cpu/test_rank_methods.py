"""Rounded weights, pruned ones and teachers over ranks: the same steps as on one device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import make_folder, refused
from packed import TINY
from process_ranks import run_ranks
from rank_work import sequences, whole_model
from torch import Tensor
from written_text import TEXT

from ridgeline.cli import main
from ridgeline.errors import UsageError
from ridgeline.models import ModelConfig, Transformer
from ridgeline.models.families import describe_hf
from ridgeline.models.transformer import build_model
from ridgeline.parallel.layout import Layout
from ridgeline.parallel.mesh import Mesh
from ridgeline.parallel.shards import whole_shapes
from ridgeline.quantization.methods.sparsity import parse_sparsity
from ridgeline.training.config import BatchOptions, DataOptions, OptimizerOptions, TrainConfig
from ridgeline.training.initial import fill_initial
from ridgeline.training.methods.options import DistillOptions, QatOptions
from ridgeline.training.methods.rounded import found_roundings
from ridgeline.training.ranks.rank_trainer import rank_trainer, whole_tensors
from ridgeline.training.ranks.weights.gathering import gathered_tensors
from ridgeline.training.stepping.step import Trainer
from ridgeline.training.watching.metrics import read_metrics

STEPS = 3
PRUNED = QatOptions(sparsity="2:4")
ROUNDED = QatOptions(scheme="int4-g32")
TAUGHT = DistillOptions(teacher="-", weight=0.7)
CONFIG = describe_hf(TINY | {"hidden_size": 32, "tie_word_embeddings": False}, origin="tiny").config
ONE = TrainConfig(
    precision="fp32",
    batch=BatchOptions(sequences=4, micro=1),
    data=DataOptions(path="-", sequence_length=16),
    optimizer=OptimizerOptions(eps=1e-3),
)


def student(pruned: bool) -> Transformer:
    model = whole_model(CONFIG)
    if pruned:
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and name.startswith("layers"):
                parameter.data *= parse_sparsity("2:4").mask(parameter.data.abs())
    return model


def teacher() -> Transformer:
    model = fill_initial(build_model(CONFIG, torch.float32, "cpu"), seed=7)
    return model.requires_grad_(False)


def taught(config: TrainConfig) -> Transformer | None:
    return None if config.distill.teacher is None else teacher()


def run(trainer: Trainer, batches: list[Any]) -> tuple[list[float], list[float]]:
    results = [trainer.step(batches, lr=1e-2) for _ in range(STEPS)]
    return [each.loss for each in results], [each.gradient_norm for each in results]


def steps(
    mesh: Mesh, model: ModelConfig, config: TrainConfig
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    whole = student(config.qat.sparsity is not None)
    trainer = rank_trainer(model, config, mesh, whole_tensors(whole), teacher=taught(config))
    batch = sequences(4, model.vocab_size)
    losses, norms = run(trainer, [batch[i] for i in mesh.layout.sequences(mesh.rank, 4)])
    held = {name: trainer.weights.master(name) for name in trainer.weights.parameters}
    return losses, norms, gathered_tensors(held, trainer.local.parts, whole_shapes(model), mesh)


def check(layout: str, config: TrainConfig) -> None:
    model = student(config.qat.sparsity is not None)
    rounded = found_roundings(model, *config.qat.parsed) if config.qat.is_given else None
    trainer = Trainer(model, config, rounded=rounded, teacher=taught(config))
    losses, norms = run(trainer, sequences(4, CONFIG.vocab_size))
    assert losses[-1] < losses[0]
    wanted = dict(model.named_parameters())
    over = replace(config, layout=Layout.parse(layout))
    for own_losses, own_norms, weights in run_ranks(over.layout, steps, CONFIG, over):
        assert own_losses == pytest.approx(losses, rel=1e-5)
        assert own_norms == pytest.approx(norms, rel=1e-4)
        for name, weight in wanted.items():
            torch.testing.assert_close(weights[name], weight.detach(), atol=1e-4, rtol=1e-4)
            if config.qat.sparsity is not None:
                assert torch.equal(weights[name] == 0, weight == 0), name


@pytest.mark.slow
def test_rounded_and_taught() -> None:
    check("shard=2", replace(ONE, qat=ROUNDED, distill=TAUGHT))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["shard=2", "replicate=2", "replicate=2,shard=2"])
@pytest.mark.parametrize("method", [{"qat": ROUNDED}, {"distill": TAUGHT}])
def test_each(layout: str, method: dict[str, Any]) -> None:
    check(layout, replace(ONE, **method))


@pytest.mark.slow
def test_pruned_weights_stay_zero() -> None:
    check("replicate=2", replace(ONE, qat=PRUNED))


@pytest.mark.slow
@pytest.mark.parametrize("more", [("--qat", "int8"), ("--distill",), ("--lora", "4", "--distill")])
def test_from_the_command_line(more: tuple[str, ...], tmp_path: Path) -> None:
    """Losses of two ranks are those of one device. The teacher is another model: beside itself a
    loss would be 1e-7, and its last digits noise.
    """
    model = make_folder(tmp_path / "model", tie_word_embeddings=True, hidden_size=64)
    teacher = make_folder(tmp_path / "teacher", tie_word_embeddings=True, num_hidden_layers=2)
    words = [*more, str(teacher)] if more[-1] == "--distill" else list(more)
    text = tmp_path / "book.txt"
    text.write_text(TEXT[:40_000])
    usual = "--sequence-length 32 --batch 4 --lr 5e-3 --precision fp32 --warmup 2 --device cpu"
    losses = []
    for layout in ("replicate=1", "shard=2"):
        out = tmp_path / layout
        command = ["train", str(model), "--data", str(text), "--out", str(out), *usual.split()]
        assert main([*command, *words, "--steps", "4", "--layout", layout]) == 0
        losses.append([row["loss"] for row in read_metrics(out) if "loss" in row])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--qat int8 --layout tensor=2", "--qat or --sparsity with other axes than replicate"),
        ("--sparsity 2:4 --layout shard=2", "--sparsity with shard is not done on several ranks"),
        ("--distill demo --layout pipeline=2", "--distill with other axes than replicate"),
        ("--precision fp8 --layout shard=2", "--precision fp8 is not done on several ranks"),
        ("--moments 8-bit --layout shard=2", "--moments 8-bit, whose scales belong to whole"),
        ("--graphs --layout shard=2", "--graphs is not done on several ranks"),
    ],
)
def test_what_is_not_done_is_refused(
    words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", "demo", "--data", "x.txt", "--steps", "1", "--out", str(tmp_path / "run")]
    said = refused(capsys, UsageError, message, *command, *words.split())
    assert "; use" in said or "; remove" in said
