"""An OpenAI endpoint that answers with words, at times that are known: for tests of what measures
endpoints. It notes when it really sent what, so that a test need not trust its sleeps.

    with FakeEndpoint(ttft_s=0.05, gap_s=0.01) as fake:
        measure(fake.url)
    fake.served[0].events        # seconds of the monotonic clock
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

KNOWN = {
    "model", "prompt", "messages", "max_tokens", "temperature", "stream", "ignore_eos",
    "stream_options",
}  # fmt: skip


@dataclass
class Served:
    body: dict[str, Any]
    arrived: float
    connection: int  # which one it came over
    events: list[float] = field(default_factory=list)  # when each was sent
    is_cut: bool = False  # the client went away


@dataclass
class FakeEndpoint:
    ttft_s: float = 0.0
    gap_s: float = 0.0
    merged: int = 1  # tokens an event
    num_slots: int | None = None  # requests that are served at a time; others wait in line
    refuses: tuple[str, ...] = ()  # fields that are answered with 400
    fault: Callable[[int], str | None] = lambda number: None  # what goes wrong, by request
    keeps_alive: bool = True

    def __post_init__(self) -> None:
        self.served: list[Served] = []
        self._num_connections = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._server = self._call(asyncio.start_server(self._connected, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self._slots = asyncio.Semaphore(self.num_slots or 10**6)
        return self

    def __exit__(self, *_: object) -> None:
        self._call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)
        self._loop.close()

    def _call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10.0)

    async def _stop(self) -> None:
        self._server.close()
        here = asyncio.current_task()
        tasks = [task for task in asyncio.all_tasks() if task is not here]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _connected(self, reader: Any, writer: asyncio.StreamWriter) -> None:
        number, self._num_connections = self._num_connections, self._num_connections + 1
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = head.partition("content-length: ")[2].partition("\r\n")[0]
                body = await reader.readexactly(int(length or 0))
                if not await self._answer(head, body, writer, number):
                    break
        writer.close()

    async def _answer(
        self, head: str, body: bytes, writer: asyncio.StreamWriter, connection: int
    ) -> bool:
        """Whether the connection goes on."""
        if head.startswith("get /v1/models"):
            return self._plain(writer, 200, {"data": [{"id": "fake"}]})
        asked = json.loads(body)
        wrong = [name for name in asked if name in self.refuses or name not in KNOWN]
        if wrong:
            return self._plain(writer, 400, {"error": {"message": f"{wrong[0]} is not known"}})
        served = Served(asked, time.monotonic(), connection)
        number = len(self.served)
        self.served.append(served)
        fault = self.fault(number)
        if fault is not None and fault.isdigit():
            return self._plain(writer, int(fault), {"error": {"message": "so it was wanted"}})
        async with self._slots:
            try:
                return await self._stream(writer, served, fault)
            except ConnectionError:
                served.is_cut = True
                raise

    def _plain(self, writer: asyncio.StreamWriter, status: int, content: Any) -> bool:
        data = json.dumps(content).encode()
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        return True

    async def _stream(
        self, writer: asyncio.StreamWriter, served: Served, fault: str | None
    ) -> bool:
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        is_chat, left = "messages" in served.body, served.body["max_tokens"]
        if is_chat:
            self._send(writer, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        await asyncio.sleep(self.ttft_s)
        while left > 0:
            if fault == "hang":
                await asyncio.sleep(60.0)
            if fault == "garbage":
                self._send(writer, "{nothing")
            elif fault == "error":
                self._send(writer, {"error": {"message": "the engine has died"}})
            elif fault == "close" and served.events:
                writer.transport.abort()
                return False
            text = "word " * min(self.merged, left)
            left -= self.merged
            choice = {"delta": {"content": text}} if is_chat else {"text": text}
            served.events.append(time.monotonic())
            self._send(writer, {"choices": [choice]})
            await writer.drain()
            if left > 0:
                await asyncio.sleep(self.gap_s)
        if "stream_options" in served.body:
            usage = {"completion_tokens": served.body["max_tokens"], "prompt_tokens": 7}
            self._send(writer, {"choices": [], "usage": usage})
        if fault != "no done":
            self._send(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return self.keeps_alive

    def _send(self, writer: asyncio.StreamWriter, event: Any) -> None:
        text = event if isinstance(event, str) else json.dumps(event)
        data = f"data: {text}\n\n".encode()
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
