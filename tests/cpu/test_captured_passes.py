"""Passes as graphs, with a capture that a CPU can follow: replaying runs the work again over the
memory that stays. What a GPU makes of it is tests/gpu/test_gpu_captured_passes.py's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import make_folder, refused
from packed import FP32, draw, pack, tiny
from torch import Tensor
from train_runs import Capture as Captured
from train_runs import make_text, words

from ridgeline.data.loading.packing import PackedBatch
from ridgeline.errors import UsageError
from ridgeline.kernels.document_attention import AttentionPath, Documents, document_attention
from ridgeline.models.config import ModelConfig
from ridgeline.training.config import DataOptions, TrainConfig
from ridgeline.training.methods.options import DistillOptions, LoraOptions, QatOptions
from ridgeline.training.stepping.captured import (
    LEAST_DOCUMENTS,
    MOST_GRAPHS,
    PassGradients,
    PassShape,
    StaticBatch,
    graphs_problem,
)
from ridgeline.training.stepping.step import Trainer

LENGTH = 24  # of a sequence
CONFIG = replace(FP32, graphs=True, data=DataOptions(None, LENGTH))
# Steps of two sequences each: documents of one length, and of any.
EQUAL = [pack(*draw(24, 24, seed=seed)) for seed in range(4)]
RAGGED = [
    pack(*draw(24, 10, 14, seed=1)),
    pack(*draw(5, 19, 24, seed=2)),
    pack(*draw(7, 7, 10, 24, seed=3)),
    pack(*draw(1, 23, 2, 22, seed=4)),
]


class FollowedCapture:
    """A capture runs nothing; what it hands out is nothing before it is replayed."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.num_replays = trainer, 0

    def __call__(
        self, work: Callable[[], PassGradients]
    ) -> tuple[FollowedCapture.Graph, PassGradients]:
        kept = self.trainer._sums._kept
        before = {name: total.clone() for name, total in kept.items()}
        result = work()
        for name, total in before.items():
            kept[name].copy_(total)
        result.loss.fill_(torch.nan)
        for name, gradient in result.gradients.items():
            if name not in before:
                gradient.fill_(torch.nan)
        return self.Graph(self, work, result), result

    class Graph:
        def __init__(
            self, owner: FollowedCapture, work: Callable[[], PassGradients], result: PassGradients
        ) -> None:
            self.owner, self.work, self.result = owner, work, result

        def replay(self) -> None:
            self.owner.num_replays += 1
            again = self.work()
            self.result.loss.copy_(again.loss)
            for name, gradient in self.result.gradients.items():
                gradient.copy_(again.gradients[name])


def learned(
    steps: list[list[PackedBatch]], config: TrainConfig, attention: AttentionPath | None = None
) -> tuple[list[tuple[float, float]], dict[str, Tensor], Trainer, FollowedCapture]:
    trainer = Trainer(tiny(num_hidden_layers=1), replace(config, graphs=False))
    capture = FollowedCapture(trainer)
    trainer.mode = trainer.mode_of(config, attention=attention, capture=capture)
    results = [trainer.step(batches, 1e-2) for batches in steps]
    numbers = [(result.loss, result.gradient_norm) for result in results]
    return numbers, dict(trainer.model.named_parameters()), trainer, capture


def check_same(steps: list[list[PackedBatch]], attention: AttentionPath | None) -> FollowedCapture:
    expected, weights, _, _ = learned(steps, replace(CONFIG, graphs=False), attention)
    got, own, _, capture = learned(steps, CONFIG, attention)
    assert got == expected
    for name, weight in weights.items():
        assert torch.equal(own[name], weight), name
    return capture


@pytest.mark.parametrize("passes", [1, 2])
def test_documents_of_one_length(passes: int) -> None:
    """The first is run, the second captured, all others replayed, to the bit."""
    steps = [[EQUAL[0]] * passes, [EQUAL[1]] * passes, [EQUAL[2], EQUAL[3]][:passes], [EQUAL[0]]]
    assert check_same(steps, None).num_replays == sum(map(len, steps)) - 1


@pytest.mark.parametrize("passes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_documents_of_any_lengths_share_a_graph(passes: int) -> None:
    """Attention takes their starts from the device, empty documents among them."""
    steps = [[batch] * passes for batch in RAGGED[:3]]
    assert check_same(steps, "triton").num_replays == sum(map(len, steps)) - 1


def test_passes_that_change_their_number_find_their_sums() -> None:
    steps = [[EQUAL[0]], [EQUAL[1]], [EQUAL[2], EQUAL[3]], [EQUAL[0], EQUAL[1]], [EQUAL[2]]]
    expected, weights, _, _ = learned(steps, replace(CONFIG, graphs=False))
    trainer = Trainer(tiny(num_hidden_layers=1), replace(CONFIG, graphs=False))
    modes = [trainer.mode_of(CONFIG, capture=FollowedCapture(trainer)) for _ in range(2)]
    got = []
    for batches in steps:
        trainer.mode = modes[len(batches) - 1]
        result = trainer.step(batches, 1e-2)
        got.append((result.loss, result.gradient_norm))
    assert got == expected
    for name, weight in weights.items():
        assert torch.equal(dict(trainer.model.named_parameters())[name], weight), name


def test_shapes_of_batches() -> None:
    shapes = {PassShape.of(batch) for batch in RAGGED}
    assert shapes == {PassShape(48, LEAST_DOCUMENTS, None)}
    assert PassShape.of(EQUAL[0]) == PassShape(48, 2, (24, 24))
    many = pack(*draw(*([1] * 30), 18, seed=5))
    assert PassShape.of(many).room == 2 * LEAST_DOCUMENTS
    static = StaticBatch(PassShape.of(many), many, LENGTH)
    static.fill(RAGGED[2])  # fewer documents: what the other one had more of is empty again
    starts = static.batch.starts.tolist()
    assert starts == [0, 7, 14, 24, *([48] * (2 * LEAST_DOCUMENTS - 3))]
    assert static.batch.lengths == (24, 24)
    assert torch.equal(static.batch.ids, RAGGED[2].ids)


def test_only_so_many_graphs_are_kept() -> None:
    steps = [
        [pack(*draw(*[48 // count] * count))] for count in (1, 2, 3, 4, 6, 8) for _ in range(3)
    ]
    _, _, trainer, capture = learned(steps, CONFIG)
    assert trainer.mode.captured is not None
    assert trainer.mode.captured.num_graphs == MOST_GRAPHS
    assert capture.num_replays == 2 * MOST_GRAPHS


def test_padded_documents_need_a_kernel_that_takes_them() -> None:
    q = torch.randn(8, 2, 8)
    documents = Documents(torch.tensor([0, 3, 8, 8, 8], dtype=torch.int32), (8,), is_padded=True)
    spec: Any = tiny().layers[0].attn.spec  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="needs the lengths of documents"):
        document_attention(q, q, q, documents, spec)


def test_what_cannot_be_captured_says_why() -> None:
    model, bf16 = tiny().config, replace(CONFIG, precision="bf16")
    assert graphs_problem(bf16, model, "cuda:0") is None
    assert graphs_problem(replace(bf16, precision="fp8"), model, "cuda:0") is None
    cases: list[tuple[TrainConfig, ModelConfig, str, str]] = [
        (bf16, model, "cpu", "need a GPU"),
        (CONFIG, model, "cuda:0", "needs bf16 or fp8, not fp32"),
        (replace(bf16, precision="fp16"), model, "cuda:0", "needs bf16 or fp8, not fp16"),
        (replace(bf16, lora=LoraOptions(4)), model, "cuda:0", "without adapters"),
        (replace(bf16, qat=QatOptions("int4-g64")), model, "cuda:0", "without adapters"),
        (replace(bf16, distill=DistillOptions("demo")), model, "cuda:0", "without adapters"),
    ]
    for config, shape, device, reason in cases:
        assert reason in (graphs_problem(config, shape, device) or ""), reason


def test_train_refuses_graphs_without_a_gpu(tmp_path: Path, capsys: Captured) -> None:
    model = make_folder(tmp_path / "model")
    argv = words(model, make_text(tmp_path), tmp_path / "run", "--graphs")
    refused(capsys, UsageError, "--graphs cannot be: CUDA graphs need a GPU", *argv)
    assert not (tmp_path / "run").exists()
