"""A document as it was read: a text and its place, or the reason why there is none."""

from __future__ import annotations

from typing import NamedTuple

SHOWN = 60  # characters of what stands in a reason


class RawDocument(NamedTuple):  # millions are made: a tuple is made twice as fast as a dataclass
    offset: int  # byte of the unpacked file, or row of a table
    num_bytes: int  # that it takes there
    text: str
    reason: str = ""  # why it is quarantined; its text is empty then


def refused(offset: int, num_bytes: int, reason: str) -> RawDocument:
    return RawDocument(offset, num_bytes, "", reason)


def decoded(data: bytes, offset: int) -> RawDocument:
    """A text in UTF-8, or what is wrong with it."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        return refused(offset, len(data), f"not UTF-8: {error.reason} at byte {error.start}")
    return checked(text, offset, len(data))


def checked(text: str, offset: int, num_bytes: int) -> RawDocument:
    if "\0" in text:
        return refused(offset, num_bytes, "holds a zero byte: not text")
    return RawDocument(offset, num_bytes, text)


def too_long(offset: int, num_bytes: int, limit: int) -> RawDocument:
    return refused(offset, num_bytes, f"longer than {limit >> 20} MB (max_document_mb)")
