"""What is done to a document by itself: each rule of quality, cleaning, language, personal data."""

from __future__ import annotations

import polars
import pytest
from raw_files import good_texts

from ridgeline.data.corpus.recipe import (
    CleanOptions,
    CorpusRecipe,
    LanguageOptions,
    PiiOptions,
    QualityOptions,
)
from ridgeline.data.corpus.stages.clean import clean
from ridgeline.data.corpus.stages.language import identify, is_identified
from ridgeline.data.corpus.stages.pii import scrub
from ridgeline.data.corpus.stages.quality import EMPTY, checked_engine, rules, verdicts
from ridgeline.errors import MissingPackageError

SENTENCE = "The river that we have seen was wide and of a colour to be remembered by number {}.\n"
GOOD = "".join(SENTENCE.format(number) for number in range(40))
MANY_WORDS = QualityOptions(max_words=300)
# A text that the rule drops.
DROPPED = {
    EMPTY: "",
    "gopher_few_words": "The river that we have seen is wide. It is of a colour. It ends here.",
    "gopher_many_words": GOOD,
    "gopher_short_words": GOOD.replace("river that we have seen was wide", "a b c d e f g h i j k"),
    "gopher_long_words": GOOD.replace("river", "river" * 40),
    "gopher_symbols": GOOD.replace("wide", "# # #"),
    "gopher_bullets": "- " + GOOD.replace("\n", "\n- ").strip(" -"),
    "gopher_ellipses": GOOD.replace(".\n", "...\n"),
    "gopher_no_letters": GOOD.replace("river that", "12345 67890 222 333 444"),
    "gopher_stop_words": GOOD.translate(str.maketrans("eaot", "iuiu")),
    "gopher_repeated_lines": GOOD[:1000] + "A line of menu text again.\n" * 40,
    "gopher_repeated_line_characters": GOOD + (GOOD[:2000] + "\n"),
    "gopher_repeated_5_grams": GOOD.replace("\n", " one two three four five six seven eight\n"),
    "c4_placeholder": GOOD + "Lorem ipsum dolor sit amet.",
    "c4_few_sentences": GOOD.replace(".\n", "\n"),
    "fineweb_line_ends": GOOD.replace(".\n", ". And\n"),
    "fineweb_short_lines": GOOD.replace(" of a ", " of a\n")
    .replace("have", "have\n")
    .replace(" be ", " be\n"),
    "fineweb_line_breaks": "\n".join(GOOD.split()),
}


def judged(text: str, options: QualityOptions, language: str = "en") -> dict[str, bool | str]:
    frame = polars.DataFrame({"text": [text.strip()], "language": [language]})
    return verdicts(frame, options).row(0, named=True)


@pytest.mark.parametrize("name", [rule.name for rule in rules(QualityOptions())])
def test_each_rule_drops_its_text(name: str) -> None:
    """A new rule fails here until it has a text."""
    options = MANY_WORDS if name == "gopher_many_words" else QualityOptions()
    assert judged(DROPPED[name], options)[name] is True
    assert judged(DROPPED[name], options)["verdict"] != ""


def test_good_texts_stay() -> None:
    words = ("red", "green", "blue", "white", "long", "short", "old", "new", "hot", "cold")
    varied = "".join(
        f"In chapter {number} of the {word} book we have to be sure that it ends with {word}s.\n"
        for number, word in enumerate(words)
    )
    more = varied + good_texts()[0]
    assert judged(more, QualityOptions())["verdict"] == ""
    assert judged("", QualityOptions(rules=("none",)))["verdict"] == EMPTY
    assert judged("few words", QualityOptions(rules=("none",)))["verdict"] == ""


def test_the_first_rule_is_the_verdict_and_all_are_counted() -> None:
    row = judged("few", QualityOptions())
    assert row["verdict"] == "gopher_few_words"
    assert row["c4_few_sentences"] is True


def test_a_text_is_judged_by_itself() -> None:
    """Whatever stands beside it, and whatever is the same in two texts."""
    texts = [text.strip() for text in (GOOD, GOOD, DROPPED["gopher_repeated_lines"], "few", GOOD)]
    frame = polars.DataFrame({"text": texts, "language": ["en"] * len(texts)})
    together = verdicts(frame, QualityOptions())
    alone = [judged(text, QualityOptions()) for text in texts]
    assert together.to_dicts() == alone


def test_rules_on_the_shape_of_words_leave_other_scripts_alone() -> None:
    line = "昨日は友達と一緒に公園へ行き、桜の花を見ながらお弁当を食べました。"
    text = "\n".join(f"{line}それは{number}回目の春でした。" for number in "一二三四五六七八九十")
    assert judged(text, QualityOptions(rules=("gopher", "c4")), "ja")["verdict"] == ""


def test_stop_words_are_asked_for_in_english_alone() -> None:
    text = DROPPED["gopher_stop_words"]
    assert judged(text, QualityOptions())["gopher_stop_words"]
    assert not judged(text, QualityOptions(), "de")["gopher_stop_words"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("cafe\u0301 \u00a0x", "café  x"),
        ("a\r\nb\rc", "a\nb\nc"),
        ("a\x00\x07b\u200b\ufeffc\u00ad", "abc"),
        ("line  \t\n  indented\n\n\n\n\nend  ", "line\n  indented\n\nend"),
        ("keep\nPlease enable JavaScript to view this.\nthis", "keep\nthis"),
        ("© 2020 Example. All rights reserved.", ""),
        ("A long text tells why privacy policy matters. " + "word " * 60, None),
        ("日本\u3000語", "日本 語"),
    ],
)
def test_cleaning(given: str, expected: str | None) -> None:
    (cleaned,) = clean(polars.Series([given]), CleanOptions())
    assert cleaned == (given.strip() if expected is None else expected)
    assert list(clean(polars.Series([cleaned]), CleanOptions())) == [cleaned], "once is enough"


def test_cleaning_can_be_left_out() -> None:
    texts = polars.Series(["e\u0301\r\nAll rights reserved."])
    assert clean(texts, CleanOptions(unicode=False, boilerplate=False))[0] == texts[0]
    assert clean(texts, CleanOptions(boilerplate=False))[0] == "é\nAll rights reserved."


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("write to jane.doe+x@mail.example.co.uk, now", "write to [email], now"),
        ("see user@localhost or a @ b", None),
        ("from 8.8.8.8 and 172.217.1.9", "from [address] and [address]"),
        ("at 192.168.1.1, 10.0.0.1, 127.0.0.1, 172.16.3.4", None),
        ("release 1.2.3 and 300.1.1.1", None),
        ("call +49 30 1234 5678 or (555) 123-4567", "call [phone] or [phone]"),
        ("sum 1+1 = 2, x(12) and 2026-11-18", None),
        ("card 4111 1111 1111 1111 is", "card [card] is"),
        ("ids 1234 5678", None),
    ],
)
def test_personal_data(given: str, expected: str | None) -> None:
    (text,), counts = scrub(polars.Series([given]), PiiOptions())
    assert text == (given if expected is None else expected)
    assert sum(counts.values()) == (expected or "").count("[")
    off = PiiOptions(emails=False, addresses=False, phones=False, cards=False)
    assert scrub(polars.Series([given]), off)[0][0] == given


def test_languages() -> None:
    texts = polars.Series(
        ["Guten Morgen, wie geht es Ihnen heute?", good_texts()[0], "Bonjour tout le monde", ""]
    )
    names = [name for name, _ in identify(texts)]
    assert names[:3] == ["de", "en", "fr"]
    assert all(0 <= score <= 1 for _, score in identify(texts))


def test_no_model_is_said_and_only_refused_where_it_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert is_identified(LanguageOptions())
    monkeypatch.setattr("ridgeline.data.corpus.stages.language.model_path", lambda: None)
    assert not is_identified(LanguageOptions())
    for options in (LanguageOptions(identify="on"), LanguageOptions(keep=("en",))):
        with pytest.raises(MissingPackageError, match=r"ridgeline\[language\]"):
            is_identified(options)
    assert not is_identified(CorpusRecipe(language=LanguageOptions(identify="off")).language)


def test_a_gpu_engine_that_is_not_there() -> None:
    assert checked_engine("cpu") == "auto"
    with pytest.raises(MissingPackageError, match="cudf-polars"):
        checked_engine("gpu")
