"""Shingles and signatures: what a word is, C++ and Triton beside the definition, and how well least
permuted hashes tell how similar two documents are.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from corpora import jaccard, shingle_set, vocabulary
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ridgeline.data.corpus.decontamination.grams import words_of
from ridgeline.kernels import host_library, minhash
from ridgeline.kernels.minhash import cpu, reference, triton

needs_compiler = pytest.mark.skipif(host_library.find_compiler() is None, reason="no C++ compiler")
EMPTY = torch.zeros(0, dtype=torch.uint8)
SHAPE = {"bands": 6, "rows": 4}
# A letter of each kind that the definition tells apart, and marks beside its borders.
CHARACTERS = (
    "aZ09 .-\x7f\x80\u00a0\u00bf\u00c0é\u07ff\u0800क"
    "\u1fff\u2000\u2014\u2fff\u3000\u303f\u3040中\ufffd🙂"
)
TEXT = st.text(st.sampled_from(CHARACTERS), max_size=60)


def packed(texts: Sequence[str | bytes]) -> tuple[Tensor, Tensor]:
    data = [text.encode() if isinstance(text, str) else text for text in texts]
    sizes = torch.tensor([0, *map(len, data)])
    joined = b"".join(data)
    text_N = torch.frombuffer(bytearray(joined), dtype=torch.uint8) if joined else EMPTY
    return text_N, sizes.cumsum(0)


def texts_of_words(seed: int, count: int, length: int) -> list[str]:
    generator = random.Random(seed)
    words = vocabulary(generator)
    return [" ".join(generator.choices(words, k=length)) for _ in range(count)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Don't STOP", ["don", "t", "stop"]),
        ("a1-b2_c3", ["a1", "b2", "c3"]),
        ("naïve Ärger", ["naïve", "Ärger"]),  # letters beyond ASCII keep their case
        ("中文。字", ["中", "文", "字"]),
        ("“so” it…goes", ["so", "it", "goes"]),
        ("mixed中a", ["mixed", "中", "a"]),
        ("...", []),
    ],
)
def test_what_a_word_is(text: str, words: list[str]) -> None:
    assert words_of(text) == words
    hashes, _ = reference.shingles(*packed([text]), ngram=1)
    alone = [reference.shingles(*packed([word]), ngram=1)[0] for word in words]
    assert hashes.tolist() == [int(one[0]) for one in alone]


@settings(max_examples=60, deadline=None)
@given(st.lists(TEXT, max_size=5), st.integers(1, 7))
def test_shingles_are_runs_of_those_words(texts: list[str], ngram: int) -> None:
    hashes, starts = reference.shingles(*packed(texts), ngram=ngram)
    expected: dict[tuple[str, ...], int] = {}
    for text, begin, end in zip(texts, starts.tolist(), starts[1:].tolist(), strict=False):
        words = words_of(text)
        runs = [tuple(words[i : i + ngram]) for i in range(max(1, len(words) - ngram + 1))]
        runs = runs if words else []
        assert end - begin == len(runs)
        for run, value in zip(runs, hashes[begin:end].tolist(), strict=True):
            assert expected.setdefault(run, value) == value
    assert len(set(expected.values())) == len(expected), "two runs have one hash"


@needs_compiler
@settings(max_examples=60, deadline=None)
@given(st.lists(TEXT, max_size=5), st.integers(1, 7))
def test_cpp_has_the_definitions_bits(texts: list[str], ngram: int) -> None:
    assert cpu.serves()
    text_N, offsets = packed(texts)
    made = cpu.signatures(text_N, offsets, **SHAPE, ngram=ngram)
    expected = reference.signatures(text_N, offsets, **SHAPE, ngram=ngram)
    for own, other in zip(made, expected, strict=True):
        assert torch.equal(own, other)
    for as_sets in (False, True):
        define = reference.shingle_sets if as_sets else reference.shingles
        own, own_starts = cpu.shingles(text_N, offsets, ngram=ngram, as_sets=as_sets)
        other, other_starts = define(text_N, offsets, ngram=ngram)
        assert torch.equal(own, other)
        assert torch.equal(own_starts, other_starts)


@needs_compiler
def test_cpp_takes_documents_of_more_shingles_than_a_block_and_any_number_of_permutations() -> None:
    text_N, offsets = packed([*texts_of_words(0, 2, 1500), "", *texts_of_words(1, 1, 516)])
    for bands, rows in ((1, 1), (26, 8), (13, 5)):
        made = cpu.signatures(text_N, offsets, bands=bands, rows=rows, ngram=5)
        expected = reference.signatures(text_N, offsets, bands=bands, rows=rows)
        for own, other in zip(made, expected, strict=True):
            assert torch.equal(own, other)


@needs_compiler
@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=80))
def test_bytes_that_are_no_text_make_no_more_words_than_there_is_room_for(data: bytes) -> None:
    assert cpu.serves()
    _, starts = cpu.shingles(*packed([data]), ngram=1, as_sets=False)
    assert int(starts[-1]) <= (len(data) + 1) // 2


def test_triton_keeps_the_shingles_of_any_documents() -> None:
    texts = ["", "one", "two words", *texts_of_words(2, 3, 40), "中文 and more", "..."]
    text_N, offsets = packed(texts)
    places = triton.shingle_places(text_N, offsets, ngram=5)
    chosen = torch.tensor([7, 0, 4, 1, 6, 2])
    own, starts = triton.shingles_of(places, chosen)
    expected, expected_starts = reference.shingles(*packed([texts[n] for n in chosen]), ngram=5)
    assert torch.equal(own, expected)
    assert torch.equal(starts, expected_starts)


@pytest.mark.parametrize("config", [triton.MinHashConfig(128, 32, 4), triton.MinHashConfig(64)])
def test_sizes_of_blocks_change_no_bit(config: triton.MinHashConfig) -> None:
    text_N, offsets = packed(texts_of_words(3, 2, 70))
    made = triton.signatures(text_N, offsets, **SHAPE, config=config)
    for own, other in zip(made, reference.signatures(text_N, offsets, **SHAPE), strict=True):
        assert torch.equal(own, other)


def test_without_a_compiler_the_definition_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    text_N, offsets = packed(texts_of_words(4, 3, 30))
    pairs = torch.tensor([[0, 1], [2, 2]])

    def all_of_it() -> list[Tensor]:
        sets = minhash.shingle_sets(text_N, offsets)
        parts = [*minhash.signatures(text_N, offsets, **SHAPE), *sets, minhash.shared(*sets, pairs)]
        return [*parts, *minhash.shingles(text_N, offsets)]

    with_compiler = all_of_it()
    monkeypatch.setattr(cpu, "serves", lambda: False)
    for own, other in zip(all_of_it(), with_compiler, strict=True):
        assert torch.equal(own, other)


def test_shared_shingles_are_counted() -> None:
    texts = texts_of_words(5, 2, 60)
    texts += [" ".join(texts[0].split()[:40] + texts[1].split()[:40]), texts[0] + " " + texts[0]]
    hashes, starts = minhash.shingle_sets(*packed(texts))
    sets = [shingle_set(text) for text in texts]
    assert starts.diff().tolist() == [len(each) for each in sets]
    pairs = [(a, b) for a in range(4) for b in range(4)]
    counts = minhash.shared(hashes, starts, torch.tensor(pairs))
    assert counts.tolist() == [len(sets[a] & sets[b]) for a, b in pairs]


def test_hashes_agree_as_often_as_documents_are_similar() -> None:
    """Over 60 pairs of each similarity and 256 hashes: within 4 standard errors of a share of
    independent draws, and a pair's own share spreads around its similarity as theirs would.
    """
    for kept in (0.95, 0.8, 0.5):
        texts = texts_of_words(int(100 * kept), 120, 300)
        cut = int(300 * kept)
        for number in range(0, 120, 2):
            one, other = texts[number].split(), texts[number + 1].split()
            texts[number + 1] = " ".join(one[:cut] + other[cut:])
        sets = [shingle_set(text) for text in texts]
        true = torch.tensor([jaccard(*sets[n : n + 2]) for n in range(0, 120, 2)])
        minima = minhash.signatures(*packed(texts), bands=32, rows=8).minima
        agree = (minima[0::2] == minima[1::2]).double().mean(1)
        variance = (true * (1 - true)).mean() / 256
        assert abs(float((agree - true).mean())) < 4 * float(variance / 60) ** 0.5
        assert 0.4 < float(((agree - true) ** 2).mean() / variance) < 2.0


@pytest.mark.parametrize("ngram", [0, 33])
def test_runs_of_no_words_or_too_many_are_refused(ngram: int) -> None:
    with pytest.raises(ValueError, match=f"ngram={ngram} is outside 1 to 32"):
        minhash.shingles(*packed(["a"]), ngram=ngram)


def test_a_signature_has_a_band() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        minhash.signatures(*packed(["a"]), bands=0, rows=8)
