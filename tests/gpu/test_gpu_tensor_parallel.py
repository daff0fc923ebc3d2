"""Tensor parallel on GPUs: what one can show with threads and with a group of one, and, where there
are two, the real thing.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any
from unittest import mock

import pytest
import torch
from engines import assert_idle, engine_for, naive_outputs, prompts_of, tiny
from thread_ranks import ThreadedEngine
from torch import Tensor, distributed

from ridgeline.engine import Engine, Output, Sampling
from ridgeline.engine.execution.tensor_runner import AgreedGraphs, TensorRunner
from ridgeline.engine.loading.loading import load_from
from ridgeline.engine.local import ranks
from ridgeline.models import Transformer
from ridgeline.parallel.inference.links import join
from ridgeline.recipe import Parallel, Recipe, Speculation

GREEDY = Sampling(max_tokens=10)
LENGTHS = [1, 5, 16, 33, 50]

needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def assert_exact(engine: Engine, model: Transformer, sampling: Sampling = GREEDY) -> None:
    prompts = prompts_of(LENGTHS)
    for prompt, output in zip(prompts, engine.generate(prompts, sampling), strict=True):
        assert output.status == "finished", output.reason
        assert [output.tokens] == naive_outputs(model, prompt, sampling)
    assert_idle(engine)


@pytest.mark.parametrize("name", ["llama-mqa-bias", "llama-tied", "qwen3-bias-tied", "gemma2"])
def test_two_threads_share_a_model_on_one_gpu(name: str) -> None:
    """The kernels with half of the heads each; a sum of threads is no NCCL, and has no graphs."""
    model = tiny(name, "fp32", "cuda")
    with ThreadedEngine(model, graphs=False) as threads:
        assert_exact(threads.engine, model)


@pytest.mark.parametrize(
    ("name", "parallel", "changes"),
    [
        ("llama-tied", Parallel(tensor=2), {"deterministic": True}),
        ("mixtral-sliding", Parallel(tensor=2), {"speculation": Speculation("prompt-lookup")}),
        ("qwen3-moe-mixed", Parallel(tensor=2, expert=2), {}),
        ("qwen3-moe-mixed", Parallel(tensor=2, expert=2), {"deterministic": True}),
        ("gemma3", Parallel(pipeline=3), {}),
        ("llama-mha", Parallel(tensor=2, pipeline=2), {}),
    ],
)
def test_threads_do_together_what_one_gpu_does(
    name: str, parallel: Parallel, changes: dict[str, Any]
) -> None:
    model, prompts = tiny(name, "fp32", "cuda"), prompts_of(LENGTHS)
    alone = {key: value for key, value in changes.items() if key != "speculation"}
    expected = engine_for(model, graphs=False, **alone).generate(prompts, GREEDY)
    with ThreadedEngine(model, parallel=parallel, graphs=False, **changes) as threads:
        outputs = threads.engine.generate(prompts, GREEDY)
        assert_idle(threads.engine)
    assert [output.tokens for output in outputs] == [output.tokens for output in expected]


def test_threads_share_codes_on_one_gpu() -> None:
    """A GPU multiplies codes in 16 bits, and sums by halves round otherwise, which layers of random
    weights carry on: two threads are as near to the same codes in fp32 as one device is.
    """
    model, prompts = tiny("llama-tied", "bf16", "cuda"), prompts_of(LENGTHS)
    codes: dict[str, Any] = {"scheme": "int8", "head": "int8"}
    seen = Sampling(max_tokens=1, prompt_logprobs=0)
    alone = logprobs(engine_for(model, graphs=False, **codes).generate(prompts, seen))
    with ThreadedEngine(model, parallel=Parallel(tensor=2), graphs=False, **codes) as threads:
        shared = logprobs(threads.engine.generate(prompts, seen))
        assert_idle(threads.engine)
    exact_model = deepcopy(model).to("cpu", torch.float32)
    exact = logprobs(engine_for(exact_model, graphs=False, **codes).generate(prompts, seen))
    assert len(shared) == len(alone) == sum(len(prompt) - 1 for prompt in prompts)
    assert (alone - exact).abs().mean() < 0.05
    assert (shared - exact).abs().mean() < 2 * (alone - exact).abs().mean()


def logprobs(outputs: Sequence[Output]) -> Tensor:
    """Of the tokens of all prompts."""
    seen = [each for output in outputs for each in output.prompt_logprobs or ()]
    return torch.tensor([each.logprob for each in seen if each is not None])


def engine_of_one(model: Transformer, **changes: Any) -> Engine:
    """An engine with a group of one rank: every sum and every gather goes through NCCL."""
    dist: Any = distributed
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = join(store, 0, 1, "cuda:0", local=True)

    def load(model: Transformer, recipe: Recipe, *_: Any) -> Any:
        task = ranks.Task(model.config, recipe, "cuda", model.embed.weight.dtype)
        loaded = load_from(task.source_for(group, 1, model), recipe)
        return loaded, ranks.Members(group, lambda: None)

    with mock.patch("ridgeline.engine.local.local_backend.load_on_ranks", load):
        return engine_for(model, **changes)


@pytest.mark.parametrize("name", ["llama-tied", "mixtral"])
@pytest.mark.parametrize("graphs", [True, False])
def test_nccl_calls_can_be_captured(name: str, graphs: bool) -> None:
    model = tiny(name, "fp32", "cuda")
    with engine_of_one(model, graphs=graphs) as engine:
        assert isinstance(engine.runner, TensorRunner)
        for _ in range(2):  # captured, then replayed
            assert_exact(engine, model)
        assert (engine.runner.graphs is not None) == graphs
        if isinstance(engine.runner.graphs, AgreedGraphs):
            assert engine.runner.graphs.captured


@needs_two
@pytest.mark.parametrize("name", ["llama-tied", "qwen3-moe", "gemma3"])
@pytest.mark.parametrize("graphs", [True, False])
def test_two_gpus_give_the_tokens_of_one(name: str, graphs: bool) -> None:
    model = tiny(name, "fp32", "cuda")
    with engine_for(model, parallel=Parallel(tensor=2), graphs=graphs) as engine:
        for _ in range(2):
            assert_exact(engine, model)


@needs_two
def test_draws_are_those_of_one_gpu() -> None:
    model = tiny("llama-mha", "fp32", "cuda")
    sampling = Sampling(max_tokens=10, temperature=0.8, top_p=0.9, seed=5)
    alone = engine_for(model).generate(prompts_of(LENGTHS), sampling)
    with engine_for(model, parallel=Parallel(tensor=2)) as engine:
        shared = engine.generate(prompts_of(LENGTHS), sampling)
    assert [output.tokens for output in shared] == [output.tokens for output in alone]
