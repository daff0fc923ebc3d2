"""Connections cannot be held for nothing, nor fill memory: over real sockets, with short times."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

import pytest
from clock import within
from live_server import until

from ridgeline.server.door.wire import WireBounds
from ridgeline.server.listening import HttpServer

BOUNDS = WireBounds(max_connections=6, max_head_bytes=4096, head_s=0.3, body_s=0.4, read_s=0.4)
PIECE = b"x" * (256 << 10)


class App:
    """Echoes the length of a body; /much sends without end; both say how it went."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        length, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.ended.append("gone")
                return
            length += len(message["body"])
            more = message["more_body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/much":
            for _ in range(400):
                await send({"type": "http.response.body", "body": PIECE, "more_body": True})
                if await self._is_gone(receive):
                    self.ended.append("dropped")
                    return
        await send({"type": "http.response.body", "body": str(length).encode()})
        self.ended.append("answered")

    async def _is_gone(self, receive: Any) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(0.001):
                return (await receive())["type"] == "http.disconnect"
        return False


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[App, int]]:
    app = App()
    server = HttpServer(app, BOUNDS, keep_alive_s=1)
    bound = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[bound])))
    thread.start()
    yield app, bound.getsockname()[1]
    server.should_exit = True
    thread.join(10)


def connect(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port))
    connection.settimeout(5)
    return connection


def read_all(connection: socket.socket) -> bytes:
    answer = b""
    with suppress(ConnectionResetError):
        while piece := connection.recv(65536):
            answer += piece
    return answer


def post(length: int, *headers: str) -> bytes:
    lines = ["POST / HTTP/1.1", "host: localhost", f"content-length: {length}", *headers]
    return "\r\n".join([*lines, "", ""]).encode()


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def test_requests_pass(served: tuple[App, int]) -> None:
    with closing(connect(served[1])) as connection:
        for _ in range(2):  # the connection stays
            connection.sendall(post(5) + b"hel")
            time.sleep(0.05)
            connection.sendall(b"lo")
            answer = connection.recv(65536)
            while not answer.endswith(b"0\r\n\r\n"):
                answer += connection.recv(65536)
            assert b"\r\n5\r\n" in answer
        connection.sendall((post(2) + b"hi") * 3)  # all at once
        answer = b""
        while answer.count(b"HTTP/1.1 200") < 3 or not answer.endswith(b"0\r\n\r\n"):
            answer += connection.recv(65536)


@pytest.mark.parametrize("end", [4, 20, 37], ids=lambda end: f"cut {end} bytes before the end")
def test_small_requests_may_come_in_one_piece(served: tuple[App, int], end: int) -> None:
    """More than a head's worth of them at once, the last one in part: it alone is unfinished."""
    request = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"
    count = 3 * BOUNDS.max_head_bytes // len(request)
    with closing(connect(served[1])) as connection:
        sent = request * (count - 1) + request.replace(
            b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"
        )
        connection.sendall(sent[:-end])
        time.sleep(0.05)
        connection.sendall(sent[-end:])
        answer = read_all(connection)
    assert answer.count(b"HTTP/1.1 200") == count
    assert answer.count(b"HTTP/1.1 ") == count


def test_a_slow_head_behind_a_small_request_is_closed(served: tuple[App, int]) -> None:
    """Its time counts from the answer before it, also when a byte comes now and then."""
    with within(3), closing(connect(served[1])) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\nGET / HTTP/1.1\r\na: ")
        time.sleep(0.1)
        connection.sendall(b"b")
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"HTTP/1.1 408" in answer


def test_a_large_head_behind_a_small_request_is_refused(served: tuple[App, int]) -> None:
    small = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"
    for head in (
        b"GET / HTTP/1.1\r\na: " + b"b" * 5000,
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 1000,
    ):
        with closing(connect(served[1])) as connection:
            connection.sendall(small + head)
            time.sleep(0.02)
            with suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(b"c" * (BOUNDS.max_head_bytes + 1))
            assert b"HTTP/1.1 431" in read_all(connection)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET / HTTP/1.1\r\nhost: a", 408),
        (post(5) + b"hel", 408),
        (b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\na: " + b"b" * 5000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\na: " + b"b" * 5000, 431),  # without an end
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 1000, 431),
        (b"\x16\x03\x01\x02\x00\x01\x00", 400),
        (b"GET\r\n\r\n", 400),
        (post(5, "transfer-encoding: chunked") + b"5\r\nhello\r\n0\r\n\r\n", 400),
    ],
)
def test_bad_requests_are_told_and_closed(
    served: tuple[App, int], sent: bytes, status: int
) -> None:
    with within(2), closing(connect(served[1])) as connection:
        connection.sendall(sent)
        answer = read_all(connection)
    assert status_of(answer) == status
    assert b'{"error"' in answer


def send_forever(connection: socket.socket) -> None:
    while True:
        connection.sendall(b"b")
        time.sleep(0.03)


def test_a_drop_at_a_time_does_not_help(served: tuple[App, int]) -> None:
    """Slow-loris: a byte now and then keeps neither head nor body alive."""
    for sent in (b"GET / HTTP/1.1\r\nhost: localhost\r\na: ", post(1000)):
        with closing(connect(served[1])) as connection:
            connection.sendall(sent)
            with within(1.5), pytest.raises((BrokenPipeError, ConnectionResetError)):
                send_forever(connection)


def test_silence_is_closed(served: tuple[App, int]) -> None:
    with closing(connect(served[1])) as connection:
        assert read_all(connection) == b""


def test_too_many_connections_are_told(served: tuple[App, int]) -> None:
    open_ones = [connect(served[1]) for _ in range(BOUNDS.max_connections)]
    try:
        time.sleep(0.05)
        with closing(connect(served[1])) as one_more:
            answer = read_all(one_more)
        assert status_of(answer) == 503
        assert b"retry-after" in answer
    finally:
        for connection in open_ones:
            connection.close()


def test_who_does_not_read_is_dropped(served: tuple[App, int]) -> None:
    app, port = served
    app.ended.clear()
    with closing(connect(port)) as connection:
        connection.sendall(b"GET /much HTTP/1.1\r\nhost: localhost\r\n\r\n")
        with within(4, at_least=BOUNDS.read_s * 0.9):
            until(lambda: app.ended)
        assert app.ended == ["dropped"]


def test_who_reads_slowly_is_served(served: tuple[App, int]) -> None:
    app, port = served
    app.ended.clear()
    with closing(connect(port)) as connection:
        connection.sendall(b"GET /much HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        num_bytes = 0
        while piece := connection.recv(1 << 20):
            num_bytes += len(piece)
            if num_bytes < 20 << 20:
                time.sleep(0.01)
    assert num_bytes > 400 * len(PIECE)
    assert app.ended == ["answered"]
