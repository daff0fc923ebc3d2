"""`deterministic`: the same request gives the same bits alone, in any batch, cut into any chunks,
after prefix hits and after preemption.
"""

from __future__ import annotations

import functools
import operator
import random
from typing import Any

import pytest
import torch
from engines import assert_exact, assert_idle, engine_for, prompts_of, tiny
from replays import Logits, assert_same, replay, requests_of
from thread_ranks import ThreadedEngine, ThreadLink
from torch import Tensor
from torch.nn import functional

from ridgeline.engine import Sampling
from ridgeline.engine.attention.fixed_attention import FixedSequences
from ridgeline.engine.loading.deterministic import deterministic
from ridgeline.errors import UnsupportedError
from ridgeline.kernels.fixed_linear import host as cpu_fixed
from ridgeline.kernels.fixed_linear.host import BLOCK, activated, block_for, in_blocks
from ridgeline.kernels.gated_activation.reference import gated_activation
from ridgeline.models import build_model
from ridgeline.models.transformer import Linear
from ridgeline.parallel.inference.group import Group, Reduction

NUM_REQUESTS = 24
RUNS: list[tuple[int, dict[str, Any]]] = [  # how many at once, and the engine's limits
    (8, {"budget": 8}),
    (8, {"budget": 17, "num_pages": 8, "overlap": False}),
    (16, {"budget": 64, "max_batch": 16, "num_pages": 14, "prefix_cache": False}),
]


@pytest.mark.sweep(keep=1)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("llama-mha", "fp32"), ("mistral-sliding", "bf16"), ("qwen3-moe", "fp32")],
)
def test_the_same_bits_in_any_company(name: str, dtype: str) -> None:
    model, draw = tiny(name, dtype), random.Random(5)
    requests = requests_of(NUM_REQUESTS, longest=60, max_tokens=(3, 9))
    order, kept = list(range(NUM_REQUESTS)), Logits()
    alone = engine_for(model, deterministic=True, prefix_cache=False)
    expected = replay(alone, requests, order, 1, kept)
    preempted = hits = 0
    for at_once, limits in RUNS:
        draw.shuffle(order)
        engine = engine_for(model, deterministic=True, **limits)
        assert_same(replay(engine, requests, order, at_once, kept, preempt=0.1), expected)
        assert_idle(engine)
        preempted += engine.stats.num_preemptions
        hits += engine.stats.hit_tokens
    assert hits > 0
    assert preempted > 5


def test_without_it_bits_differ() -> None:
    """What the test above would see: the usual sums do depend on the batch."""
    model = tiny("llama-mha")
    requests = requests_of(12, longest=60, max_tokens=(4, 8))
    kept = Logits()
    replay(engine_for(model), requests, list(range(12)), 1, kept)
    with pytest.raises(AssertionError, match="differ"):
        replay(engine_for(model, budget=17), requests, list(range(12)), 8, kept)


def in_a_ring(link: ThreadLink, tensor: Tensor, reduction: Reduction = "sum") -> None:
    """A sum as libraries make it: cut in as many pieces as there are ranks, each of which begins
    with another. The last bit of an element follows from where its tensor is cut.
    """
    parts = [part.flatten() for part in link._meet(f"all_reduce {reduction}", tensor)]
    if reduction != "sum":
        tensor.copy_({"max": torch.amax, "min": torch.amin}[reduction](torch.stack(parts), 0))
        return
    pieces = [part.tensor_split(link.size) for part in parts]
    total = [
        functools.reduce(
            operator.add, [pieces[(n + turn) % link.size][n] for turn in range(link.size)]
        )
        for n in range(link.size)
    ]
    tensor.copy_(torch.cat(total).view_as(tensor))


@pytest.mark.parametrize(
    ("name", "dtype", "size"),
    [
        ("llama-mha", "bf16", 2),
        pytest.param("llama-mha", "fp32", 4, marks=pytest.mark.slow),
        pytest.param("qwen3-moe", "fp32", 4, marks=pytest.mark.slow),
    ],
)
def test_the_same_bits_in_any_company_on_ranks(
    name: str, dtype: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ThreadLink, "all_reduce", in_a_ring)
    requests = requests_of(12, longest=40, max_tokens=(3, 6))
    order, kept = list(range(12)), Logits()
    assert_same_on_ranks(name, dtype, size, requests, order, kept, True)


def assert_same_on_ranks(
    name: str, dtype: str, size: int, requests: list[Any], order: list[int], kept: Any, fixed: bool
) -> None:
    model = tiny(name, dtype)
    with ThreadedEngine(model, size, deterministic=fixed, prefix_cache=False) as alone:
        expected = replay(alone.engine, requests, order, 1, kept)
    with ThreadedEngine(model, size, deterministic=fixed, budget=17, num_pages=8) as ranks:
        found = replay(ranks.engine, requests, order[::-1], 8, kept, preempt=0.1)
        assert_idle(ranks.engine)
    assert_same(found, expected)


@pytest.mark.slow
def test_a_sum_over_ranks_in_any_order_has_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test above would see if ranks summed as they come."""
    monkeypatch.setattr(ThreadLink, "all_reduce", in_a_ring)
    monkeypatch.setattr(Group, "in_order", property(lambda _: False, lambda *_: None), False)
    requests = requests_of(12, longest=40, max_tokens=(3, 6))
    with pytest.raises(AssertionError, match="differ"):
        assert_same_on_ranks("llama-mha", "fp32", 4, requests, list(range(12)), Logits(), True)


def test_the_plain_loops_tokens_on_ranks() -> None:
    model = tiny("gemma2")
    with ThreadedEngine(model, deterministic=True, budget=24) as ranks:
        outputs = ranks.engine.generate(prompts_of([1, 17, 60]), Sampling(max_tokens=8))
        alone = engine_for(model).generate(prompts_of([1, 17, 60]), Sampling(max_tokens=8))
    assert [each.tokens for each in outputs] == [each.tokens for each in alone]


def test_the_model_it_is_made_of_stays_as_it_is() -> None:
    model = tiny("llama-tied")
    fixed = deterministic(model)
    assert type(model.layers[0].attn.qkv) is Linear
    assert fixed.layers[0].attn.qkv is not model.layers[0].attn.qkv
    assert fixed.layers[0].attn.qkv.weight is model.layers[0].attn.qkv.weight
    assert fixed.head.weight is fixed.embed.weight


def test_layers_it_does_not_know_are_refused() -> None:
    class Other(Linear):
        pass

    model = build_model(tiny("llama-mha").config, torch.float32, "cpu")
    model.head.__class__ = Other
    with pytest.raises(UnsupportedError, match="not known to hold for Other layers"):
        deterministic(model)


def test_what_does_not_go_with_it_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="fp16 and an 8-bit KV"):
        engine_for(tiny("llama-mha", "fp16"), deterministic=True, kv_dtype="int8")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_block_do_not_know_of_each_other(dtype: torch.dtype) -> None:
    weight, x = torch.randn(131, 48).to(dtype), torch.randn(37, 48).to(dtype)
    block = block_for(weight)
    assert block in (1, BLOCK)

    def product(rows: Tensor) -> Tensor:
        return in_blocks(lambda part: functional.linear(part, weight), block, rows)

    whole = product(x)
    for start, end in ((0, 1), (3, 20), (16, 37), (36, 37)):
        assert torch.equal(product(x[start:end]), whole[start:end])
    torch.testing.assert_close(whole, functional.linear(x, weight))


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_activations_are_those_of_the_definition(activation: Any) -> None:
    x = torch.randn(5, 66) * 3
    torch.testing.assert_close(activated(x, activation), gated_activation(x, activation))
    assert torch.equal(activated(x, activation)[2:3], activated(x[2:3].clone(), activation))


def test_the_plain_loops_tokens() -> None:
    model = tiny("gemma2")
    prompts = prompts_of([1, 17, 60])
    engine = engine_for(model, deterministic=True, budget=24)
    assert_exact(engine, prompts, [Sampling(max_tokens=8)] * 3)


def test_the_gpus_way_through_a_step() -> None:
    """Decode rows as prompts of one token, by the reference: what a GPU's kernel is asked for."""
    model = tiny("gemma3")
    engine = engine_for(model, budget=24)
    engine.runner.passes.sequences = FixedSequences
    assert_exact(engine, prompts_of([1, 17, 40]), [Sampling(max_tokens=6)] * 3)


def test_a_function_that_looks_at_its_neighbours_is_given_none() -> None:
    """As erf is on ARM: the last bit follows from what else is in the vector."""

    def neighbourly(x: Tensor) -> Tensor:
        groups = torch.nn.functional.pad(x, (0, -len(x) % 8)).view(-1, 8)
        return (groups * (1 + 2e-7 * (groups.amax(1, keepdim=True) > 5))).view(-1)[: len(x)]

    made = cpu_fixed._alike.__wrapped__(neighbourly, torch.get_num_threads())
    x = torch.randn(1000, generator=torch.Generator().manual_seed(1)) * 4
    assert not torch.equal(neighbourly(x[3:90]), neighbourly(x)[3:90])
    assert torch.equal(made(x[3:90]), made(x)[3:90])
    assert cpu_fixed._alike.__wrapped__(torch.neg, 1) is torch.neg
