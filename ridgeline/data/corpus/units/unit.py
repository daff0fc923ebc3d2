"""A unit: pieces of files that one task reads, together at most 64 MB.

Small files share a unit, large ones have several. Where a file is cut does not depend on the
machine, so that neither does any output.

    Unit(12, (FilePiece("crawl/a.jsonl", "lines", begin=67108864, end=134217728, ...),))
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["text", "lines", "parquet", "arrow", "html", "warc", "refused"]
Packing = Literal["", "gz", "zst"]
MAX_PIECES = 4096  # of a unit: tiny files cost more than their bytes


@dataclass(frozen=True)
class FileState:
    """By which a file that changes is recognised."""

    num_bytes: int = 0
    modified_ns: int = 0


@dataclass(frozen=True)
class FilePiece:
    file: str
    kind: Kind
    packing: Packing = ""
    begin: int = 0  # bytes of the unpacked file, of a WARC as it is; rows of tables
    end: int = 0
    num_bytes: int = 0  # of input, about: what fills a unit
    state: FileState = field(default_factory=FileState)
    reason: str = ""  # why the file is not read, or not behind this piece


@dataclass(frozen=True)
class Unit:
    number: int
    pieces: tuple[FilePiece, ...]

    @property
    def num_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.pieces)

    @property
    def name(self) -> str:
        return f"{self.number:06d}"


def units_of(pieces: Iterable[FilePiece], max_bytes: int) -> list[Unit]:
    """In the order of the pieces."""
    units: list[Unit] = []
    own: list[FilePiece] = []
    filled = 0
    for piece in pieces:
        if own and (filled + piece.num_bytes > max_bytes or len(own) == MAX_PIECES):
            units.append(Unit(len(units), tuple(own)))
            own, filled = [], 0
        own.append(piece)
        filled += piece.num_bytes
    if own:
        units.append(Unit(len(units), tuple(own)))
    return units
