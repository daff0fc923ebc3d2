"""Experts spread over ranks, whole ones on each: the tokens are those of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engines import assert_idle, engine_for, naive_outputs, prompts_of, tiny
from thread_ranks import ThreadedEngine
from tiny_models import MODELS, save_model

from ridgeline.engine import Engine, Sampling
from ridgeline.errors import UsageError
from ridgeline.kernels.moe import reference, triton
from ridgeline.parallel.inference.tensor import RowExperts
from ridgeline.recipe import Parallel, Recipe

GREEDY = Sampling(max_tokens=8, ignore_eos=True)
PROMPTS = prompts_of([1, 21, 40, 9])


@pytest.fixture(autouse=True)
def _mixtures(monkeypatch: pytest.MonkeyPatch) -> None:
    """With experts that two and four ranks can share."""
    eight = {"num_experts": 8, "num_key_value_heads": 4}
    monkeypatch.setitem(MODELS, "moe-8", (MODELS["qwen3-moe"][0], MODELS["qwen3-moe"][1] | eight))
    four = {"num_local_experts": 4, "num_experts_per_tok": 2}
    monkeypatch.setitem(MODELS, "mixtral-4", ("Mixtral", four))


@pytest.mark.parametrize(
    ("name", "size", "changes"),
    [
        ("mixtral-4", 2, {}),
        ("moe-8", 4, {}),
        ("qwen3-moe-mixed", 2, {"deterministic": True}),  # one layer of it is dense
    ],
)
def test_whole_experts_give_the_tokens_of_one_rank(
    name: str, size: int, changes: dict[str, Any]
) -> None:
    model = tiny(name)
    parallel = Parallel(tensor=size, expert=size)
    with ThreadedEngine(model, size, parallel=parallel, budget=29, **changes) as ranks:
        for prompt, output in zip(PROMPTS, ranks.engine.generate(PROMPTS, GREEDY), strict=True):
            assert output.status == "finished", output.reason
            assert [output.tokens] == naive_outputs(model, prompt, GREEDY)
        assert_idle(ranks.engine)
        layers = [experts_of(ranks.runners[rank].model) for rank in range(size)]
        for whole, *parts in zip(experts_of(model), *layers, strict=True):
            assert all(isinstance(part, RowExperts) for part in parts)
            assert torch.equal(torch.cat([part.down for part in parts]), whole.down)
        held = sum(parameter.nbytes for parameter in ranks.runners[0].model.parameters())
        assert ranks.engine.memory_plan.bytes_of("weights") == held


def experts_of(model: Any) -> list[Any]:
    return [block.mlp for block in model.layers if hasattr(block.mlp, "router")]


def test_a_checkpoint_and_a_scheme(tmp_path: Path) -> None:
    save_model("mixtral-4", tmp_path)
    expected = engine_for(tmp_path, scheme="int8").generate(PROMPTS, GREEDY)  # type: ignore[arg-type]
    parallel = Parallel(tensor=2, expert=2)
    with ThreadedEngine(tmp_path, parallel=parallel, scheme="int8") as ranks:
        found = ranks.engine.generate(PROMPTS, GREEDY)
    assert [each.tokens for each in found] == [each.tokens for each in expected]


@pytest.mark.parametrize("fixed", [False, True])
def test_the_kernel_leaves_out_what_others_have(fixed: bool) -> None:
    """Parts of the experts, each with the tokens routed there, add up to all of them."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(21, 40, generator=generator)
    gate_up = torch.randn(6, 2 * 24, 40, generator=generator) * 0.2
    down = torch.randn(6, 40, 24, generator=generator) * 0.2
    weights, experts = reference.route(torch.randn(21, 6, generator=generator), 3, True)
    whole = reference.mixture_of_experts(x, weights, experts, gate_up, down, "silu")
    total = torch.zeros_like(whole)
    for first in (0, 2, 4):
        own = experts - first
        own = own.where((own >= 0) & (own < 2), 2)
        held = (gate_up[first : first + 2].clone(), down[first : first + 2].clone())
        part = triton.mixture_of_experts(
            x, weights, own, *held, "silu", fixed=fixed, is_part=True
        )  # fmt: skip
        torch.testing.assert_close(
            part, reference.mixture_of_experts(x, weights, own, *held, "silu")
        )
        total += part
    torch.testing.assert_close(total, whole)


@pytest.mark.parametrize(
    ("name", "degree", "says"),
    [
        ("llama-mha", 2, "the model has no experts; remove --expert-parallel"),
        ("mixtral", 2, "does not divide the 5 experts of a layer; remove --expert-parallel"),
        ("qwen3-moe", 4, "does not divide the 6 experts of a layer; try one of 2 for both"),
    ],
)
def test_experts_that_cannot_be_spread_are_refused(name: str, degree: int, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Engine(tiny(name), Recipe(parallel=Parallel(tensor=degree, expert=degree)))


def test_experts_are_spread_over_the_ranks_there_are() -> None:
    with pytest.raises(UsageError, match=r"expert_parallel is 2 and tensor_parallel 1.* the same"):
        Parallel(expert=2)
