"""Texts in Arrow buffers to ids, with what a tokenizer leaves out or might take for something else.

Texts go through the native kernel, except those that it cannot be exact on: where a token that is
not special is written in the text, the library does that text; where Unicode's NFC may change it,
the library composes it first. Special tokens stay text.

    encoded = CorpusTokenizer(tokenizer).encode(pyarrow.array(["Why is the sky blue?"]))
    encoded.ids, encoded.offsets, encoded.counts.missing_bytes
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.data.corpus.tokens.native import NativeTokenizer
from ridgeline.data.tokenizer import Tokenizer
from ridgeline.data.vocabulary import token_dtype
from ridgeline.errors import UnsupportedError, UsageError
from ridgeline.kernels.byte_pairs import TextSurvey, TextSurveyor

SLICE_BYTES = 2**22  # of text encoded together
log = logging.getLogger(__name__)

Offsets = NDArray[np.int64]
Data = NDArray[np.uint8]


@dataclass
class TextCounts:
    """What was encoded, summed over texts."""

    texts: int = 0
    bytes: int = 0
    tokens: int = 0
    missing_bytes: int = 0  # without a token: they are not in the ids
    special_texts: dict[str, int] = field(default_factory=dict)  # written in texts: they stay text
    library_texts: int = 0  # that the kernel left to the library


@dataclass(frozen=True)
class EncodedTexts:
    ids: NDArray[Any]  # [N] uint16 or uint32
    offsets: Offsets  # [D + 1]: where those of each text begin, then N
    counts: TextCounts


@dataclass(frozen=True)
class TextSlice:
    """Texts one behind the other."""

    data: Data
    offsets: Offsets

    @property
    def num_texts(self) -> int:
        return len(self.offsets) - 1

    def text(self, number: int) -> str:
        begin, end = self.offsets[number], self.offsets[number + 1]
        return self.data[begin:end].tobytes().decode()


class CorpusTokenizer:
    """A document is what the tokenizer puts before a text, the text, and the end-of-text token."""

    def __init__(self, tokenizer: Tokenizer, *, native: bool = True) -> None:
        self.tokenizer = tokenizer
        self.dtype = token_dtype(tokenizer.vocab_size)
        self.before = tuple(tokenizer.prefix_ids)
        self.behind = tuple(tokenizer.text_end_ids)
        self.native: NativeTokenizer | None = None
        self.reason = ""  # why the kernel is not used
        if native:
            try:
                self.native = NativeTokenizer(tokenizer)
            except UnsupportedError as error:
                self.reason = f"tokenized by the library, which is slower: {error}"
                log.warning("%s", self.reason)
        added = tokenizer.plain_backend.get_added_tokens_decoder().values()
        self._specials = sorted({token.content for token in added if token.special})
        self._others = sorted({token.content for token in added if not token.special})
        self._surveyor: TextSurveyor | None = None
        if self.native is not None:
            needles = [text.encode() for text in (*self._specials, *self._others)]
            self._surveyor = TextSurveyor(needles, tokenizer.missing_bytes, self.native.order)

    def by_library(self) -> CorpusTokenizer:
        """The same without the kernel."""
        return CorpusTokenizer(self.tokenizer, native=False)

    def encode(self, texts: Any) -> EncodedTexts:
        """Of an Arrow array of strings without nulls; each is a document of its own."""
        counts = TextCounts()
        ids: list[NDArray[Any]] = [np.empty(0, self.dtype)]
        offsets: list[Offsets] = [np.zeros(1, dtype=np.int64)]
        for part in slices(texts):
            part_ids, part_offsets = self._surrounded(*self._encode_slice(part, counts))
            ids.append(part_ids)
            offsets.append(part_offsets[1:] + offsets[-1][-1])
        whole = np.concatenate(ids)
        counts.tokens = len(whole)
        return EncodedTexts(whole, np.concatenate(offsets), counts)

    def _encode_slice(self, part: TextSlice, counts: TextCounts) -> tuple[NDArray[Any], Offsets]:
        counts.texts += part.num_texts
        counts.bytes += int(part.offsets[-1] - part.offsets[0])
        if self.native is None:
            return self._by_library(part, counts)
        assert self._surveyor is not None
        survey = self._surveyor.survey(part.data, part.offsets)
        self._count(survey, counts)
        try:
            ids, offsets = self.native.encoder.encode(part.data, part.offsets)
        except ValueError as error:
            raise UsageError(f"{error}; give UTF-8") from None
        is_odd = survey.hits[:, len(self._specials) :].any(axis=1) | survey.may_compose
        if is_odd.any():
            chosen = np.flatnonzero(is_odd)
            counts.library_texts += len(chosen)
            odd = [self._encode_odd(part.text(number)) for number in chosen.tolist()]
            ids, offsets = _replaced(ids, offsets, chosen, odd)
        return ids, offsets

    def _encode_odd(self, text: str) -> NDArray[np.uint32]:
        assert self.native is not None
        if not any(other in text for other in self._others) and self.native.order is not None:
            composed = self.tokenizer.plain_backend.normalizer.normalize_str(text)
            if not any(other in composed for other in self._others):
                return self.native.encode_text(composed)
        return np.array(self.tokenizer.encode_many([text])[0], dtype=np.uint32)

    def _by_library(self, part: TextSlice, counts: TextCounts) -> tuple[NDArray[Any], Offsets]:
        texts = [part.text(number) for number in range(part.num_texts)]
        counts.library_texts += len(texts)
        for text in texts:
            for special in self._specials:
                if number := text.count(special):
                    counts.special_texts[special] = counts.special_texts.get(special, 0) + number
            if missing := self.tokenizer.missing_bytes:
                data = text.encode()
                counts.missing_bytes += len(data) - len(data.translate(None, missing))
        encoded = self.tokenizer.encode_many(texts)
        offsets = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
        return np.array([each for ids in encoded for each in ids], dtype=np.uint32), offsets

    def _count(self, survey: TextSurvey, counts: TextCounts) -> None:
        counts.missing_bytes += int(survey.missing.sum())
        hits = survey.hits.sum(axis=0).tolist()
        for special, number in zip(self._specials, hits, strict=False):
            if number:
                counts.special_texts[special] = counts.special_texts.get(special, 0) + number

    def _surrounded(self, ids: NDArray[Any], offsets: Offsets) -> tuple[NDArray[Any], Offsets]:
        """Documents, of the ids of texts."""
        added = len(self.before) + len(self.behind)
        offsets = offsets + added * np.arange(len(offsets))
        if not added:
            return ids.astype(self.dtype), offsets
        out = np.empty(offsets[-1], dtype=self.dtype)
        is_text = np.ones(len(out), dtype=np.bool_)
        for number, token in enumerate(self.before):
            out[offsets[:-1] + number] = token
            is_text[offsets[:-1] + number] = False
        for number, token in enumerate(self.behind[::-1], 1):
            out[offsets[1:] - number] = token
            is_text[offsets[1:] - number] = False
        out[is_text] = ids
        return out, offsets


def slices(texts: Any) -> Iterator[TextSlice]:
    """The texts of an Arrow array, some at once. Nothing is copied but offsets."""
    import pyarrow

    chunks = texts.chunks if isinstance(texts, pyarrow.ChunkedArray) else [texts]
    for chunk in chunks:
        if chunk.null_count:
            raise UsageError("a text is null; leave such rows out")
        if not pyarrow.types.is_large_string(chunk.type):
            chunk = chunk.cast(pyarrow.large_string())
        if not len(chunk):
            continue
        _, places, data = chunk.buffers()
        offsets = np.frombuffer(places, dtype=np.int64)[chunk.offset :][: len(chunk) + 1]
        content = np.frombuffer(data if data is not None and data.size else b"\0", dtype=np.uint8)
        first = 0
        while first < len(chunk):
            last = int(np.searchsorted(offsets, offsets[first] + SLICE_BYTES, side="right")) - 1
            last = min(max(last, first + 1), len(chunk))
            begin, end = int(offsets[first]), int(offsets[last])
            yield TextSlice(content[begin : max(end, begin + 1)], offsets[first : last + 1] - begin)
            first = last


def _replaced(
    ids: NDArray[Any], offsets: Offsets, chosen: Offsets, others: Sequence[NDArray[np.uint32]]
) -> tuple[NDArray[Any], Offsets]:
    """With other ids for the texts chosen."""
    parts, place = [], 0
    for number, other in zip(chosen.tolist(), others, strict=True):
        parts += [ids[place : offsets[number]], other]
        place = int(offsets[number + 1])
    lengths = np.diff(offsets)
    lengths[chosen] = [len(other) for other in others]
    return np.concatenate([*parts, ids[place:]]), np.concatenate(([0], np.cumsum(lengths)))
