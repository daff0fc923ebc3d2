"""Connections that cannot be held for nothing: uvicorn's protocol with a bound on everything a
client may take its time for, or fill memory with.

A request's head is bounded in bytes, head and body in seconds; a client that does not read what it
was sent is dropped once the buffer of its connection has been full for so long; and connections
beyond the most that may be open get an error. What is refused here never was a request, and is
answered in the same shape as everything else.

    uvicorn.Config(app, http=partial(BoundedProtocol, bounds=Bounds(max_connections=100)))
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from ridgeline.server.protocol import ApiError, error_body

# In a request's scope:
ABORT = "ridgeline.abort"  # closes its connection without more ado
WRITER = "ridgeline.writer"  # a ChunkWriter for its answer


@dataclass(frozen=True)
class WireBounds:
    max_connections: int = 2048
    max_head_bytes: int = 32 << 10  # request line and headers
    head_s: float = 10.0  # from the first byte of a request, or the connection, to its last header
    body_s: float = 30.0  # from the last header to the last byte of the body
    read_s: float = 30.0  # that what was sent may lie unread


class ChunkWriter:
    """Pieces of an answer that has begun, sent without a coroutine: thousands a second are."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle, self._flow = cycle, cycle.flow

    @property
    def is_ready(self) -> bool:
        """Whether a piece would be sent at once, as part of an answer of chunks."""
        cycle = self._cycle
        is_open = not (self._flow.write_paused or cycle.disconnected or cycle.response_complete)
        return is_open and cycle.response_started and bool(cycle.chunked_encoding)

    def write(self, data: bytes) -> None:
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


class _TooLargeError(Exception):
    """Raised inside the parser, which then stops."""


class BoundedProtocol(HttpToolsProtocol):
    def __init__(self, *args: Any, bounds: WireBounds, **options: Any) -> None:
        super().__init__(*args, **options)
        self._bounds = bounds
        self._timer: asyncio.TimerHandle | None = None  # for what the client is to send
        self._reading: asyncio.TimerHandle | None = None  # for what it is to read
        self._in_head = True
        self._num_bytes = self._num_parsed = 0  # of a head: all, and what was understood of it
        self._has_ended_one = False  # a request, in the bytes that came last

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._bounds.max_connections:
            self._refuse(503, f"{self._bounds.max_connections} connections are open; try later")
        else:
            self._arm(self._bounds.head_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._stop_reading_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._has_ended_one = False
        super().data_received(data)
        # Of bytes in which another request has ended it is not known how many belong to this head:
        # they are not counted. What came in one read is bounded by asyncio, at 256 KiB.
        if self._in_head and not self._has_ended_one:
            self._num_bytes += len(data)
            if self._is_too_large and not self.transport.is_closing():
                self._refuse(431, self._head_message())

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._num_bytes, self._num_parsed = True, 0, 0
        if self._is_answered:
            self._arm(self._bounds.head_s)

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count_head(len(name) + len(value) + 4)

    def on_headers_complete(self) -> None:
        self._in_head, self._num_bytes, self._num_parsed = False, 0, 0
        self.scope[ABORT] = self.transport.abort  # type: ignore[literal-required]
        super().on_headers_complete()
        self.scope[WRITER] = ChunkWriter(self.cycle)  # type: ignore[literal-required]
        if not self.pipeline:
            self._arm(self._bounds.body_s)

    def on_message_complete(self) -> None:
        self._disarm()
        self._has_ended_one = True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing():  # the next one waited for this answer to end
            if self._in_head:
                self._arm(self._bounds.head_s)
            elif self.cycle.more_body:
                self._arm(self._bounds.body_s)
        if self.transport.get_write_buffer_size():
            self._start_reading_timer()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_reading_timer()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_reading_timer()

    def send_400_response(self, msg: str) -> None:
        """Called by the parent where the parser has stopped."""
        if self._is_too_large:
            self._refuse(431, self._head_message())
        else:
            self._refuse(400, "malformed HTTP/1.1 request")

    @property
    def _is_answered(self) -> bool:
        """Whether no answer is being made on this connection."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def _is_too_large(self) -> bool:
        return max(self._num_bytes, self._num_parsed) > self._bounds.max_head_bytes

    def _count_head(self, num: int) -> None:
        self._num_parsed += num
        if self._is_too_large:
            raise _TooLargeError

    def _head_message(self) -> str:
        return f"the headers are larger than {self._bounds.max_head_bytes} bytes; send less"

    def _arm(self, seconds: float) -> None:
        self._disarm()
        self._timer = self.loop.call_later(seconds, self._be_late)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _be_late(self) -> None:
        self._timer = None
        if self.transport.is_closing():
            return
        has_answer = self.cycle is not None and self.cycle.response_started
        if self.scope is None or (has_answer and not self._in_head):
            self.transport.abort()  # it never sent anything, or was answered before it had ended
        else:
            self._refuse(408, "the request did not come in time; send it faster")

    def _start_reading_timer(self) -> None:
        self._stop_reading_timer()
        self._reading = self.loop.call_later(self._bounds.read_s, self._stop_waiting)

    def _stop_reading_timer(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _stop_waiting(self) -> None:
        self._reading = None
        if self.transport.get_write_buffer_size():
            self.transport.abort()

    def _refuse(self, status: int, message: str) -> None:
        """An answer without a request, and the end of the connection."""
        kind = "server_error" if status == 503 else "invalid_request_error"
        body = error_body(ApiError(status, message, kind))
        again = b"retry-after: 1\r\n" if status == 503 else b""
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n"
        )
        self._disarm()
        self.transport.write(head.encode() + again + b"\r\n" + body)
        self.transport.close()
        self._start_reading_timer()
