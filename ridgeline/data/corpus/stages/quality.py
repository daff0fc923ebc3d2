"""Rules that say which documents are not worth learning from, each a Polars expression over
counts of a text: Gopher's (arXiv 2112.11446), C4's (1910.10683), FineWeb's (2406.17557).

    verdicts(frame, QualityOptions())       # a column: "" or the first rule that drops a text

The rules and all counts are Polars expressions; words and lines are counted in C++ where that can
be built (kernels/text_counts), to the same numbers. Thresholds are the papers'. Counts are integers
and ratios are compared without dividing, so that every engine of Polars decides alike. What is
written without spaces (Chinese, Japanese, Thai) counts a word a character, and is not judged by
rules on the shape of words.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Literal

import numpy as np
import polars
from polars import Expr, col

from ridgeline.data.corpus.recipe import QualityOptions
from ridgeline.data.corpus.stages.columns import packed
from ridgeline.errors import MissingPackageError
from ridgeline.kernels import host_library, text_counts
from ridgeline.kernels.byte_pairs import NUM_CODES, CodeTable

PolarsEngine = Literal["auto", "gpu"]
UNSPACED = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")
LINE_END = r'[.!?。！？…"”’)]$'
SENTENCE_END = r"[.!?](?:\s|$)|[。！？]"
SHORT_LINE = 30  # characters
NUM_GRAM = 5  # words that are looked for again
MIXER = 0x9E3779B97F4A7C15  # an odd number that scatters bits: of the golden ratio
EMPTY = "empty"


def checked_engine(name: str) -> PolarsEngine:
    """Of `cpu` and `gpu`; MissingPackageError where Polars has no GPU engine."""
    if name == "gpu" and find_spec("cudf_polars") is None:
        raise MissingPackageError(
            "--engine gpu needs the package cudf-polars and a GPU of NVIDIA; try: pip install "
            "cudf-polars-cu13, or --engine cpu"
        )
    return "gpu" if name == "gpu" else "auto"


@dataclass(frozen=True)
class Rule:
    """A text is dropped where `drops` is true."""

    name: str
    drops: Expr


def rules(options: QualityOptions) -> list[Rule]:
    """The first that drops a text is its verdict."""
    families = {"gopher": _gopher(options), "c4": _c4(), "fineweb": _fineweb()}
    chosen = [rule for name in families if name in options.rules for rule in families[name]]
    return [Rule(EMPTY, col("characters") == 0), *chosen]


def _gopher(options: QualityOptions) -> list[Rule]:
    words, lines = col("words"), col("lines")
    is_spaced = 2 * col("unspaced") < words
    letters = col("characters") - col("spaces")
    return [
        Rule("gopher_few_words", words < options.min_words),
        Rule("gopher_many_words", words > options.max_words),
        Rule("gopher_short_words", is_spaced & (letters < 3 * words)),
        Rule("gopher_long_words", is_spaced & (letters > 10 * words)),
        Rule("gopher_symbols", 10 * col("symbols") > words),
        Rule("gopher_bullets", 10 * col("bullets") > 9 * lines),
        Rule("gopher_ellipses", 10 * col("ellipses") > 3 * lines),
        Rule("gopher_no_letters", is_spaced & (10 * col("worded") < 8 * col("spaced_words"))),
        Rule("gopher_stop_words", (col("language") == "en") & (col("stop_words") < 2)),
        Rule("gopher_repeated_lines", 10 * col("repeated_lines") > 3 * lines),
        Rule(
            "gopher_repeated_line_characters",
            10 * col("repeated_line_characters") > 2 * col("line_characters"),
        ),
        Rule("gopher_repeated_5_grams", 100 * col("repeated_grams") > 15 * col("grams")),
    ]


def _c4() -> list[Rule]:
    return [
        Rule("c4_placeholder", col("placeholder")),
        Rule("c4_few_sentences", col("sentences") < 3),
    ]


def _fineweb() -> list[Rule]:
    lines = col("lines")
    return [
        Rule("fineweb_line_ends", 100 * col("ended_lines") < 12 * lines),
        Rule("fineweb_short_lines", 100 * col("short_lines") > 67 * lines),
        Rule("fineweb_line_breaks", 10 * col("breaks") > 3 * col("words")),
    ]


def verdicts(
    frame: polars.DataFrame, options: QualityOptions, engine: PolarsEngine = "auto"
) -> polars.DataFrame:
    """For each text its `verdict`, and for each rule whether it alone would drop it. The frame has
    the columns `text` and `language`.
    """
    own = rules(options)
    counts = _counts(frame.with_row_index("number"), engine)
    verdict = polars.lit("")
    for rule in reversed(own):
        verdict = polars.when(rule.drops).then(polars.lit(rule.name)).otherwise(verdict)
    columns = [verdict.alias("verdict"), *(rule.drops.alias(rule.name) for rule in own)]
    return counts.lazy().select(columns).collect(engine=engine)


def _counts(frame: polars.DataFrame, engine: PolarsEngine) -> polars.DataFrame:
    """A row a text, in their order."""
    if engine != "gpu" and host_library.load(text_counts.OP):
        counts = frame.lazy().select("language", **_quick_counts(col("text")))
        whole = counts.collect(engine=engine).hstack(_native_counts(frame["text"]))
    else:
        whole = counts_by_expressions(frame, engine)
    return whole.with_columns(words=col("spaced_words") + col("unspaced"))


def _native_counts(texts: polars.Series) -> polars.DataFrame:
    rows = text_counts.count(*packed(texts), _classes())
    counts = polars.DataFrame(
        {name: rows[:, number] for number, name in enumerate(text_counts.COLUMNS)}
    )
    has_some = (texts != "").cast(polars.Int64)
    return counts.with_columns(spaced_words=col("gaps") + has_some).drop("gaps")


@cache
def _classes() -> CodeTable:
    """Of every character, as the expressions have them: Polars is asked."""
    codes = [code for code in range(NUM_CODES) if not 0xD800 <= code < 0xE000]  # no surrogates
    characters = polars.Series([chr(code) for code in codes])
    values = np.zeros(NUM_CODES, np.uint8)
    for bit, pattern in (
        (text_counts.LETTER, r"\p{L}"),
        (text_counts.SPACE, r"\s"),
        (text_counts.UNSPACED, f"[{UNSPACED}]"),
    ):
        values[codes] |= characters.str.contains(pattern).to_numpy().astype(np.uint8) * np.uint8(
            bit
        )
    return CodeTable.of(values)


def counts_by_expressions(
    frame: polars.DataFrame, engine: PolarsEngine = "auto"
) -> polars.DataFrame:
    """All that rules look at, but the number of words; the frame has a column `number`."""
    lines, words = _lines(frame, engine), _grams(frame, engine)
    expressions = _quick_counts(col("text")) | _slow_counts(col("text"))
    counts = frame.lazy().select("number", "language", **expressions)
    for part in (lines, words):
        counts = counts.join(part.lazy(), on="number", how="left")
    return counts.sort("number").drop("number").fill_null(0).collect(engine=engine)


def _slow_counts(text: Expr) -> dict[str, Expr]:
    return {
        "unspaced": text.str.count_matches(f"[{UNSPACED}]").cast(polars.Int64),
        # of a stripped text, one more than gaps: counting those is five times as fast
        "spaced_words": text.str.count_matches(r"[ \n\t]+").cast(polars.Int64) + (text != ""),
        # what follows the first letter of a word counts with it
        "worded": text.str.count_matches(r"\p{L}\S*").cast(polars.Int64),
        "spaces": text.str.count_matches(r"[ \n\t]").cast(polars.Int64),
    }


def _quick_counts(text: Expr) -> dict[str, Expr]:
    """Which Polars takes more than a gigabyte a second of."""
    return {
        "characters": text.str.len_chars().cast(polars.Int64),
        "breaks": text.str.count_matches("\n", literal=True).cast(polars.Int64),
        "symbols": text.str.count_matches(r"#|…|\.\.\.").cast(polars.Int64),
        "sentences": text.str.count_matches(SENTENCE_END).cast(polars.Int64),
        "placeholder": text.str.contains("(?i)lorem ipsum"),
        "stop_words": polars.sum_horizontal(
            [text.str.contains(rf"(?i)\b{word}\b").cast(polars.Int64) for word in STOP_WORDS]
        ),
    }


def _lines(frame: polars.DataFrame, engine: PolarsEngine) -> polars.DataFrame:
    """Counts over the lines of each text that have something in them."""
    line = col("line")
    lines = (
        frame.lazy()
        .select("number", line=col("text").str.split("\n"))
        .explode("line")
        .filter(line != "")
        .select(
            "number",
            size=line.str.len_chars().cast(polars.Int64),
            bullet=line.str.contains(r"^\s*[-*•‣●◦▪·–]"),
            ellipsis=line.str.contains(r"(?:\.\.\.|…)$"),
            ended=line.str.contains(LINE_END),
            again=_is_again(line.hash()),
        )
    )
    of_text = lines.group_by("number").agg(
        lines=polars.len().cast(polars.Int64),
        line_characters=col("size").sum(),
        bullets=col("bullet").sum().cast(polars.Int64),
        ellipses=col("ellipsis").sum().cast(polars.Int64),
        ended_lines=col("ended").sum().cast(polars.Int64),
        short_lines=(col("size") <= SHORT_LINE).sum().cast(polars.Int64),
        repeated_lines=col("again").sum().cast(polars.Int64),
        repeated_line_characters=col("size").filter(col("again")).sum(),
    )
    return of_text.collect(engine=engine)


def _grams(frame: polars.DataFrame, engine: PolarsEngine) -> polars.DataFrame:
    """How many runs of five words a text has, and how many of them it had before."""
    words = (
        frame.lazy()
        .select("number", word=col("text").str.split(" "))
        .explode("word")
        .select("number", word=col("word").hash())
    )
    gram = polars.sum_horizontal(
        [col("word").shift(-step) * _weight(step) for step in range(NUM_GRAM)]
    )
    grams = (
        words.select("number", gram=gram, last=col("number").shift(1 - NUM_GRAM))
        .filter(col("last") == col("number"))
        .select("number", again=_is_again(col("gram")))
    )
    of_text = grams.group_by("number").agg(
        grams=polars.len().cast(polars.Int64),
        repeated_grams=col("again").sum().cast(polars.Int64),
    )
    return of_text.collect(engine=engine)


def _weight(step: int) -> Expr:
    """Of the word in this place; 1, 3, 5, … would take `a b _ b a` for `b a _ a b`."""
    return polars.lit(pow(MIXER, step, 1 << 64), dtype=polars.UInt64)


def _is_again(hashed: Expr) -> Expr:
    """Whether the same text had this before."""
    own = hashed ^ (col("number").cast(polars.UInt64) * polars.lit(MIXER, dtype=polars.UInt64))
    return ~own.is_first_distinct()
