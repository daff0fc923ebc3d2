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


BYTE = r"(?:25[0-5]|2[0-4]\d|1?\d?\d)"
PATTERNS = {
    "emails": Pattern(
        "@", r"\b[A-Za-z0-9._%+-]{1,64}@(?:[A-Za-z0-9-]{1,63}\.)+[A-Za-z]{2,24}\b", "[email]"
    ),
    # not those of private networks, which tell nobody's place
    "addresses": Pattern(
        r"\d\.\d",
        rf"\b(?:[1-9]|1[1-9]|[2-9]\d|1[013-9]\d|12[0-689]|2[01]\d|22[0-3])\.{BYTE}\.{BYTE}\.{BYTE}\b",
        "[address]",
    ),
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
            found_in = texts.filter(mask).str.count_matches(pattern.pattern)
            counts[entry.name] = int(found_in.sum() or 0)
            texts = changed_where(texts, mask, partial(_replaced, pattern))
    return texts, counts


def _replaced(pattern: Pattern, texts: polars.Series) -> polars.Series:
    return texts.str.replace_all(pattern.pattern, pattern.instead)
