"""Tidies a text without changing what it says: composed characters, no control characters, no
spaces at line ends, at most one empty line; and drops lines that belong to a page, not to its text.

Indentation and tabs stay: they are part of code and tables.
"""

from __future__ import annotations

from functools import partial
from unicodedata import is_normalized

import polars

from ridgeline.data.corpus.recipe import CleanOptions
from ridgeline.data.corpus.stages.columns import changed_where

# Controls but tab and line end, soft hyphens, marks that turn the direction, byte order marks.
INVISIBLE = (
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u200b\u200e\u200f\u202a-\u202e\u2060\u2066-\u2069\ufeff]"
)
SPACES = r"[\u00a0\u2000-\u200a\u202f\u205f\u3000]"
TIDIED = (
    (SPACES, " "), (r"\r\n?", "\n"), (INVISIBLE, ""), (r"[ \t]+\n", "\n"), (r"\n{3,}", "\n\n"),
)  # fmt: skip
MAX_LINE = 200  # characters: a longer line is text that mentions such words
PHRASES = (
    "enable javascript", "javascript is disabled", "javascript is required", "requires javascript",
    "turn on javascript", "accept cookies", "accept all cookies", "use of cookies", "uses cookies",
    "use cookies", "cookie policy", "privacy policy", "terms of use", "terms of service",
    "all rights reserved", "skip to main content", "skip to content", "jump to navigation",
    "log in to comment", "sign up for our newsletter", "subscribe to our newsletter",
    "click here to read more", "share on facebook", "share on twitter",
)  # fmt: skip
LINE = rf"(?im)^.{{0,{MAX_LINE}}}?(?:{'|'.join(PHRASES)}).{{0,{MAX_LINE}}}$\n?"


def clean(texts: polars.Series, options: CleanOptions) -> polars.Series:
    if options.unicode:
        texts = _tidied(texts)
    if options.boilerplate:
        has_some = texts.str.contains_any(list(PHRASES), ascii_case_insensitive=True)
        texts = changed_where(texts, has_some, lambda some: some.str.replace_all(LINE, ""))
    return texts.str.strip_chars()


def _tidied(texts: polars.Series) -> polars.Series:
    # Python knows quickly that a text is composed; Polars composes each anew (290 and 45 MB/s)
    loose = [not is_normalized("NFC", text) for text in texts]
    texts = changed_where(
        texts,
        polars.Series(loose, dtype=polars.Boolean),
        lambda some: some.str.normalize("NFC"),
    )
    for pattern, instead in TIDIED:
        change = partial(_replaced, pattern, instead)
        texts = changed_where(texts, texts.str.contains(pattern), change)
    return texts


def _replaced(pattern: str, instead: str, texts: polars.Series) -> polars.Series:
    return texts.str.replace_all(pattern, instead)
