"""Replaces what tells who somebody is: addresses of mail and of machines, numbers of telephones and
of payment cards. What stands in its place says what it was.

    scrub(texts, PiiOptions())          # the texts, and how many of each kind were replaced
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial

import polars

from ridgeline.data.corpus.recipe import PiiOptions
from ridgeline.data.corpus.stages.columns import changed_where


@dataclass(frozen=True)
class Pattern:
    sign: str  # a text without a match of it has none of the other: quick to look for
    pattern: str
    instead: str


def _one_of(*ranges: range) -> str:
    """A pattern of the numbers in these ranges, longer ones first."""
    numbers = sorted((str(number) for each in ranges for number in each), key=len, reverse=True)
    return f"(?:{'|'.join(numbers)})"


BYTE = _one_of(range(256))
# The first two of a public address: those of private networks tell nobody's place.
PUBLIC = "|".join(
    (
        rf"{_one_of(range(1, 10), range(11, 127), range(128, 172), range(173, 192))}\.{BYTE}",
        rf"{_one_of(range(193, 224))}\.{BYTE}",
        rf"172\.{_one_of(range(16), range(32, 256))}",
        rf"192\.{_one_of(range(168), range(169, 256))}",
    )
)
PATTERNS = {
    "emails": Pattern(
        "@", r"\b[A-Za-z0-9._%+-]{1,64}@(?:[A-Za-z0-9-]{1,63}\.)+[A-Za-z]{2,24}\b", "[email]"
    ),
    "addresses": Pattern(r"\d\.\d", rf"\b(?:{PUBLIC})\.{BYTE}\.{BYTE}\b", "[address]"),
    "cards": Pattern(
        r"\d{4}[ -]\d{4}[ -]\d", r"\b[3-6]\d{3}[ -]\d{4}[ -]\d{4}[ -]\d{4}\b", "[card]"
    ),
    "phones": Pattern(
        r"[+(]\d",
        r"\+\d{1,3}[ .-]?\(?\d{1,4}\)?(?:[ .-]?\d{2,4}){2,4}\b|\(\d{3}\) ?\d{3}[ .-]\d{4}\b",
        "[phone]",
    ),
}


def scrub(texts: polars.Series, options: PiiOptions) -> tuple[polars.Series, dict[str, int]]:
    counts = {}
    for entry in fields(options):
        if getattr(options, entry.name):
            pattern = PATTERNS[entry.name]
            mask = texts.str.contains(pattern.sign)
            matches = texts.filter(mask).str.count_matches(pattern.pattern)
            counts[entry.name] = int(matches.sum() or 0)
            texts = changed_where(texts, mask, partial(_replaced, pattern))
    return texts, counts


def _replaced(pattern: Pattern, texts: polars.Series) -> polars.Series:
    return texts.str.replace_all(pattern.pattern, pattern.instead)
