"""A training step against the plain loop: loss, every gradient, every weight, however the batch is
cut, whatever is recomputed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from packed import BATCHES, FP32, draw, pack, tiny
from tiny_models import one_of_each_family
from torch import Tensor

from ridgeline.data.loading.packing import PackedBatch, joined
from ridgeline.errors import NumericsError, UsageError
from ridgeline.kernels import host_library
from ridgeline.models import Transformer
from ridgeline.training.config import OptimizerOptions, RunLength, ScheduleOptions, TrainConfig
from ridgeline.training.evaluation import held_out_loss
from ridgeline.training.naive import naive_gradients, naive_loss, naive_step
from ridgeline.training.schedule import Counters, learning_rate, share_done
from ridgeline.training.stepping.gradients import GradientSum
from ridgeline.training.stepping.ops import KERNELS, PlainOps, TrainingOps
from ridgeline.training.stepping.step import Trainer


def check_gradients(
    model: Transformer,
    config: TrainConfig,
    batches: list[PackedBatch],
    ops: TrainingOps | None = None,
) -> None:
    expected = naive_gradients(model, BATCHES)
    loss = naive_loss(model, BATCHES).item()
    got_loss, count, got = Trainer(model, config, ops=ops).gradients(batches)
    assert count == 44
    assert got_loss == pytest.approx(loss, abs=1e-6)
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, atol=1e-5, rtol=1e-5)


RECOMPUTATIONS = ["none", "elementwise", "attention", "blocks"]


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    """The kernels in C++ that a run on a CPU has."""
    host_library.prepare()


@pytest.mark.parametrize("recomputation", RECOMPUTATIONS)
def test_the_gradients_of_a_batch_without_a_compiler(
    recomputation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_library, "_loaded", {})
    check_gradients(tiny(), replace(FP32, recomputation=recomputation), BATCHES)


@pytest.mark.parametrize("recomputation", RECOMPUTATIONS)
@pytest.mark.parametrize("cut", [joined, list], ids=["one-pass", "micro-batches"])
def test_the_gradients_of_a_batch(recomputation: Any, cut: Callable[[Any], Any]) -> None:
    batches = cut(BATCHES)
    batches = batches if isinstance(batches, list) else [batches]
    check_gradients(tiny(), replace(FP32, recomputation=recomputation), batches)


@pytest.mark.parametrize("changes", [{}, {"model_type": "qwen2"}], ids=["plain", "biases"])
def test_the_gradients_of_a_batch_by_kernels(changes: dict[str, Any]) -> None:
    """The passes that a GPU runs, through Triton's interpreter."""
    config = replace(FP32, recomputation="elementwise")
    check_gradients(tiny(**changes), config, BATCHES, KERNELS)


@pytest.mark.parametrize("name", one_of_each_family())
def test_every_family_learns_as_in_the_plain_loop(
    name: str, family_models: Callable[[str], Transformer]
) -> None:
    check_gradients(family_models(name), replace(FP32, recomputation="attention"), BATCHES)


@pytest.fixture(scope="module")
def family_models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Transformer]:
    from tiny_models import save_model

    from ridgeline.quantization import load_model

    def make(name: str) -> Transformer:
        folder = tmp_path_factory.mktemp(name)
        save_model(name, folder)
        return load_model(folder, dtype="fp32", device="cpu")

    return make


class CountingOps(PlainOps):
    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def norm(self, *inputs: Any) -> Any:
        self.calls["norm"] += 1
        return super().norm(*inputs)

    def activation(self, *inputs: Any) -> Any:
        self.calls["activation"] += 1
        return super().activation(*inputs)

    def activation_backward(self, *inputs: Any) -> Any:
        self.calls["activation"] += inputs[3]  # made again in the same pass
        return super().activation_backward(*inputs)

    def rotate(self, *inputs: Any, inverse: bool = False, **more: Any) -> Any:
        self.calls["rotate"] += not inverse
        return super().rotate(*inputs, inverse=inverse, **more)


@pytest.mark.parametrize(
    ("recomputation", "norms", "activations", "rotations"),
    [
        ("none", 5, 2, 4),
        ("elementwise", 5 + 4, 2 + 2, 4),
        ("attention", 5 + 4 + 2, 2 + 2, 4 + 4),
        ("blocks", 5 + 4, 2 + 2, 4 + 4),
    ],
)
def test_what_is_computed_again(
    recomputation: Any, norms: int, activations: int, rotations: int
) -> None:
    """Two layers: two norms each and one behind them, an activation each, q and k turned each."""
    ops = CountingOps()
    Trainer(tiny(), replace(FP32, recomputation=recomputation), ops=ops).gradients(BATCHES[:1])
    assert ops.calls == {"norm": norms, "activation": activations, "rotate": rotations}


def kept_bytes(recomputation: Any) -> int:
    """Of activations, between the forward and the backward pass."""
    trainer = Trainer(tiny(), replace(FP32, recomputation=recomputation))
    weights = {each.untyped_storage().data_ptr() for each in trainer.model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = trainer.loss(BATCHES[0])
    assert loss.requires_grad
    return sum(kept.values())


def test_less_is_kept_where_more_is_computed_again() -> None:
    sizes = [kept_bytes(recomputation) for recomputation in RECOMPUTATIONS]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 4


@pytest.mark.parametrize("tied", [True, False])
def test_steps_are_those_of_the_plain_loop(tied: bool) -> None:
    """Clipped and decayed: torch's own AdamW with a group for what does not decay."""
    options = OptimizerOptions(lr=3e-3, weight_decay=0.1, max_norm=0.5)
    ours, plain = (tiny(tie_word_embeddings=tied) for _ in range(2))
    trainer = Trainer(ours, replace(FP32, optimizer=options))
    matrices = [each for each in plain.parameters() if each.dim() > 1]
    vectors = [each for each in plain.parameters() if each.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]
    peer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    norms = []
    for step in range(5):
        lr = 3e-3 * (step + 1)
        result = trainer.step(BATCHES, lr)
        norms.append(result.gradient_norm)
        expected = naive_step(plain, peer, BATCHES, lr, max_norm=0.5)
        assert result.loss == pytest.approx(expected, abs=1e-5)
    assert max(norms) > 0.5  # it was clipped
    assert ours.head.weight.data_ptr() == ours.embed.weight.data_ptr() or not tied
    for (name, one), other in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(one, other, atol=2e-5, rtol=1e-4), name


def test_a_small_update_is_not_lost_in_bf16() -> None:
    """Updates of a thousandth of a weight's last digit stay in the master, and reach the weight."""
    trainer = Trainer(tiny(), replace(FP32, precision="bf16"))
    weights = trainer.weights
    weight = weights.parameters["norm.weight"]
    before, master_before = weight.detach().clone(), weights.master("norm.weight")
    assert not torch.equal(before.float(), master_before)  # it is exact, from the first step
    result = trainer.step(BATCHES, lr=1e-6)
    assert torch.equal(weight, before)
    assert (weights.master("norm.weight") != master_before).all()
    assert result.lost_share < 0.1
    for _ in range(3):
        trainer.step(BATCHES, lr=1e-2)
    assert not torch.equal(weight, before)
    for name, each in weights.parameters.items():
        assert each.dtype == torch.bfloat16
        assert (each.float() - weights.master(name)).abs().max() <= each.abs().max() / 256


def test_micro_batches_in_bf16_are_summed_in_fp32() -> None:
    """One and 256 times 1/512 are 1.5; bf16 would stay at one."""
    weights = Trainer(tiny(), replace(FP32, precision="bf16")).weights
    sums, parameter = GradientSum(weights.parameters), weights.parameters["norm.weight"]
    sums.begin(257)
    for value in [1.0, *[2**-9] * 256]:
        parameter.grad = torch.full_like(parameter, value)
        sums.add()
    assert (sums.take()["norm.weight"] == 1.5).all()
    assert parameter.grad is None


def test_a_tied_table_is_one_parameter() -> None:
    trainer = Trainer(tiny(), FP32)
    assert "head.weight" not in trainer.weights.states
    assert len(trainer.weights.states) == len(list(trainer.model.parameters()))


def test_nothing_to_learn_is_refused() -> None:
    document = draw(6)
    with pytest.raises(UsageError, match="nothing to learn"):
        Trainer(tiny(), FP32).step([pack(*document, ignored=range(6))], lr=1e-3)


def test_gradients_that_are_no_numbers_change_nothing() -> None:
    trainer = Trainer(tiny(), FP32)
    with torch.no_grad():
        trainer.weights.parameters["norm.weight"][3] = math.nan
    before = trainer.weights.master("embed.weight").clone()
    with pytest.raises(NumericsError, match="not numbers"):
        trainer.step(BATCHES, lr=1e-3)
    assert torch.equal(trainer.weights.master("embed.weight"), before)
    assert trainer.optimizer.num_steps == 0


def test_held_out_loss_weighs_every_token_alike() -> None:
    model = tiny()
    expected = naive_loss(model, [joined(BATCHES)]).item()
    loss = held_out_loss(Trainer(model, FP32), BATCHES)
    assert loss == pytest.approx(expected, abs=1e-5)
    assert held_out_loss(Trainer(model, FP32), []) is None


@pytest.mark.parametrize(
    ("decay", "expected"),
    [("constant", [1, 1, 1]), ("linear", [1, 0.6, 0.2]), ("cosine", [1, 0.6, 0.2])],
)
def test_the_learning_rate(decay: Any, expected: list[float]) -> None:
    options = ScheduleOptions(decay, warmup=4, final=0.2)
    assert [learning_rate(8.0, options, step, 0.0) for step in range(4)] == [2, 4, 6, 8]
    got = [learning_rate(1.0, options, 4, done) for done in (0, 0.5, 1)]
    assert got == pytest.approx(expected)


def test_how_much_of_a_run_is_done() -> None:
    counters = Counters(steps=5, tokens=100, seconds=30)
    assert share_done(RunLength(steps=20), counters) == 0.25
    assert share_done(RunLength(tokens=400), counters) == 0.25
    assert share_done(RunLength(minutes=2), counters) == 0.25
    assert share_done(RunLength(steps=2), counters) == 1.0
