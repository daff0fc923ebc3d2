"""Documents of web pages: HTML files, and the pages and texts in WARC archives (WET included).

Menus, footers and the like are left out by resiliparse, which also finds out the encoding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO

from fastwarc.warc import ArchiveIterator, WarcRecordType
from resiliparse.extract.html2text import extract_plain_text
from resiliparse.parse.encoding import detect_encoding
from resiliparse.parse.html import HTMLTree

from ridgeline.data.corpus.sources.document import RawDocument, checked, decoded, refused, too_long

PAGES = ("text/html", "application/xhtml+xml")
TEXTS = WarcRecordType.response | WarcRecordType.conversion | WarcRecordType.resource


def html_document(
    data: bytes, offset: int, num_bytes: int, charset: str | None = None
) -> RawDocument:
    """The page's own text."""
    if b"\0" in data[:4096]:
        return refused(offset, num_bytes, "holds a zero byte: no page")
    try:
        tree = HTMLTree.parse_from_bytes(data, charset or detect_encoding(data) or "utf-8")
        text = extract_plain_text(tree, main_content=True, alt_texts=False, links=False)
    except (ValueError, LookupError) as error:
        return refused(offset, num_bytes, f"no page: {error}")
    return checked(text, offset, num_bytes)


def html_file(file: BinaryIO, max_bytes: int) -> RawDocument:
    data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        return too_long(0, len(data), max_bytes)
    return html_document(data, 0, len(data))


def warc_records(file: BinaryIO) -> Iterator[Any]:
    """Every record that may be a document; each is only valid until the next."""
    yield from ArchiveIterator(file, record_types=TEXTS, parse_http=False)


def warc_documents(file: BinaryIO, begin: int, end: int, max_bytes: int) -> Iterator[RawDocument]:
    """Of the records that begin in [begin, end) of the file as it is."""
    file.seek(begin)
    for record in warc_records(file):
        if record.stream_pos >= end:
            return
        yield _warc_document(record, max_bytes)


def _warc_document(record: Any, max_bytes: int) -> RawDocument:
    offset, size = record.stream_pos, record.content_length
    if size > max_bytes:
        return too_long(offset, size, max_bytes)
    record.freeze()
    if record.content_length < size:
        return refused(offset, size, "the record ends too early")
    kind, charset = record.headers.get("Content-Type", ""), None
    if record.record_type == WarcRecordType.response:
        record.parse_http()
        kind, charset = record.http_content_type or "", record.http_charset
    data = record.reader.read()
    if kind.startswith(PAGES):
        return html_document(data, offset, size, charset)
    if kind.startswith("text/plain"):
        return decoded(data, offset)
    return refused(offset, size, f"content of type {kind or 'unknown'}, no text")
