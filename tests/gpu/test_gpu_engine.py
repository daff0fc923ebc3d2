"""The engine on a GPU: near the plain loop, and the same with graphs and overlap on and off."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engines import assert_idle, engine_for, naive_outputs, prompts_of, tiny
from tiny_models import MODELS

from ridgeline.capture import capture
from ridgeline.engine import Engine, Sampling
from ridgeline.engine.execution.ahead import Ahead
from ridgeline.engine.execution.graph_kinds import is_mixed
from ridgeline.engine.naive import OneSequence
from ridgeline.models import Transformer, build_model, fill_random
from ridgeline.models.shapes import describe_shape
from ridgeline.recipe import KV, Limits, Recipe

LENGTHS = [1, 5, 16, 21, 33, 50]
GREEDY = Sampling(max_tokens=10)


def shape_model(name: str = "llama-3.2-1b", layers: int = 4) -> Transformer:
    """Few layers of a real shape, with random weights."""
    config = describe_shape(name, num_layers=layers).config
    return fill_random(build_model(config, torch.bfloat16, "cuda"))


def run(model: Transformer, prompts: list[list[int]], sampling: Any, **recipe: Any) -> Any:
    engine = engine_for(model, budget=256, max_batch=32, num_pages=400, **recipe)
    outputs = engine.generate(prompts, sampling)
    assert_idle(engine)
    return engine, outputs


@pytest.mark.parametrize("name", sorted(MODELS))
def test_fp32_gives_the_plain_loops_tokens(name: str) -> None:
    model = tiny(name, "fp32", "cuda")
    longest = model.config.max_context - 12
    prompts = prompts_of([min(length, longest) for length in LENGTHS])
    for graphs in (False, True):
        _, outputs = run(model, prompts, GREEDY, graphs=graphs)
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output.status == "finished", output.reason
            assert [output.tokens] == naive_outputs(model, prompt, GREEDY)


@torch.inference_mode()
def reference_logprobs(model: Transformer, prompt: list[int]) -> torch.Tensor:
    cache = OneSequence(model, len(prompt))
    cache.begin(len(prompt), len(prompt))
    tokens = torch.tensor(prompt, device=model.embed.weight.device)
    return torch.log_softmax(model.logits(model(tokens, cache)), -1)


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8", "int8"])
def test_bf16_is_near_fp32(kv_dtype: str) -> None:
    """KL to the fp32 model over the whole vocabulary, at positions that were computed in chunks,
    in decode steps through graphs, and eagerly.
    """
    model = shape_model()
    exact = build_model(model.config, torch.float32, "cuda")
    exact.load_state_dict({name: value.float() for name, value in model.state_dict().items()})
    prompts = prompts_of([70, 300, 129], vocab_size=model.config.vocab_size)
    bound = 1e-3 if kv_dtype == "bf16" else 1e-2
    for graphs in (True, False):
        engine = engine_for(
            model, budget=128, num_pages=200, max_batch=8, graphs=graphs, kv_dtype=kv_dtype
        )
        kept = watch_logits(engine)
        outputs = engine.generate(prompts, Sampling(max_tokens=24, ignore_eos=True))
        for prompt, output in zip(prompts, outputs, strict=True):
            sequence = prompt + list(output.tokens)
            expected = reference_logprobs(exact, sequence[:-1])[len(prompt) - 1 :]
            found = torch.stack([kept[tuple(sequence[: len(prompt) + i])] for i in range(24)])
            divergence = (expected.exp() * (expected - found)).sum(-1)
            assert divergence.max() < bound, (graphs, divergence.max())


def watch_logits(engine: Engine) -> dict[tuple[int, ...], torch.Tensor]:
    """The log-probabilities of every sample, by the tokens before it."""
    kept: dict[tuple[int, ...], torch.Tensor] = {}
    finish, known = engine.runner.finish, engine.scheduler.known_tokens
    pending: list[tuple[Any, int, torch.Tensor]] = []

    def watching(step: Any, logits: torch.Tensor, *rest: Any) -> Any:
        plan = step.plan
        for index, key in enumerate(plan.sample_keys):
            position = plan.positions[plan.logit_tokens[index]]
            pending.append((key, position, torch.log_softmax(logits[index].float(), -1)))
        return finish(step, logits, *rest)

    receive = engine.scheduler.receive

    def received(step_id: int, tokens: Any, counts: Any = None) -> Any:
        for key, position, logprobs in list(pending):
            if key in engine.scheduler._running.streams and len(known(key)) > position:
                kept[tuple(known(key)[: position + 1])] = logprobs
                pending.remove((key, position, logprobs))
        return receive(step_id, tokens, counts)

    engine.runner.finish = watching  # type: ignore[method-assign]
    engine.scheduler.receive = received  # type: ignore[method-assign]
    return kept


def mixed_requests(vocab_size: int) -> tuple[list[list[int]], list[Sampling]]:
    prompts = prompts_of([3, 40, 64, 65, 130, 200, 17, 90, 33, 12, 77, 150], vocab_size=vocab_size)
    kinds = [
        {},
        {"temperature": 0.8, "seed": 3},
        {"temperature": 1.0, "top_p": 0.9, "top_k": 50, "seed": 4},
        {"temperature": 0.7, "frequency_penalty": 0.5, "repetition_penalty": 1.2, "seed": 5},
        {"logit_bias": {7: 4.0}, "min_tokens": 5, "stop_ids": (9, 11)},
        {"temperature": 1.0, "n": 3, "seed": 6, "logprobs": 2},
    ]
    samplings = [
        Sampling(max_tokens=12 + 3 * index, **kinds[index % len(kinds)])  # type: ignore[arg-type]
        for index in range(len(prompts))
    ]
    return prompts, samplings


def tokens_of(outputs: Any) -> list[list[tuple[int, ...]]]:
    return [[completion.tokens for completion in output.completions] for output in outputs]


def test_overlap_changes_nothing() -> None:
    """fp32: the same batches may come in another order, and rounding in bf16 would show."""
    model = tiny("llama-mha", "fp32", "cuda")
    prompts, samplings = mixed_requests(131)
    prompts = [prompt[:90] for prompt in prompts]
    for graphs in (True, False):
        results = [
            tokens_of(run(model, prompts, samplings, overlap=overlap, graphs=graphs)[1])
            for overlap in (True, False)
        ]
        assert results[0] == results[1]


def test_graphs_change_nothing() -> None:
    """fp32 again: a graph's sizes are padded up, and another size may sum in another order."""
    model = tiny("qwen3", "fp32", "cuda")
    prompts, samplings = mixed_requests(131)
    prompts = [prompt[:90] for prompt in prompts]
    results = []
    for graphs in (True, False):
        engine, outputs = run(model, prompts, samplings, graphs=graphs)
        results.append(tokens_of(outputs))
        assert (engine.runner.graphs is not None) == graphs
        if engine.runner.graphs is not None:
            assert len(engine.runner.graphs.captured) > 1
    assert results[0] == results[1]


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "mixtral"])
@pytest.mark.parametrize("kv_dtype", ["fp32", "fp8"])
def test_graphs_with_prompts_beside_decode_rows_change_nothing(name: str, kv_dtype: str) -> None:
    """Prompts come in pieces while others decode, in the same batches with and without graphs; once
    more, when all sizes have been met.
    """
    model = tiny(name, "fp32", "cuda")
    longest = model.config.max_context - 30
    prompts = prompts_of([min(7 + 5 * index, longest) for index in range(24)])
    samplings = [Sampling(max_tokens=5 + index % 17, ignore_eos=True) for index in range(24)]
    limits = {"budget": 48, "max_batch": 6, "num_pages": 400, "prefix_cache": False}
    plain = engine_for(model, **limits, kv_dtype=kv_dtype, graphs=False)
    expected = tokens_of(plain.generate(prompts, samplings))
    engine = engine_for(model, **limits, kv_dtype=kv_dtype)
    for _ in range(2):
        assert tokens_of(engine.generate(prompts, samplings)) == expected
    assert_idle(engine)
    assert any(is_mixed(kind) for kind in engine.runner.graphs.captured)


def test_graphs_are_replayed_and_stay_within_their_memory() -> None:
    model = shape_model()
    kv, limits = KV(page_size=64), Limits(max_batch=64, max_context=4096)
    engine = Engine(model, Recipe(kv=kv, limits=limits), num_pages=800)
    prompts = prompts_of([20] * 40, vocab_size=model.config.vocab_size)
    samplings = [Sampling(max_tokens=4 + 2 * index, ignore_eos=True) for index in range(40)]
    engine.generate(prompts, samplings)
    graphs = engine.runner.graphs
    assert graphs is not None
    assert len(graphs.captured) > 3
    assert graphs.used_bytes <= graphs.budget_bytes
    before = len(graphs.captured)
    engine.generate(prompts, samplings)
    assert len(graphs.captured) <= before + 2
    for key, notes in graphs.notes.items():
        assert notes[0].op == "step_start"
        assert [note.op for note in notes[-2:]] == ["sampling", "keep_tokens"]
        names = [note.op for note in notes]
        op = "rotary_pages" if key.shape.num_prompt_rows else "projected_attention"
        assert names.count(op) == model.config.num_layers


def test_the_memory_plan_is_what_is_used() -> None:
    """Within 5%, weights and pages included, after steps of the largest size. Graphs are apart:
    their pool is not full when such a step is run.
    """
    torch.cuda.empty_cache()
    start = torch.cuda.memory_allocated()
    free, _ = torch.cuda.mem_get_info()
    share = min(0.9, (24 << 30) / free)
    model = shape_model("llama-3.1-8b", layers=8)
    recipe = Recipe(limits=Limits(max_context=8192, memory_share=share))
    engine = Engine(model, recipe)
    prompts = prompts_of([2000] * 16, vocab_size=model.config.vocab_size)
    torch.cuda.reset_peak_memory_stats()
    engine.generate(prompts, Sampling(max_tokens=40, ignore_eos=True, temperature=0.6))
    used = torch.cuda.max_memory_allocated() - start
    items = {item.name: item.num_bytes for item in engine.memory_plan.items}
    planned = engine.memory_plan.used_bytes - items["graphs"]
    assert used == pytest.approx(planned, rel=0.05), items
    engine.generate(prompts[:1], Sampling(max_tokens=2, ignore_eos=True))  # the largest graph
    assert engine.runner.graphs.used_bytes <= items["graphs"]


def test_many_requests_of_all_kinds_finish() -> None:
    model = shape_model()
    prompts, samplings = mixed_requests(model.config.vocab_size)
    _, outputs = run(model, prompts * 4, samplings * 4)
    assert {output.status for output in outputs} == {"finished"}


def test_a_capture_that_fails_costs_a_graph_and_nobodys_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Among the first captures of a pool, and among later ones."""
    model = shape_model(layers=2)
    prompts = prompts_of([30, 7, 12], vocab_size=model.config.vocab_size)
    sampling = Sampling(max_tokens=12, ignore_eos=True)
    _, expected = run(model, prompts, sampling, graphs=False)
    for failing in (1, 3):
        calls: list[int] = []

        def capture_or_fail(
            work: Any, pool: Any, failing: int = failing, calls: Any = calls
        ) -> Any:
            calls.append(1)

            def fails() -> None:
                work()
                raise ValueError("not this one")

            return capture(fails if len(calls) == failing else work, pool)

        monkeypatch.setattr("ridgeline.engine.execution.graphs.capture", capture_or_fail)
        engine, outputs = run(model, prompts, sampling)
        assert len(engine.runner.graphs.refused) == 1
        assert engine.runner.graphs.captured
        assert [output.status for output in outputs] == ["finished"] * 3
        assert [output.tokens[0] for output in outputs] == [o.tokens[0] for o in expected]


def test_a_nan_row_fails_alone() -> None:
    """The head is not the embedding here: one that is would make every row's logits NaN."""
    model = shape_model("llama-2-7b", layers=2)
    with torch.no_grad():
        model.embed.weight[77] = float("nan")
    prompts = prompts_of([30] * 6, vocab_size=model.config.vocab_size)
    prompts = [[token for token in prompt if token != 77] for prompt in prompts]
    prompts[2][4] = 77
    _, outputs = run(model, prompts, Sampling(max_tokens=12, ignore_eos=True))
    assert [output.status for output in outputs].count("failed") == 1
    assert "NaN" in outputs[2].reason


def test_embeddings_and_prompt_logprobs_run() -> None:
    model = shape_model()
    prompts = prompts_of([30, 200], vocab_size=model.config.vocab_size)
    engine, outputs = run(model, prompts, Sampling(max_tokens=3, prompt_logprobs=2))
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = reference_logprobs(model, prompt)
        for position in (1, 15, len(prompt) - 1):
            entry = output.prompt_logprobs[position]
            right = expected[position - 1, prompt[position]].item()
            assert entry.logprob == pytest.approx(right, abs=0.1)
    embeddings = engine.embed(prompts)
    assert embeddings.shape == (2, model.config.hidden_size)
    assert embeddings.norm(dim=1).tolist() == pytest.approx([1.0, 1.0], abs=1e-3)


def test_fresh_prompts_of_one_length_are_as_right_as_any() -> None:
    """Their attention is cuDNN's, where it has one; beside a prompt of another length it is not."""
    model = shape_model(layers=2)
    prompts = prompts_of([2048, 2048], vocab_size=model.config.vocab_size)
    limits = {"budget": 4096, "max_batch": 4, "num_pages": 300, "graphs": False}
    sampling = Sampling(max_tokens=1, logprobs=1, ignore_eos=True)
    even = engine_for(model, **limits, prefix_cache=False).generate(prompts, sampling)
    other = prompts_of([700], seed=9, vocab_size=model.config.vocab_size)
    mixed = engine_for(model, **limits, prefix_cache=False).generate(other + prompts, sampling)[1:]
    for a, b in zip(even, mixed, strict=True):
        one, other = a.completions[0].logprobs, b.completions[0].logprobs
        assert one[0].logprob == pytest.approx(other[0].logprob, abs=0.05)


def capture_ahead(engine: Engine) -> int:
    """All graphs that there is room for; how many there are then."""
    ahead = Ahead(engine.runner)
    while ahead.one():
        pass
    assert engine.runner.graphs is not None
    return len(engine.runner.graphs.captured)


def test_graphs_captured_ahead_change_no_answer() -> None:
    """Among requests and their cached prefixes. fp32: what is cached is not computed again, and a
    shorter step may sum in another order, which bf16 would show.
    """
    model = tiny("qwen3", "fp32", "cuda")
    prompts = prompts_of([20, 30, 13, 40])
    engine, expected = run(model, prompts, GREEDY)
    assert tokens_of(expected) == [naive_outputs(model, prompt, GREEDY) for prompt in prompts]
    captured = len(engine.runner.graphs.captured)
    assert capture_ahead(engine) > captured
    assert tokens_of(engine.generate(prompts, GREEDY)) == tokens_of(expected)


def test_graphs_captured_ahead_are_all_that_requests_need() -> None:
    model = shape_model(layers=2)
    prompts = prompts_of([40, 70, 33, 90], vocab_size=model.config.vocab_size)
    limits = {"budget": 256, "max_batch": 8, "num_pages": 100}
    expected = engine_for(model, **limits).generate(prompts, GREEDY)
    fresh = engine_for(model, **limits)
    captured = capture_ahead(fresh)
    assert tokens_of(fresh.generate(prompts, GREEDY)) == tokens_of(expected)
    assert len(fresh.runner.graphs.captured) == captured
