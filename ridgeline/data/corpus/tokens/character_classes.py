"""Classes of all characters, as the `tokenizers` library has them.

It is asked by its own regexes: its tables are of another Unicode version than Python's, and one
letter more or less would be other words. That takes a second, so the answers are kept in the cache
folder by the library's version. Which texts NFC may change is derived from Python's tables, and a
character that these do not have counts as one that may.

    class_table(recognized)     # a CodeTable for kernels/byte_pairs
"""

from __future__ import annotations

import hashlib
import json
import logging
import unicodedata
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import Regex, pre_tokenizers

from ridgeline.data.corpus.tokens.word_rules import Recognized
from ridgeline.errors import OutputError
from ridgeline.formats.files import atomic_write
from ridgeline.hardware.paths import cache_dir
from ridgeline.kernels.byte_pairs import (
    ALONE,
    CAPITAL,
    LETTER,
    MARK,
    NUM_CODES,
    NUMBER,
    SMALL,
    SPACE,
    CodeTable,
)

_REGEXES = {
    LETTER: r"\p{L}",
    NUMBER: r"\p{N}",
    SPACE: r"\s",
    MARK: r"\p{M}",
    CAPITAL: r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]",
    SMALL: r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]",
}
# Surrogates are in no text; planes 4 to 13 are empty, 15 and 16 for private use: of no class.
_PLANES = ((0, 0xD800), (0xE000, 0x40000), (0xE0000, 0xF0000))
MAY_CHANGE = 255
log = logging.getLogger(__name__)

Ranges = Sequence[tuple[int, int]]


def class_table(recognized: Recognized) -> CodeTable:
    bits = [LETTER, NUMBER, SPACE]
    if recognized.rule.letters & MARK:
        bits.append(MARK)
    if recognized.rule.family == "gpt4o":
        bits += [MARK, CAPITAL, SMALL]
    values = np.zeros(NUM_CODES, dtype=np.uint8)
    for bit in bits:
        _mark(values, _kept_ranges(_REGEXES[bit]), bit)
    if recognized.alone is not None:
        is_digits = recognized.alone["type"] == "Digits"
        ranges = _kept_ranges(None if is_digits else recognized.alone["pattern"]["Regex"])
        _mark(values, ranges, ALONE)
    return CodeTable.of(values)


def _mark(values: NDArray[np.uint8], ranges: Ranges, bit: int) -> None:
    for begin, end in ranges:
        values[begin:end] |= bit


@cache
def _kept_ranges(regex: str | None) -> Ranges:
    """Of the characters that a regex matches, or the library's own digits for None."""
    name = hashlib.sha256(f"{tokenizers.__version__} {regex} {_PLANES}".encode()).hexdigest()[:16]
    path = cache_dir() / "characters" / f"{name}.json"
    try:
        return [(begin, end) for begin, end in json.loads(path.read_text())]
    except (OSError, ValueError, TypeError):
        ranges = _matched_ranges(regex)
    try:
        with atomic_write(path) as file:
            json.dump(ranges, file)
    except OutputError as error:
        log.warning("the classes of characters are worked out again each time: %s", error)
    return ranges


def _matched_ranges(regex: str | None) -> list[tuple[int, int]]:
    step: Any = (
        pre_tokenizers.Digits(individual_digits=False)
        if regex is None
        else pre_tokenizers.Split(Regex(f"{regex}+"), "isolated")
    )
    matched = []
    for begin, end in _PLANES:
        text = "".join(map(chr, range(begin, end)))
        pieces = [place for _, place in step.pre_tokenize_str(text)]
        # matched and unmatched characters take turns; which is which, the first character says
        first = step.pre_tokenize_str(f"\0{text[0]}\0")
        matched += [
            (begin + low, begin + high)
            for number, (low, high) in enumerate(pieces)
            if number % 2 != (len(first) > 1)
        ]
    return matched


@cache
def order_table() -> CodeTable:
    """Of NFC: the combining class of each character, MAY_CHANGE where composing may change it."""
    values = np.full(NUM_CODES, MAY_CHANGE, dtype=np.uint8)
    values[0xF0000:] = 0  # for private use
    for begin, end in _PLANES:
        values[begin:end] = [_order(chr(code)) for code in range(begin, end)]
    values[sorted(_second_parts())] = MAY_CHANGE
    return CodeTable.of(values)


def _order(character: str) -> int:
    if unicodedata.category(character) == "Cn" or not unicodedata.is_normalized("NFC", character):
        return MAY_CHANGE
    return unicodedata.combining(character)


def _second_parts() -> set[int]:
    """Characters that some other may be composed with, Hangul's vowels and ends among them."""
    parts = set(range(0x1161, 0x1176)) | set(range(0x11A8, 0x11C3))
    for begin, end in _PLANES:
        for code in range(begin, end):
            fields = unicodedata.decomposition(chr(code)).split()
            if len(fields) == 2 and not fields[0].startswith("<"):
                parts.add(int(fields[1], 16))
    return parts
