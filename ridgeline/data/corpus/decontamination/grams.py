"""What is looked for: runs of words of the evaluation sets, by their hash.

runs = Runs(texts, 13)
runs.places(hashes)                 # which of these hashes are a run's, quickly
runs.source("the words of a run")   # the set and the row it stands in, surely
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ridgeline.data.corpus.duplicates.tables import Numbers, packed_strings
from ridgeline.errors import UsageError
from ridgeline.formats.fields import check_fields, field_help
from ridgeline.kernels.minhash import shingles

# The words of kernels/minhash/reference.py, as text.
WORD = re.compile(r"[0-9A-Za-z\u00c0-\u07ff]+|[\u0800-\u1fff\u3040-\U0010ffff]")
CAPITALS = {code: code + 32 for code in range(ord("A"), ord("Z") + 1)}
SIEVE_BITS = 24


@dataclass(frozen=True)
class DecontaminationOptions:
    sets: tuple[str, ...] = field(
        default=(),
        metadata=field_help(
            "evaluation sets that documents may not repeat, NAME=FILE", flag="evaluation",
            several=True,
        ),
    )  # fmt: skip
    ngram: int = field(
        default=13,
        metadata=field_help(
            "words in a row that a document may not share with one", flag="evaluation-words"
        ),
    )
    least: int = field(
        default=8,
        metadata=field_help("texts of fewer words are not looked for", flag="evaluation-least"),
    )

    def __post_init__(self) -> None:
        check_fields(self)
        wrong = [entry for entry in self.sets if not all(entry.partition("="))]
        if wrong:
            raise UsageError(f"evaluation is {wrong[0]!r}; give NAME=FILE, e.g. mmlu=mmlu.jsonl")
        if not 2 <= self.least <= self.ngram <= 32:
            raise UsageError(
                f"decontamination: ngram is {self.ngram} and least is {self.least}; give 2 to 32 "
                "words, and least no more than ngram"
            )

    @property
    def files(self) -> dict[str, str]:
        """By the name of the set."""
        return dict(entry.split("=", 1) for entry in self.sets)


@dataclass(frozen=True)
class EvaluationText:
    set: str
    row: int
    words: tuple[str, ...]


def words_of(text: str) -> list[str]:
    return WORD.findall(text.translate(CAPITALS))


def evaluation_texts(
    sets: Iterable[str], rows: Iterable[int], texts: Iterable[str]
) -> list[EvaluationText]:
    """Without the short ones' spaces and case; the same text in one set once."""
    made: dict[tuple[str, tuple[str, ...]], EvaluationText] = {}
    for name, row, text in zip(sets, rows, texts, strict=True):
        words = tuple(words_of(text))
        made.setdefault((name, words), EvaluationText(name, row, words))
    return list(made.values())


class Runs:
    """All runs of so many words of some texts."""

    def __init__(self, texts: Sequence[EvaluationText], length: int) -> None:
        self.length = length
        self._sources: dict[tuple[str, ...], EvaluationText] = {}
        for text in texts:
            for start in range(len(text.words) - length + 1):
                self._sources.setdefault(text.words[start : start + length], text)
        lines = [" ".join(words) for words in self._sources]
        hashes_S, _ = shingles(*packed_strings(lines), ngram=length)
        self._hashes = np.unique(hashes_S.numpy().view(np.uint64))
        self._sieve = np.zeros(1 << SIEVE_BITS, np.bool_)
        self._sieve[self._low(self._hashes)] = True

    @staticmethod
    def _low(hashes: Numbers) -> Numbers:
        return hashes & np.uint64((1 << SIEVE_BITS) - 1)

    def places(self, hashes: Numbers) -> Numbers:
        """Of hashes that are a run's."""
        if not len(self._hashes):
            return np.zeros(0, np.int64)
        likely = np.flatnonzero(self._sieve[self._low(hashes)])
        nearest = np.searchsorted(self._hashes, hashes[likely])
        nearest = np.minimum(nearest, len(self._hashes) - 1)
        return likely[self._hashes[nearest] == hashes[likely]]

    def source(self, words: Sequence[str]) -> EvaluationText | None:
        return self._sources.get(tuple(words))
