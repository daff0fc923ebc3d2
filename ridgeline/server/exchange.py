"""One HTTP request and its answer: who asks, what was read of it, what was sent, and the line that
the log has of it.

    exchange = Exchange(scope, receive, send, request_id)
    body = await exchange.body(bodies)
    await exchange.answer(200, b"{}")
    await exchange.begin_stream(); await exchange.write(b"data: …"); await exchange.end_stream()
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Iterable, Mapping
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from ridgeline.server.door.refusals import ClientGoneError, RefusalError, retry_after
from ridgeline.server.door.wire import WRITER, ChunkWriter
from ridgeline.server.protocol import PATHS, ApiError, error_body, messages_error

JSON = "application/json"
PIECE = 64 << 10  # bytes of a large answer that are sent at once
_REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,63}")


class Bodies:
    """How many bytes of requests may be in memory: each, and all together."""

    def __init__(self, max_bytes: int, max_total: int) -> None:
        self.max_bytes, self._max_total, self._total = max_bytes, max(max_total, max_bytes), 0

    def take(self, num: int, length: int) -> None:
        """So many more of a body that then has so many."""
        if length > self.max_bytes:
            raise RefusalError(
                413,
                f"the request body is larger than {self.max_bytes} bytes, the limit; send less",
                code="request_too_large",
            )
        if self._total + num > self._max_total:
            raise RefusalError(
                503, "too many large requests at once; try again later", code="overloaded"
            )
        self._total += num

    def give_back(self, num: int) -> None:
        self._total -= num


class Exchange:
    def __init__(self, scope: Scope, receive: Receive, send: Send, request_id: str) -> None:
        self.scope, self.receive, self._send = scope, receive, send
        self._wire: ChunkWriter | None = scope.get(WRITER)
        self.headers: Mapping[bytes, bytes] = dict(scope["headers"])
        self.request_id = request_id
        self.began = time.monotonic()
        self.tenant = ""
        self.status: int | None = None  # of the answer, once it has begun
        self.is_complete = False
        self.facts: dict[str, Any] = {}  # for the log
        self.more_headers: dict[str, str] = {}  # of the answer, whatever it will be

    def header(self, name: bytes) -> str | None:
        value = self.headers.get(name)
        return None if value is None else value.decode("latin-1")

    @property
    def is_messages(self) -> bool:
        """Whether it came by Anthropic's API, which has errors and a header of its own."""
        return bool(self.scope["path"].startswith(PATHS["messages"]))

    async def body(self, bodies: Bodies) -> bytes:
        """All of the request's body, if it is JSON and not too large."""
        kind = (self.header(b"content-type") or "").partition(";")[0].strip().lower()
        if kind != JSON and not kind.endswith("+json"):
            raise RefusalError(
                415,
                f"the content-type is {kind[:80] or 'not given'!r}; send {JSON}",
                code="unsupported_media_type",
            )
        if (self.header(b"content-encoding") or "identity").lower() != "identity":
            raise RefusalError(
                415, "the body is compressed; send it uncompressed", code="unsupported_encoding"
            )
        length = self.header(b"content-length") or "0"
        if length.isdigit() and int(length[:20]) > bodies.max_bytes:
            bodies.take(0, int(length[:20]))
        return await self._read(bodies)

    async def _read(self, bodies: Bodies) -> bytes:
        pieces: list[bytes] = []
        length = 0
        try:
            while True:
                message = await self.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                piece = message.get("body", b"")
                bodies.take(len(piece), length + len(piece))
                length += len(piece)
                pieces.append(piece)
                if not message.get("more_body", False):
                    return b"".join(pieces)
        finally:
            bodies.give_back(length)

    async def until_gone(self) -> None:
        """Return when the client has closed its connection."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    async def send(self, message: Message) -> None:
        """What Starlette's own answers send."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            names = ("x-request-id", "request-id") if self.is_messages else ("x-request-id",)
            more = [*self.more_headers.items(), *((name, self.request_id) for name in names)]
            message = {**message, "headers": [*message.get("headers", []), *_encoded(more)]}
        elif not message.get("more_body", False):
            self.is_complete = True
        await self._send(message)

    async def answer(
        self, status: int, body: bytes, kind: str = JSON, headers: Mapping[str, str] | None = None
    ) -> None:
        await self._begin(status, kind, {"content-length": str(len(body)), **(headers or {})})
        for start in range(0, max(1, len(body)), PIECE):
            more = start + PIECE < len(body)
            piece = body[start : start + PIECE] if more or start else body
            await self.send({"type": "http.response.body", "body": piece, "more_body": more})

    async def refuse(self, error: ApiError, headers: Mapping[str, str] | None = None) -> None:
        seconds = retry_after(error)
        again = {} if seconds is None else {"retry-after": str(seconds)}
        self.facts |= {"code": error.code, "param": error.param}
        body = error_body(error)
        if self.is_messages:
            body = json.dumps(messages_error(error, self.request_id)).encode()
        await self.answer(error.status, body, headers={**again, **(headers or {})})

    async def begin_stream(self) -> None:
        await self._begin(
            200,
            "text/event-stream; charset=utf-8",
            {"cache-control": "no-cache", "x-accel-buffering": "no"},
        )

    async def write(self, data: bytes) -> None:
        """Waits while the client has much to read."""
        if data:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    @property
    def can_write(self) -> bool:
        """Whether a piece of a stream can be sent without waiting."""
        return self._wire is not None and self._wire.is_ready

    def write_now(self, data: bytes) -> None:
        """As `write`, where it `can_write`."""
        assert self._wire is not None, "asked first"
        if data:
            self._wire.write(data)

    async def end_stream(self, data: bytes = b"") -> None:
        await self.send({"type": "http.response.body", "body": data, "more_body": False})

    async def _begin(self, status: int, kind: str, headers: Mapping[str, str]) -> None:
        lines = _encoded([("content-type", kind), *headers.items()])
        await self.send({"type": "http.response.start", "status": status, "headers": lines})


def _encoded(headers: Iterable[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]


def clean_request_id(given: str | None) -> str:
    """A client's own id for its request if it is harmless in a header and a log, else a new one."""
    if given is not None and _REQUEST_ID.fullmatch(given):
        return given
    return f"req-{secrets.token_hex(12)}"
