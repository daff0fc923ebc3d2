"""Each sampling setting does in the engine what it does in the plain loop, for the same seed."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from engines import assert_exact, engine_for, naive_outputs, prompts_of, tiny

from ridgeline.engine import Sampling
from ridgeline.engine.naive import generate_chosen, generate_samples, prompt_logprobs
from ridgeline.engine.sampling.choosing import Chooser, TokenLogprob, best_samples
from ridgeline.errors import NumericsError, UsageError

DRAWN = Sampling(temperature=1.0, seed=11, max_tokens=12)
SETTINGS = {
    "greedy": Sampling(max_tokens=12),
    "temperature": DRAWN,
    "hot": replace(DRAWN, temperature=2.5, seed=2**63 + 5),
    "top_k": replace(DRAWN, top_k=4),
    "top_p": replace(DRAWN, top_p=0.6),
    "min_p": replace(DRAWN, min_p=0.2),
    "all filters": replace(DRAWN, top_k=20, top_p=0.8, min_p=0.05, temperature=1.5),
    "repetition": replace(DRAWN, repetition_penalty=1.7),
    "repetition greedy": Sampling(max_tokens=12, repetition_penalty=1.4),
    "presence": replace(DRAWN, presence_penalty=-2.5),
    "frequency": replace(DRAWN, temperature=0.4, frequency_penalty=1.9, max_tokens=30),
    "rewarded": replace(DRAWN, frequency_penalty=-1.5),
    "bias": replace(DRAWN, logit_bias={7: 5.0, 9: -100.0, 30: float("-inf")}),
    "banned stop": replace(DRAWN, stop_ids=tuple(range(3, 60)), min_tokens=9),
    "banned and biased": replace(DRAWN, stop_ids=(7, 8), min_tokens=5, logit_bias={7: 50.0}),
    "everything": replace(
        DRAWN,
        top_k=50,
        top_p=0.9,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        logit_bias={5: 2.0},
        stop_ids=tuple(range(100, 120)),
        min_tokens=3,
    ),
    "samples": replace(DRAWN, n=3, frequency_penalty=0.5),
}


@pytest.mark.parametrize("overlap", [True, False])
def test_settings_are_exact_together(overlap: bool) -> None:
    """Every request of a batch has its own settings."""
    prompts = prompts_of([4 + 3 * index for index in range(len(SETTINGS))])
    engine = engine_for(tiny("llama-mha"), max_batch=32, num_pages=200, overlap=overlap)
    assert_exact(engine, prompts, list(SETTINGS.values()))


def test_settings_survive_preemption() -> None:
    """Penalties are counted again from what the host knows when a request comes back."""
    names = ("everything", "frequency", "repetition", "top_p", "samples")
    samplings = [replace(SETTINGS[name], max_tokens=40, stop_ids=()) for name in names]
    engine = engine_for(tiny("llama-mha"), num_pages=13)
    assert_exact(engine, prompts_of([20, 31, 25, 22, 18]), samplings)
    assert engine.stats.num_preemptions > 0


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_change_something(name: str) -> None:
    """Or the comparisons above would compare nothing."""
    model, (prompt,) = tiny("llama-mha"), prompts_of([15])
    plain = Sampling(max_tokens=12) if name == "repetition greedy" else DRAWN
    if name in ("temperature", "greedy"):
        plain = replace(SETTINGS[name], temperature=1.0 - SETTINGS[name].temperature, seed=11)
    if name == "frequency":
        plain = replace(SETTINGS[name], frequency_penalty=0.0)
    assert naive_outputs(model, prompt, SETTINGS[name]) != naive_outputs(model, prompt, plain)


def test_seats_are_taken_over_clean() -> None:
    """A request without penalties in the seat of one with them."""
    model, prompts = tiny("llama-mha"), prompts_of([9, 9])
    engine = engine_for(model, max_batch=1)
    for name in ("everything", "temperature", "bias", "greedy", "frequency"):
        assert_exact(engine, prompts, [SETTINGS[name]] * 2)


def test_logprobs_are_the_plain_loops() -> None:
    model, prompts = tiny("llama-mha"), prompts_of([12, 30, 8])
    samplings = [
        replace(DRAWN, logprobs=3),
        Sampling(max_tokens=7, logprobs=0),
        replace(DRAWN, n=2, logprobs=5, presence_penalty=0.5),
    ]
    for output, prompt, sampling in zip(
        engine_for(model).generate(prompts, samplings), prompts, samplings, strict=True
    ):
        expected = generate_samples(model, prompt, sampling)
        for completion, chosen in zip(output.completions, expected, strict=True):
            assert completion.logprobs is not None
            for found, right in zip(completion.logprobs, chosen, strict=True):
                assert right.logprob is not None
                assert_near(found, right.logprob)
                assert len(found.top) == sampling.logprobs


def test_prompt_logprobs_are_the_plain_loops() -> None:
    model, prompts = tiny("qwen3"), prompts_of([1, 40, 17])
    engine = engine_for(model, budget=16)
    engine.generate(prompts, Sampling(max_tokens=1))  # so that the prefix is there to be hit
    outputs = engine.generate(prompts, Sampling(max_tokens=2, prompt_logprobs=4))
    for output, prompt in zip(outputs, prompts, strict=True):
        expected = prompt_logprobs(model, prompt, 4)
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        for found, right in zip(output.prompt_logprobs[1:], expected[1:], strict=True):
            assert found is not None
            assert right is not None
            assert_near(found, right)


def assert_near(found: TokenLogprob, right: TokenLogprob) -> None:
    assert found.token == right.token
    assert found.logprob == pytest.approx(right.logprob, abs=1e-4)
    assert [token for token, _ in found.top] == [token for token, _ in right.top]
    values = [value for _, value in right.top]
    assert [value for _, value in found.top] == pytest.approx(values, abs=1e-4)


def test_best_of_returns_the_likeliest() -> None:
    model, (prompt,) = tiny("llama-mha"), prompts_of([14])
    sampling = replace(DRAWN, n=2, best_of=6)
    (output,) = engine_for(model).generate([prompt], sampling)
    expected = naive_outputs(model, prompt, sampling)
    assert [completion.tokens for completion in output.completions] == expected
    assert expected != naive_outputs(model, prompt, replace(DRAWN, n=2))
    assert output.completions[0].logprobs is None  # not asked for


def test_best_of_ranks_by_the_mean() -> None:
    def output(*logprobs: float) -> list[TokenLogprob]:
        return [TokenLogprob(0, logprob, ()) for logprob in logprobs]

    outputs = [output(-1.0), output(-0.6, -0.6), output(-3.0), output(-0.6)]
    assert best_samples(outputs, 3) == [1, 3, 0]


def test_stop_ids_end_an_output() -> None:
    model, (prompt,) = tiny("llama-mha"), prompts_of([14])
    ((*tokens,),) = naive_outputs(model, prompt, Sampling(max_tokens=12))
    (output,) = engine_for(model).generate([prompt], Sampling(max_tokens=12, stop_ids=(tokens[4],)))
    assert output.finish_reason == "stop"
    assert output.tokens == tuple(tokens[: tokens.index(tokens[4]) + 1])


def test_a_row_of_nan_is_seen_by_the_definition() -> None:
    logits = torch.zeros(16)
    logits[5] = math.nan
    chooser = Chooser(replace(DRAWN, presence_penalty=1.0), [1], 16, (), logits.device)
    with pytest.raises(NumericsError, match="position 1 "):
        chooser.choose(logits)


def test_samples_have_seeds_of_their_own() -> None:
    seeds = [Sampling(seed=2**64 - 1, n=4).sample_seed(index) for index in range(4)]
    assert seeds[0] == 2**64 - 1
    assert len(set(seeds)) == 4
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_the_plain_loop_stops_at_the_samplings_own_ids() -> None:
    model, (prompt,) = tiny("llama-mha"), prompts_of([14])
    free = [chosen.token for chosen in generate_chosen(model, prompt, Sampling(max_tokens=12))]
    stopped = Sampling(max_tokens=12, stop_ids=(free[3],))
    assert [chosen.token for chosen in generate_chosen(model, prompt, stopped)] == free[:4]


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"presence_penalty": math.nan}, "presence_penalty is nan"),
        ({"frequency_penalty": math.inf}, "frequency_penalty is inf"),
        ({"logit_bias": {3: math.nan}}, "logit_bias of token 3 is nan"),
        ({"logit_bias": dict.fromkeys(range(2000), 1.0)}, "has 2000 tokens"),
        ({"min_tokens": 300}, "min_tokens is 300"),
        ({"logprobs": -1}, "logprobs is -1"),
        ({"prompt_logprobs": 101}, "prompt_logprobs is 101"),
        ({"n": 0}, "n is 0"),
        ({"n": 3, "best_of": 2}, "best_of is 2"),
    ],
)
def test_wrong_settings_are_named(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Sampling(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [{"logit_bias": {131: 1.0}}, {"stop_ids": (500,)}])
def test_token_ids_of_another_vocabulary_are_named(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="vocabulary has 131"):
        engine_for(tiny("llama-mha")).generate([[5]], Sampling(**wrong))  # type: ignore[arg-type]
