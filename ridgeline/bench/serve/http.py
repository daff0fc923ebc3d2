"""As much of HTTP/1.1 and of server-sent events as a load generator needs: bytes in, body and
events out. No sockets here, and nothing but the standard library: load processes start at once.

    reader = ResponseReader()
    for piece in reader.feed(b"HTTP/1.1 200 OK\\r\\ncontent-length: 2\\r\\n\\r\\nhi"): ...
    EventReader().feed(b"data: {}\\n\\n")          # [b"{}"]
"""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import urlsplit

from ridgeline.errors import UsageError

MAX_HEAD_BYTES = 64 << 10
MAX_LINE_BYTES = 1 << 20  # of a chunk's size, or of one event


class BadAnswerError(Exception):
    """What came is not HTTP, or not an event."""


class Endpoint(NamedTuple):
    """Where requests go."""

    url: str  # as it was given
    host: str
    port: int
    tls: bool
    base: str  # path in front of `/chat/completions`
    api_key: str | None = None

    @classmethod
    def parse(cls, url: str, api_key: str | None = None, flag: str = "--url") -> Endpoint:
        """`http://host:8000` and `http://host:8000/v1` are the same. Errors name the flag."""
        allowed = "give one like http://127.0.0.1:8000"
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise UsageError(f"{flag} is {url!r}: {error}; {allowed}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"{flag} is {url!r}; {allowed}")
        if parts.username or parts.query or parts.fragment:
            raise UsageError(f"{flag} is {url!r}: no user, query or fragment belongs in it")
        tls = parts.scheme == "https"
        path = parts.path.rstrip("/")
        base = path if path.endswith("/v1") else path + "/v1"
        return cls(url, parts.hostname, port or (443 if tls else 80), tls, base, api_key)

    def request(
        self, method: str, path: str, body: bytes = b"", request_id: str | None = None
    ) -> bytes:
        """The bytes of a request; the connection is kept."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [
            f"{method} {self.base}{path} HTTP/1.1",
            f"host: {host}:{self.port}",
            "accept: text/event-stream, application/json",
            "user-agent: ridgeline-bench",
        ]
        if self.api_key is not None:
            lines.append(f"authorization: Bearer {self.api_key}")
        if request_id is not None:
            lines.append(f"x-request-id: {request_id}")
        if body:
            lines += ["content-type: application/json", f"content-length: {len(body)}"]
        return "\r\n".join([*lines, "", ""]).encode("latin-1", "replace") + body


class ResponseReader:
    """One response: `feed` gives the pieces of its body as they come."""

    def __init__(self) -> None:
        self.status = 0  # until the head has come
        self.headers: dict[str, str] = {}
        self.is_done = False
        self._buffer = bytearray()
        self._left: int | None = None  # bytes of the body, or of the chunk; None: until it closes
        self._is_chunked = False
        self._is_last = False  # the chunk of no bytes came: lines until an empty one

    @property
    def keeps_alive(self) -> bool:
        kept = self.headers.get("connection", "").lower() != "close"
        return self.is_done and kept and not self._buffer

    def feed(self, data: bytes) -> list[bytes]:
        self._buffer += data
        if not self.status and not self._read_head():
            return []
        return self._chunks() if self._is_chunked else self._plain()

    def close(self) -> None:
        """The connection has ended, which is how some bodies do."""
        if self.status and self._left is None and not self._is_chunked:
            self.is_done = True

    def _read_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > MAX_HEAD_BYTES:
                raise BadAnswerError(f"a head of more than {MAX_HEAD_BYTES} bytes")
            return False
        first, *lines = self._buffer[:end].decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        words = first.split(" ", 2)
        if not words[0].startswith("HTTP/1.") or len(words) < 2 or not words[1].isdigit():
            raise BadAnswerError(f"{first[:80]!r} is no answer in HTTP/1.1")
        if int(words[1]) < 200:  # 100 Continue and its like: the answer follows
            return self._read_head()
        for line in lines:
            name, _, value = line.partition(":")
            self.headers[name.strip().lower()] = value.strip()
        self.status = int(words[1])
        self._is_chunked = "chunked" in self.headers.get("transfer-encoding", "").lower()
        self._left = 0 if self._is_chunked else self._length()
        self.is_done = self._left == 0 and not self._is_chunked
        return True

    def _length(self) -> int | None:
        text = self.headers.get("content-length")
        if text is not None and not text.isdigit():
            raise BadAnswerError(f"content-length is {text[:40]!r}")
        return None if text is None else int(text)

    def _plain(self) -> list[bytes]:
        if self._left is None:
            piece, self._buffer = bytes(self._buffer), bytearray()
        else:
            piece = bytes(self._buffer[: self._left])
            del self._buffer[: len(piece)]
            self._left -= len(piece)
            self.is_done = self._left == 0
        return [piece] if piece else []

    def _chunks(self) -> list[bytes]:
        """Sizes are lines of their own; a chunk is followed by an empty line."""
        pieces, buffer, at = [], bytes(self._buffer), 0
        while not self.is_done:
            if self._left:
                piece = buffer[at : at + self._left]
                at += len(piece)
                self._left -= len(piece)
                if piece:
                    pieces.append(piece)
                if self._left:
                    break
            end = buffer.find(b"\r\n", at)
            if end < 0:
                if len(buffer) - at > MAX_LINE_BYTES:
                    raise BadAnswerError("a chunk without its size")
                break
            line, at = buffer[at:end], end + 2
            if self._is_last:
                self.is_done = not line
            elif line:
                self._left = _chunk_size(line)
                self._is_last = self._left == 0
        self._buffer = bytearray(buffer[at:])
        return pieces


def _chunk_size(line: bytes) -> int:
    try:
        return int(line.partition(b";")[0], 16)
    except ValueError:
        raise BadAnswerError(f"{line[:40]!r} is no size of a chunk") from None


class EventReader:
    """The data of server-sent events, each as soon as it is whole."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            raise BadAnswerError(f"an event of more than {MAX_LINE_BYTES} bytes")
        result = []
        for line in lines:
            line = line.rstrip(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                result.append(b"\n".join(self._data))
                self._data.clear()
        return result
