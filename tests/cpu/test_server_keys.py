"""What a key may see and do, through a live server: its own requests, its own rates, several names
of a model, pages of other origins, a proxy's path.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest
from live_server import LiveServer, chat, live_server, until

from ridgeline.server import reloading
from ridgeline.version import __version__

ALICE, BOB, ADMIN, SLOW = "key-of-alice", "key-of-bob-1", "key-of-admin", "key-of-slow-1"
CHAT = "/v1/chat/completions"
KEYS = f"""\
{ALICE}   name=alice
{BOB}     name=bob
# who looks after it
{ADMIN}   name=operations admin
{SLOW}    name=slow requests-per-minute=2 tokens-per-minute=100000
"""
ORIGIN = "https://chat.example.org"


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.txt"
    path.write_text(KEYS)
    return path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, key_file: Path) -> Iterator[LiveServer]:
    with (
        mock.patch.object(reloading, "LOOK_S", 0.01),
        live_server(
            tmp_path_factory.mktemp("server"),
            api_key_file=(str(key_file),),
            served_model_name=("tiny", "gpt-4o-mini"),
            allow_origin=(ORIGIN, "http://localhost:3000"),
            root_path="/llm",
            probe_port=0,
        ) as server,
    ):
        yield server


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@contextmanager
def running(server: LiveServer, key: str, name: str) -> Iterator[list[httpx.Response]]:
    """A long request of this key and name; its answer, once it has ended."""
    answers: list[httpx.Response] = []

    def post() -> None:
        headers = {**bearer(key), "x-request-id": name}
        answers.append(server.post(CHAT, chat(max_tokens=1000), headers=headers))

    with server.fault("slow"):
        thread = threading.Thread(target=post)
        thread.start()
        until(lambda: server.serving.pump.holds(name))
        try:
            yield answers
        finally:
            server.post(f"/live/cancel/{name}", {}, headers=bearer(ADMIN))
            thread.join(10)
    until(server.is_idle)


def live_ids(server: LiveServer, key: str, which: str = "live") -> list[str]:
    requests = server.get("/live", headers=bearer(key)).json()["requests"]
    if which == "live":
        assert requests["num_live"] == len(requests["live"])
    return [row["id"] for row in requests[which]]


def cancel(server: LiveServer, key: str, name: str) -> httpx.Response:
    return server.post(f"/live/cancel/{name}", {}, headers=bearer(key))


def test_a_key_sees_and_cancels_its_own_requests_alone(server: LiveServer) -> None:
    with running(server, ALICE, "of-alice") as answers:
        assert live_ids(server, ALICE) == ["of-alice"]
        assert live_ids(server, BOB) == []
        assert live_ids(server, ADMIN) == ["of-alice"]
        of_other, of_none = cancel(server, BOB, "of-alice"), cancel(server, BOB, "of-nobody")
        assert of_other.status_code == of_none.status_code == 404
        # Not even that there is one can be learned from the answer.
        assert of_other.text.replace("of-alice", "of-nobody") == of_none.text
        assert server.serving.pump.holds("of-alice")
        assert "of-alice" not in server.get("/live", headers=bearer(BOB)).text
        assert cancel(server, ALICE, "of-alice").status_code == 200
        until(lambda: bool(answers))
    assert answers[0].json()["error"]["code"] == "cancelled"
    assert "of-alice" in live_ids(server, ALICE, "ended")
    assert "of-alice" not in live_ids(server, BOB, "ended")


def test_an_admin_key_sees_and_cancels_everybodys(server: LiveServer) -> None:
    with running(server, BOB, "of-bob") as answers:
        live = server.get("/live", headers=bearer(ADMIN)).json()
        assert [(row["id"], row["tenant"]) for row in live["requests"]["live"]] == [
            ("of-bob", "bob")
        ]
        assert live["viewer"] == {"tenant": "operations", "is_admin": True}
        assert cancel(server, ADMIN, "of-bob").status_code == 200
        until(lambda: bool(answers))
    assert answers[0].status_code == 503


def test_metrics_hold_totals_and_no_requests_or_names(server: LiveServer) -> None:
    with running(server, ALICE, "counted-request"):
        text = server.get("/metrics", headers=bearer(BOB)).text
    assert "vllm:num_requests_running" in text
    for word in ("counted-request", "alice", "bob", ALICE):
        assert word not in text


def test_rates_of_a_key(server: LiveServer) -> None:
    statuses = [
        server.post(CHAT, chat(max_tokens=1), headers=bearer(SLOW)).status_code for _ in range(2)
    ]
    assert statuses == [200, 200]
    answer = server.post(CHAT, chat(max_tokens=1), headers=bearer(SLOW))
    assert answer.status_code == 429
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert "2 requests per minute" in error["message"]
    assert 1 <= int(answer.headers["retry-after"]) <= 30
    assert server.post(CHAT, chat(max_tokens=1), headers=bearer(ALICE)).status_code == 200
    assert server.get("/v1/models", headers=bearer(SLOW)).status_code == 200


def test_tokens_are_counted_when_a_request_has_ended(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of one whose client has gone."""
    monkeypatch.setattr(server.serving.rates, "_tokens_per_minute", 50)
    body = chat("hello", max_tokens=30, ignore_eos=True)
    with httpx.Client(base_url=server.url, headers=bearer(BOB), timeout=30) as client:
        first = client.post(CHAT, json=body).json()["usage"]
        assert first["completion_tokens"] == 30
        with server.fault("slow"), client.stream("POST", CHAT, json={**body, "stream": True}) as it:
            next(it.iter_bytes())
        until(server.is_idle)
        answer = client.post(CHAT, json=body)
    assert answer.status_code == 429
    assert "50 tokens per minute" in answer.json()["error"]["message"]
    assert int(answer.headers["retry-after"]) >= 1


def test_the_model_has_all_its_names(server: LiveServer) -> None:
    with httpx.Client(base_url=server.url, headers=bearer(ALICE), timeout=30) as client:
        models = client.get("/v1/models").json()["data"]
        assert [model["id"] for model in models] == ["tiny", "gpt-4o-mini"]
        for name in ("tiny", "gpt-4o-mini"):
            assert client.get(f"/v1/models/{name}").json()["id"] == name
            body = {**chat(max_tokens=2), "model": name}
            assert client.post(CHAT, json=body).json()["model"] == name
            with client.stream("POST", CHAT, json={**body, "stream": True}) as answer:
                assert f'"model":"{name}"' in answer.read().decode()
        answer = client.post(CHAT, json={**chat(max_tokens=2), "model": "gpt-4o"})
        assert answer.status_code == 404
        assert "tiny, gpt-4o-mini" in answer.json()["error"]["message"]


def test_version(server: LiveServer) -> None:
    assert server.get("/version", headers=bearer(ALICE)).json() == {"version": __version__}
    assert server.get("/version").status_code == 401


def test_keys_come_as_bearer_password_or_x_api_key(server: LiveServer) -> None:
    for options in (
        {"headers": bearer(ALICE)},
        {"headers": {"x-api-key": ALICE}},
        {"auth": ("anybody", ALICE)},
        {"headers": {"x-api-key": ALICE, "authorization": "Bearer unused"}},
    ):
        assert server.get("/v1/models", **options).status_code == 200
    wrong = {"x-api-key": "wrong-key-1", "authorization": "Bearer wrong-key-2"}
    assert server.get("/v1/models", headers=wrong).status_code == 401


def test_pages_of_allowed_origins(server: LiveServer) -> None:
    headers = {**bearer(ALICE), "origin": ORIGIN}
    for status, body in ((200, chat(max_tokens=1)), (400, {"model": "tiny"})):
        answer = server.post(CHAT, body, headers=headers)
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == ORIGIN
        assert "access-control-allow-credentials" not in answer.headers
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
        assert answer.headers["vary"] == "origin"
    refused = server.post(CHAT, chat(), headers={"origin": ORIGIN})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == ORIGIN
    plain = server.get("/v1/models", headers=bearer(ALICE))
    assert "access-control-allow-origin" not in plain.headers
    assert plain.headers["vary"] == "origin"  # a cache keeps the two apart


def test_preflights(server: LiveServer) -> None:
    """They have no key, and get no further than the door."""

    def preflight(origin: str, path: str = CHAT) -> httpx.Response:
        headers = {
            "origin": origin,
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type,x-stainless-os",
        }
        return httpx.request("OPTIONS", server.url + path, headers=headers)

    for origin in (ORIGIN, "http://localhost:3000"):
        for path in (CHAT, f"/llm{CHAT}"):
            answer = preflight(origin, path)
            assert answer.status_code == 200
            assert answer.content == b""
            assert answer.headers["access-control-allow-origin"] == origin
            assert "POST" in answer.headers["access-control-allow-methods"]
            assert answer.headers["access-control-allow-headers"] == (
                "authorization,content-type,x-stainless-os"
            )
    for origin in (
        "https://chat.example.org.evil.example",
        "http://chat.example.org",
        "https://chat.example.org:8443",
        "https://sub.chat.example.org",
        "http://localhost:3001",
        "null",
    ):
        answer = preflight(origin)
        assert answer.status_code == 403, origin
        assert "access-control-allow-origin" not in answer.headers
    assert httpx.options(server.url + CHAT, headers=bearer(ALICE)).status_code == 405


def test_behind_a_proxys_path(server: LiveServer) -> None:
    """Whether the proxy takes the path off or not."""
    with httpx.Client(base_url=server.url, headers=bearer(ALICE), timeout=30) as client:
        for prefix in ("", "/llm"):
            for path in ("/v1/models", "/v1/models/", "/version", "/health", "/live", "/"):
                assert client.get(prefix + path).status_code == 200, prefix + path
            answer = client.post(prefix + CHAT, json=chat(max_tokens=1))
            assert answer.status_code == 200
        bare = client.get("/llm")
        assert (bare.status_code, bare.headers["location"]) == (308, "/llm/")
        assert client.get("/llmv1/models").status_code == 404
        document = client.get("/llm/openapi.json").json()
        assert document["servers"] == [{"url": "/llm"}]
        assert "/v1/chat/completions" in document["paths"]
    assert httpx.get(server.url + "/llm/v1/models").status_code == 401


def test_changed_keys_are_read_again(
    server: LiveServer, key_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def status(key: str) -> int:
        return server.get("/v1/models", headers=bearer(key)).status_code

    try:
        key_file.write_text(KEYS + "key-of-carol-1 name=carol\n")
        until(lambda: status("key-of-carol-1") == 200)
        with caplog.at_level(logging.ERROR, "ridgeline.server.reloading"):
            key_file.write_text("key-of-dave-12 nam=dave\n")
            until(lambda: bool(caplog.records))
        assert "line 1" in caplog.text
        assert "key-of-dave" not in caplog.text
        assert [status(key) for key in ("key-of-carol-1", "key-of-dave-12")] == [200, 401]
    finally:
        key_file.write_text(KEYS)
    until(lambda: status("key-of-carol-1") == 401)
    assert status(ALICE) == 200


def test_probes_have_their_own_port(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = server.serving.probe_url
    assert probe is not None
    assert httpx.get(probe + "/health").json() == {"status": "alive"}
    assert httpx.get(probe + "/ready").json() == {"status": "ready"}
    for path in ("/metrics", "/v1/models", "/live", "/"):
        assert httpx.get(probe + path).status_code == 404
    assert httpx.post(probe + CHAT, json=chat()).status_code == 404
    monkeypatch.setattr(server.serving.gate, "is_closed", True)
    assert httpx.get(probe + "/ready").status_code == 503


def test_probes_are_answered_while_all_connections_are_taken(server: LiveServer) -> None:
    probe = server.serving.probe_url
    host, port = server.url.removeprefix("http://").split(":")
    bounds = replace(server.serving._bounds(), max_connections=3)
    protocol = server.serving._server.config.http_protocol_class
    with mock.patch.dict(protocol.keywords, bounds=bounds):  # type: ignore[attr-defined]
        taken = [socket.create_connection((host, int(port))) for _ in range(3)]
        try:
            until(lambda: server.get("/health").status_code == 503)
            assert httpx.get(f"{probe}/health").status_code == 200
            assert httpx.get(f"{probe}/ready").status_code == 200
        finally:
            for connection in taken:
                connection.close()
    until(lambda: server.get("/health").status_code == 200)


def test_logs_name_the_key_and_never_hold_it(
    server: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        server.post(CHAT, chat(max_tokens=1), headers=bearer(ALICE))
        server.post(CHAT, chat(max_tokens=1), headers=bearer("key-of-nobody"))
        until(lambda: sum(record.message == "request" for record in caplog.records) >= 2)
    facts: list[dict[str, Any]] = [
        record.__dict__["facts"] for record in caplog.records if "facts" in record.__dict__
    ]
    assert {fact["tenant"] for fact in facts} == {"alice", ""}
    assert "key-of" not in json.dumps(facts, default=str)
