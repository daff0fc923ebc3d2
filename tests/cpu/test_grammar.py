"""Outputs that follow a grammar: what they may be, that they are the plain loop's, and that nobody
else notices.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from engines import assert_idle, tiny
from live_server import until
from slow_grammars import slow_grammar
from tiny_tokenizers import byte_level_metadata, sentencepiece_metadata

from ridgeline.data import Tokenizer
from ridgeline.engine import Engine, Grammar, Output, Sampling, reference_generate
from ridgeline.engine.naive import generate_samples
from ridgeline.engine.sampling.masks import Masks
from ridgeline.engine.sampling.matching import Grammars
from ridgeline.errors import GrammarError, MissingPackageError, UsageError
from ridgeline.kernels.sampling import sample_rows
from ridgeline.kernels.sampling import triton as kernels
from ridgeline.models import Transformer, build_model, fill_random
from ridgeline.recipe import KV, Limits, Recipe

PADDING = 45  # entries of the models' vocabularies that their tokenizers do not have
TEXTS = ["The sky", "a value of", "Import statements are"]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["cat", "dog", "naïve"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "kind", "age", "tags"],
    "additionalProperties": False,
}
DRAWN = Sampling(temperature=1.0, seed=3, max_tokens=200)
NUMBER = replace(DRAWN, grammar=Grammar.regex("[0-9]{2,9}"))
GRAMMARS = {
    "schema": Grammar.json_schema(SCHEMA),
    "regex": Grammar.regex(r"[0-9]{4}-[0-9]{2} (é|ü){1,3}"),
    "ebnf": Grammar.ebnf('root ::= "(" (root | [a-c]) ")"'),
    "choice": Grammar.choice(["yes", "no", 'may"be\n', "日本"]),
}


@pytest.fixture(autouse=True)
def _little_space(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random models love white space; short outputs make quick tests."""
    monkeypatch.setattr("ridgeline.engine.sampling.matching.MAX_WHITESPACE", 1)


def grammars_of(engine: Engine) -> Grammars:
    grammars = engine.local.grammars
    assert grammars is not None
    return grammars


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    if kind == "byte-level":
        return Tokenizer.from_gguf(byte_level_metadata("smollm"))
    return Tokenizer.from_gguf(sentencepiece_metadata())


@cache
def writer(kind: str = "byte-level") -> Transformer:
    """A random model that speaks a real vocabulary, padded as models pad theirs."""
    size = tokenizer_of(kind).vocab_size + PADDING
    config = replace(tiny("llama-mha").config, vocab_size=size, max_context=512)
    return fill_random(build_model(config, torch.float32, "cpu"), seed=4)


def engine_of(kind: str = "byte-level", num_pages: int = 200, **changes: Any) -> Engine:
    recipe = Recipe(
        kv=KV(page_size=16),
        limits=Limits(max_batch=24, token_budget=64, max_context=512),
        **changes,
    )
    return Engine(writer(kind), recipe, tokenizer=tokenizer_of(kind), num_pages=num_pages)


def plain_tokens(engine: Engine, prompt: str, sampling: Sampling) -> list[tuple[int, ...]]:
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    grammars = Grammars(tokenizer, engine.model.config.vocab_size)
    eos_ids = () if sampling.ignore_eos else tokenizer.eos_ids
    prompt_ids = tokenizer.encode(prompt)
    outputs = generate_samples(engine.model, prompt_ids, sampling, eos_ids, grammars)
    return [tuple(chosen.token for chosen in output) for output in outputs]


def tokens_of(outputs: Sequence[Output]) -> list[list[tuple[int, ...]]]:
    for output in outputs:
        assert output.status == "finished", output.reason
    return [[completion.tokens for completion in output.completions] for output in outputs]


def matches(name: str, text: str) -> bool:
    """By other means than xgrammar's."""
    if name == "schema":
        found = json.loads(text)
        assert list(found) == SCHEMA["required"]
        return (
            len(found["name"]) <= 6
            and found["kind"] in ("cat", "dog", "naïve")
            and type(found["age"]) is int
            and 0 <= found["age"] <= 150
            and 1 <= len(found["tags"]) <= 3
            and all(type(tag) is bool for tag in found["tags"])
        )
    if name == "choice":
        return text in GRAMMARS["choice"].choices
    pattern = GRAMMARS["regex"].text if name == "regex" else r"(\()+[a-c](\))+"
    return re.fullmatch(pattern, text) is not None and text.count("(") == text.count(")")


@pytest.mark.parametrize(("kind", "num_seeds"), [("byte-level", 12), ("sentencepiece", 6)])
def test_outputs_have_the_form(kind: str, num_seeds: int) -> None:
    """Many seeds of a schema and 3 of each other grammar, all at once, at temperature 1."""
    engine = engine_of(kind)
    names = [name for name in GRAMMARS for _ in range(num_seeds if name == "schema" else 3)]
    samplings = [
        replace(DRAWN, grammar=GRAMMARS[name], seed=seed, max_tokens=20 if name == "ebnf" else 200)
        for seed, name in enumerate(names)
    ]
    outputs = engine.generate([TEXTS[0]] * len(names), samplings)
    whole = dict.fromkeys(GRAMMARS, 0)
    for name, output in zip(names, outputs, strict=True):
        assert output.status == "finished", output.reason
        if name != "ebnf" or output.finish_reason == "stop":  # which may go on for ever
            assert matches(name, output.text), (name, output.text)
            assert output.finish_reason == "stop"
            whole[name] += 1
    assert whole == {"schema": num_seeds, "regex": 3, "choice": 3, "ebnf": whole["ebnf"]}
    assert whole["ebnf"] > 0
    assert_idle(engine)


@pytest.mark.parametrize("overlap", [True, False])
def test_outputs_are_the_plain_loops_and_free_ones_do_not_notice(overlap: bool) -> None:
    """Together with every setting that a grammar meets."""
    free = [replace(DRAWN, max_tokens=20), Sampling(max_tokens=12, frequency_penalty=0.5)]
    schema = replace(DRAWN, grammar=GRAMMARS["schema"])
    samplings = [
        *free,
        replace(schema, temperature=0.0, max_tokens=40),
        replace(schema, n=3, max_tokens=30),
        replace(NUMBER, n=2, best_of=4),
        replace(NUMBER, min_tokens=4, repetition_penalty=1.3, top_p=0.9),
        replace(NUMBER, logit_bias={400: 5.0, 20: float("-inf")}, top_k=20),
        replace(NUMBER, ignore_eos=True, logprobs=2),
        replace(DRAWN, grammar=Grammar.json_object(), max_tokens=25, prompt_logprobs=0),
    ]
    prompts = [TEXTS[index % 3] for index in range(len(samplings))]
    engine = engine_of(overlap=overlap)
    alone = tokens_of([engine.generate(prompts[index], free[index])[0] for index in range(2)])
    found = tokens_of(engine.generate(prompts, samplings))
    assert found[:2] == alone
    for prompt, sampling, tokens in zip(prompts, samplings, found, strict=True):
        assert tokens == plain_tokens(engine, prompt, sampling)
    assert_idle(engine)


def test_a_prefix_that_is_there_and_too_few_pages_change_nothing() -> None:
    engine = engine_of(num_pages=12)
    samplings = [
        replace(DRAWN, grammar=GRAMMARS["schema"], seed=seed, max_tokens=40) for seed in range(4)
    ]
    expected = [plain_tokens(engine, TEXTS[0] * 3, sampling) for sampling in samplings]
    for _ in range(2):
        assert tokens_of(engine.generate([TEXTS[0] * 3] * 4, samplings)) == expected
    assert engine.stats.num_preemptions > 0
    assert engine.stats.hit_tokens > 0
    assert_idle(engine)


def test_texts_streams_and_the_plain_loop_agree() -> None:
    for kind in ("byte-level", "sentencepiece"):
        engine, sampling = (
            engine_of(kind),
            replace(DRAWN, grammar=Grammar.regex(" (yes|no)[0-9]?!")),
        )
        expected = reference_generate(writer(kind), tokenizer_of(kind), TEXTS[0], sampling)
        assert re.fullmatch(" (yes|no)[0-9]?!", expected.text)  # with its first space
        (output,) = engine.generate(TEXTS[0], sampling)
        assert (output.text, output.tokens) == (expected.text, expected.tokens)
        assert output.finish_reason == expected.finish_reason == "stop"
        deltas = list(engine.stream(TEXTS[0], sampling))
        assert "".join(delta.text for delta in deltas) == expected.text
        assert [delta.finish_reason for delta in deltas[-2:]] == [None, "stop"]


def test_where_an_output_ends() -> None:
    engine, eos = engine_of(), tokenizer_of("byte-level").eos_ids[0]
    closed = replace(DRAWN, grammar=Grammar.regex("[0-9]{3}"))
    (output,) = engine.generate(TEXTS[0], closed)
    assert output.finish_reason == "stop"
    assert eos not in output.tokens  # none is needed to know that it is complete
    willing = replace(NUMBER, logit_bias={eos: 100.0})
    (output,) = engine.generate(TEXTS[0], willing)
    assert output.tokens[-1] == eos  # as soon as the grammar allows it
    assert re.fullmatch("[0-9]{2,}", output.text)
    (output,) = engine.generate(TEXTS[0], replace(willing, min_tokens=5))
    assert len(output.tokens) > 5 or len(output.text) == 9
    (output,) = engine.generate(TEXTS[0], replace(NUMBER, max_tokens=1))
    assert output.finish_reason in ("length", "stop")
    (free,) = engine.generate(TEXTS[0], replace(DRAWN, grammar=Grammar.regex("[a-z]{30}")))
    stop = free.text[4:6]
    (output,) = engine.generate(
        TEXTS[0], replace(DRAWN, grammar=Grammar.regex("[a-z]{30}"), stop=(stop,))
    )
    assert output.text == free.text[: free.text.index(stop)]
    assert output.finish_reason == "stop"


WRONG = {
    "minLength 5 is greater than maxLength 2": Grammar.json_schema(
        {"type": "string", "minLength": 5, "maxLength": 2}
    ),
    "Unclosed '['": Grammar.regex("[0-9"),
    'Rule "foo" is not defined': Grammar.ebnf('root ::= "a" | foo'),
    "no text matches it": Grammar.ebnf('root ::= root "a"'),
}


def test_a_bad_grammar_fails_its_own_request() -> None:
    engine = engine_of()
    good = replace(NUMBER, max_tokens=9)
    samplings = [replace(DRAWN, grammar=grammar) for grammar in WRONG.values()]
    banned = Sampling(grammar=Grammar.choice(["x"]), logit_bias=banned_tokens("x"))
    early = Sampling(
        grammar=Grammar.choice(["x"]), stop_ids=tuple(banned_tokens("x")), min_tokens=1
    )
    samplings += [banned, early]
    outputs = engine.generate([TEXTS[0]] * (len(samplings) + 1), [*samplings, good])
    assert tokens_of(outputs[-1:]) == [plain_tokens(engine, TEXTS[0], good)]
    reasons = [*WRONG, *["rule out every token"] * 2]
    for reason, output in zip(reasons, outputs[:-1], strict=True):
        assert output.status == "failed"
        assert reason in output.reason
        assert "\n" not in output.reason
        assert ".cc:" not in output.reason
    with pytest.raises(GrammarError, match="Unclosed"):
        reference_generate(writer(), tokenizer_of("byte-level"), TEXTS[0], samplings[1])
    with pytest.raises(GrammarError, match="rule out every token"):
        reference_generate(writer(), tokenizer_of("byte-level"), TEXTS[0], banned)
    assert_idle(engine)


def banned_tokens(text: str) -> dict[int, float]:
    """All tokens that begin as this text does."""
    tokenizer = tokenizer_of("byte-level")
    first = text.encode()[:1]
    return {
        token: float("-inf")
        for token in range(tokenizer.vocab_size)
        if tokenizer.token_bytes(token).startswith(first)
    }


def test_a_grammar_that_takes_long_to_compile_stalls_nobody() -> None:
    """And its request can be cancelled, or be too late, meanwhile: then its compiling ends."""
    engine, slow = engine_of(), replace(DRAWN, grammar=slow_grammar(1))
    for number, timeout_s in ((1, None), (2, None), (3, 0.0)):
        engine.add(TEXTS[0], slow, request_id=number, timeout_s=timeout_s)
    with pytest.raises(UsageError, match="is in use"):
        engine.add(TEXTS[0], request_id=1)
    free, held = engine.generate([TEXTS[1]] * 2, [Sampling(max_tokens=5), NUMBER])
    assert len(free.tokens) == 5
    assert tokens_of([held]) == [plain_tokens(engine, TEXTS[1], NUMBER)]
    assert engine.cancel(2)
    assert not engine.cancel(2)
    compilers = grammars_of(engine).compilers
    assert compilers.num_pending == 1  # the first one waits for it
    engine.local.loop._last_time -= 1e6
    events = engine.step()
    assert engine.progress.idle_s < 1e5  # no step is due: nobody should restart it for that
    assert engine.cancel(1)
    events += engine.step()
    ended = {event.request_id: event for event in events if isinstance(event, Output)}
    assert {number: output.status for number, output in ended.items()} == dict.fromkeys(
        (1, 2, 3), "cancelled"
    )
    assert "deadline" in ended[3].reason
    until(lambda: compilers.num_pending == 0)
    assert_idle(engine)


def test_compiled_grammars_are_kept_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ridgeline.engine.sampling.matching.MAX_KEPT", 2)
    grammars = Grammars(tokenizer_of("byte-level"), writer().config.vocab_size)
    first, second, third = (Grammar.choice([text]) for text in ("a", "b", "c"))
    kept = grammars.compile(first)
    grammars.compile(second)
    assert grammars.compile(first) is kept
    grammars.compile(third)  # the second was not used for longest
    assert grammars.compile(first) is kept
    assert list(grammars._kept) == [third, first]
    monkeypatch.setattr("ridgeline.engine.sampling.matching.MAX_KEPT_BYTES", 1)
    for grammar in (first, third):
        grammars.compile(grammar).result()
    grammars.compile(third)
    assert list(grammars._kept) == [third]


def test_masks_rule_out_the_same_by_the_kernels() -> None:
    """Most of a vocabulary is ruled out, which is hard on sums of weights."""
    size = 1100
    draw = np.random.default_rng(2)
    masks: list[np.ndarray | None] = [None]
    for share in (0.004, 0.02, 0.5):
        bits = draw.random(-(-size // 32) * 32) < share
        masks.append(np.packbits(bits, bitorder="little").view(np.int32))
    bias = Masks(size, torch.device("cpu")).bias(masks)
    assert bias.shape == (4, size)
    for row, mask in enumerate(masks):
        for token in (0, 31, 32, 999, size - 1):
            allowed = mask is None or bool(int(mask[token // 32]) >> token % 32 & 1)
            assert bias[row, token] == (0.0 if allowed else float("-inf"))
    logits = torch.randn(4, size, generator=torch.Generator().manual_seed(1))
    about = (torch.tensor([1.0, 1.0, 0.0, 0.7]), torch.arange(4), torch.arange(4) * 7)
    filters = {"top_k_B": torch.tensor([0, 40, 40, 40], dtype=torch.int32)}
    found = kernels.sample_rows(logits, *about, bias_BV=bias, **filters)
    assert torch.equal(found, sample_rows(logits, *about, bias_BV=bias, **filters))
    assert (bias[torch.arange(4), found] == 0).all()


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("jsonschema", "{}", "did you mean 'json_schema'"),
        ("json_schema", "{", "is not JSON"),
        ("json_schema", "[1]", "expected a JSON object"),
        ("json_object", "{}", "has no text"),
        ("regex", "", "is empty"),
        ("choice", "[]", "list of texts"),
        ("choice", '["a", ""]', "none empty"),
        ("ebnf", "x" * 1_000_001, "at most"),
        ("regex", 7, r"use Grammar\.regex"),
    ],
)
def test_wrong_grammars_are_named(kind: Any, text: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Grammar(kind, text)


@pytest.mark.smoke
def test_what_a_grammar_needs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="give a Grammar"):
        Sampling(grammar="[0-9]+")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="list of texts"):
        Grammar.choice("yes")
    assert hash(NUMBER.grammar) == hash(Grammar.regex("[0-9]{2,9}"))
    recipe = Recipe(kv=KV(page_size=16), limits=Limits(max_batch=2, token_budget=32))
    with pytest.raises(UsageError, match="needs a tokenizer"):
        Engine(tiny("llama-mha"), recipe, num_pages=8).generate([[5]], NUMBER)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"ridgeline\[grammar\]"):
        engine_of().generate(TEXTS[0], NUMBER)
