"""One request to an OpenAI endpoint and what came of it, timed: an `Answer` for each, whatever
happens. Times are taken where bytes arrive, before anything is made of them.

A `Client` keeps connections and uses them again, as clients do; one that the server has closed in
the meantime is replaced.

    client = Client(Endpoint.parse("http://127.0.0.1:8000"))
    answer = await client.ask("/completions", body, timeout_s=60.0)
    answer.first, answer.num_tokens, answer.error
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import time
from dataclasses import dataclass, field
from typing import Any

from ridgeline.bench.serve.http import BadAnswerError, Endpoint, EventReader, ResponseReader

MAX_DETAIL = 200  # characters of what a server said
CONNECT_S = 10.0


@dataclass(slots=True)
class Answer:
    """Times are of the monotonic clock, which all processes of a machine share."""

    index: int = 0  # of the request
    due: float = 0.0  # when it was to be sent
    begun: float = 0.0  # when the client came to it
    sent: float = 0.0
    head: float | None = None  # first byte of the answer
    first: float | None = None  # first piece of text
    last: float | None = None
    end: float = 0.0
    num_events: int = 0  # with text
    num_tokens: int | None = None  # as the server counted them
    num_prompt_tokens: int | None = None
    gaps: list[float] = field(default_factory=list)  # seconds between events with text
    error: str | None = None  # its kind
    detail: str = ""

    @property
    def tokens(self) -> int:
        """Where the server does not count them, an event is taken for a token."""
        return self.num_events if self.num_tokens is None else self.num_tokens

    @property
    def first_token_s(self) -> float | None:
        """From when it was due: a client that is late has waited all the same."""
        return None if self.first is None else self.first - self.due

    @property
    def per_token_s(self) -> float | None:
        """Between tokens on average; None where there are not two."""
        if self.first is None or self.last is None or self.tokens < 2:
            return None
        return (self.last - self.first) / (self.tokens - 1)


class ClientExchange(asyncio.Protocol):
    """A connection, and the request that is on it."""

    def __init__(self) -> None:
        self.is_open = False
        self._reader = ResponseReader()
        self._events = EventReader()
        self._answer = Answer()
        self._body = b""
        self._saw_done = False
        self._done: asyncio.Future[None] | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self.is_open = transport, True
        held = transport.get_extra_info("socket")
        if held is not None:
            held.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, data: bytes, answer: Answer) -> asyncio.Future[None]:
        """The future is done when the answer is complete, be it with an error."""
        assert self._transport is not None, "a connection is used when it is open"
        self._reader, self._events, self._answer = ResponseReader(), EventReader(), answer
        self._body, self._saw_done = b"", False
        self._done = asyncio.get_running_loop().create_future()
        answer.sent = time.monotonic()
        self._transport.write(data)
        return self._done

    @property
    def body(self) -> bytes:
        """Of an answer that is no stream."""
        return self._body

    @property
    def status(self) -> int:
        return self._reader.status

    @property
    def has_begun(self) -> bool:
        """Whether anything of an answer has come."""
        return self._reader.status > 0

    @property
    def can_be_kept(self) -> bool:
        return self.is_open and self._reader.keeps_alive

    def close(self) -> None:
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        if self._done is None or self._done.done():
            self.close()  # nothing was asked
            return
        if self._answer.head is None:
            self._answer.head = now
        try:
            for piece in self._reader.feed(data):
                self._take(piece, now)
        except BadAnswerError as error:
            self._fail("malformed", str(error), now)
        if self._reader.is_done:
            self._finish(now)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        self._reader.close()
        now = time.monotonic()
        if self._reader.is_done:
            self._finish(now)
        else:
            self._fail("disconnected", str(error or "closed before the end of the answer"), now)

    def _take(self, piece: bytes, now: float) -> None:
        if self._reader.status != 200 or not self._is_stream:
            self._body += piece
            return
        for data in self._events.feed(piece):
            if data == b"[DONE]":
                self._saw_done = True
            else:
                take_event(self._answer, data, now)

    @property
    def _is_stream(self) -> bool:
        return self._reader.headers.get("content-type", "").startswith("text/event-stream")

    def _finish(self, now: float) -> None:
        status, answer = self._reader.status, self._answer
        if status != 200:
            self._fail(f"http {status}", message_of(self._body), now)
        elif self._is_stream and not self._saw_done and answer.error is None:
            self._fail("malformed", "the stream ended without [DONE]", now)
        else:
            self._end(now)

    def _fail(self, kind: str, detail: str, now: float) -> None:
        if self._done is not None and not self._done.done() and self._answer.error is None:
            self._answer.error, self._answer.detail = kind, detail[:MAX_DETAIL]
        self._end(now)

    def _end(self, now: float) -> None:
        if self._done is not None and not self._done.done():
            self._answer.end = now
            self._done.set_result(None)


def take_event(answer: Answer, data: bytes, now: float) -> None:
    """One event of a stream."""
    try:
        event: Any = json.loads(data)
    except ValueError:
        raise BadAnswerError(f"{data[:80]!r} is no JSON") from None
    if not isinstance(event, dict):
        raise BadAnswerError(f"{data[:80]!r} is no object")
    if event.get("error"):
        answer.error, answer.detail = "in the stream", message_of(data)[:MAX_DETAIL]
        return
    usage = event.get("usage")
    if isinstance(usage, dict):
        answer.num_tokens = _count(usage, "completion_tokens")
        answer.num_prompt_tokens = _count(usage, "prompt_tokens")
    if any(_has_text(choice) for choice in event.get("choices") or ()):
        if answer.first is None or answer.last is None:
            answer.first = now
        else:
            answer.gaps.append(now - answer.last)
        answer.last = now
        answer.num_events += 1


def _count(usage: dict[str, Any], name: str) -> int | None:
    value = usage.get(name)
    return value if type(value) is int and value >= 0 else None


def _has_text(choice: Any) -> bool:
    """Chat puts it into `delta`, whose first has a role alone; completions put it into `text`."""
    if not isinstance(choice, dict):
        raise BadAnswerError("a choice is no object")
    delta = choice.get("delta") or choice
    names = ("content", "text", "reasoning_content", "reasoning", "tool_calls")
    return any(delta.get(name) for name in names)


def message_of(body: bytes) -> str:
    """What an error says, in OpenAI's shape or any other."""
    try:
        error = json.loads(body)
        error = error.get("error", error)
        return str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        return body[:MAX_DETAIL].decode("utf-8", "replace")


class Client:
    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._tls = ssl.create_default_context() if endpoint.tls else None
        self._idle: list[ClientExchange] = []

    async def ask(
        self,
        path: str,
        body: bytes,
        *,
        timeout_s: float,
        answer: Answer | None = None,
        name: str = "",
    ) -> Answer:
        """One answer, whatever happens; `answer` holds what is known before it is sent. With a
        `name` the request has an id: that, and the answer's index.
        """
        answer = Answer() if answer is None else answer
        answer.begun = time.monotonic()
        request_id = f"{name}-{answer.index}" if name else None
        data = self._endpoint.request("POST", path, body, request_id)
        try:
            async with asyncio.timeout(timeout_s):
                await self._exchange(data, answer)
        except TimeoutError:
            answer.error, answer.detail = "timeout", f"not done after {timeout_s:g} s"
        except OSError as error:
            answer.error, answer.detail = "connect", str(error)[:MAX_DETAIL]
        answer.end = answer.end or time.monotonic()
        return answer

    async def get(self, path: str, timeout_s: float = CONNECT_S) -> tuple[int, bytes]:
        """Status and body. What goes wrong is an OSError."""
        answer = Answer()
        async with asyncio.timeout(timeout_s):
            exchange = await self._exchange(self._endpoint.request("GET", path), answer)
        if answer.error is not None and not answer.error.startswith("http"):
            raise OSError(f"{answer.error}: {answer.detail}")
        return exchange.status, exchange.body

    async def _exchange(self, data: bytes, answer: Answer) -> ClientExchange:
        while True:
            exchange, is_fresh = await self._connection()
            try:
                await exchange.send(data, answer)
            except asyncio.CancelledError:
                exchange.close()
                raise
            if exchange.can_be_kept:
                self._idle.append(exchange)
            else:
                exchange.close()
            if answer.error != "disconnected" or exchange.has_begun or is_fresh:
                return exchange
            answer.error, answer.detail = None, ""  # it was closed while it lay idle: once more

    async def _connection(self) -> tuple[ClientExchange, bool]:
        """An open one, and whether it was made for this."""
        while self._idle:
            exchange = self._idle.pop()
            if exchange.is_open:
                return exchange, False
        host, port, loop = self._endpoint.host, self._endpoint.port, asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                _, exchange = await loop.create_connection(
                    ClientExchange, host, port, ssl=self._tls
                )
        except TimeoutError:
            raise ConnectionError(f"no connection after {CONNECT_S:g} s") from None
        return exchange, True

    def close(self) -> None:
        for exchange in self._idle:
            exchange.close()
        self._idle.clear()
