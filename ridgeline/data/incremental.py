"""From token ids back to text, all at once or token by token.

`TokenBytes` owns what each id stands for, as bytes; text is those bytes joined and read as UTF-8. A
token may hold half a character, so `IncrementalDecoder` keeps unfinished bytes back until the
character is whole or can no longer become one (then it is U+FFFD). What it emits, joined, is always
what `decode` gives for the same ids.

    decoder = tokenizer.decoder()
    for token_id in generated:
        print(decoder.push(token_id), end="")
    print(decoder.finish())
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable
from typing import Any

import tokenizers
from tokenizers.pre_tokenizers import ByteLevel

from ridgeline.errors import UnsupportedError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's stand-ins for bytes: visible Latin-1 as it is, the rest from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    table = {chr(byte): byte for byte in visible}
    table.update({chr(0x100 + index): byte for index, byte in enumerate(hidden)})
    assert set(table) == set(ByteLevel.alphabet()), "the byte-level alphabet changed"
    return table


BYTE_OF = _byte_level_alphabet()


class TokenBytes:
    """id → bytes, worked out on first use from the tokenizer's decoder steps."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self.special = frozenset(token_id for token_id, token in added.items() if token.special)
        self._cache: dict[int, bytes] = {}
        self._byte_level = False
        self._byte_fallback = False
        self._replacements: list[tuple[str, str]] = []
        self.strip_spaces = 0  # at most this many spaces are dropped at the start of a text
        for step in _decoder_steps(backend):
            self._add_step(step)

    def _add_step(self, step: dict[str, Any]) -> None:
        match step:
            case {"type": "ByteLevel"}:
                self._byte_level = True
            case {"type": "ByteFallback"}:
                self._byte_fallback = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                self._replacements.append((old, new))
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0}:
                self.strip_spaces = start
            case {"type": "Metaspace", "replacement": str(old), "prepend_scheme": scheme}:
                self._replacements.append((old, " "))
                self.strip_spaces = 0 if scheme == "never" else 1
            case _:
                raise UnsupportedError(
                    f"the tokenizer's decoder has the step {json.dumps(step)};"
                    " byte-level and sentencepiece-style decoders are supported"
                )

    def is_special(self, token_id: int) -> bool:
        return token_id in self.special

    def special_id(self, text: str) -> int | None:
        """The special token that is written so."""
        return next((token for token in self.special if self._added[token] == text), None)

    def missing(self) -> bytes:
        """Bytes that a byte-level vocabulary has no token for: texts lose them in encoding."""
        if not self._byte_level:
            return b""
        lookup = self._backend.token_to_id
        return bytes(sorted(byte for char, byte in BYTE_OF.items() if lookup(char) is None))

    def __getitem__(self, token_id: int) -> bytes:
        """The bytes of one token; none for an id past the vocabulary (models pad their tables)."""
        piece = self._cache.get(token_id)
        if piece is None:
            piece = self._cache[token_id] = self._bytes_of(token_id)
        return piece

    def _bytes_of(self, token_id: int) -> bytes:
        if self._byte_level and token_id in self._added:
            return self._added[token_id].encode()  # added tokens are plain text, not byte stand-ins
        text = self._backend.id_to_token(token_id)
        if text is None:
            return b""
        if self._byte_level and all(char in BYTE_OF for char in text):
            return bytes(BYTE_OF[char] for char in text)
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(text)):
            return bytes([int(match[1], 16)])
        for old, new in self._replacements:
            text = text.replace(old, new)
        return text.encode()

    def join(self, ids: Iterable[int], *, skip_special_tokens: bool) -> str:
        """The text of all ids. Bytes that are no UTF-8 become U+FFFD."""
        skipped = self.special if skip_special_tokens else ()
        data = b"".join([self[token_id] for token_id in ids if token_id not in skipped])
        return strip_start(data, self.strip_spaces)[0].decode("utf-8", "replace")


def _decoder_steps(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    if backend.decoder is None:
        raise UnsupportedError("the tokenizer has no decoder: its tokens cannot be decoded to text")
    state: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    return state["decoders"] if state["type"] == "Sequence" else [state]


def strip_start(data: bytes, spaces: int) -> tuple[bytes, int]:
    """`data` without up to `spaces` leading spaces, and how many more may go from what follows."""
    while spaces and data.startswith(b" "):
        data, spaces = data[1:], spaces - 1
    return data, 0 if data else spaces


class IncrementalDecoder:
    """Turns ids into text one by one; the work per token does not grow with the text."""

    def __init__(
        self,
        pieces: TokenBytes,
        *,
        skip_special_tokens: bool = True,
        strip_start: bool = True,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        """Special tokens in `shown` are never skipped."""
        self._pieces = pieces
        self._skipped: frozenset[int] = frozenset()
        if skip_special_tokens:
            self._skipped = pieces.special - shown if shown else pieces.special
        self._spaces = pieces.strip_spaces if strip_start else 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that is certain now: "" while a character is unfinished."""
        if token_id in self._skipped:
            return ""
        data = self._pieces[token_id]
        if self._spaces:
            data, self._spaces = strip_start(data, self._spaces)
        return self._utf8.decode(data)

    def finish(self) -> str:
        """What was kept back; an unfinished character comes out as U+FFFD."""
        return self._utf8.decode(b"", final=True)
