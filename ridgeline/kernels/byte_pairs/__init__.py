"""Byte-level BPE in C++ (cpu.cpp): texts in one buffer to ids in one array, on one core.

What is right is defined by the `tokenizers` library, which the tests compare with id by id; nothing
here knows its files. data/corpus/tokens reads rules, classes and merges out of a tokenizer.

    if host_library.load("byte_pairs"):
        encoder = BytePairs(rule, classes, merges)
        ids, offsets = encoder.encode(data, text_offsets)
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ridgeline.kernels.host_library import function

OP = "byte_pairs"
NUM_CODES = 0x110000
NO_TOKEN = 2**32 - 1  # of a byte; the source knows it by this number
SPARE_IDS = 3  # the source may write so many behind the last
FAMILIES = ("gpt2", "gpt4", "gpt4o")

# Classes of characters, as scan.h numbers them.
LETTER, NUMBER, SPACE, ALONE, MARK, CAPITAL, SMALL = (1 << bit for bit in range(7))

Bytes = NDArray[np.uint8]
Offsets = NDArray[np.int64]


@dataclass(frozen=True)
class WordRule:
    """How text is split into words: a family of regexes and what varies in it."""

    family: Literal["gpt2", "gpt4", "gpt4o"]
    letters: int = LETTER  # the classes that make a word
    max_digits: int = 1  # of a number, in the families gpt4 and gpt4o
    contractions: bool = False  # gpt4o: words keep 's and the like
    slash_tail: bool = False  # gpt4o: signs keep slashes behind them

    def numbers(self) -> NDArray[np.int32]:
        fields = [self.letters, self.max_digits, self.contractions, self.slash_tail]
        return np.array([FAMILIES.index(self.family), *fields], dtype=np.int32)


@dataclass(frozen=True)
class CodeTable:
    """A byte for every code point, in blocks of 256 that are kept once each."""

    index: NDArray[np.uint16]
    blocks: Bytes

    @classmethod
    def of(cls, values: Bytes) -> CodeTable:
        assert values.shape == (NUM_CODES,), values.shape
        blocks, index = np.unique(values.reshape(-1, 256), axis=0, return_inverse=True)
        return cls(index.reshape(-1).astype(np.uint16), np.ascontiguousarray(blocks))


@dataclass(frozen=True)
class Merges:
    """A vocabulary as the merging needs it."""

    byte_ids: NDArray[np.uint32]  # [256]: NO_TOKEN where there is none
    triples: NDArray[np.uint32]  # [P, 3]: left, right, what they give; first learned first
    whole: Sequence[tuple[bytes, int]] = ()  # words that are taken as one token before any merge


class BytePairs:
    """One text after the other; several threads take turns."""

    def __init__(self, rule: WordRule, classes: CodeTable, merges: Merges) -> None:
        self._kept = classes  # the source reads it as long as it lives
        self._lock = Lock()
        words, offsets = joined([word for word, _ in merges.whole])
        ids = np.array([token_id for _, token_id in merges.whole], dtype=np.uint32)
        triples = np.ascontiguousarray(merges.triples, dtype=np.uint32)
        byte_ids = np.ascontiguousarray(merges.byte_ids, dtype=np.uint32)
        numbers = rule.numbers()
        handle = ctypes.c_void_p()
        function(OP, "create", "pppppplpppl")(
            ctypes.addressof(handle),
            numbers.ctypes.data,
            classes.index.ctypes.data,
            classes.blocks.ctypes.data,
            byte_ids.ctypes.data,
            triples.ctypes.data,
            len(triples),
            words.ctypes.data,
            offsets.ctypes.data,
            ids.ctypes.data,
            len(ids),
        )
        self._handle = handle

    def __del__(self) -> None:
        if handle := getattr(self, "_handle", None):
            function(OP, "free", "p")(handle)

    def encode(self, data: Bytes, offsets: Offsets) -> tuple[NDArray[np.uint32], Offsets]:
        """The ids of all texts, and where those of each begin. `offsets` are places in `data`, one
        more than there are texts. ValueError for what is no UTF-8.
        """
        num_bytes, count = int(offsets[-1] - offsets[0]), len(offsets) - 1
        out = np.empty(num_bytes + SPARE_IDS, dtype=np.uint32)
        out_offsets, done = np.empty(count + 1, dtype=np.int64), np.empty(1, dtype=np.int64)
        with self._lock:
            function(OP, "encode", "ppplppp")(
                self._handle,
                data.ctypes.data,
                offsets.ctypes.data,
                count,
                out.ctypes.data,
                out_offsets.ctypes.data,
                done.ctypes.data,
            )
        if done[0] < count:
            raise ValueError(f"text {int(done[0]) + 1} is not UTF-8")
        return out[: out_offsets[-1]], out_offsets


@dataclass(frozen=True)
class TextSurvey:
    """What matters to a tokenizer in each of D texts."""

    missing: NDArray[np.int64]  # [D]: bytes without a token
    may_compose: NDArray[np.bool_]  # [D]: Unicode's NFC may change it
    hits: NDArray[np.int32]  # [D, needles]: how often each stands in it


@dataclass(frozen=True)
class TextSurveyor:
    """What to look for: texts that are tokens, bytes without one, characters that may compose."""

    needles: Sequence[bytes]
    missing: bytes = b""
    order: CodeTable | None = None  # 255: may change; else the combining class
    _is_missing: Bytes = field(init=False, repr=False, default_factory=lambda: np.zeros(256, "u1"))

    def __post_init__(self) -> None:
        assert all(self.needles), "an empty text stands everywhere"
        self._is_missing[list(self.missing)] = 1

    def survey(self, data: Bytes, offsets: Offsets) -> TextSurvey:
        count = len(offsets) - 1
        needles, needle_offsets = joined(self.needles)
        missing, may_compose = np.zeros(count, np.int64), np.zeros(count, np.bool_)
        hits = np.zeros((count, len(self.needles)), np.int32)
        function(OP, "survey", "pplpplpppppp")(
            data.ctypes.data,
            offsets.ctypes.data,
            count,
            needles.ctypes.data,
            needle_offsets.ctypes.data,
            len(self.needles),
            self._is_missing.ctypes.data,
            None if self.order is None else self.order.index.ctypes.data,
            None if self.order is None else self.order.blocks.ctypes.data,
            missing.ctypes.data,
            may_compose.ctypes.data,
            hits.ctypes.data,
        )
        return TextSurvey(missing, may_compose, hits)


def joined(texts: Sequence[bytes]) -> tuple[Bytes, Any]:
    """Texts one behind the other, and where they begin."""
    offsets = np.cumsum([0, *map(len, texts)], dtype=np.int64)
    return np.frombuffer(b"".join(texts) or b"\0", dtype=np.uint8), offsets
