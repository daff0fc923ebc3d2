"""Steps of a pipeline are those of the plain loop, whatever its schedule and what it is joined
with.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from packed import TINY, draw, pack, tiny
from pipeline_work import kept_bytes, lives, tied_ends
from process_ranks import run_ranks
from rank_work import steps, whole_model
from test_layout_steps import TRAIN, check_steps, shape
from torch import Tensor

from ridgeline.errors import UsageError
from ridgeline.models import ModelConfig
from ridgeline.models.families import describe_hf
from ridgeline.parallel.layout import Layout
from ridgeline.parallel.mesh import Mesh, alone, own_groups
from ridgeline.training.config import OptimizerOptions, Recomputation, TrainConfig
from ridgeline.training.naive import naive_gradients
from ridgeline.training.ranks.pipelines.pipeline import filled_up
from ridgeline.training.ranks.rank_trainer import rank_trainer, whole_tensors
from ridgeline.training.stepping.forward import ForwardPlan, loss_of
from ridgeline.training.stepping.gradient_products import DeferredGradients
from ridgeline.training.stepping.ops import PlainOps

UNTIED = {"tie_word_embeddings": False}
EXPERTS = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
slow = pytest.mark.slow


def config_of(num_layers: int, **changes: Any) -> ModelConfig:
    return describe_hf(TINY | {"num_hidden_layers": num_layers} | changes, origin="tiny").config


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ("pipeline=2", {"num_hidden_layers": 3}),
        pytest.param(
            "pipeline=2,schedule=zero-bubble,stages=2",
            {"num_hidden_layers": 4} | UNTIED,
            marks=slow,
        ),
        pytest.param(
            "pipeline=2,schedule=interleaved,stages=2,shard=2", {"num_hidden_layers": 4}, marks=slow
        ),
    ],
)
def test_steps(layout: str, changes: dict[str, Any]) -> None:
    check_steps(layout, shape(**changes))


@slow
@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ("pipeline=2,schedule=gpipe", {"num_hidden_layers": 3} | UNTIED),
        ("pipeline=2,schedule=interleaved,stages=2", {"num_hidden_layers": 4}),
        ("pipeline=2,schedule=interleaved,stages=2", {"num_hidden_layers": 5} | UNTIED),
        ("pipeline=2,schedule=zero-bubble,stages=2", {"num_hidden_layers": 4}),
        ("pipeline=4", {"num_hidden_layers": 5}),
        ("pipeline=4,schedule=zero-bubble,stages=2", {"num_hidden_layers": 8}),
        ("pipeline=2,shard=2", {"num_hidden_layers": 3} | UNTIED),
        ("pipeline=2,replicate=2", {"num_hidden_layers": 3}),
        ("pipeline=2,schedule=gpipe,shard=2", {"num_hidden_layers": 3}),
        ("pipeline=2,schedule=zero-bubble,stages=2,shard=2", {"num_hidden_layers": 4}),
        ("pipeline=2,schedule=zero-bubble,stages=2", {"num_hidden_layers": 4} | EXPERTS),
        ("pipeline=2,tensor=2", {"num_hidden_layers": 3}),
        ("pipeline=2,tensor=2,sequence=false", {"num_hidden_layers": 3} | UNTIED),
        ("pipeline=2,schedule=interleaved,stages=2,tensor=2", {"num_hidden_layers": 4}),
        ("pipeline=2,schedule=zero-bubble,stages=2,tensor=2", {"num_hidden_layers": 4}),
    ],
)
def test_all_schedules_and_pairs(layout: str, changes: dict[str, Any]) -> None:
    check_steps(layout, shape(**changes))


@slow
@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ("pipeline=2,context=2", {"num_hidden_layers": 3}),
        ("pipeline=2,context=2,schedule=interleaved,stages=2", {"num_hidden_layers": 4} | UNTIED),
        ("pipeline=2,context=2,schedule=zero-bubble,stages=2", {"num_hidden_layers": 4}),
        ("pipeline=2,shard=2,expert=2", {"num_hidden_layers": 3} | EXPERTS),
        ("pipeline=2,replicate=2,expert=2,capacity=4", {"num_hidden_layers": 2} | EXPERTS),
        (
            "pipeline=2,shard=2,expert=2,schedule=zero-bubble,stages=2",
            {"num_hidden_layers": 4} | EXPERTS | UNTIED,
        ),
    ],
)
def test_tokens_and_experts_are_shared_beside_it(layout: str, changes: dict[str, Any]) -> None:
    check_steps(layout, shape(**changes))


@slow
@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ("pipeline=2,shard=2,tensor=2", {"num_hidden_layers": 3}),
        ("pipeline=2,context=2,tensor=2", {"num_hidden_layers": 3}),
        ("pipeline=2,schedule=gpipe,replicate=2,shard=2", {"num_hidden_layers": 3} | UNTIED),
        ("pipeline=2,context=2,shard=2,expert=4", {"num_hidden_layers": 2} | EXPERTS),
        ("replicate=2,shard=2,tensor=2", {}),
        ("context=2,shard=2,tensor=2", {}),
        ("context=2,shard=2,tensor=2,expert=2", EXPERTS),
    ],
)
def test_three_axes_and_four(layout: str, changes: dict[str, Any]) -> None:
    """On eight ranks."""
    check_steps(layout, shape(**changes))


@slow
@pytest.mark.parametrize(
    "layout",
    ["pipeline=2,schedule=gpipe", "pipeline=2,schedule=zero-bubble,stages=2"],
)
def test_a_step_that_is_one_pass(layout: str) -> None:
    check_steps(layout, shape(num_hidden_layers=4), micro=4)


@pytest.mark.parametrize("layout", ["pipeline=2", pytest.param("pipeline=2,shard=2", marks=slow)])
def test_a_trainers_life(layout: str) -> None:
    """Held-out loss, a bad step, its replay, and micro-batches of unlike lengths."""
    config = config_of(3)
    model = whole_model(config)
    own = [pack(*draw(9, 5, seed=1)), pack(*draw(21, seed=2), ignored=(0, 1))]
    count = sum(batch.num_targets for batch in own)
    with torch.no_grad():
        plan = ForwardPlan(PlainOps())
        losses = [loss_of(model, batch, plan).item() for batch in own]
    expected = naive_gradients(model, own)
    for each in run_ranks(Layout.parse(layout), lives, config, TRAIN, own):
        assert each.held_out == pytest.approx(losses, rel=1e-5)
        assert each.loss == pytest.approx(sum(losses) / count, rel=1e-5)
        for name, gradient in expected.items():
            torch.testing.assert_close(each.gradients[name], gradient, atol=1e-5, rtol=1e-5)
        assert each.is_bad == [True, True, False]
        assert each.behind_bad == each.held_out
        assert each.behind_good < sum(each.held_out)
        even = [batch.num_targets * math.log(config.vocab_size) for batch in own]
        assert each.of_zeros == pytest.approx(even, rel=1e-5)


def test_tied_tables_stay_alike() -> None:
    """Bit for bit, where rounding is random: the last rank has a stage before that of its table."""
    moments = OptimizerOptions(moments="bf16")
    train = replace(TRAIN, precision="bf16", optimizer=moments)
    layout = Layout(pipeline=2, schedule="interleaved", stages=2)
    first, last = run_ranks(layout, tied_ends, config_of(4), train)
    assert first.keys() == last.keys()
    for name, values in first.items():
        assert torch.equal(values, last[name]), name


@slow
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_bf16_with_shards_is_near_one_device(schedule: str) -> None:
    config = config_of(4)
    stages = 2 if schedule == "zero-bubble" else 1
    train = replace(TRAIN, precision="bf16")
    expected = steps(alone(), config, train, 1, 1).gradients
    layout = Layout.parse(f"pipeline=2,shard=2,schedule={schedule},stages={stages}")
    for each in run_ranks(layout, steps, config, train, 1, 1):
        for name, gradient in expected.items():
            error = (each.gradients[name] - gradient).norm() / gradient.norm()
            assert error < 0.02, (name, error)


@slow
def test_activations_are_bounded_by_the_schedule() -> None:
    kept = {
        schedule: [
            run_ranks(Layout.parse(f"pipeline=2,schedule={schedule}"), kept_bytes, config_of(2), n)
            for n in (4, 8)
        ]
        for schedule in ("gpipe", "1f1b")
    }
    few, many = kept["1f1b"]
    assert few == many
    few, many = kept["gpipe"]
    assert all(b == 2 * a for a, b in zip(few, many, strict=True))
    assert kept["1f1b"][0][0] == few[0] // 2  # two of four


@pytest.mark.slow
def test_a_number_of_micro_batches_that_does_not_fit_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"UsageError: pipeline=2 .* and a step has 1; try 2"):
        run_ranks(Layout(pipeline=2), steps, config_of(2), TRAIN, 1, 4)


def test_graphs_are_refused() -> None:
    mesh = Mesh(Layout(pipeline=2), 0, torch.device("cpu"))
    train = TrainConfig(precision="fp32", graphs=True)
    with pytest.raises(UsageError, match="remove --graphs"):
        rank_trainer(config_of(2), train, mesh, whole_tensors(whole_model(config_of(2))))


@pytest.mark.parametrize("recomputation", ["none", "elementwise", "attention", "blocks"])
def test_put_off_products_are_the_same_gradients(recomputation: Recomputation) -> None:
    batch = pack(*draw(21, 5))
    model = tiny().requires_grad_(True)
    loss_of(model, batch, ForwardPlan(PlainOps())).backward()
    expected = {name: each.grad for name, each in model.named_parameters()}
    model.zero_grad()
    deferred = DeferredGradients()
    plan = ForwardPlan(PlainOps(), recomputation, deferred=deferred)
    for _ in range(2):
        loss_of(model, batch, plan).backward()
    late = {name for name, each in model.named_parameters() if each.grad is None}
    products = ("qkv", "out", "gate_up", "down")
    assert late == {
        f"layers.{layer}.{'attn' if product in ('qkv', 'out') else 'mlp'}.{product}.weight"
        for layer in range(2)
        for product in products
    }
    deferred.take()()
    for name, each in model.named_parameters():
        assert isinstance(each.grad, Tensor)
        assert expected[name] is not None
        torch.testing.assert_close(each.grad, 2 * expected[name], atol=1e-5, rtol=1e-5)
    deferred.take()()  # nothing is left


def test_filled_up_batches_count_the_same() -> None:
    short, long = pack(*draw(9, 5, seed=1)), pack(*draw(21, seed=2))
    filled, same = filled_up([short, long])
    assert same is long
    assert len(filled.ids) == len(filled.targets) == len(filled.positions) == 21
    assert filled.num_targets == short.num_targets
    assert filled.lengths == (9, 5, 7)


@pytest.mark.parametrize("layout", ["pipeline=4", "pipeline=3,shard=2,tensor=2", "pipeline=2"])
def test_each_rank_is_in_one_group_of_each_name(layout: str) -> None:
    """torch names a group by how many a rank has: ranks that had fewer would wait for ever."""
    chosen = Layout.parse(layout)
    groups = [own_groups(chosen, rank) for rank in range(chosen.size)]
    for each in groups:
        assert list(each) == list(groups[0])
    for name in groups[0]:
        ranks = sorted(rank for group in {each[name] for each in groups} for rank in group)
        assert ranks == list(range(chosen.size)), name
