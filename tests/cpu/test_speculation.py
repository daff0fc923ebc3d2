"""Drafting changes the speed and nothing else: the plain loop's tokens, with whatever happens
around a request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from engines import assert_exact, assert_idle, engine_for, naive_outputs, prompts_of, tiny
from speculation import (
    DRAWN,
    GREEDY,
    LOOKUP,
    Oracle,
    assert_drafted_exact,
    force_drafts,
    markov,
    oracle_engine,
    steps_without_drafts,
)
from tiny_tokenizers import byte_level_metadata

from ridgeline.data import Tokenizer
from ridgeline.engine import Engine, Sampling, reference_generate
from ridgeline.engine.attention.host_sequences import HostSequences
from ridgeline.engine.attention.paged import CpuSequences, PagedSequences
from ridgeline.engine.execution.graphs import Graphs
from ridgeline.engine.execution.step_pass import PassKind, SamplingKind
from ridgeline.engine.naive import OneSequence, forward, generate_samples, generate_tokens
from ridgeline.engine.sampling.drafter import PromptLookup
from ridgeline.engine.scheduling.step_plan import StepPlan
from ridgeline.kernels.prompt_lookup import Streams, prompt_lookup
from ridgeline.kernels.sampling import filtered_logits
from ridgeline.models import Transformer, build_model, fill_random

pytestmark = pytest.mark.usefixtures("every_step_kept_its_drafts")


@pytest.mark.parametrize(
    "name", ["llama-mha", "gemma3", "mistral-sliding", "qwen3-moe", "phi3-longrope-partial"]
)
def test_families_are_exact(name: str) -> None:
    """Greedy and drawn, prompts in chunks, drafts right and wrong."""
    model = tiny(name)
    prompts = prompts_of([1, 5, 16, 33, min(60, model.config.max_context - 16)])
    samplings = [GREEDY, DRAWN, replace(GREEDY, max_tokens=1), GREEDY, replace(DRAWN, top_p=0.7)]
    assert_drafted_exact(oracle_engine(model, budget=24), prompts, samplings)


class PaddedSteps(Graphs):
    """Graphs that are run instead of captured."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.runner, 48, engine.max_context, budget_bytes=1)
        self.keys: list[PassKind] = []

    def replay(self, key: PassKind, inputs: Any, choice: SamplingKind) -> tuple[Any, Any]:
        self.keys.append(key)
        logits_RV = self.compute(key, inputs)
        tokens_R = self.work.choose(logits_RV, inputs, choice)
        return logits_RV, tokens_R


def test_a_graph_judges_what_was_looked_up() -> None:
    """Verdicts, the table of tokens and the next drafts come from the graph; steps that no graph
    serves (prompts with others, log-probabilities) are judged behind them, and all of it agrees.
    """
    engine = engine_for(markov(deepcopy(tiny("llama-mha"))), speculation=LOOKUP)
    engine.runner.passes.sequences = PagedSequences
    engine.runner.graphs = graphs = PaddedSteps(engine)
    force_drafts(engine)
    drafter = engine.runner.drafter
    assert isinstance(drafter, PromptLookup)
    behind: list[int] = []
    judge = drafter.judge

    def judging(plan: Any, *rest: Any) -> Any:
        behind.append(plan.num_draft_rows)
        return judge(plan, *rest)

    drafter.judge = judging  # type: ignore[method-assign]
    assert_exact(engine, prompts_of([9, 20, 4]), [Sampling(max_tokens=60)] * 3)
    first = engine.stats
    assert first.accepted_tokens > 0.6 * first.drafted_tokens > 0
    assert len(graphs.keys) > 10
    assert behind == []
    wanted = Sampling(max_tokens=40, logprobs=1)
    assert_exact(engine, prompts_of([9, 11]), [wanted, Sampling(max_tokens=40)])
    assert sum(behind) > 0
    assert engine.stats.accepted_tokens > first.accepted_tokens


def ahead_engine(
    monkeypatch: pytest.MonkeyPatch,
    graphs: bool,
    model: Transformer | None = None,
    **changes: Any,
) -> Engine:
    """As on a GPU: drafts are decode rows, and a step is launched behind those that are out. Of a
    model that repeats itself, if none is given.
    """
    model = model or markov(deepcopy(tiny("llama-mha")))
    monkeypatch.setattr(CpuSequences, "whole_rows", False)
    monkeypatch.setattr(HostSequences, "whole_rows", False)
    engine = engine_for(model, speculation=LOOKUP, **changes)
    if graphs:
        engine.runner.passes.sequences = PagedSequences
        engine.runner.graphs = PaddedSteps(engine)
    force_drafts(engine)
    return engine


def plans_of(engine: Engine) -> list[StepPlan]:
    """Those that are launched from now on."""
    plans, launch = [], engine.runner.launch

    def watching(plan: StepPlan, *rest: Any) -> Any:
        plans.append(plan)
        return launch(plan, *rest)

    engine.runner.launch = watching  # type: ignore[method-assign]
    return plans


@pytest.mark.parametrize("graphs", [False, True])
def test_steps_behind_drafts_that_are_out(graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy and drawn, ends of all kinds, prompts that come in between, some with
    log-probabilities, which no graph judges.
    """
    engine = ahead_engine(monkeypatch, graphs, budget=24)
    plans, samplings = plans_of(engine), [Sampling(max_tokens=20 + 3 * n) for n in range(5)]
    samplings[1] = replace(samplings[1], temperature=0.4, seed=3)
    samplings[2] = replace(samplings[2], logprobs=1)
    samplings[3] = replace(samplings[3], temperature=0.3, seed=9, top_k=3, n=2)
    assert_exact(engine, prompts_of([9, 20, 4, 33, 50]), samplings)
    moved = [plan for plan in plans if plan.moved_tokens]
    assert sum(plan.num_draft_rows > 0 for plan in moved) > 3
    assert any(plan.num_tokens[-1] > 1 and not plan.sample_drafts[-1] for plan in moved)
    assert engine.stats.accepted_tokens > 60
    (prompt,) = prompts_of([14])
    (tokens,) = naive_outputs(engine.model, prompt, Sampling(max_tokens=30))
    stops = replace(GREEDY, max_tokens=30, stop_ids=(tokens[3], tokens[20]))
    assert_exact(engine, [prompt, prompt[:9]], [stops, replace(GREEDY, max_tokens=7)])
    assert_idle(engine)


def foreseeing(sequences: list[list[int]]) -> Callable[..., torch.Tensor]:
    """The lookup, with drafts that are right but for every fifth position: by a model whose
    attention counts, what a text repeats would seldom be.
    """

    def lookup(
        streams: Streams, tokens_R: torch.Tensor, samples_4N: torch.Tensor, *into: Any
    ) -> torch.Tensor:
        found = prompt_lookup(streams, tokens_R, samples_4N, *into)
        history, drafts = streams.history, streams.drafts
        for sample, (seat, _, _, position) in enumerate(samples_4N.T.tolist()):
            line, end = history[seat].tolist(), position + int(found[0, sample])
            for sequence in sequences:
                if sequence[:4] == line[:4]:
                    coming = [*sequence[end:], *[0] * drafts.shape[1]][: drafts.shape[1]]
                    wrong = [(end + index) % 5 == 0 for index in range(len(coming))]
                    drafts[seat] = torch.tensor(coming) ^ torch.tensor(wrong)
        return found

    return lookup


@pytest.mark.parametrize(("name", "graphs"), [("llama-mha", True), ("gemma3", False)])
def test_rows_behind_drafts_read_and_write_where_they_belong(
    name: str, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ahead_engine(monkeypatch, graphs, tiny(name), budget=24)
    prompts = prompts_of([9, 20, 33])
    samplings = [replace(GREEDY, max_tokens=24), replace(DRAWN, max_tokens=30), GREEDY]
    pairs = list(zip(prompts, samplings, strict=True))
    sequences = [[*prompt, *naive_outputs(engine.model, prompt, each)[0]] for prompt, each in pairs]
    monkeypatch.setattr("ridgeline.engine.sampling.drafter.prompt_lookup", foreseeing(sequences))
    plans = plans_of(engine)
    assert_exact(engine, prompts, samplings)
    assert engine.stats.accepted_tokens > 25
    assert sum(bool(plan.moved_tokens) for plan in plans) > 4


def test_one_stream_fills_the_smallest_graph_with_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has room for five rows, and the graph has twelve."""
    engine = ahead_engine(monkeypatch, graphs=True, max_batch=1)
    assert_exact(engine, prompts_of([9, 20]), [Sampling(max_tokens=40)] * 2)
    graphs = engine.runner.graphs
    assert isinstance(graphs, PaddedSteps)
    assert {key.shape.num_samples for key in graphs.keys if not key.own_sequences} == {12}
    assert engine.stats.accepted_tokens > 40


def test_steps_behind_drafts_with_too_few_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ahead_engine(monkeypatch, graphs=False, num_pages=8, budget=24)
    plans = plans_of(engine)
    assert_exact(engine, prompts_of([20, 25, 18, 30, 9, 22]), [Sampling(max_tokens=40)] * 6)
    assert engine.stats.num_preemptions > 0
    assert any(plan.moved_tokens for plan in plans)


def test_a_step_behind_drafts_runs_in_parts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its rows are moved, whichever of them are run together."""
    engine = ahead_engine(monkeypatch, graphs=False)
    plans, forward_pass, raised = plans_of(engine), engine.runner.forward, [0]

    def raising(inputs: Any, kind: Any, *rest: Any) -> torch.Tensor:
        if kind.shape.num_samples > 4 and len(plans) % 3 == 0:
            raised[0] += 1
            raise RuntimeError("too many rows")
        return forward_pass(inputs, kind, *rest)

    monkeypatch.setattr(engine.runner, "forward", raising)
    assert_exact(engine, prompts_of([9, 30, 14]), [Sampling(max_tokens=50)] * 3)
    assert any(plan.moved_tokens for plan in plans[2::3])
    assert raised[0] > 5
    assert steps_without_drafts(caplog)
    caplog.clear()


@pytest.mark.parametrize("name", ["llama-mha", "gemma3"])
def test_the_gpus_path_is_exact(name: str) -> None:
    """There drafts are decode rows of their own, and a step of them goes through a graph."""
    engine = oracle_engine(tiny(name))
    engine.runner.passes.sequences = PagedSequences
    engine.runner.graphs = graphs = PaddedSteps(engine)
    prompts = prompts_of([3, 20, 40])
    assert_drafted_exact(engine, prompts, [GREEDY, DRAWN, replace(DRAWN, top_k=5, n=2)])
    assert_drafted_exact(engine, prompts[:1], [GREEDY])
    assert any(key.shape.num_decode_rows == 12 for key in graphs.keys)  # one stream: five, padded
    assert_drafted_exact(engine, prompts_of([9] * 8), [GREEDY] * 8)
    assert any(key.shape.num_decode_rows == 48 for key in graphs.keys)  # eight streams: forty


@pytest.mark.parametrize("overlap", [True, False])
def test_too_few_pages(overlap: bool) -> None:
    engine = oracle_engine(tiny("llama-mha"), num_pages=8, overlap=overlap)
    prompts = prompts_of([20, 25, 18, 30, 22])
    assert_drafted_exact(engine, prompts, [replace(GREEDY, max_tokens=40)] * 5)
    assert engine.stats.num_preemptions > 0


def test_prompts_that_begin_alike_and_part() -> None:
    """Shared pages, copied ones, and several outputs of a prompt, twice."""
    (base,) = prompts_of([50])
    prompts = [[*base[:40], 7, 8], [*base[:40], 9], base[:12] + [3] * 9, base]
    engine = oracle_engine(tiny("llama-mha"))
    for _ in range(2):
        assert_drafted_exact(engine, prompts, [GREEDY, replace(DRAWN, n=3), GREEDY, DRAWN])
    assert engine.stats.hit_tokens > 0


def test_pages_of_codes() -> None:
    """int8 keys and values: what the engine gives without drafting."""
    prompts = prompts_of([40, 23, 9])
    right = engine_for(tiny("llama-mha"), kv_dtype="int8").generate(prompts, GREEDY)
    engine = oracle_engine(tiny("llama-mha"), kv_dtype="int8")
    oracle = engine.runner.drafter
    assert isinstance(oracle, Oracle)
    for index, (prompt, output) in enumerate(zip(prompts, right, strict=True)):
        oracle.sequences[f"request-{index}", 0] = [*prompt, *output.tokens]
    found = engine.generate(prompts, GREEDY)
    assert [output.tokens for output in found] == [output.tokens for output in right]
    assert engine.stats.accepted_tokens > 10


def test_the_lookup_drafts_what_repeats_itself() -> None:
    """The real lookup, asked by the real policy, where steps cost the same whatever their size."""
    model = markov(deepcopy(tiny("llama-mha")))
    engine = engine_for(model, speculation=LOOKUP)
    assert engine.local.loop.drafting is not None
    costs = engine.local.loop.drafting.policy.costs
    costs.of = lambda num_tokens, most_drafts=0: 1.0  # type: ignore[method-assign]
    prompts, sampling = prompts_of([9, 20, 4]), Sampling(max_tokens=60)
    assert_exact(engine, prompts, [sampling] * 3)
    stats = engine.stats
    assert stats.accepted_tokens > 0.7 * stats.drafted_tokens > 0
    assert stats.num_steps < 40
    assert_exact(engine, prompts, [replace(sampling, temperature=0.3, seed=8)] * 3)


def test_the_lookup_survives_preemption_and_a_new_seat() -> None:
    model = markov(deepcopy(tiny("llama-mha")))
    engine = engine_for(model, speculation=LOOKUP, num_pages=8, budget=24)
    force_drafts(engine)
    assert_exact(engine, prompts_of([20, 25, 18, 30, 9, 22]), [Sampling(max_tokens=40)] * 6)
    stats = engine.stats
    assert stats.num_preemptions > 0
    assert stats.accepted_tokens > 50


def test_drafts_that_do_not_pay_are_not_made_and_steps_overlap() -> None:
    engine = engine_for(tiny("llama-mha"), speculation=LOOKUP)
    assert engine.local.loop.drafting is not None
    costs = engine.local.loop.drafting.policy.costs
    costs.of = lambda num_tokens, most_drafts=0: float(num_tokens)  # type: ignore[method-assign]
    launch, collect, out, most = engine.runner.launch, engine.runner.collect, [0], [0]

    def launching(*args: Any) -> Any:
        out[0] += 1
        most[0] = max(most[0], out[0])
        return launch(*args)

    def collecting(*args: Any) -> Any:
        out[0] -= 1
        return collect(*args)

    engine.runner.launch, engine.runner.collect = launching, collecting  # type: ignore[method-assign]
    assert_exact(engine, prompts_of([9, 20]), [GREEDY] * 2)
    assert engine.stats.drafted_tokens == 0
    assert most[0] == 2


def test_the_whole_distribution_is_the_models() -> None:
    """Chi-square over all outputs of three tokens, drawn with top-k 2, where the likeliest is
    always drafted: 8 outputs, beyond the limit once in ten thousand such tests.
    """
    model, (prompt,) = tiny("llama-mha"), prompts_of([9])
    sampling = Sampling(max_tokens=3, temperature=1.3, top_k=2)
    expected = path_probabilities(model, prompt, sampling)
    engine = oracle_engine(model, wrong_share=0.0, max_batch=50, num_pages=400, budget=256)
    oracle = engine.runner.drafter
    assert isinstance(oracle, Oracle)
    likeliest = [*prompt, *max(expected, key=lambda path: expected[path])]
    num_draws = 300
    for index in range(num_draws):
        oracle.sequences[f"request-{index}", 0] = likeliest
    samplings = [replace(sampling, seed=seed) for seed in range(num_draws)]
    found = Counter(o.tokens for o in engine.generate([prompt] * num_draws, samplings))
    assert found.keys() <= expected.keys()
    assert engine.stats.accepted_tokens > 50
    chi_square = sum(
        (found[path] - num_draws * p) ** 2 / (num_draws * p) for path, p in expected.items()
    )
    assert chi_square < 29.9  # 7 degrees of freedom


def path_probabilities(
    model: Any, prompt: list[int], sampling: Sampling
) -> dict[tuple[int, ...], float]:
    paths: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(sampling.max_tokens):
        longer = {}
        for path, probability in paths.items():
            cache = OneSequence(model, 32)
            with torch.inference_mode():
                logits = forward(model, [*prompt, *path], cache, len(prompt))
            about = {"top_k": sampling.top_k, "top_p": 1.0, "min_p": 0.0}
            kept = filtered_logits(logits, temperature=sampling.temperature, **about)  # type: ignore[arg-type]
            chances = torch.softmax(kept, -1)
            for token in chances.nonzero().flatten().tolist():
                longer[*path, token] = probability * float(chances[token])
        paths = longer
    return paths


def test_stop_ids_and_lengths_end_inside_accepted_drafts() -> None:
    model, (prompt,) = tiny("llama-mha"), prompts_of([14])
    (tokens,) = naive_outputs(model, prompt, replace(GREEDY, max_tokens=30))
    for sampling in (
        replace(GREEDY, max_tokens=7),
        replace(GREEDY, max_tokens=30, stop_ids=(tokens[6],)),
        replace(GREEDY, max_tokens=30, stop_ids=(tokens[3], tokens[8])),
    ):
        engine = oracle_engine(model, wrong_share=0.0)
        oracle = engine.runner.drafter
        assert isinstance(oracle, Oracle)
        oracle.sequences["request-0", 0] = [*prompt, *tokens]
        (output,) = engine.generate([prompt], sampling)
        expected = tuple(generate_tokens(model, prompt, sampling))
        assert output.tokens == expected
        assert output.finish_reason == ("stop" if sampling.stop_ids else "length")
        assert_idle(engine)


def test_logprobs_come_with_accepted_drafts() -> None:
    model, prompts = tiny("llama-mha"), prompts_of([12, 30])
    sampling = replace(DRAWN, logprobs=2, prompt_logprobs=1)
    engine = oracle_engine(model, wrong_share=0.2)
    oracle = engine.runner.drafter
    assert isinstance(oracle, Oracle)
    expected = [generate_samples(model, prompt, sampling)[0] for prompt in prompts]
    for index, (prompt, chosen) in enumerate(zip(prompts, expected, strict=True)):
        tokens = [entry.token for entry in chosen]
        oracle.sequences[f"request-{index}", 0] = [*prompt, *tokens]
    outputs = engine.generate(prompts, sampling)
    assert engine.stats.accepted_tokens > 8
    for output, chosen in zip(outputs, expected, strict=True):
        found = output.completions[0].logprobs
        assert found is not None
        assert [entry.token for entry in found] == [entry.token for entry in chosen]
        right = [entry.logprob.logprob for entry in chosen if entry.logprob is not None]
        assert [entry.logprob for entry in found] == pytest.approx(right, abs=1e-4)
        assert output.prompt_logprobs is not None


def test_requests_with_tables_get_no_drafts() -> None:
    """Penalties change with every token, so nothing is drafted for them; others are not kept."""
    model, prompts = tiny("llama-mha"), prompts_of([9, 20])
    engine = oracle_engine(model)
    samplings = [replace(DRAWN, frequency_penalty=0.7), GREEDY]
    drafted: set[Any] = set()
    launch = engine.runner.launch

    def watching(plan: Any, *rest: Any) -> Any:
        pairs = zip(plan.sample_keys, plan.sample_drafts, strict=True)
        drafted.update(key for key, drafts in pairs if drafts)
        return launch(plan, *rest)

    engine.runner.launch = watching  # type: ignore[method-assign]
    assert_drafted_exact(engine, prompts, samplings)
    assert drafted == {("request-1", 0)}


def test_nan_of_a_wrong_draft_harms_nobody() -> None:
    """A drafted token whose embedding is no number; and a prompt with it still fails alone."""
    model = deepcopy(tiny("llama-mha"))
    prompts = [[token for token in prompt if token != 77] for prompt in prompts_of([9, 30, 14])]
    with torch.no_grad():
        model.embed.weight[77] = float("nan")
    engine = oracle_engine(model, wrong_share=0.0)
    oracle = engine.runner.drafter
    assert isinstance(oracle, Oracle)
    right = [naive_outputs(tiny("llama-mha"), prompt, GREEDY)[0] for prompt in prompts]
    for index, (prompt, tokens) in enumerate(zip(prompts, right, strict=True)):
        poisoned = [77 if place % 4 == 3 else token for place, token in enumerate(tokens)]
        oracle.sequences[f"request-{index}", 0] = [*prompt, *poisoned]
    assert not any(77 in tokens for tokens in right)
    prompts[1][3] = 77
    outputs = engine.generate(prompts, GREEDY)
    assert [output.status for output in outputs] == ["finished", "failed", "finished"]
    assert "NaN" in outputs[1].reason
    assert [outputs[0].tokens, outputs[2].tokens] == [right[0], right[2]]
    assert engine.stats.accepted_tokens > 5
    assert_idle(engine)


@pytest.mark.parametrize("error", [RuntimeError("poison"), torch.OutOfMemoryError("none left")])
def test_a_step_that_fails_with_drafts_runs_without(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = oracle_engine(tiny("llama-mha"))
    forward_pass, raised = engine.runner.forward, [0]

    def raising(inputs: Any, kind: Any, *rest: Any) -> torch.Tensor:
        if kind.shape.num_samples > 3:  # which only drafts bring about
            raised[0] += 1
            if raised[0] % 2:
                raise error
        return forward_pass(inputs, kind, *rest)

    monkeypatch.setattr(engine.runner, "forward", raising)
    assert_drafted_exact(engine, prompts_of([9, 30, 14]), [GREEDY] * 3)
    assert raised[0] > 1
    assert steps_without_drafts(caplog)
    caplog.clear()


def test_the_table_of_tokens_is_planned_for() -> None:
    engine = engine_for(tiny("llama-mha"), speculation=LOOKUP)
    drafter = engine.runner.drafter
    assert isinstance(drafter, PromptLookup)
    assert engine.memory_plan.bytes_of("token table") == drafter.streams.history.nbytes


def test_text_ends_at_a_stop_string_inside_accepted_drafts() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_metadata("smollm"))
    config = replace(tiny("llama-mha").config, vocab_size=tokenizer.vocab_size)
    model = fill_random(build_model(config, torch.float32, "cpu"), seed=4)
    prompt = tokenizer.encode("The sky")
    sampling = Sampling(max_tokens=30, ignore_eos=True)
    free = reference_generate(model, tokenizer, prompt, sampling)
    stop = free.text[20:23]
    engine = oracle_engine(model, wrong_share=0.0)
    engine.tokenizer = tokenizer
    oracle = engine.runner.drafter
    assert isinstance(oracle, Oracle)
    oracle.sequences["request-0", 0] = [*prompt, *free.tokens]
    (output,) = engine.generate([prompt], replace(sampling, stop=(stop,)))
    expected = reference_generate(model, tokenizer, prompt, replace(sampling, stop=(stop,)))
    assert output.finish_reason == "stop"
    assert (output.text, output.tokens) == (expected.text, expected.tokens)
    assert engine.stats.accepted_tokens > 0
    assert_idle(engine)


def test_the_lookup_knows_the_prompt() -> None:
    """An output that goes round in circles, cut off and given as a prompt: all is drafted."""
    model = markov(deepcopy(tiny("llama-mha")))
    prompt = list(naive_outputs(model, [3], Sampling(max_tokens=80))[0])
    assert len(set(prompt[-9:])) == 3
    engine = engine_for(model, speculation=LOOKUP)
    force_drafts(engine)
    assert_exact(engine, [prompt], [Sampling(max_tokens=11)])
    stats = engine.stats
    assert stats.accepted_tokens == stats.drafted_tokens == 8  # twice four, and three beside them


def test_streams_without_drafts_run_ahead_of_those_with() -> None:
    """And take their tokens from the device, past the rows of drafts and the ends of prompts."""
    engine = oracle_engine(tiny("llama-mha"), budget=24)
    force_drafts(engine, lambda key: 3 * (int(key[0][-1]) % 2))  # type: ignore[index]
    assert engine.local.loop.drafting is not None
    engine.local.loop.drafting.waits = lambda plan: False  # type: ignore[method-assign]
    plans = []
    launch = engine.runner.launch

    def watching(plan: Any, *rest: Any) -> Any:
        plans.append(plan)
        return launch(plan, *rest)

    engine.runner.launch = watching  # type: ignore[method-assign]
    prompts = prompts_of([5, 9, 33, 40, 21, 30, 12, 50])
    samplings = [replace(GREEDY, max_tokens=20 + index) for index in range(8)]
    assert_drafted_exact(engine, prompts, samplings)
    after_drafts = [
        later
        for earlier, later in pairwise(plans)
        if earlier.num_draft_rows and later.device_tokens
    ]
    assert len(after_drafts) > 5
