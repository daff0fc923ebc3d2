"""Thoughts told from answers: by the scanner, by stop strings, by the limit an engine keeps."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from live_server import RECIPE, write_model
from tiny_tokenizers import tagged_tokenizer

from ridgeline.data import Tokenizer
from ridgeline.engine import Engine, Grammar, Sampling, Thinking, reference_generate
from ridgeline.engine.requests.thinking import ThinkingPart, ThinkingScanner, stop_watcher
from ridgeline.engine.sampling.matching import Grammars
from ridgeline.engine.sampling.thinking import AnyMatcher, matcher_for
from ridgeline.errors import GrammarError, UsageError
from ridgeline.recipe import edited

VOCAB = 1504
OPEN, CLOSE = ("tag", "<think>"), ("tag", "</think>")


def parts_of(text: str, sizes: list[int], **options: object) -> list[ThinkingPart]:
    """The parts of a text that comes in pieces; neighbours of one kind are joined."""
    scanner = ThinkingScanner(Thinking(**options))  # type: ignore[arg-type]
    parts: list[ThinkingPart] = []
    start = 0
    for size in [*sizes, len(text)]:
        parts += scanner.push(text[start : start + size])
        start += size
    parts += scanner.finish()
    joined: list[ThinkingPart] = []
    for part in parts:
        if joined and joined[-1].kind == part.kind:
            joined[-1] = ThinkingPart(part.kind, joined[-1].text + part.text)
        else:
            joined.append(part)
    return joined


@pytest.mark.parametrize(
    ("text", "is_open", "expected"),
    [
        ("plain <think>x</think>", False, [("answer", "plain <think>x</think>")]),
        ("<think>a<b</think>c", False, [OPEN, ("thought", "a<b"), CLOSE, ("answer", "c")]),
        ("\n<think>\n</think>", False, [("tag", "\n<think>"), ("thought", "\n"), CLOSE]),
        ("a</think>b</think>", True, [("thought", "a"), CLOSE, ("answer", "b</think>")]),
        ("never ends </thi", True, [("thought", "never ends </thi")]),
        ("<thi", False, [("answer", "<thi")]),
        ("", True, []),
    ],
)
def test_however_a_text_is_cut_its_parts_are_the_same(
    text: str, is_open: bool, expected: list[tuple[str, str]]
) -> None:
    assert parts_of(text, [], is_open=is_open) == expected
    draw = random.Random(1)
    for _ in range(50):
        sizes = [draw.randint(0, 4) for _ in range(len(text))]
        assert parts_of(text, sizes, is_open=is_open) == expected
    assert parts_of(text, [1] * len(text), is_open=is_open) == expected


def test_stop_strings_are_for_the_answer() -> None:
    for is_open in (True, False):
        watcher = stop_watcher(("END",), Thinking(is_open=is_open))
        text = ("" if is_open else "<think>") + "an END in a thought</think>one EN two END three"
        shown = "".join(watcher.push(char) for char in text) + watcher.finish()
        assert watcher.stopped
        assert shown == text.removesuffix("END three")
    watcher = stop_watcher(("END",), Thinking())
    assert watcher.push("no thought END") + watcher.finish() == "no thought "


def allowed(matcher: AnyMatcher) -> set[int] | None:
    mask = matcher.mask()
    if mask is None:
        return None
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def follow(tokenizer: Tokenizer, sampling: Sampling) -> AnyMatcher:
    grammars = Grammars(tokenizer, VOCAB)
    grammar = sampling.grammar
    compiled = None if grammar is None else grammars.compile(grammar).result()
    return matcher_for(grammars, compiled, sampling, {0})


@pytest.mark.parametrize("tags", [("<think>", "</think>"), ()])
def test_the_limit_forces_the_closing_tag(tags: tuple[str, ...]) -> None:
    tokenizer = tagged_tokenizer(tags)
    closing = tokenizer.encode("</think>")
    assert (len(closing) == 1) is bool(tags)
    matcher = follow(tokenizer, Sampling(thinking=Thinking(is_open=True, max_tokens=3)))
    (word,) = tokenizer.encode("a")
    for _ in range(3):
        assert allowed(matcher) is None
        matcher.accept(word)
    for token in closing:
        assert allowed(matcher) == {token}
        with pytest.raises(GrammarError):
            matcher.accept(word)
        matcher.accept(token)
    for _ in range(5):
        assert allowed(matcher) is None  # the answer is free
        matcher.accept(word)
    assert not matcher.is_complete


def test_the_limit_counts_only_thoughts() -> None:
    tokenizer = tagged_tokenizer(("<think>", "</think>"))
    (word,) = tokenizer.encode("a")
    opening, closing = tokenizer.encode("<think></think>")
    sampling = Sampling(thinking=Thinking(max_tokens=2))
    matcher = follow(tokenizer, sampling)  # a model that answers at once
    for _ in range(5):
        matcher.accept(word)
        assert allowed(matcher) is None
    matcher = follow(tokenizer, sampling)  # one that closes its thought itself
    for token in (opening, word, closing, word, word, word):
        matcher.accept(token)
        assert allowed(matcher) is None
    matcher = follow(tokenizer, sampling)
    matcher.follow([opening, word, word])  # after a restart: it goes on where it was
    assert allowed(matcher) == {closing}


@pytest.mark.parametrize("is_open", [True, False])
def test_a_grammar_is_for_the_answer(is_open: bool) -> None:
    tokenizer = tagged_tokenizer(("<think>", "</think>"))
    opening, closing = tokenizer.encode("<think></think>")
    (word,), (yes,) = tokenizer.encode("a"), tokenizer.encode("y")
    sampling = Sampling(grammar=Grammar.choice(["y"]), thinking=Thinking(is_open=is_open))
    matcher = follow(tokenizer, sampling)
    if not is_open:
        assert allowed(matcher) == {opening, yes}
        at_once = follow(tokenizer, sampling)
        at_once.accept(yes)
        assert at_once.is_complete
        matcher.accept(opening)
    thinking = allowed(matcher)
    assert thinking is not None
    assert 0 not in thinking  # a stop token would end it without an answer
    assert word in thinking
    matcher.accept(word)
    matcher.accept(closing)
    assert allowed(matcher) == {yes}
    assert not matcher.is_complete
    matcher.accept(yes)
    assert matcher.is_complete


def test_tags_that_are_special_tokens_have_text() -> None:
    tokenizer = tagged_tokenizer(("[THINK]", "[/THINK]"), special=True)
    ids = tokenizer.encode("[THINK]a[/THINK]b<|im_end|>")
    tags = frozenset(
        token for tag in ("[THINK]", "[/THINK]") if (token := tokenizer.special_id(tag)) is not None
    )
    decoder = tokenizer.decoder(shown=tags)
    assert "".join(map(decoder.push, ids)) == "[THINK]a[/THINK]b"
    assert "".join(map(tokenizer.decoder().push, ids)) == "ab"


def test_bad_settings_are_named() -> None:
    with pytest.raises(UsageError, match="max_tokens is 0"):
        Thinking(max_tokens=0)
    with pytest.raises(UsageError, match="tag is empty"):
        Thinking(open_tag="")
    with pytest.raises(UsageError, match="thinking is a int"):
        Sampling(thinking=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("overlap", [True, False])
def test_an_engine_keeps_the_limit_as_the_plain_loop_does(tmp_path: Path, overlap: bool) -> None:
    """Beside requests without one, whose steps it leaves as they are."""
    write_model(tmp_path, tags=("<think>", "</think>"))
    recipe = edited(RECIPE, "overlap", overlap)
    with Engine(tmp_path, recipe, device="cpu", num_pages=64) as engine:
        assert engine.tokenizer is not None
        limited = Thinking(is_open=True, max_tokens=7)
        samplings = [
            Sampling(max_tokens=24, ignore_eos=True, thinking=limited),
            Sampling(max_tokens=24, ignore_eos=True),
            Sampling(max_tokens=24, ignore_eos=True, temperature=1.0, seed=5, thinking=limited),
            Sampling(max_tokens=24, thinking=limited, grammar=Grammar.choice(["yes", "no"])),
        ]
        outputs = engine.generate(["one two"] * len(samplings), samplings)
        (closing,) = engine.tokenizer.encode("</think>")
        for sampling, output in zip(samplings, outputs, strict=True):
            expected = reference_generate(engine.model, engine.tokenizer, "one two", sampling)
            assert output.tokens == expected.tokens
            assert output.text == expected.text
            if sampling.thinking is not None:
                assert output.tokens.index(closing) == 7
        assert outputs[-1].text.partition("</think>")[2] in ("yes", "no")
