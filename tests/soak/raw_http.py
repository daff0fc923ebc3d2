"""Requests as raw bytes, so that a test can be as rude as it likes, and what came back.

reply = await exchange(port, post("/v1/completions", body))
reply.status, reply.text, reply.is_complete
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ridgeline.bench.serve.http import EventReader, ResponseReader

READ_BYTES = 1 << 16


@dataclass
class Reply:
    status: int = 0  # 0: none came
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    events: list[bytes] = field(default_factory=list)
    is_complete: bool = False  # the answer came to its end
    note: str = ""  # how it went wrong

    @property
    def error(self) -> dict[str, Any] | None:
        """What it states as the reason of a refusal, in OpenAI's shape."""
        texts = [self.body, *self.events[-2:]]
        for text in texts:
            with suppress(ValueError, AttributeError):
                error = json.loads(text).get("error")
                if isinstance(error, dict) and error.get("message") and error.get("type"):
                    return error
        return None

    @property
    def is_done(self) -> bool:
        """Whether it is a whole answer."""
        if self.status != 200 or not self.is_complete or self.error is not None:
            return False
        if self.events:
            return self.events[-1] == b"[DONE]"
        return bool(self.body)

    @property
    def text(self) -> str:
        """Of a completion that was not streamed."""
        choice = json.loads(self.body)["choices"][0]
        return str(choice["text"] if "text" in choice else choice["message"]["content"])


def post(path: str, body: bytes | Any, *headers: str, length: int | None = None) -> bytes:
    """A request whose body may be anything, and its length a lie."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [
        f"POST {path} HTTP/1.1", "host: 127.0.0.1", "content-type: application/json",
        f"content-length: {len(data) if length is None else length}", *headers, "", "",
    ]  # fmt: skip
    return "\r\n".join(lines).encode("utf-8", "surrogatepass") + data


async def exchange(
    port: int,
    data: bytes | Sequence[bytes],
    *,
    timeout_s: float = 60.0,
    stop_after: int | None = None,
    pause_s: float = 0.0,
    half_close: bool = False,
) -> Reply:
    """Send all parts with pauses between them, and read the answer; or go away after so many bytes
    of it (0: at once, as soon as all is sent).
    """
    reply = Reply()
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                await _send(writer, data, pause_s, half_close)
                await _receive(reader, reply, stop_after)
            finally:
                writer.transport.abort()
    except TimeoutError:
        reply.note = f"no end after {timeout_s:g} s"
    except OSError as error:
        reply.note = f"{type(error).__name__}: {error}"
    return reply


async def _send(
    writer: asyncio.StreamWriter, data: bytes | Sequence[bytes], pause_s: float, half_close: bool
) -> None:
    parts = [data] if isinstance(data, bytes) else data
    with suppress(ConnectionError):  # it may have refused already: its answer is there to read
        for number, part in enumerate(parts):
            if number:
                await asyncio.sleep(pause_s)
            writer.write(part)
            await writer.drain()
        if half_close:
            writer.write_eof()


async def _receive(reader: asyncio.StreamReader, reply: Reply, stop_after: int | None) -> None:
    answer, events, num_bytes = ResponseReader(), EventReader(), 0
    while not answer.is_done and (stop_after is None or num_bytes < stop_after):
        try:
            data = await reader.read(READ_BYTES)
        except ConnectionError as error:
            reply.note = f"{type(error).__name__}: {error}"
            data = b""
        num_bytes += len(data)
        if not data:
            answer.close()
            break
        for piece in answer.feed(data):
            if "event-stream" in answer.headers.get("content-type", ""):
                reply.events += events.feed(piece)
            else:
                reply.body += piece
        reply.status, reply.headers = answer.status, answer.headers
    reply.is_complete = answer.is_done
