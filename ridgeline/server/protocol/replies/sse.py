"""Server-sent events by hand: text is escaped once, the rest of a chunk is bytes made beforehand.

data(f'{{"delta":{quoted(text)}}}')
"""

from __future__ import annotations

import json
from json.encoder import encode_basestring
from typing import Any

DONE = b"data: [DONE]\n\n"


def quoted(text: str) -> str:
    """The text as a JSON string. Characters that some clients take for the end of a line are
    written as escapes.
    """
    literal: str = encode_basestring(text)
    if literal.isascii():
        return literal
    return (
        literal.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029").replace("\x85", "\\u0085")
    )


def compact(value: Any) -> str:
    """A value as JSON on one line, in ASCII."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def data(payload: str) -> bytes:
    return f"data: {payload}\n\n".encode()


def event(kind: str, payload: str) -> bytes:
    return f"event: {kind}\ndata: {payload}\n\n".encode()
