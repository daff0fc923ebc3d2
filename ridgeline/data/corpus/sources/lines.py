"""Documents of JSON lines, and of plain text that is cut at a separator: those that begin in a
range of bytes. A whole file of text is one document.

orjson parses line by line, so that a bad one stays alone (`scan_ndjson` fails a whole file).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

import orjson

from ridgeline.data.corpus.sources.document import (
    SHOWN,
    RawDocument,
    checked,
    decoded,
    refused,
    too_long,
)

BLOCK_BYTES = 1 << 20


def json_documents(
    file: BinaryIO, begin: int, end: int, field: str, max_bytes: int
) -> Iterator[RawDocument]:
    """Of the lines that begin in [begin, end)."""
    for offset, num_bytes, line in records(file, b"\n", begin, end, max_bytes):
        if line is None:
            yield too_long(offset, num_bytes, max_bytes)
        elif not line.isspace():
            yield _json_document(line, offset, field)


def _json_document(line: bytes, offset: int, field: str) -> RawDocument:
    try:
        values = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        return refused(offset, len(line), f"not JSON: {error.msg} at character {error.pos}")
    if not isinstance(values, dict):
        shown = line[:SHOWN].decode(errors="replace")
        return refused(offset, len(line), f"{shown!r} is not an object")
    text = values.get(field)
    if not isinstance(text, str):
        names = ", ".join(list(values)[:8]) or "nothing"
        is_there = field in values and text is not None
        reason = f"{field} is {str(text)[:SHOWN]!r}, no text" if is_there else (
            f"has no {field}; it has {names}"
        )  # fmt: skip
        return refused(offset, len(line), reason)
    return checked(text, offset, len(line))


def separated_documents(
    file: BinaryIO, begin: int, end: int, separator: str, max_bytes: int
) -> Iterator[RawDocument]:
    """Of a plain text: what begins in [begin, end), without the separator behind it."""
    mark = separator.encode()
    for offset, num_bytes, data in records(file, mark, begin, end, max_bytes):
        if data is None:
            yield too_long(offset, num_bytes, max_bytes)
        else:
            data = b"" if mark.endswith(data) else data.removesuffix(mark)
            if data and not data.isspace():
                yield decoded(data, offset)


def whole_document(file: BinaryIO, max_bytes: int) -> RawDocument:
    data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        return refused(
            0,
            len(data),
            f"longer than {max_bytes >> 20} MB (max_document_mb); a separator cuts it into several",
        )
    return decoded(data, 0)


def records(
    file: BinaryIO, mark: bytes, begin: int, end: int, max_bytes: int
) -> Iterator[tuple[int, int, bytes | None]]:
    """Offset, length and bytes (None if longer than `max_bytes`) of the records that begin in
    [begin, end). One begins at the start and behind every mark, overlapping ones included, so that
    where a file is cut changes nothing.
    """
    reader = _Lines(file) if mark == b"\n" else _Records(file, mark)
    offset = reader.start(begin)
    while offset < end:
        num_bytes, data = reader.next(max_bytes)
        if not num_bytes:
            return
        yield offset, num_bytes, data
        offset += num_bytes


class _Lines:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def start(self, begin: int) -> int:
        """Where the first line at `begin` or behind it begins."""
        if not begin:
            return 0
        skip(self._file, begin - 1)
        return begin - 1 + self.next(0)[0]

    def next(self, max_bytes: int) -> tuple[int, bytes | None]:
        line = self._file.readline(max_bytes + 1)
        if len(line) <= max_bytes:
            return len(line), line
        num_bytes = len(line)
        while not line.endswith(b"\n") and (line := self._file.readline(BLOCK_BYTES)):
            num_bytes += len(line)
        return num_bytes, None


class _Records:
    def __init__(self, file: BinaryIO, mark: bytes) -> None:
        self._file, self._mark = file, mark
        self._data = b""  # read and not yet given
        self._before = b""  # the bytes in front of it, of which a mark may take some

    def start(self, begin: int) -> int:
        back = min(begin, len(self._mark))
        skip(self._file, begin - back)
        self._before = self._file.read(back)
        if not begin or self._before == self._mark:
            return begin
        return begin + self.next(0)[0]

    def next(self, max_bytes: int) -> tuple[int, bytes | None]:
        num_before = num_bytes = 0
        size = len(self._mark)
        while True:
            # a mark may begin in what was given already, and must end behind it
            joined = self._before[1 - size :] + self._data if size > 1 else self._data
            shift = len(joined) - len(self._data)
            place = joined.find(self._mark, max(0, num_before))
            if place >= 0:
                return self._take(num_bytes, place + size - shift, max_bytes)
            block = self._file.read(BLOCK_BYTES)
            if not block:
                return self._take(num_bytes, len(self._data), max_bytes)
            num_before = max(0, len(joined) - size + 1)
            if len(self._data) > max_bytes + size:  # what is too long is not kept
                num_bytes += len(self._data)
                self._before, self._data, num_before = self._data[-size:], b"", 0
            self._data += block

    def _take(self, num_dropped: int, count: int, max_bytes: int) -> tuple[int, bytes | None]:
        data, self._data = self._data[:count], self._data[count:]
        self._before = (self._before + data)[-len(self._mark) :]
        num_bytes = num_dropped + len(data)
        return num_bytes, None if num_dropped or num_bytes > max_bytes else data


def skip(file: BinaryIO, num_bytes: int) -> None:
    """From the start of a file; what is packed has to be read."""
    if file.seekable():
        file.seek(num_bytes)
        return
    while num_bytes and (block := file.read(min(num_bytes, BLOCK_BYTES))):
        num_bytes -= len(block)
