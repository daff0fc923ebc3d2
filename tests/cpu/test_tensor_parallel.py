"""A model on several ranks gives the tokens it gives on one: here the ranks are threads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import assert_idle, engine_for, naive_outputs, prompts_of, tiny
from gguf_files import write_gguf
from thread_ranks import ThreadedEngine, run_ranks
from tiny_models import MODELS, make_model, num_heads, one_of_each_family, save_model

from ridgeline.engine import Sampling
from ridgeline.engine.memory.footprint import weight_bytes
from ridgeline.engine.naive import OneSequence
from ridgeline.errors import UnsupportedError
from ridgeline.models import Transformer
from ridgeline.models.checkpoint import open_checkpoint
from ridgeline.models.families import describe
from ridgeline.parallel.degrees import rank_config
from ridgeline.parallel.inference.filling import cut_weights, load_split_weights
from ridgeline.parallel.inference.group import Group
from ridgeline.parallel.inference.tensor import split_model
from ridgeline.quantization import load_model

GREEDY = Sampling(max_tokens=10)
SHORT = Sampling(max_tokens=3)
SPLIT = sorted(name for name in MODELS if num_heads(name) % 2 == 0)  # that two can share
# Of every family, with what is awkward to share.
ONE_EACH = one_of_each_family("llama-mqa-bias", "mistral-sliding", "mixtral")
CPU = torch.device("cpu")


def part_of(model: Transformer, group: Group) -> Transformer:
    part = split_model(model.config, model.embed.weight.dtype, CPU, group)
    cut_weights(part, model.config, group, dict(model.named_parameters()).__getitem__)
    return part


@torch.inference_mode()
def logits_of(model: Transformer, prompt: list[int]) -> torch.Tensor:
    cache = OneSequence(model, len(prompt))
    cache.begin(len(prompt), len(prompt))
    return model.logits(model(torch.tensor(prompt), cache))


@pytest.mark.parametrize("name", SPLIT)
def test_the_parts_of_a_model_are_the_model(name: str) -> None:
    model = tiny(name)
    (prompt,) = prompts_of([min(40, model.config.max_context - 1)])
    expected = logits_of(model, prompt)
    found = run_ranks(2, lambda group: logits_of(part_of(model, group), prompt))
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "size"), [("llama-mqa-bias", 4), ("llama-mha", 4), ("mixtral", 4), ("qwen3", 5)]
)
def test_more_ranks_than_kv_heads(name: str, size: int) -> None:
    """One KV head on all ranks, one on each, one on two; a vocabulary of 131 filled up."""
    model = tiny(name)
    (prompt,) = prompts_of([40])
    expected = logits_of(model, prompt)
    for found in run_ranks(size, lambda group: logits_of(part_of(model, group), prompt)):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("what", ["embedding", "layer", "head"])
def test_gradients_are_refused(what: str) -> None:
    """They would be wrong, and the loss right."""
    model = tiny("llama-mha")

    def run(group: Group) -> None:
        part: Any = part_of(model, group)
        hidden = torch.randn(3, model.config.hidden_size)
        calls = {
            "embedding": lambda: part.embed(torch.tensor([5])),
            "layer": lambda: part.layers[0].mlp(hidden, part.layers[0].mlp_norm),
            "head": lambda: part.logits(hidden),
        }
        with pytest.raises(UnsupportedError, match=r"is for inference: .* torch\.inference_mode"):
            calls[what]()
        with torch.no_grad():
            assert calls[what]().isfinite().all()

    run_ranks(2, run)


@pytest.mark.parametrize("name", ["llama-mqa-bias", "gemma3", "phi3"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_cpus_own_kernels_on_ranks(name: str, dtype: str) -> None:
    model, prompts = tiny(name, dtype), prompts_of([21, 9, 40])
    expected = engine_for(model, kernels="fused").generate(prompts, SHORT)
    with ThreadedEngine(model, kernels="fused") as ranks:
        kinds = {type(module).__name__ for module in ranks.runners[1].model.modules()}
        assert {"HostRowLinear", "HostVocabHead", "HostLinear", "HostNorm"} <= kinds
        assert "RowLinear" not in kinds
        found = ranks.engine.generate(prompts, SHORT)
        assert_idle(ranks.engine)
    assert [each.tokens for each in found] == [each.tokens for each in expected]


@pytest.mark.parametrize("name", [*ONE_EACH, "llama-tied"])
def test_a_checkpoint_is_loaded_part_by_part(name: str, tmp_path: Path) -> None:
    save_model(name, tmp_path)
    assert_loads_its_part(tiny(name), tmp_path)


@pytest.mark.parametrize("name", ["llama-wide-heads", "mixtral", "qwen3-moe", "gemma3", "phi3"])
def test_a_gguf_file_is_loaded_part_by_part(name: str, tmp_path: Path) -> None:
    """Heads are turned into our order first, experts lie in one tensor, norms have lost their 1."""
    path = tmp_path / "model.gguf"
    write_gguf(make_model(name), path)
    assert_loads_its_part(load_model(path, dtype="fp32", device="cpu"), path)


def assert_loads_its_part(model: Transformer, path: Path) -> None:
    """What a rank reads from the file is what would be cut from the model, and no more than that
    is ever allocated.
    """
    description = describe(open_checkpoint(path))

    def check(group: Group) -> int:
        loaded = split_model(model.config, torch.float32, CPU, group)
        with torch.no_grad():
            for parameter in loaded.parameters():
                parameter.fill_(float("nan"))
        load_split_weights(loaded, open_checkpoint(path), description, group)
        cut = dict(part_of(model, group).named_parameters())
        for parameter_name, parameter in loaded.named_parameters():
            assert torch.equal(parameter, cut[parameter_name]), parameter_name
        return sum(parameter.nbytes for parameter in loaded.parameters())

    planned = weight_bytes(rank_config(model.config, 2), "fp32")
    sizes = run_ranks(2, check)
    assert sizes[0] == planned
    assert sizes[1] <= planned  # without the biases that are added once
    assert planned < 0.6 * sum(parameter.nbytes for parameter in model.parameters())


def assert_exact(engine: Any, model: Transformer, prompts: list[list[int]], sampling: Any) -> None:
    for prompt, output in zip(prompts, engine.generate(prompts, sampling), strict=True):
        assert output.status == "finished", output.reason
        found = [completion.tokens for completion in output.completions]
        assert found == naive_outputs(model, prompt, sampling)
    assert_idle(engine)


@pytest.mark.sweep(keep=4)
@pytest.mark.parametrize("name", ONE_EACH)
def test_every_family_is_exact_on_two_ranks(name: str) -> None:
    """With prompts in chunks, prefixes that are shared, and too few pages for all at once."""
    model = tiny(name)
    (base,) = prompts_of([60])
    prompts = [*prompts_of([1, 21]), base, [*base[:56], 7, 8], base[:20]]
    with ThreadedEngine(model, budget=29, num_pages=10, max_batch=4) as ranks:
        assert_exact(ranks.engine, model, prompts, GREEDY)
        assert ranks.engine.stats.hit_tokens > 0


@pytest.mark.parametrize("overlap", [True, False])
def test_preemption_on_two_ranks(overlap: bool) -> None:
    model = tiny("llama-tied")
    prompts = prompts_of([20, 25, 18, 30])
    with ThreadedEngine(model, num_pages=6, overlap=overlap) as ranks:
        assert_exact(ranks.engine, model, prompts, Sampling(max_tokens=25))
        assert ranks.engine.stats.num_preemptions > 0


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_tokens=12, temperature=0.9, seed=3, n=3),
        Sampling(max_tokens=12, temperature=0.9, top_k=20, top_p=0.9, seed=5),
        Sampling(max_tokens=12, repetition_penalty=1.3, logit_bias={7: 3.0}, min_tokens=4),
    ],
)
def test_draws_and_penalties_are_those_of_one_rank(sampling: Sampling) -> None:
    model = tiny("llama-tied")
    with ThreadedEngine(model) as ranks:
        assert_exact(ranks.engine, model, prompts_of([21, 16, 37]), sampling)


def test_what_is_asked_for_beside_tokens() -> None:
    model, prompts = tiny("llama-mha"), prompts_of([70, 9, 30])
    sampling = Sampling(max_tokens=5, logprobs=2, prompt_logprobs=1)
    alone = engine_for(model, budget=40)
    with ThreadedEngine(model, budget=40) as ranks:
        expected = alone.generate(prompts, sampling)
        for found, right in zip(ranks.engine.generate(prompts, sampling), expected, strict=True):
            assert found.tokens == right.tokens
            assert found.prompt_logprobs is not None
            assert right.prompt_logprobs is not None
            assert_close_logprobs(found.prompt_logprobs[1:], right.prompt_logprobs[1:])
            assert_close_logprobs(found.completions[0].logprobs, right.completions[0].logprobs)
        embedded = ranks.engine.embed(prompts, "mean")
        torch.testing.assert_close(embedded, alone.embed(prompts, "mean"), rtol=1e-4, atol=1e-5)


def assert_close_logprobs(found: Any, right: Any) -> None:
    for one, other in zip(found, right, strict=True):
        assert one.token == other.token
        assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]


def test_requests_come_and_go_by_any_id() -> None:
    """Cancelled ones too; and an id that comes again is another request."""
    model = tiny("qwen2")
    with ThreadedEngine(model) as ranks:
        engine = ranks.engine
        for number in range(8):
            (prompt,) = prompts_of([5 + number], seed=number)
            asked = replace(SHORT, prompt_logprobs=0 if number % 2 else None)
            engine.add(prompt, asked, request_id=("a", 1))
            for _ in range(6):
                engine.add([7, 8], Sampling(max_tokens=1), request_id=object())
            cancelled = engine.add(prompt, GREEDY, request_id="to cancel")
            engine.step()
            assert engine.cancel(cancelled)
            events = []
            while engine.has_work:
                events += engine.step()
            outputs = {event.request_id: event for event in events if hasattr(event, "status")}
            assert [outputs["a", 1].tokens] == naive_outputs(model, prompt, SHORT)
            assert outputs["to cancel"].status == "cancelled"
        assert_idle(engine)
        runner = ranks.runners[0]
        assert len(runner._known) == len(runner._numbers) < 40  # of 50: the others are forgotten
        assert ranks.runners[1]._told_jobs.keys() == set(runner._numbers.values())


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_coded_pages_are_those_of_one_rank(kv_dtype: str) -> None:
    """A token's codes are scaled head by head, so that sharing the heads changes none of them."""
    model, prompts = tiny("llama-mha"), prompts_of([30, 22])
    expected = engine_for(model, kv_dtype=kv_dtype).generate(prompts, GREEDY)
    with ThreadedEngine(model, kv_dtype=kv_dtype) as ranks:
        found = ranks.engine.generate(prompts, GREEDY)
    assert [output.tokens for output in found] == [output.tokens for output in expected]
