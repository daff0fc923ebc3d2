"""Token by token gives what all at once gives, for any ids, and never half a character."""

import json
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import (
    TRAPS,
    byte_level_json,
    byte_level_metadata,
    demo,
    sentencepiece_metadata,
)
from tokenizers import decoders
from written_text import TEXT

from ridgeline.data import Tokenizer
from ridgeline.data.incremental import IncrementalDecoder


def streamed(tokenizer: Tokenizer, ids: list[int], **options: bool) -> list[str]:
    decoder = tokenizer.decoder(**options)
    return [*(decoder.push(token_id) for token_id in ids), decoder.finish()]


def make(kind: str) -> Tokenizer:
    if kind == "demo":
        return demo()
    if kind == "byte-level":
        return Tokenizer.from_gguf(byte_level_metadata("llama-bpe"))
    prefix = kind == "sentencepiece with a leading space"
    return Tokenizer.from_gguf(
        sentencepiece_metadata(**{"tokenizer.ggml.add_space_prefix": prefix})
    )


KINDS = ["demo", "byte-level", "sentencepiece", "sentencepiece with a leading space"]


@pytest.mark.sweep(keep=4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip", [True, False])
def test_any_ids_come_out_as_they_do_at_once(kind: str, skip: bool) -> None:
    tokenizer = make(kind)
    # Low ids are bytes and special tokens, where the hard cases lie; a few lie past the vocabulary.
    token_ids = st.integers(0, 300) | st.integers(0, tokenizer.vocab_size + 20)

    @settings(max_examples=300, deadline=None)
    @given(st.lists(token_ids, max_size=40))
    def equal(ids: list[int]) -> None:
        parts = streamed(tokenizer, ids, skip_special_tokens=skip)
        assert "".join(parts) == tokenizer.decode(ids, skip_special_tokens=skip)

    equal()


@pytest.mark.parametrize("kind", ["demo", "byte-level"])
def test_byte_level_text_is_the_library_s(kind: str) -> None:
    tokenizer = make(kind)
    backend = tokenizer._vocabulary.backend

    @settings(max_examples=300, deadline=None)
    @given(st.lists(st.integers(0, 300) | st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    def equal(ids: list[int]) -> None:
        for skip in (True, False):
            expected = backend.decode(ids, skip_special_tokens=skip)
            assert tokenizer.decode(ids, skip_special_tokens=skip) == expected

    equal()


@pytest.mark.parametrize("kind", KINDS)
def test_text_comes_whole_and_at_once(kind: str) -> None:
    tokenizer = make(kind)
    backend = tokenizer._vocabulary.backend
    for text in [*TRAPS, TEXT[:20_000]]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        parts = streamed(tokenizer, ids)
        assert "\ufffd" not in "".join(parts)
        assert "".join(parts) == backend.decode(ids)
        assert parts[-1] == ""  # nothing was kept back once the text was whole


def test_a_character_over_several_tokens_waits_for_its_last() -> None:
    tokenizer = make("sentencepiece")
    ids = tokenizer.encode("a😀日b", add_special_tokens=False)
    assert streamed(tokenizer, ids) == ["a", "", "", "", "😀", "", "", "日", "b", ""]


def test_bytes_that_are_no_character() -> None:
    tokenizer = make("sentencepiece")
    byte = {value: 5 + value for value in range(256)}
    lead = [byte[0xF0], byte[0x9F]]
    a = tokenizer.encode("a", add_special_tokens=False)
    assert streamed(tokenizer, [*lead, *a]) == ["", "", "\ufffda", ""]
    assert streamed(tokenizer, lead) == ["", "", "\ufffd"]
    assert streamed(tokenizer, [byte[0xFF]]) == ["\ufffd", ""]
    # A special token that is not shown does not part the bytes around it.
    assert "".join(streamed(tokenizer, [*lead, 1, byte[0x98], byte[0x80]])) == "😀"


def test_the_leading_space_of_sentencepiece() -> None:
    tokenizer = make("sentencepiece with a leading space")
    ids = tokenizer.encode("the word")
    assert "".join(streamed(tokenizer, ids)) == "the word"
    assert "".join(streamed(tokenizer, ids, continuation=True)) == " the word"
    assert "".join(streamed(tokenizer, ids, skip_special_tokens=False)) == "<s> the word"
    assert tokenizer.decode(tokenizer.encode("  two")) == "  two"


def test_metaspace_decoders(tmp_path: Path) -> None:
    backend = make("sentencepiece with a leading space")._vocabulary.backend
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    for text in TRAPS:
        ids = tokenizer.encode(text)
        assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids) == text.replace("▁", " ")


def test_added_tokens_are_plain_text(tmp_path: Path) -> None:
    backend = byte_level_json()
    backend.add_tokens(["<né Ġ>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.vocab_size == 1501
    ids = tokenizer.encode("a<né Ġ>b")
    assert 1500 in ids
    assert tokenizer.decode(ids) == "a<né Ġ>b"
    assert json.loads((tmp_path / "tokenizer.json").read_text())["decoder"]["type"] == "ByteLevel"


@pytest.mark.slow
def test_the_work_per_token_does_not_grow() -> None:
    """A decoder that has seen much, in turns with one that has not."""
    tokenizer = make("byte-level")
    ids = tokenizer.encode(TEXT[:60_000])

    def seconds(decoder: IncrementalDecoder) -> float:
        start = time.perf_counter()
        for token_id in ids:
            decoder.push(token_id)
        return time.perf_counter() - start

    old = tokenizer.decoder()
    for _ in range(12):
        seconds(old)
    pairs = [(seconds(tokenizer.decoder()), seconds(old)) for _ in range(5)]
    assert min(late / early for early, late in pairs) < 3
