"""What a server promises beyond the protocol: it refuses at the door, forgets who has gone, goes on
when its engine dies or is stuck, and keeps prompts to itself.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import httpx
import pytest
from clock import within
from live_server import LiveServer, chat, events_of, live_server, until

from ridgeline.formats.api_keys import ApiKey
from ridgeline.server import answering, pump
from ridgeline.server.answering import Answering
from ridgeline.server.door.keys import Keys
from ridgeline.server.door.wire import ChunkWriter

STEP_TIMEOUT, CLIENT_TIMEOUT = 5.0, 2.0  # a busy machine takes a second for a step


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("life")
    times = {"step_timeout": STEP_TIMEOUT, "client_timeout": CLIENT_TIMEOUT}
    with live_server(folder, max_body_mib=1, **times) as found:
        yield found


def text_of(lines: Iterator[str]) -> str:
    return "".join(
        choice["delta"].get("content") or ""
        for event in events_of(lines)
        for choice in event["choices"]
    )


def stream_text(server: LiveServer, body: dict[str, Any]) -> str:
    url, asked = server.url + "/v1/chat/completions", {**body, "stream": True}
    with httpx.stream("POST", url, json=asked, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        return text_of(answer.iter_lines())


def open_stream(server: LiveServer, body: dict[str, Any]) -> socket.socket:
    """A request for a stream whose head has come."""
    sent = json.dumps({**body, "stream": True}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=10)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}:{port}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(sent)}\r\n\r\n"
    )
    connection.sendall(head.encode() + sent)
    assert connection.recv(100).startswith(b"HTTP/1.1 200")
    return connection


def test_on_a_cpu_a_token_does_not_wait_for_the_next_step(server: LiveServer) -> None:
    """Its answer begins while the second step is held up. Steps that overlap would be launched, and
    here computed, before anything is told of the first.
    """
    assert server.engine.recipe.overlap is False
    with server.fault("first"):
        connection = open_stream(server, chat(max_tokens=4, ignore_eos=True))
    with closing(connection), connection.makefile("rb") as answer:
        assert b"[DONE]" in b"".join(iter(answer.readline, b"0\r\n"))


def test_the_tokens_of_a_stream_wake_no_task(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are written where they are handed out; each has an event of its own."""
    pieces: list[bytes] = []
    write = ChunkWriter.write

    def writing(self: ChunkWriter, data: bytes) -> None:
        pieces.append(data)
        write(self, data)

    monkeypatch.setattr(ChunkWriter, "write", writing)
    asked = chat(max_tokens=16, ignore_eos=True)
    with server.fault("slow"):
        streamed = stream_text(server, asked)
    whole = server.post("/v1/chat/completions", asked).json()["choices"][0]["message"]["content"]
    assert streamed == whole
    assert len(pieces) > 8
    assert all(piece.count(b"data: ") == 1 for piece in pieces)


def test_every_route_but_health_and_the_pages_files_needs_the_key(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.serving.front, "_keys", Keys([ApiKey("a-secret-key")]))
    document = server.get("/openapi.json", headers={"authorization": "Bearer a-secret-key"}).json()
    paths = {(path, method) for path, about in document["paths"].items() for method in about}
    asked = {*paths, ("/live", "get"), ("/metrics", "get"), ("/nothing", "get"), ("/page", "get")}
    asked.add(("/live/cancel/req-1", "post"))
    assert len(asked) > 10
    for path, method in asked:
        for headers in ({}, {"authorization": "Bearer a-secret-kez"}):
            answer = httpx.request(method, server.url + path, headers=headers)
            assert answer.status_code == (200 if path == "/health" else 401), path
            if path != "/health":
                assert answer.headers["www-authenticate"] == "Bearer"
                assert answer.json()["error"]["type"] == "authentication_error"
    browser = server.get("/metrics", headers={"accept": "text/html"})
    assert browser.headers["www-authenticate"].startswith("Basic")
    for path in ("/", "/page/main.js", "/page/chat/chat.js"):
        assert server.get(path).status_code == 200
    assert server.get("/page/..%2Froutes.py").status_code == 404
    assert server.get("/ready", auth=("", "a-secret-key")).status_code == 200


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({"content": b"{" * 100, "headers": {"content-type": "application/json"}}, 400),
        ({"content": b"[" * 100_000, "headers": {"content-type": "application/json"}}, 400),
        ({"content": b"\xff\xfe", "headers": {"content-type": "application/json"}}, 400),
        ({"content": b"{}", "headers": {"content-type": "text/plain"}}, 415),
        ({"content": b"{}", "headers": {}}, 415),
        ({"json": chat(), "headers": {"content-encoding": "gzip"}}, 415),
        ({"json": chat("x" * (2 << 20))}, 413),
        ({"json": chat("word " * 20_000)}, 400),
        ({"json": chat(stop=["x" * 10_000] * 100)}, 400),
        ({"json": chat(), "headers": {"origin": "http://evil.example"}}, 403),
        ({"json": chat(), "headers": {"host": "evil.example"}}, 403),
        ({"json": {**chat(), "made_up": 1}}, 400),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_refused(server: LiveServer, options: dict[str, Any], status: int) -> None:
    answer = server.post("/v1/chat/completions", **options)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]
    assert answer.headers["x-request-id"]


def test_a_chunked_body_without_end_is_refused(server: LiveServer) -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(64):
            yield b" " * (64 << 10)

    headers = {"content-type": "application/json"}
    try:
        answer = server.post("/v1/chat/completions", content=pieces(), headers=headers)
    except httpx.WriteError:
        return  # closed while it was still being sent
    assert answer.status_code == 413


def test_a_full_house_turns_away_at_the_door(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = server.serving.gate
    with server.fault("slow"), closing(open_stream(server, chat(max_tokens=500))):
        monkeypatch.setattr(gate, "room", 1)
        answer = server.post("/v1/chat/completions", chat(max_tokens=2))
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
        assert int(answer.headers["retry-after"]) >= 1
        monkeypatch.setattr(gate, "room", 100)
        monkeypatch.setattr(gate, "_max_per_tenant", 1)
        answer = server.post("/v1/chat/completions", chat(max_tokens=2))
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "too_many_requests")
        assert int(answer.headers["retry-after"]) >= 1
    until(server.is_idle)


def test_who_goes_is_forgotten_within_two_steps(server: LiveServer) -> None:
    """Streaming or not: the pages are free again, while a step takes its time."""
    with server.fault("slow"):
        for is_stream in (True, False):
            connection = open_stream(server, chat(max_tokens=1000))
            if not is_stream:
                connection.close()
                until(server.is_idle)
                body = json.dumps(chat(max_tokens=1000)).encode()
                connection = socket.create_connection(connection_address(server), timeout=10)
                head = (
                    "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: "
                    f"application/json\r\ncontent-length: {len(body)}\r\n\r\n"
                )
                connection.sendall(head.encode() + body)
            until(lambda: server.engine.stats.num_decoding == 1)
            steps = server.engine.progress.num_steps
            connection.close()
            until(server.is_idle)
            assert server.engine.progress.num_steps - steps <= 3  # one was running already


def test_who_does_not_read_is_dropped(server: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    """Long before its answer would have ended, and what waited for it was merged."""
    wide = chat(n=8, logprobs=True, top_logprobs=20, max_tokens=1900)
    with caplog.at_level(logging.INFO, "ridgeline"), closing(open_stream(server, wide)):
        until(lambda: len(caplog.records) == 1, 30)
    facts = caplog.records[0].__dict__["facts"]
    assert facts["status"] == 499
    assert facts["total_s"] > CLIENT_TIMEOUT
    assert "output_tokens" not in facts
    until(server.is_idle)


def connection_address(server: LiveServer) -> tuple[str, int]:
    host, port = server.url.removeprefix("http://").split(":")
    return host, int(port)


def test_a_request_is_cancelled_by_its_id(server: LiveServer) -> None:
    with server.fault("slow"):
        found: list[httpx.Response] = []
        headers = {"x-request-id": "the-one"}

        def ask() -> None:
            found.append(
                server.post("/v1/chat/completions", chat(max_tokens=1000), headers=headers)
            )

        thread = threading.Thread(target=ask)
        thread.start()
        until(lambda: server.serving.pump.holds("the-one"))
        until(lambda: server.engine.stats.num_decoding == 1)
        assert server.post("/live/cancel/the-one", {}).status_code == 200
        thread.join(10)
        assert found[0].status_code == 503
        assert found[0].json()["error"]["code"] == "cancelled"
        assert found[0].headers["x-request-id"] == "the-one"
        assert server.post("/live/cancel/the-one", {}).status_code == 404
    until(server.is_idle)


def test_deadlines(server: LiveServer) -> None:
    with server.fault("slow"):
        answer = server.post("/v1/chat/completions", chat(max_tokens=1000, deadline_s=0.2))
    assert answer.status_code == 408, answer.text
    until(server.is_idle)


def test_salts_keep_prefixes_apart(server: LiveServer) -> None:
    long = "the same beginning " * 20

    def hits(**more: Any) -> int:
        before = server.engine.stats.hit_tokens
        assert server.post("/v1/chat/completions", chat(long, max_tokens=2, **more)).is_success
        until(server.is_idle)
        return server.engine.stats.hit_tokens - before

    assert hits(cache_salt="one") == 0
    assert hits(cache_salt="one") > 50
    assert hits(cache_salt="two") == 0
    assert hits() < 10  # the first words of the template, from other tests


def test_logs_hold_no_prompts(
    server: LiveServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = Answering.answer
    with caplog.at_level(logging.DEBUG, "ridgeline"):
        headers = {"x-request-id": "seen-1"}
        server.post("/v1/chat/completions", chat("pelican", max_tokens=2), headers=headers)
        server.post("/v1/chat/completions", chat("pelican", top_p="pelican"))
        server.post("/v1/chat/completions", content=b'{"pelican": ')
        until(lambda: len(caplog.records) >= 3)
    lines = [f"{record.getMessage()} {record.__dict__.get('facts')}" for record in caplog.records]
    assert any("seen-1" in line and "'prompt_tokens'" in line for line in lines)
    assert not any("pelican" in line for line in lines)
    logged = replace(server.serving.answering, log_prompts=True)
    monkeypatch.setattr(Answering, "answer", lambda _, *args: answer(logged, *args))
    with caplog.at_level(logging.INFO, "ridgeline"):
        server.post("/v1/chat/completions", chat("pelican", max_tokens=2))
        until(lambda: "pelican" in str(caplog.records[-1].__dict__.get("facts")))


def test_the_unforeseen_is_a_503(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("nobody thought of this")

    monkeypatch.setattr(answering, "reply_for", broken)
    answer = server.post("/v1/chat/completions", chat(), headers={"x-request-id": "odd"})
    assert answer.status_code == 503
    assert "odd" in answer.json()["error"]["message"]
    assert answer.headers["retry-after"] == "1"
    assert any("nobody thought" in (record.exc_text or "") for record in caplog.records)
    until(server.is_idle)


def test_requests_outlive_an_engine_that_is_killed(server: LiveServer) -> None:
    bodies = [chat(f"story {number}", max_tokens=60) for number in range(8)]
    expected = [stream_text(server, body) for body in bodies]
    found: dict[int, str] = {}
    restarts = server.engine.num_restarts

    def run(number: int) -> None:
        found[number] = stream_text(server, bodies[number])

    with server.fault("slow"):
        threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        until(lambda: server.engine.stats.num_decoding == 8)
        with within(1):
            server.kill_engine()
            until(lambda: server.serving.pump.down_since is not None)
        answer = server.get("/ready")
        assert (answer.status_code, answer.json()["reason"]) == (503, "the engine is being started")
        assert server.get("/health").status_code == 200
    for thread in threads:
        thread.join(120)
    assert [found[number] for number in range(8)] == expected
    assert server.engine.num_restarts == restarts + 1
    assert server.get("/ready").status_code == 200
    until(server.is_idle)


@pytest.mark.slow
def test_a_stuck_step_is_a_restart(server: LiveServer) -> None:
    body = chat("stuck or not", max_tokens=20)
    expected = stream_text(server, body)
    restarts = server.engine.num_restarts
    with server.fault("stuck"):
        assert stream_text(server, body) == expected
    assert server.engine.num_restarts == restarts + 1
    until(server.is_idle)


def test_an_engine_that_is_gone_is_told(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While none stays up requests are refused with a reason; then it comes back by itself."""
    monkeypatch.setattr(pump, "DOWN_S", 0.0)
    server.kill_engine()
    until(lambda: server.serving.pump.down_since is not None)
    answer = server.post("/v1/chat/completions", chat())
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_down")
    assert int(answer.headers["retry-after"]) >= 1
    until(lambda: server.engine.is_up, 30)
    until(lambda: server.get("/ready").status_code == 200)
    assert server.post("/v1/chat/completions", chat(max_tokens=2)).status_code == 200
