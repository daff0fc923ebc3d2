"""Certificates: that ids are those of the `tokenizers` library, on a sample or on all of a corpus.

Pieces of texts, at least 1% of the bytes and chosen by a seed, are encoded by both; with `certify`
all of them are. Where a piece differs, every text of the unit is done again by the library, and the
certificate says so.

    encoded, certificate = certified(tokenizer, texts, seed=7)
    certificate.is_proven, certificate.missing_bytes, certificate.special_texts
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
import pyarrow

from ridgeline.data.corpus.tokens.corpus_tokenizer import (
    CorpusTokenizer,
    EncodedTexts,
    TextSlice,
    slices,
)

SAMPLED_SHARE = 100  # one byte of so many is encoded by both
SAMPLED_BYTES = 2**13  # of the longest piece that is sampled
CERTIFIED_BYTES = 2**22  # of the longest piece where all is certified
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TokenCertificate:
    """What was counted and proven of a unit, or of a corpus."""

    texts: int = 0
    bytes: int = 0
    tokens: int = 0
    proven_bytes: int = 0  # encoded by the library too
    proven_pieces: int = 0
    differing_pieces: int = 0  # whose units were then done by the library
    missing_bytes: int = 0  # that the vocabulary has no token for: they are dropped
    special_texts: Mapping[str, int] = field(default_factory=dict)  # in texts, where they stay text
    library_texts: int = 0  # that the kernel left to the library
    reasons: tuple[str, ...] = ()  # why the kernel was not used

    def words(self) -> str:
        """A line for people."""
        share = self.proven_bytes / self.bytes if self.bytes else 1.0
        parts = [f"{self.tokens:,} tokens; ids checked against tokenizers on {share:.1%} of bytes"]
        if self.differing_pieces:
            parts.append(f"{self.differing_pieces} pieces differed: their units were done by it")
        parts += self.reasons
        if self.missing_bytes:
            parts.append(f"{self.missing_bytes:,} bytes have no token and are dropped")
        if self.special_texts:
            number = sum(self.special_texts.values())
            parts.append(f"{number:,} special tokens written in texts stay text")
        return "; ".join(parts)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"reasons": list(self.reasons)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> TokenCertificate:
        known = {each.name for each in fields(cls)}
        chosen = {name: value for name, value in values.items() if name in known}
        return cls(**chosen | {"reasons": tuple(values.get("reasons", ()))})


def summed(certificates: Iterable[TokenCertificate]) -> TokenCertificate:
    numbers: dict[str, int] = {}
    specials: dict[str, int] = {}
    reasons: list[str] = []
    for each in certificates:
        for name, value in asdict(each).items():
            if isinstance(value, int):
                numbers[name] = numbers.get(name, 0) + value
        for special, count in each.special_texts.items():
            specials[special] = specials.get(special, 0) + count
        reasons += each.reasons
    unique = tuple(dict.fromkeys(reasons))
    return TokenCertificate(**numbers, special_texts=dict(sorted(specials.items())), reasons=unique)


def certified(
    tokenizer: CorpusTokenizer, texts: Any, *, seed: int, certify: bool = False
) -> tuple[EncodedTexts, TokenCertificate]:
    """The ids of an Arrow array of texts, and what is proven of them."""
    encoded = tokenizer.encode(texts)
    pieces = _pieces(texts, seed, certify) if tokenizer.native is not None else []
    differing = _num_differing(tokenizer, pieces)
    reasons = (tokenizer.reason,) if tokenizer.reason else ()
    if differing:
        reason = "ids of the kernel differed from the library's"
        log.warning("%s on %d pieces: the library does this unit", reason, differing)
        encoded, reasons = tokenizer.by_library().encode(texts), (reason,)
    counts = encoded.counts
    return encoded, TokenCertificate(
        texts=counts.texts,
        bytes=counts.bytes,
        tokens=counts.tokens,
        proven_bytes=sum(len(piece) for piece in pieces) if pieces else counts.bytes,
        proven_pieces=len(pieces),
        differing_pieces=differing,
        missing_bytes=counts.missing_bytes,
        special_texts=dict(sorted(counts.special_texts.items())),
        library_texts=counts.library_texts,
        reasons=reasons,
    )


def _pieces(texts: Any, seed: int, certify: bool) -> list[bytes]:
    chosen: list[bytes] = []
    random = np.random.default_rng(seed)
    for part in slices(texts):
        limit = CERTIFIED_BYTES if certify else SAMPLED_BYTES
        places = [place for number in range(part.num_texts) for place in _cut(part, number, limit)]
        wanted = part.data.size if certify else -(-part.data.size // SAMPLED_SHARE)
        for number in random.permutation(len(places)).tolist():
            if wanted <= 0:
                break
            begin, end = places[number]
            chosen.append(part.data[begin:end].tobytes())
            wanted -= end - begin
    return chosen


def _cut(part: TextSlice, number: int, limit: int) -> list[tuple[int, int]]:
    """A text in pieces, cut between characters."""
    begin, end = part.offsets[number : number + 2].tolist()
    places = []
    while begin < end:
        last = min(begin + limit, end)
        while last < end and part.data[last] & 0xC0 == 0x80:
            last -= 1
        places.append((begin, last))
        begin = last
    return places


def _num_differing(tokenizer: CorpusTokenizer, pieces: list[bytes]) -> int:
    if not pieces:
        return 0
    encoded = tokenizer.encode(pyarrow.array([p.decode() for p in pieces], pyarrow.large_string()))
    around = len(tokenizer.before), len(tokenizer.behind)
    expected = tokenizer.tokenizer.encode_many([piece.decode() for piece in pieces])
    differing = 0
    for number, ids in enumerate(expected):
        begin, end = encoded.offsets[number : number + 2].tolist()
        own = encoded.ids[begin + around[0] : end - around[1]]
        differing += not np.array_equal(own, np.array(ids, dtype=own.dtype))
    return differing
