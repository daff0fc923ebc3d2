"""Layers cut in stages, one behind the other on ranks of their own: the tokens are those of one."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import (
    assert_idle,
    assert_only_these_failed,
    engine_for,
    naive_outputs,
    prompts_of,
    tiny,
)
from speculation import LOOKUP, force_drafts, markov
from test_tensor_faults import POISON, poisoned_prompts
from thread_ranks import ThreadedEngine
from tiny_models import save_model

from ridgeline.engine import Engine, Sampling
from ridgeline.engine.execution.tensor_runner import TensorRunner
from ridgeline.engine.loading.supported import check_supported
from ridgeline.engine.local import ranks as engine_ranks
from ridgeline.engine.local.local_backend import widest_window
from ridgeline.engine.memory.parts import stages_of
from ridgeline.errors import HardwareError, UnsupportedError, UsageError
from ridgeline.models.shapes import describe_shape
from ridgeline.parallel.inference.stages import stage_config, stage_layers
from ridgeline.profiling.tracing.stepping import EngineSteps
from ridgeline.recipe import Parallel, Recipe, Speculation, with_auto

GREEDY = Sampling(max_tokens=8, ignore_eos=True)
PROMPTS = prompts_of([1, 21, 40, 9])
NUM_LAYERS = 3  # of these models


def pipeline(num_stages: int = 2, tensor: int = 1) -> dict[str, Any]:
    return {"parallel": Parallel(tensor=tensor, pipeline=num_stages)}


def assert_exact(ranks: ThreadedEngine, model: Any, prompts: list[list[int]], how: Any) -> None:
    for prompt, output in zip(prompts, ranks.engine.generate(prompts, how), strict=True):
        assert output.status == "finished", output.reason
        found = [completion.tokens for completion in output.completions]
        assert found == naive_outputs(model, prompt, how)
    assert_idle(ranks.engine)


@pytest.mark.parametrize(
    ("name", "num_stages", "tensor", "changes"),
    [
        ("llama-mha", 3, 1, {}),
        ("llama-tied", 2, 2, {"budget": 29}),
        ("gemma3", 3, 1, {"kernels": "reference"}),  # windows of the first stage, none of the last
        ("granite", 2, 1, {"kernels": "fused"}),  # which scales its embedding and its logits
        ("mixtral", 2, 2, {"deterministic": True}),
    ],
)
def test_stages_give_the_tokens_of_one_rank(
    name: str, num_stages: int, tensor: int, changes: dict[str, Any]
) -> None:
    """And each has its part of the weights, the largest as planned."""
    model = tiny(name)
    with ThreadedEngine(model, **pipeline(num_stages, tensor), **changes) as ranks:
        assert_exact(ranks, model, PROMPTS, GREEDY)
        parts = [ranks.runners[rank].model for rank in range(num_stages * tensor)]
        held = [sum(parameter.nbytes for parameter in part.parameters()) for part in parts]
        stages = list(stages_of(model.config, ranks.engine.recipe))
        assert [part.config.num_layers for part in parts[::tensor]] == [
            len(stage.layers) for stage in stages
        ]
        assert sum(len(stage.layers) for stage in stages) == model.config.num_layers
        # Pages are kept as long as a layer of any stage may look at them.
        assert ranks.engine.scheduler.config.window == widest_window([model.config])
        assert ranks.engine.memory_plan.bytes_of("weights") in held
        assert max(held) < 0.9 * sum(p.nbytes for p in model.parameters())


def test_preemption_draws_and_what_is_asked_for_beside_tokens() -> None:
    model, prompts = tiny("llama-mha"), prompts_of([20, 25, 18, 30])
    drawn = Sampling(max_tokens=12, temperature=0.9, seed=3, n=2)
    wanted = Sampling(max_tokens=5, logprobs=2, prompt_logprobs=1)
    alone = engine_for(model, budget=40)
    with ThreadedEngine(model, num_pages=6, budget=40, **pipeline()) as ranks:
        assert_exact(ranks, model, prompts, Sampling(max_tokens=25))
        assert ranks.engine.stats.num_preemptions > 0
        assert_exact(ranks, model, prompts[:2], drawn)
        expected = alone.generate(prompts, wanted)
        for found, right in zip(ranks.engine.generate(prompts, wanted), expected, strict=True):
            assert found.tokens == right.tokens
            assert found.prompt_logprobs is not None
            assert right.prompt_logprobs is not None
            for one, other in zip(
                found.prompt_logprobs[1:], right.prompt_logprobs[1:], strict=True
            ):
                assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
        embedded = ranks.engine.embed(prompts, "mean")
        torch.testing.assert_close(embedded, alone.embed(prompts, "mean"), rtol=1e-4, atol=1e-5)


def test_a_checkpoint_with_a_scheme_and_a_head_of_codes(tmp_path: Path) -> None:
    save_model("llama-mha", tmp_path)
    changes: dict[str, Any] = {"scheme": "int8", "head": "int8"}
    expected = engine_for(tmp_path, **changes).generate(PROMPTS, GREEDY)  # type: ignore[arg-type]
    with ThreadedEngine(tmp_path, **pipeline(2, 2), **changes) as ranks:
        found = ranks.engine.generate(PROMPTS, GREEDY)
        assert_idle(ranks.engine)
    assert [each.tokens for each in found] == [each.tokens for each in expected]


def test_what_is_looked_up_and_what_a_draft_model_drafts(tmp_path: Path) -> None:
    model = markov(deepcopy(tiny("llama-mha")))
    with ThreadedEngine(model, speculation=LOOKUP, **pipeline(2, 2)) as ranks:
        force_drafts(ranks.engine)
        assert_exact(ranks, model, PROMPTS, replace(GREEDY, max_tokens=30))
        assert ranks.engine.stats.accepted_tokens > 0
    save_model("llama-mha", tmp_path)
    speculation = Speculation("draft", max_draft_tokens=4, draft_model=str(tmp_path))
    target = tiny("llama-mha")
    with ThreadedEngine(target, speculation=speculation, **pipeline()) as ranks:
        force_drafts(ranks.engine)
        assert_exact(ranks, target, PROMPTS, GREEDY)
        stats = ranks.engine.stats
        assert stats.drafted_tokens == stats.accepted_tokens > 0


# --- what goes wrong ------------------------------------------------------------------------


def fail_at(runner: TensorRunner, number: int) -> list[int]:
    """Passes with the poison fail on this rank at their call of this number."""
    group, forward = runner.group, runner.forward
    left: list[int | None] = [None]
    failed: list[int] = []

    def poisoned(inputs: Any, *rest: Any) -> torch.Tensor:
        bad = (inputs.ids == POISON) & (inputs.positions == 3)
        left[0] = number if bad.any() else None
        return forward(inputs, *rest)

    def counted(call: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        def call_or_fail(x: torch.Tensor) -> Any:
            if left[0] == 0:
                left[0] = None
                failed.append(len(x))
                raise RuntimeError("poison")
            left[0] = None if left[0] is None else left[0] - 1
            return call(x)

        return call_or_fail

    runner.forward = poisoned  # type: ignore[method-assign]
    for name in ("all_reduce", "all_gather", "hand_on", "take_over"):
        setattr(group, name, counted(getattr(group, name)))
    return failed


@pytest.mark.sweep(keep=4)
@pytest.mark.parametrize("rank", [0, 1, 2, 3])
@pytest.mark.parametrize("number", [0, 1, 3, 5])
def test_a_pass_that_fails_in_one_stage_is_bisected_in_all(rank: int, number: int) -> None:
    prompts, wrong = poisoned_prompts()
    with ThreadedEngine(tiny("llama-mha"), **pipeline(2, 2)) as ranks:
        own = len(stage_layers(ranks.engine.config, 2)[rank // 2])
        failed = fail_at(ranks.runners[rank], min(number, 2 * own + 1))
        outputs = ranks.engine.generate(prompts, replace(GREEDY, max_tokens=6))
        assert_idle(ranks.engine)
        assert len(failed) > 1  # whole, then in parts
        assert not any(future.done() for future in ranks.futures)
    sampling = replace(GREEDY, max_tokens=6)
    assert_only_these_failed(outputs, prompts, sampling, wrong, "RuntimeError: poison")


def test_a_stage_that_goes_ends_the_engine_in_words() -> None:
    with ThreadedEngine(tiny("llama-mha"), **pipeline()) as ranks:

        def dying(*_: Any) -> torch.Tensor:
            raise HardwareError("the device failed: CUDA error: gone")

        ranks.runners[1].forward = dying  # type: ignore[method-assign]
        with pytest.raises(HardwareError, match="lost a rank"):
            ranks.engine.generate(prompts_of([9]), GREEDY)


def test_stages_that_cannot_be_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_ranks, "Ranks", None)  # must not be reached
    with pytest.raises(
        UsageError, match="pipeline_parallel is 4, and the model has 3 layers; give"
    ):
        Engine(tiny("llama-mha"), Recipe(parallel=Parallel(pipeline=4)))
    config, staged = tiny("llama-mha").config, Recipe(parallel=Parallel(pipeline=2))
    filled = with_auto(replace(staged, graphs=True), config, torch.bfloat16, "cuda:0")
    with pytest.raises(UnsupportedError, match="pipeline parallel and graphs"):
        check_supported(filled, "cuda:0")
    assert not with_auto(staged, config, torch.bfloat16, "cuda:0").graphs


def test_a_profile_refuses_stages() -> None:
    with (
        ThreadedEngine(tiny("llama-mha"), **pipeline()) as ranks,
        pytest.raises(UnsupportedError, match="leave --pipeline-parallel out"),
    ):
        EngineSteps(ranks.engine)


# --- who has what ---------------------------------------------------------------------------


@pytest.mark.parametrize("num_stages", [2, 4, 8])
def test_stages_cost_about_the_same(num_stages: int) -> None:
    """The head counts with the first: it has fewer layers."""
    config = describe_shape("llama-3.1-8b").config
    counts = [len(layers) for layers in stage_layers(config, num_stages)]
    assert sum(counts) == config.num_layers == 32
    assert counts[0] == min(counts) < max(counts) <= 32 // num_stages + 1
    parts = [stage_config(config, num_stages, stage) for stage in range(num_stages)]
    assert [part.vocab_size for part in parts] == [config.vocab_size] + [1] * (num_stages - 1)
    recipe = with_auto(
        Recipe(parallel=Parallel(tensor=2, pipeline=num_stages), graphs=False),
        config,
        torch.bfloat16,
        "cuda:0",
    )
    layers = [stage.layers for stage in stages_of(config, recipe)]
    assert [number for each in layers for number in each] == list(range(32))
