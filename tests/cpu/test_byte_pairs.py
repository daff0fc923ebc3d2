"""The native tokenizer against the `tokenizers` library, id by id: every rule it knows, texts on
which rules part ways, words too long for its tables, tables that are emptied.
"""

from __future__ import annotations

import json
import random
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import (
    TRAPS,
    byte_level_json,
    byte_level_metadata,
    byte_level_tokens,
    demo,
    sentencepiece_metadata,
    tagged_tokenizer,
)
from tokenizers import Regex, models, normalizers, pre_tokenizers
from written_text import TEXT

from ridgeline.data import Tokenizer
from ridgeline.data.corpus.tokens import CorpusTokenizer, certified, corpus_tokenizer, native
from ridgeline.data.corpus.tokens.word_rules import Recognized
from ridgeline.data.pre_tokenizers import split_rule
from ridgeline.errors import UsageError
from ridgeline.kernels import host_library
from ridgeline.kernels.byte_pairs import WordRule

pytestmark = pytest.mark.skipif(host_library.find_compiler() is None, reason="no C++ compiler")

RULES = ("gpt-2", "smollm", "llama3", "qwen2", "qwen35", "gpt-4o", "tekken", "olmo", "command-r")
# Characters of every class, of each length in UTF-8, composing and combining ones, spaces that
# regexes and Python disagree about, and what rules name.
CHARACTERS = [
    *"abzABZ019 \t\n\r '''stremvldSTL.,;/\\|<>{}()_-+=*&^%$#@!?`~\"",
    *"\u00a0\u3000\u0085\u2028\u1680\u180e\u200b\ufeff\x00\x01\x04\x0b\x1c\x7f",
    *"éÉßſǅʰ日本のア가각\u1161\u11a8\u0301\u0327\u0345\u0f73ानน\u093c\u0e31Å²½Ⅷ١𝔘𝟙👩🇫\u200d\ufe0f",
    *("'s", "'ll", "'RE", "'ſ", "   ", "\n\n", " \n", "hello", "World", "123", "//"),
]


@cache
def of_rule(name: str) -> tuple[Tokenizer, CorpusTokenizer]:
    tokenizer = Tokenizer.from_gguf(byte_level_metadata(name))
    return tokenizer, CorpusTokenizer(tokenizer)


def own_ids(tokenizer: CorpusTokenizer, texts: list[str]) -> list[list[int]]:
    """Less what is put around each text."""
    encoded = tokenizer.encode(pyarrow.array(texts, pyarrow.large_string()))
    before, behind = len(tokenizer.before), len(tokenizer.behind)
    bounds = encoded.offsets.tolist()
    return [encoded.ids[begin + before : end - behind].tolist() for begin, end in pairwise(bounds)]


@pytest.mark.parametrize("name", RULES)
def test_ids_are_the_library_s(name: str) -> None:
    tokenizer, corpus = of_rule(name)
    assert corpus.native is not None, corpus.reason
    draw = random.Random(26)
    texts = [*TEXT[:100_000].split("\n\n"), *TRAPS]
    texts += [
        "".join(draw.choices(CHARACTERS, k=draw.choice([1, 2, 3, 5, 9, 30, 200])))
        for _ in range(600)
    ]
    texts += [chr(draw.randrange(0xE000, 0x30000)) + draw.choice("ab 1'\n") for _ in range(100)]
    assert own_ids(corpus, texts) == tokenizer.encode_many(texts)


@pytest.mark.parametrize("name", RULES)
@settings(max_examples=40, deadline=None)
@given(
    text=st.text(
        st.one_of(st.sampled_from("' \n\ras1É\u0301"), st.characters(exclude_categories=["Cs"])),
        max_size=30,
    )
)
def test_ids_of_any_text(name: str, text: str) -> None:
    tokenizer, corpus = of_rule(name)
    assert own_ids(corpus, [text]) == tokenizer.encode_many([text])


LLAMA = split_rule("llama3").regexes[0]
PIPELINES: dict[str, Any] = {
    "words and bytes": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "digits first": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    ),
    "a regex": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_pipelines_as_tokenizer_json_has_them(tmp_path: Path, name: str) -> None:
    backend = byte_level_json()
    backend.pre_tokenizer = PIPELINES[name]
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    corpus = CorpusTokenizer(tokenizer)
    assert corpus.native is not None, corpus.reason
    texts = [*TEXT[:50_000].split("\n\n"), *TRAPS]
    assert own_ids(corpus, texts) == tokenizer.encode_many(texts)


def test_the_demo_s_ids() -> None:
    tokenizer = demo()
    corpus = CorpusTokenizer(tokenizer)
    texts = [*TEXT[:150_000].split("\n\n"), *TRAPS, "lost: \x04\x06\x13, kept: \x05"]
    assert corpus.native is not None
    encoded = corpus.encode(pyarrow.array(texts, pyarrow.large_string()))
    assert own_ids(corpus, texts) == tokenizer.encode_many(texts)
    assert encoded.counts.missing_bytes == 3


def test_words_of_any_length() -> None:
    """In the table, beside it, past what is kept, merged by looking and merged by a heap."""
    tokenizer, corpus = of_rule("gpt-2")
    draw = random.Random(3)
    texts = ["e" * length for length in (1, 7, 8, 14, 15, 16, 17, 63, 64, 65, 255, 256, 3000)]
    texts += ["".join(draw.choices("theinaro", k=length)) for length in range(1, 400, 13)]
    texts += [" " * 500 + "x", "=-" * 700, "\n" * 300, "日本" * 150]
    expected = tokenizer.encode_many(texts)
    for _ in range(2):  # merged, and remembered
        assert own_ids(corpus, texts) == expected


def test_tables_that_grow_and_are_emptied(monkeypatch: pytest.MonkeyPatch) -> None:
    _, corpus = of_rule("gpt-2")
    draw = np.random.default_rng(1)
    # 700,000 words fill the table of short ones past its limit; 150,000 long ones theirs
    words = draw.integers(ord("a"), ord("z") + 1, (700_000, 7), dtype=np.uint8)
    words[:, 0] = ord(" ")
    long_words = draw.integers(ord("a"), ord("z") + 1, (150_000, 20), dtype=np.uint8)
    long_words[:, 0] = ord(" ")
    probe = TEXT[:3000]
    before = own_ids(corpus, [probe])
    flood = pyarrow.array([words.tobytes().decode(), long_words.tobytes().decode()])
    first = corpus.encode(flood)
    assert own_ids(corpus, [probe]) == before
    again = corpus.encode(flood)
    assert np.array_equal(first.ids, again.ids)
    some = words[:2000].tobytes().decode()
    assert own_ids(corpus, [some]) == corpus.tokenizer.encode_many([some])


def test_slices_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    _, corpus = of_rule("llama3")
    texts = [*TEXT[:20_000].split("\n\n"), "", "end"]
    whole = corpus.encode(pyarrow.array(texts))
    monkeypatch.setattr(corpus_tokenizer, "SLICE_BYTES", 100)
    chunks = pyarrow.chunked_array(
        [pyarrow.array(texts[:3]), pyarrow.array(["skip", *texts[3:]])[1:]]
    )
    cut = corpus.encode(chunks)
    assert np.array_equal(whole.ids, cut.ids)
    assert np.array_equal(whole.offsets, cut.offsets)
    assert whole.counts == cut.counts
    assert whole.counts.bytes == sum(len(text.encode()) for text in texts)


def test_special_tokens_in_texts_stay_text() -> None:
    tokenizer, corpus = of_rule("gpt-2")
    text = "a <|im_end|> b <|im_end|> <|endoftext|>"
    encoded = corpus.encode(pyarrow.array([text]))
    assert encoded.counts.special_texts == {"<|im_end|>": 2, "<|endoftext|>": 1}
    assert encoded.ids.tolist() == [*tokenizer.encode(text, parse_special=False), 0]
    assert tokenizer.special_id("<|im_end|>") not in encoded.ids


def test_other_added_tokens_are_the_library_s() -> None:
    tokenizer = tagged_tokenizer(("<think>", "  "))
    corpus = CorpusTokenizer(tokenizer)
    texts = ["plain", "a <think> b", "two  spaces", "none"]
    assert corpus.native is not None
    assert own_ids(corpus, texts) == tokenizer.encode_many(texts)
    assert corpus.encode(pyarrow.array(texts)).counts.library_texts == 2


def test_bytes_without_a_token() -> None:
    """They are left out, what stood on their sides is merged, and they are counted."""
    ids, merges = byte_level_tokens()
    kept = {text: token_id for text, token_id in ids.items() if text != "q"}
    pairs = [tuple(line.split(" ")) for line in merges if "q" not in line]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={t: i for t, i in kept.items() if t == "q" or "q" not in t}, merges=pairs)
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = byte_level_json().decoder
    tokenizer = tagged_tokenizer(())
    tokenizer._backend = backend
    tokenizer.__dict__.pop("plain_backend", None)
    tokenizer._pieces = type(tokenizer._pieces)(backend)
    corpus = CorpusTokenizer(tokenizer)
    texts = ["thqe quick thqeqn", "qq", "no"]
    assert corpus.native is not None, corpus.reason
    assert own_ids(corpus, texts) == tokenizer.encode_many(texts)
    for one in (corpus, corpus.by_library()):
        assert one.encode(pyarrow.array(texts)).counts.missing_bytes == 6


def test_what_the_kernel_cannot_do_is_the_library_s(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece_metadata())
    corpus = CorpusTokenizer(tokenizer)
    assert corpus.native is None
    assert "tokenized by the library, which is slower" in caplog.text
    texts = [*TEXT[:5_000].split("\n\n"), "<end_of_turn> stays"]
    encoded, certificate = certified(corpus, pyarrow.array(texts), seed=1)
    assert own_ids(corpus, texts) == tokenizer.encode_many(texts)
    assert certificate.proven_bytes == certificate.bytes
    assert certificate.special_texts == {"<end_of_turn>": 1}
    assert certificate.reasons == (corpus.reason,)
    assert encoded.offsets[-1] == certificate.tokens


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda b: setattr(b, "pre_tokenizer", pre_tokenizers.ByteLevel()), "a space before"),
        (lambda b: setattr(b, "pre_tokenizer", pre_tokenizers.Whitespace()), "Whitespace"),
        (lambda b: setattr(b, "normalizer", normalizers.Lowercase()), "Lowercase"),
        (lambda b: setattr(b, "normalizer", normalizers.NFKC()), "NFKC"),
    ],
)
def test_pipelines_that_are_not_known(tmp_path: Path, change: Any, reason: str) -> None:
    backend = byte_level_json()
    change(backend)
    backend.save(str(tmp_path / "tokenizer.json"))
    corpus = CorpusTokenizer(Tokenizer.load(tmp_path))
    assert corpus.native is None
    assert reason in corpus.reason


def test_a_rule_that_differs_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were a rule recognized wrongly, the texts of traps would show it."""
    wrong = Recognized(WordRule("gpt4", max_digits=3))
    monkeypatch.setattr(native, "word_rule", lambda _: wrong)
    corpus = CorpusTokenizer(Tokenizer.from_gguf(byte_level_metadata("gpt-2")))
    assert corpus.native is None
    assert "differ from the library's" in corpus.reason


def test_a_certificate_sees_wrong_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_metadata("gpt-2"))
    corpus = CorpusTokenizer(tokenizer)
    assert corpus.native is not None
    encode = corpus.native.encoder.encode

    def wrong(data: Any, offsets: Any) -> Any:
        ids, places = encode(data, offsets)
        return np.where(ids == ids[0], ids + 1, ids), places

    monkeypatch.setattr(corpus.native.encoder, "encode", wrong)
    texts = TEXT[:20_000].split("\n\n")
    encoded, certificate = certified(corpus, pyarrow.array(texts), seed=7)
    assert certificate.differing_pieces > 0
    assert "differed" in certificate.words()
    expected = [token for ids in tokenizer.encode_many(texts) for token in [*ids, 0]]
    assert encoded.ids.tolist() == expected


def test_what_a_certificate_covers() -> None:
    _, corpus = of_rule("gpt-2")
    texts = pyarrow.array(TEXT[:60_000].split("\n\n"))
    total = sum(len(text.as_py().encode()) for text in texts)
    _, sampled = certified(corpus, texts, seed=7)
    _, same = certified(corpus, texts, seed=7)
    _, whole = certified(corpus, texts, seed=7, certify=True)
    assert total / 100 <= sampled.proven_bytes < total / 10
    assert sampled == same
    assert whole.proven_bytes == whole.bytes == total
    assert whole.differing_pieces == 0
    assert json.loads(json.dumps(whole.to_json()))["tokens"] == whole.tokens


def test_bytes_that_are_no_text() -> None:
    _, corpus = of_rule("gpt-2")
    for data in (b"ab\xff", b"\xc3", b"\xe2\x82", b"\xf0\x9f\x98", b"\xc0\x80", b"a\x80b"):
        bad = pyarrow.array([b"good", data], pyarrow.large_binary())
        texts = pyarrow.LargeStringArray.from_buffers(2, bad.buffers()[1], bad.buffers()[2])
        with pytest.raises(UsageError, match=r"text 2 is not UTF-8; give UTF-8"):
            corpus.encode(texts)
    with pytest.raises(UsageError, match="a text is null"):
        corpus.encode(pyarrow.array(["a", None]))
    assert corpus.encode(pyarrow.array([], pyarrow.string())).offsets.tolist() == [0]


def test_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_library, "find_compiler", lambda: None)
    monkeypatch.setattr(host_library, "_single", {})
    corpus = CorpusTokenizer(Tokenizer.from_gguf(byte_level_metadata("gpt-2")))
    assert corpus.native is None
    assert "C++ compiler" in corpus.reason
    assert caplog.text.count("no C++ compiler") == 1
