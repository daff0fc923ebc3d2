"""No option of Python's API is taken and ignored: every field of `Sampling` and every parameter of
`Engine.add` changes what it promises. HTTP's fields are test_every_field.py's.

A new field fails here until it has a case: a function `sampling_NAME(engine)` or `add_NAME(engine)`
below, which runs requests with it and without it, and asserts what changed.
"""

from __future__ import annotations

import inspect
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from test_commands import Maker, local, outputs_of, replicated, supervised
from test_supervisor import plain_engine

from ridgeline.engine import Engine, Grammar, Output, Sampling, Thinking
from ridgeline.engine.grammars.compilers import Compilers, CompileTask

SAMPLING = [field.name for field in fields(Sampling)]
ADD = [name for name in inspect.signature(Engine.add).parameters if name != "self"]
PLAIN = Sampling(max_tokens=8, ignore_eos=True)
DRAWN = replace(PLAIN, temperature=2.0, seed=3)
PROMPT = list(range(50, 90))


@pytest.fixture(scope="module")
def engine() -> Engine:
    return plain_engine()


@pytest.mark.parametrize("name", SAMPLING)
def test_a_field_of_sampling(engine: Engine, name: str) -> None:
    case = globals().get(f"sampling_{name}")
    assert case is not None, f"Sampling.{name} has no case: see the top of this file"
    case(engine)


@pytest.mark.parametrize("make", [local, supervised, replicated])
@pytest.mark.parametrize("name", ADD)
def test_a_parameter_of_add(make: Maker, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = globals().get(f"add_{name}")
    assert case is not None, f"Engine.add's {name} has no case: see the top of this file"
    case(make(monkeypatch))


def run(engine: Engine, sampling: Sampling = PLAIN, **changes: Any) -> Output:
    (output,) = engine.generate([PROMPT], replace(sampling, **changes))
    output.raise_unless_finished()
    return output


def sampling_temperature(engine: Engine) -> None:
    assert run(engine, seed=1).tokens == run(engine, seed=2).tokens
    assert run(engine, DRAWN).tokens != run(engine).tokens


def sampling_seed(engine: Engine) -> None:
    assert run(engine, DRAWN).tokens == run(engine, DRAWN).tokens
    assert run(engine, DRAWN).tokens != run(engine, DRAWN, seed=4).tokens


def sampling_top_k(engine: Engine) -> None:
    assert run(engine, DRAWN, top_k=1).tokens == run(engine).tokens


def sampling_top_p(engine: Engine) -> None:
    assert run(engine, DRAWN, top_p=1e-9).tokens == run(engine).tokens


def sampling_min_p(engine: Engine) -> None:
    assert run(engine, DRAWN, min_p=1.0).tokens == run(engine).tokens


def num_distinct(engine: Engine, **changes: Any) -> int:
    """How many of twenty tokens that have a chance are in the output."""
    few = dict.fromkeys(range(100, 120), 100.0)
    return len(set(run(engine, DRAWN, max_tokens=40, logit_bias=few, **changes).tokens))


def sampling_presence_penalty(engine: Engine) -> None:
    assert num_distinct(engine, presence_penalty=2) > num_distinct(engine, presence_penalty=-2)


def sampling_frequency_penalty(engine: Engine) -> None:
    assert num_distinct(engine, frequency_penalty=2) > num_distinct(engine, frequency_penalty=-2)


def sampling_repetition_penalty(engine: Engine) -> None:
    more, less = (num_distinct(engine, repetition_penalty=value) for value in (5.0, 0.2))
    assert more > less


def sampling_logit_bias(engine: Engine) -> None:
    assert run(engine, logit_bias={100: 1000.0}).tokens == (100,) * 8


def sampling_max_tokens(engine: Engine) -> None:
    assert len(run(engine, max_tokens=3).tokens) == 3


def sampling_stop_ids(engine: Engine) -> None:
    assert run(engine, logit_bias={100: 1000.0}, stop_ids=(100,)).tokens == (100,)


def sampling_min_tokens(engine: Engine) -> None:
    biased = {"logit_bias": {100: 1000.0}, "stop_ids": (100,)}
    assert len(run(engine, min_tokens=4, **biased).tokens) == 5


def sampling_ignore_eos(engine: Engine) -> None:
    assert engine.tokenizer is not None
    ending = {"logit_bias": {next(iter(engine.tokenizer.eos_ids)): 1000.0}}
    assert len(run(engine, **ending).tokens) == 8
    assert len(run(engine, ignore_eos=False, **ending).tokens) == 1


def sampling_stop(engine: Engine) -> None:
    text = run(engine).text
    stop = text[len(text) // 2 :][:2]
    assert run(engine, stop=(stop,)).text == text[: text.index(stop)]


def sampling_logprobs(engine: Engine) -> None:
    assert run(engine).completions[0].logprobs is None
    logprobs = run(engine, logprobs=2).completions[0].logprobs
    assert logprobs is not None
    assert [len(each.top) for each in logprobs] == [2] * 8


def sampling_prompt_logprobs(engine: Engine) -> None:
    assert run(engine).prompt_logprobs is None
    assert len(run(engine, prompt_logprobs=0).prompt_logprobs or ()) == len(PROMPT)


def sampling_n(engine: Engine) -> None:
    assert len({completion.tokens for completion in run(engine, DRAWN, n=3).completions}) == 3


def sampling_best_of(engine: Engine) -> None:
    """Of the four that `n` shows, the one with the highest mean log-probability."""
    four = run(engine, DRAWN, n=4, logprobs=0).completions
    means = [sum(each.logprob for each in made.logprobs or ()) for made in four]
    (best,) = run(engine, DRAWN, best_of=4).completions
    assert best.tokens == four[means.index(max(means))].tokens


def sampling_grammar(engine: Engine) -> None:
    assert run(engine, grammar=Grammar.choice(["yes"])).text == "yes"


def sampling_thinking(engine: Engine) -> None:
    """A thought of at most three tokens, and then the tag that ends it."""
    output = run(engine, max_tokens=20, thinking=Thinking(is_open=True, max_tokens=3))
    assert "</think>" in output.text
    assert "</think>" not in run(engine, max_tokens=20).text


def sampling_skip_special_tokens(engine: Engine) -> None:
    special = {"logit_bias": {1: 1000.0}, "max_tokens": 2}
    assert run(engine, **special).text == ""
    assert run(engine, **special, skip_special_tokens=False).text == "<|im_start|>" * 2


def add_prompt(engine: Engine) -> None:
    for number, prompt in enumerate((PROMPT, PROMPT[:9])):
        engine.add(prompt, PLAIN, request_id=number)
    outputs = outputs_of(engine)
    assert [outputs[number].num_prompt_tokens for number in range(2)] == [len(PROMPT), 9]


def add_sampling(engine: Engine) -> None:
    for length in (3, 5):
        engine.add(PROMPT, replace(PLAIN, max_tokens=length), request_id=length)
    assert {key: len(output.tokens) for key, output in outputs_of(engine).items()} == {3: 3, 5: 5}


def add_request_id(engine: Engine) -> None:
    assert engine.add(PROMPT, PLAIN, request_id="mine") == "mine"
    other = engine.add(PROMPT, PLAIN)
    assert set(outputs_of(engine)) == {"mine", other}


def add_priority(engine: Engine) -> None:
    """Ten, of which the last is the most important: it is not the last to be answered, on whichever
    replica it is.
    """
    for number in range(10):
        engine.add([*PROMPT, number], PLAIN, request_id=number, priority=5 * (number == 9))
    assert list(outputs_of(engine)).index(9) < 3


def add_timeout_s(engine: Engine) -> None:
    engine.add(PROMPT, PLAIN, request_id="late", timeout_s=0.0)
    engine.add(PROMPT, PLAIN, request_id="in time", timeout_s=1000.0)
    statuses = {key: output.status for key, output in outputs_of(engine).items()}
    assert statuses == {"late": "cancelled", "in time": "finished"}


def add_salt(engine: Engine) -> None:
    """What one salt has computed is not found under another."""
    hits = []
    for salt in ("one", "two"):
        before = engine.stats.hit_tokens
        engine.add(PROMPT, PLAIN, salt=salt)
        outputs_of(engine)
        hits.append(engine.stats.hit_tokens - before)
    assert hits == [0, 0]
    for _ in range(2):  # on either replica
        engine.add(PROMPT, PLAIN, salt="one")
        outputs_of(engine)
    assert engine.stats.hit_tokens > 16


def add_tenant(engine: Engine) -> None:
    """A grammar is compiled for whose it is: turns and limits go by that."""
    tenants: list[str] = []
    submit = Compilers.submit

    def noted(self: Compilers, *task: Any) -> CompileTask:
        tenants.append(task[3])
        return submit(self, *task)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Compilers, "submit", noted)
        for tenant in ("alice", "bob"):
            grammar = Grammar.regex(f"[{tenant}]{{8}}")
            engine.add(PROMPT, replace(PLAIN, grammar=grammar), tenant=tenant)
        outputs_of(engine)
    assert tenants == ["alice", "bob"]


def add_pooling(engine: Engine) -> None:
    engine.add(PROMPT, PLAIN, request_id="none")
    engine.add(PROMPT, PLAIN, request_id="last", pooling="last")
    engine.add(PROMPT, PLAIN, request_id="mean", pooling="mean")
    outputs = outputs_of(engine)
    assert outputs["none"].embedding is None
    last, mean = outputs["last"].embedding, outputs["mean"].embedding
    assert last is not None
    assert mean is not None
    assert not torch.allclose(last, mean)
