"""Counts of texts and names of languages in C++, beside what defines them."""

from __future__ import annotations

import random

import numpy as np
import polars
import pytest

from ridgeline.data.corpus.recipe import QualityOptions
from ridgeline.data.corpus.stages import language, quality
from ridgeline.data.corpus.stages.columns import packed
from ridgeline.data.corpus.stages.language import identify, identify_by_package, model_path
from ridgeline.data.corpus.stages.quality import counts_by_expressions, verdicts
from ridgeline.kernels import fasttext, host_library, text_counts

pytestmark = pytest.mark.skipif(
    host_library.find_compiler() is None, reason="no C++ compiler: the definitions serve"
)
PARTS = (
    " ", " ", " ", "  ", "\n", "\n", "\n\n", "\t", "the", "of", "word", "Word's", "x1", "42", "#",
    "...", "..", "…", ".", ". ", "! ", "?", "。", "！", "”", "’", '"', ")", "-", "*", "\n- ",
    "\n• ",
    "\n \u2003‣", "\n · ", "–", "\u00a0", "\u2028", "\r", "\x0b", "\x1c", "\x85", "é", "e\u0301",
    "漢字", "ひらがな", "カタカナ", "ไทย", "ລາວ", "ខ្មែរ", "မြန်မာ", "한글", "Ελλά", "😀",
    "\U0002a6d6",
    "\U000e0001", "lorem ipsum", "a b c d e ", "a b x b a b a x a b ", "same line\n",
)  # fmt: skip
SENTENCES = (
    "The quick brown fox jumps over the lazy dog.", "Der Hund schläft unter dem Tisch.",
    "Le chat dort sur la chaise.", "今日はいい天気ですね。", "Сегодня хорошая погода.",
    "हम कल बाज़ार गए थे।", "هذا كتاب جديد", "El perro duerme.\nY el gato también.", "🙂🙃",
)  # fmt: skip


def random_texts(count: int, seed: int, most: int = 120) -> list[str]:
    generator = random.Random(seed)
    return ["".join(generator.choices(PARTS, k=generator.randrange(most))) for _ in range(count)]


def frame_of(texts: list[str]) -> polars.DataFrame:
    column = polars.Series("text", texts, dtype=polars.String)
    frame = polars.DataFrame([column]).with_columns(language=polars.lit("en"))
    return frame.with_row_index("number")


@pytest.mark.parametrize("seed", range(3))
def test_counts_are_those_of_the_expressions(seed: int) -> None:
    texts = ["", "\n", " ", "a b a b x b a x", *random_texts(300, seed)]
    expected = counts_by_expressions(frame_of(texts))
    assert host_library.load(text_counts.OP)
    counts = quality._native_counts(polars.Series(texts, dtype=polars.String))
    for name in counts.columns:
        wrong = (counts[name] != expected[name]).arg_true()
        assert not len(wrong), (name, texts[wrong[0]])
    assert all(expected[name].sum() for name in counts.columns)  # nothing is always 0


def test_a_slice_of_a_column_is_counted_as_itself() -> None:
    texts = polars.Series(["one two\nthree", "x", "four five", "漢字 six"])
    for column in (texts.slice(1, 2), polars.concat([texts[:1], texts[2:]]), texts[:0]):
        data, offsets = packed(column)
        counts = text_counts.count(data, offsets, quality._classes())
        expected = counts_by_expressions(frame_of(column.to_list()))
        np.testing.assert_array_equal(
            counts[:, text_counts.COLUMNS.index("spaces")], expected["spaces"].to_numpy()
        )


def test_verdicts_are_the_same_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = random_texts(200, seed=9, most=400)
    frame = frame_of(texts).drop("number")
    native = verdicts(frame, QualityOptions(min_words=5))
    monkeypatch.setattr(host_library, "load", lambda name: False)
    assert native.equals(verdicts(frame, QualityOptions(min_words=5)))
    assert native["verdict"].n_unique() > 3


def test_grams_in_another_order_are_not_repeated() -> None:
    counts = counts_by_expressions(frame_of(["a b x b a b a x a b", "a b x b a a b x b a"]))
    assert counts["repeated_grams"].to_list() == [0, 1]


@pytest.mark.skipif(model_path() is None, reason="needs the extra `language`")
def test_languages_are_those_of_the_package() -> None:
    generator = random.Random(4)
    texts = [
        "", " ", "\n", "a", "</s>", "x </s> Der Hund", "__label__de the", "__label__xx", "\0 the",
        "é" * 3000, "😀" * 3000, "word " * 600, "the\r\nend\x0b\x0cof", *SENTENCES,
        *random_texts(60, seed=5),
    ]  # fmt: skip
    texts += [" ".join(generator.choices(SENTENCES, k=generator.randrange(80))) for _ in range(60)]
    assert host_library.load(fasttext.OP)
    named = identify(polars.Series(texts))
    expected = identify_by_package(texts)
    for text, own, other in zip(texts, named, expected, strict=True):
        assert own[0] == other[0], text
        # another build of the package may round a product and a sum at once
        assert own[1] == pytest.approx(other[1], abs=1e-5), text
    assert {"en", "de", "fr", "ja", "ru", "hi", "ar", "es"} <= {name for name, _ in named}


@pytest.mark.skipif(model_path() is None, reason="needs the extra `language`")
def test_the_package_serves_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = identify(polars.Series(SENTENCES))
    language._classifier.cache_clear()
    monkeypatch.setattr(host_library, "load", lambda name: False)
    try:
        named = identify(polars.Series(SENTENCES))
    finally:
        language._classifier.cache_clear()
    assert [name for name, _ in named] == [name for name, _ in expected]
