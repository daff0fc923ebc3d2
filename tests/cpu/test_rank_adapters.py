"""Adapters on several ranks: steps are those of one device, the base is cut, a run goes on under
another layout, and what cannot be cut is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from command_line import make_folder, refused
from process_ranks import run_ranks
from rank_work import LENGTH, sequences
from safetensors.torch import load_file
from test_train_layout import losses, on_ranks
from torch import Tensor
from train_runs import Capture, make_text, single_thread, trained, words

from ridgeline.cli import main
from ridgeline.errors import UsageError
from ridgeline.models.checkpoint import open_checkpoint
from ridgeline.models.families import describe
from ridgeline.parallel.layout import Layout
from ridgeline.parallel.mesh import Mesh, alone
from ridgeline.training.config import BatchOptions, DataOptions, OptimizerOptions, TrainConfig
from ridgeline.training.memory.plan import itemise
from ridgeline.training.methods.options import LoraOptions
from ridgeline.training.ranks import adapters
from ridgeline.training.starting_model import StartingModel

COUNT, STEPS = 4, 5
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}  # groups of 32 fit


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return make_folder(folder, tie_word_embeddings=True, num_hidden_layers=2, **SIZES)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text(tmp_path_factory.mktemp("text"))


@dataclass
class Learned:
    losses: list[float]
    norms: list[float]
    adapters: dict[str, Tensor]
    base_elements: int  # that lie on this rank


def config_of(layout: Layout, path: Path) -> TrainConfig:
    return TrainConfig(
        model=str(path),
        precision="fp32",
        recomputation="none",
        batch=BatchOptions(sequences=COUNT, micro=1),
        data=DataOptions(path="-", sequence_length=LENGTH),
        optimizer=OptimizerOptions(eps=1e-3),
        lora=LoraOptions(rank=4),
        layout=layout,
    )


def learn(mesh: Mesh, path: Path, mutant: str | None = None) -> Learned:
    if mutant == "no sum":
        adapters.sum_over = lambda axis, tensors: None
    config = config_of(mesh.layout, path)
    source = StartingModel(describe(open_checkpoint(path)), None, path)
    trainer = source.trainer(config, "cpu", None, None, mesh)
    vocab = source.description.config.vocab_size
    result = Learned([], [], {}, 0)
    for step in range(STEPS):
        batch = sequences(COUNT * STEPS, vocab)[step * COUNT : (step + 1) * COUNT]
        done = trainer.step([batch[i] for i in mesh.layout.sequences(mesh.rank, COUNT)], lr=1e-2)
        result.losses.append(done.loss)
        result.norms.append(done.gradient_norm)
    result.adapters = {name: each.clone() for name, each in trainer.weights.local.items()}
    result.base_elements = sum(
        adapters.local_tensor(each).numel()
        for name, each in trainer.model.named_parameters()
        if name not in result.adapters
    )
    return result


def same(one: Learned, other: Learned) -> bool:
    return one.losses == pytest.approx(other.losses, rel=1e-5) and one.norms == pytest.approx(
        other.norms, rel=1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["shard=2", "replicate=2", "replicate=2,shard=2"])
def test_steps_are_those_of_one_device(layout: str, model: Path) -> None:
    ranks = Layout.parse(layout)
    expected = learn(alone(), model)
    assert expected.losses[-1] != pytest.approx(expected.losses[0], rel=1e-3)
    for each in run_ranks(ranks, learn, model):
        assert same(each, expected)
        assert each.adapters.keys() == expected.adapters.keys()
        for name, weight in expected.adapters.items():
            torch.testing.assert_close(each.adapters[name], weight, atol=1e-5, rtol=1e-4)
        assert each.base_elements == expected.base_elements // ranks.shard


@pytest.mark.slow
def test_a_sum_that_is_left_out_is_seen(model: Path) -> None:
    expected = learn(alone(), model)
    for each in run_ranks(Layout(shard=2), learn, model, "no sum"):
        assert not same(each, expected)


LORA = ("--lora", "4", "--precision", "fp32", "--save-every", "2", "--schedule", "constant")


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--moments", "8-bit")], ids=["fp32", "8-bit moments"])
def test_a_run_goes_on_under_other_layouts(
    more: tuple[str, ...], model: Path, text: Path, tmp_path: Path, capsys: Capture
) -> None:
    """Saved by two ranks, gone on with by two others and by one device; PEFT's files the same."""
    alone_out, out = tmp_path / "alone", tmp_path / "run"
    onward = ("train", "--out", str(out), "--resume", "--device", "cpu")
    with single_thread():
        trained(capsys, *words(model, text, alone_out, *LORA, *more, "--steps", "6"))
        first = on_ranks(
            *words(model, text, out, *LORA, *more, "--steps", "2", "--layout", "shard=2")
        )
        on_ranks(*onward, "--steps", "4", "--layout", "replicate=2")
        trained(capsys, *onward, "--steps", "6", "--devices", "1")
    assert first["communication"] is not None
    assert losses(out) == pytest.approx(losses(alone_out), rel=1e-5)
    name = "checkpoints/step-00000006/adapter_model.safetensors"
    expected, got = load_file(alone_out / name), load_file(out / name)
    assert got.keys() == expected.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(got[key], tensor, atol=1e-5, rtol=1e-4)
    assert main(["train", "--merge", str(out), "--out", str(tmp_path / "merged")]) == 0


@pytest.mark.slow
def test_codes_are_whole_on_every_rank(
    model: Path, text: Path, tmp_path: Path, capsys: Capture
) -> None:
    codes, outs = tmp_path / "codes", [tmp_path / "alone", tmp_path / "ranks"]
    loose = ("--method", "rtn", "--sequences", "1", "--max-kl", "9", "--max-ppl-increase", "0.9")
    argv = ("quantize", str(model), "--scheme", "int4-g32", "--out", str(codes), *loose)
    assert main([*argv, "--device", "cpu", "--batch-sizes", "none"]) == 0
    more = ("--lora", "4", "--precision", "fp32", "--steps", "3")
    with single_thread():
        trained(capsys, *words(codes, text, outs[0], *more))
        on_ranks(*words(codes, text, outs[1], *more, "--layout", "replicate=2"))
    assert losses(outs[1]) == pytest.approx(losses(outs[0]), rel=1e-5)
    refused(
        capsys, UsageError, "weights as codes (int4-g32) --layout replicate=2",
        *words(codes, text, tmp_path / "none", *more, "--layout", "shard=2", "--dry-run"),
    )  # fmt: skip


def test_other_axes_and_the_proof_are_refused(
    model: Path, text: Path, tmp_path: Path, capsys: Capture
) -> None:
    argv = words(model, text, tmp_path / "run", *LORA)
    refused(capsys, UsageError, "--lora with other axes use these", *argv, "--layout", "tensor=2")
    refused(capsys, UsageError, "--lora with other axes", *argv, "--layout", "pipeline=2,shard=2")


def planned(model: Path, layout: str) -> dict[str, int]:
    config = config_of(Layout.parse(layout), model)
    source = StartingModel(describe(open_checkpoint(model)), None, model)
    method = source.method(config, "cpu")
    plan = itemise(source.description.config, config, "cpu", 1 << 40, method)
    return {item.name: item.num_bytes for item in plan.items}


def test_the_memory_plan_knows_what_is_cut(model: Path) -> None:
    one, half, copies = (planned(model, each) for each in ("replicate=1", "shard=2", "replicate=2"))
    assert half["weights"] == -(-one["weights"] // 2)
    assert copies["weights"] == one["weights"]
    assert half["adapters"] == one["adapters"]
    assert "gathered weights" in half
    assert not {"gathered weights", "sums"} & copies.keys()
    assert "sums" not in half
