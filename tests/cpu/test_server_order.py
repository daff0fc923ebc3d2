"""Whose turn it is, through HTTP on a server that runs one request at a time: higher priorities go
first and nobody starves; a client that leaves costs no step; a deadline is told on time whatever
the engine does.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

import httpx
import pytest
from live_server import LiveServer, chat, live_server, until

from ridgeline.engine.scheduling.waiting import MAX_PASSED


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(tmp_path_factory.mktemp("order"), max_batch=1) as started:
        yield started


@pytest.fixture
def ends(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ids of requests in the order in which they are answered."""
    order: list[str] = []
    ended = server.serving.meters.ended

    def noting(request_id: str, status: Any, reason: str) -> None:
        if request_id not in order:
            order.append(request_id)
        ended(request_id, status, reason)

    monkeypatch.setattr(server.serving.meters, "ended", noting)
    return order


def num_held(server: LiveServer) -> int:
    """Requests that have reached the engine and not ended."""
    return len(server.engine._backend._held)  # type: ignore[attr-defined]


def in_order(server: LiveServer, requests: dict[str, int | None]) -> None:
    """Send requests, by id with their priorities, one after the other while the engine is paused;
    then let it go on and see all of them answered.
    """
    with ThreadPoolExecutor(len(requests)) as threads:
        answers: list[Future[httpx.Response]] = []
        with server.fault("paused"):
            for number, (name, priority) in enumerate(requests.items(), 1):
                given = {} if priority is None else {"priority": priority}
                body = chat(name, max_tokens=3, ignore_eos=True, **given)
                headers = {"x-request-id": name}
                path = "/v1/chat/completions"
                answers.append(threads.submit(server.post, path, body, headers=headers))
                until(lambda number=number: num_held(server) == number)
        assert [answer.result().status_code for answer in answers] == [200] * len(requests)
    until(server.is_idle)


def test_requests_without_priorities_are_served_as_they_come(
    server: LiveServer, ends: list[str]
) -> None:
    names = [f"plain-{number}" for number in range(5)]
    in_order(server, dict.fromkeys(names))
    assert ends == names


def test_higher_priorities_are_served_first(server: LiveServer, ends: list[str]) -> None:
    low = [f"low-{number}" for number in range(5)]
    high = [f"high-{number}" for number in range(3)]
    in_order(server, {**dict.fromkeys(low), **dict.fromkeys(high, 100), "higher": 101, "less": -1})
    assert ends == ["higher", *high, *low, "less"]


def test_nobody_starves_behind_higher_priorities(server: LiveServer, ends: list[str]) -> None:
    high = [f"first-{number}" for number in range(MAX_PASSED + 3)]
    in_order(server, {"oldest": 0, "older": 0, **dict.fromkeys(high, 100)})
    assert ends == [*high[:MAX_PASSED], "oldest", *high[MAX_PASSED:], "older"]


def raw_stream(server: LiveServer, body: dict[str, Any]) -> socket.socket:
    """A request that was sent, and whose answer nobody waits for."""
    sent = json.dumps({**body, "stream": True}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=10)
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}:{port}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(sent)}\r\n\r\n"
    )
    connection.sendall(head.encode() + sent)
    return connection


def test_clients_that_leave_cost_two_steps_together(server: LiveServer) -> None:
    num_clients = 60
    body = chat("gone", max_tokens=1500, ignore_eos=True)
    with ExitStack() as clients:
        clients.enter_context(closing(raw_stream(server, body)))
        until(lambda: server.engine.stats.num_decoding == 1)
        with server.fault("paused"):
            for _ in range(num_clients - 1):
                clients.enter_context(closing(raw_stream(server, body)))
            until(lambda: num_held(server) == num_clients)
            steps = server.engine.progress.num_steps
            clients.close()
            until(lambda: num_held(server) == 0)
    until(server.is_idle)
    assert server.engine.progress.num_steps - steps <= 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_is_told_while_the_engine_is_stuck(server: LiveServer, stream: bool) -> None:
    """Of a request in the step that does not end, and of one that waits behind it."""
    with server.fault("paused"), ThreadPoolExecutor(2) as threads:
        body = chat("hurry", max_tokens=1000, deadline_s=0.1, stream=stream)
        sent = [
            threads.submit(server.post, "/v1/chat/completions", {**body, "seed": number})
            for number in range(2)
        ]
        for answer in sent:
            assert answer.result().status_code == 408
            error = answer.result().json()["error"]
            assert (error["code"], error["type"]) == ("deadline_exceeded", "timeout_error")
        until(lambda: num_held(server) == 0)
    until(server.is_idle)


def test_a_stream_that_has_begun_tells_of_its_deadline(server: LiveServer) -> None:
    body = chat("go on", max_tokens=1000, ignore_eos=True, deadline_s=0.3, stream=True)
    with ExitStack() as faults:
        url = server.url + "/v1/chat/completions"
        with httpx.stream("POST", url, json=body, timeout=30) as answer:
            lines = answer.iter_lines()
            first = json.loads(next(lines).removeprefix("data: "))
            faults.enter_context(server.fault("paused"))
            events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert first["object"] == "chat.completion.chunk"
    assert events[-1]["error"]["code"] == "deadline_exceeded"
    until(server.is_idle)
