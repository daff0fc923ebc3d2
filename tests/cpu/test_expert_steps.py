"""Steps in which ranks share the experts of a layer are those of the plain loop, whether all tokens
arrive or there is room for all of them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from packed import TINY
from process_ranks import run_ranks
from rank_work import sequences, starved, undecided
from test_layout_steps import TRAIN, check_steps, shape

from ridgeline.errors import UsageError
from ridgeline.kernels.moe import mixture_of_experts, route
from ridgeline.models.families import describe_hf
from ridgeline.models.transformer import ExpertMLP
from ridgeline.parallel.degrees import check_experts
from ridgeline.parallel.layout import Layout
from ridgeline.parallel.mesh import alone
from ridgeline.training.naive import naive_gradients
from ridgeline.training.stepping.experts import DropCounts, ExpertCut

MIXTRAL: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
QWEN: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "head_dim": 8,
}
MIXED = QWEN | {"mlp_only_layers": [1], "norm_topk_prob": False}


def test_steps_of_mixtral() -> None:
    check_steps("shard=2,expert=2", shape(**MIXTRAL))


@pytest.mark.slow
def test_steps_with_room_for_all() -> None:
    check_steps("replicate=2,expert=2,capacity=4", shape(**QWEN), micro=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ("replicate=2,expert=2", MIXTRAL),
        ("shard=2,expert=2", MIXED),
        ("shard=2,expert=2,capacity=4", MIXTRAL),
        ("shard=2,expert=2,tensor=2", MIXTRAL),
        ("shard=2,expert=2,tensor=2,capacity=3", QWEN),
        ("shard=2,expert=2,tensor=2,sequence=false", QWEN),
        ("shard=4,expert=2", QWEN),
        ("shard=2,replicate=2,expert=2", MIXTRAL),
        ("replicate=4,expert=4", QWEN),
        ("context=2,expert=2", MIXTRAL),
        ("context=2,shard=2,expert=4", QWEN),
    ],
)
def test_steps(layout: str, changes: dict[str, Any]) -> None:
    check_steps(layout, shape(**changes))


@pytest.mark.slow
@pytest.mark.parametrize("changes", [MIXTRAL, QWEN], ids=["mixtral", "qwen"])
def test_steps_that_compute_blocks_again(changes: dict[str, Any]) -> None:
    train = replace(TRAIN, recomputation="blocks")
    check_steps("shard=2,expert=2", shape(**changes), micro=2, train=train)


@pytest.mark.parametrize(
    "layout",
    [
        "shard=2,expert=2",
        pytest.param("shard=2,expert=2,capacity=2", marks=pytest.mark.slow),
    ],
)
def test_experts_that_no_token_reached_have_zeros(layout: str) -> None:
    """On the second rank they are all, and nobody waits for it in vain."""
    config = describe_hf(TINY | MIXTRAL, origin="tiny").config
    expected = naive_gradients(undecided(config), sequences(4, config.vocab_size))
    for gradients, share in run_ranks(Layout.parse(layout), starved, config, TRAIN):
        assert share == 0.0
        assert gradients.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(gradients[name], gradient, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_rows_without_room_are_counted() -> None:
    """Two of four experts are chosen by all, with room for half of their rows."""
    config = describe_hf(TINY | MIXTRAL, origin="tiny").config
    layout = Layout.parse("shard=2,expert=2,capacity=1")
    for gradients, share in run_ranks(layout, starved, config, TRAIN):
        assert share == 0.5
        assert all(each.isfinite().all() for each in gradients.values())


@pytest.mark.parametrize("capacity", [1.0, 1.3, 4.0])
def test_rows_with_the_smallest_weights_are_dropped(capacity: float) -> None:
    config = describe_hf(TINY | QWEN, origin="tiny").config
    experts = config.layers[0].experts
    assert experts is not None
    torch.manual_seed(1)
    mlp = ExpertMLP(config, experts)
    for parameter in mlp.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x_TD = torch.randn(20, config.hidden_size, requires_grad=True)
    counts = DropCounts(torch.device("cpu"))
    out_TD = ExpertCut(alone().axis("expert"), capacity, counts).routed(mlp, x_TD)
    weights_TA, experts_TA = route(mlp.router(x_TD), 3, renormalize=True)
    room = min(20, math.ceil(capacity * 20 * 3 / 8))
    keeps_TA = torch.zeros_like(experts_TA, dtype=torch.bool)
    for expert in range(8):
        chosen = (experts_TA == expert).nonzero().tolist()
        chosen.sort(key=lambda place: -weights_TA[tuple(place)].item())
        for place in chosen[:room]:
            keeps_TA[tuple(place)] = True
    assert counts.take().tolist() == [60 - int(keeps_TA.sum()), 60]
    assert keeps_TA.all() == (capacity == 4.0)
    expected_TD = mixture_of_experts(
        x_TD, weights_TA * keeps_TA, experts_TA, mlp.gate_up, mlp.down, mlp.activation
    )
    torch.testing.assert_close(out_TD, expected_TD)
    grad_TD = torch.randn(x_TD.shape)
    leaves = [x_TD, *mlp.parameters()]
    own = torch.autograd.grad(out_TD, leaves, grad_TD)
    wanted = torch.autograd.grad(expected_TD, leaves, grad_TD)
    for gradient, want in zip(own, wanted, strict=True):
        torch.testing.assert_close(gradient, want)


def test_experts_that_cannot_be_shared_are_refused() -> None:
    mixtral = describe_hf(TINY | MIXTRAL | {"num_local_experts": 6}, origin="tiny").config
    with pytest.raises(UsageError, match="does not divide the 6 experts of a layer; try expert=2"):
        check_experts(mixtral, Layout(shard=4, expert=4))
    with pytest.raises(UsageError, match="the model has no experts; remove it"):
        check_experts(describe_hf(TINY, origin="tiny").config, Layout(shard=2, expert=2))
    with pytest.raises(UsageError, match=r"capacity is 1\.5 without expert; remove it"):
        Layout.parse("shard=2,capacity=1.5")
    with pytest.raises(UsageError, match="capacity=much; give a number"):
        Layout.parse("capacity=much")
