"""Grammars through the whole chain: what a client sends, what it is told, and what it cannot do to
others.
"""

from __future__ import annotations

import json
import os
import random
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from live_server import LiveServer, chat, live_server, until, write_model
from soak.hostile_formats import (
    FORGED_EVENT,
    HOSTILE_FORMATS,
    forging_format,
    huge_format,
    slow_format,
    strict_format,
    trivial_format,
)

from ridgeline.engine.grammars.compile_process import NUM_IDLE
from ridgeline.engine.grammars.compilers import crowded_message
from ridgeline.server.protocol import error_of

KEYS = ("key-of-somebody", "key-of-another")
PATH = "/v1/chat/completions"
UNIQUE = {"type": "array", "items": {"type": "boolean"}, "maxItems": 2, "uniqueItems": True}
SCHEMA = {"type": "object", "properties": {"tags": UNIQUE}, "required": ["tags"]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("model")
    with live_server(folder, api_key=KEYS) as live:
        yield live


@pytest.fixture(scope="module")
def hasty_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """One that gives up after a second of compiling."""
    folder = tmp_path_factory.mktemp("model")
    with live_server(folder, api_key=KEYS, grammar_timeout=1.0) as live:
        yield live


def ask(server: LiveServer, key: str = KEYS[0], **fields: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    body = chat(**{"max_tokens": 60, "temperature": 1.0, "seed": 3, **fields})
    return server.post(PATH, body, headers=headers)


def pending(server: LiveServer, format: dict[str, Any]) -> socket.socket:
    """A client that has asked and waits."""
    body = json.dumps(chat(response_format=format, max_tokens=5)).encode()
    host, port = server.url.removeprefix("http://").split(":")
    client = socket.create_connection((host, int(port)))
    head = f"POST {PATH} HTTP/1.1\r\nhost: {host}:{port}\r\nauthorization: Bearer {KEYS[0]}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    client.sendall(head.encode() + body)
    return client


def children_of(pid: int) -> set[int]:
    files = Path(f"/proc/{pid}/task").glob("*/children")
    return {int(child) for file in files for child in file.read_text().split()}


def num_compiling(server: LiveServer) -> int:
    """Processes under the engine's, those that only wait left out."""
    return sum(len(children_of(child)) for child in children_of(server.engine_pid)) - NUM_IDLE


@pytest.mark.slow
def test_a_small_schema_waits_for_none_of_ten_slow_ones(server: LiveServer) -> None:
    """Of the same key; and when their clients leave, nothing more is done for them."""
    draw = random.Random(3)
    assert ask(server, response_format=trivial_format(draw)).status_code == 200
    clients = [pending(server, slow_format(draw)) for _ in range(10)]
    until(lambda: num_compiling(server) > 1)
    for key in KEYS:
        answer = ask(server, key, response_format=trivial_format(draw))
        assert answer.status_code == 200, answer.text
        answered, _, _ = select.select(clients, [], [], 0)
        assert len(answered) < len(clients)  # of the same key four may be compiled for long
    for client in clients:
        client.close()
    until(server.is_idle)
    until(lambda: num_compiling(server) <= 0)


def test_after_a_kill_nobody_waits_for_the_grammar_of_another(server: LiveServer) -> None:
    """No step was under way, so who waited for a grammar is suspected too."""
    draw = random.Random(9)
    until(server.is_idle)
    client = pending(server, slow_format(draw))
    until(lambda: num_compiling(server) > 0)
    server.kill_engine()
    answer = ask(server, KEYS[1])
    assert answer.status_code == 200, answer.text
    assert not select.select([client], [], [], 0)[0]  # its grammar takes half a minute
    client.close()
    until(server.is_idle)


@pytest.mark.slow
def test_a_grammar_that_takes_too_long_is_refused(hasty_server: LiveServer) -> None:
    answer = ask(hasty_server, response_format=slow_format(random.Random(5)))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["code"] == "invalid_grammar"
    assert "compiling it takes longer than 1 s, the limit" in error["message"]


@pytest.mark.smoke
def test_too_many_slow_ones_are_a_429() -> None:
    ended = SimpleNamespace(status="failed", reason=crowded_message(4), total_s=1.0)
    error = error_of(ended)  # type: ignore[arg-type]
    assert error is not None
    assert (error.status, error.code) == (429, "too_many_grammars")


@pytest.mark.slow
def test_a_key_with_many_slow_ones_is_told_to_try_again(server: LiveServer) -> None:
    draw = random.Random(4)
    waiting = [pending(server, slow_format(draw)) for _ in range(8)]
    clients, answers = list(waiting), []
    while waiting and not any("HTTP/1.1 429" in answer for answer in answers):
        for client in select.select(waiting, [], [], 60)[0]:
            client.settimeout(10)
            answers.append(client.recv(1 << 16).decode())
            waiting.remove(client)
    for client in clients:
        client.close()
    (refused,) = [answer for answer in answers if "HTTP/1.1 429" in answer][:1]
    assert "retry-after" in refused
    until(server.is_idle)


def test_what_a_strict_schema_cannot_have_is_named(server: LiveServer) -> None:
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    format["json_schema"] |= {"strict": True}  # type: ignore[operator]
    answer = ask(server, response_format=format)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "response_format"
    assert "cannot be enforced: uniqueItems at #/properties/tags;" in error["message"]
    function = {"name": "mark", "parameters": SCHEMA, "strict": True}
    answer = ask(server, tools=[{"type": "function", "function": function}])
    assert answer.status_code == 400
    assert "parameters of mark: " in answer.json()["error"]["message"]
    flat = {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}
    body = {"model": "tiny", "input": "hello", "text": {"format": flat}}
    headers = {"authorization": f"Bearer {KEYS[0]}"}
    answer = server.post("/v1/responses", body, headers=headers)
    assert answer.json()["error"]["param"] == "text.format"


@pytest.mark.parametrize("stream", [False, True])
def test_what_others_cannot_have_is_told_in_a_header(server: LiveServer, stream: bool) -> None:
    schema = {**SCHEMA, "properties": {"tags": UNIQUE, "né\r\nx": {"not": {}}}}
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = ask(server, response_format=format, stream=stream)
    assert answer.status_code == 200
    assert answer.headers["x-ridgeline-unenforced"] == (
        "uniqueItems at #/properties/tags, not at #/properties/n%C3%A9%0D%0Ax"
    )
    forced = {"type": "function", "function": {"name": "mark", "parameters": SCHEMA}}
    answer = ask(server, tools=[forced], tool_choice="required", stream=stream)
    assert answer.status_code == 200
    named = answer.headers["x-ridgeline-unenforced"]
    assert named == "uniqueItems at tools.mark#/properties/tags"
    answer = ask(server, response_format=trivial_format(random.Random(1)), stream=stream)
    assert "x-ridgeline-unenforced" not in answer.headers


def test_what_is_hostile_is_refused_by_its_name(server: LiveServer) -> None:
    draw = random.Random(6)
    for make, words in ((huge_format, "the limit is"), (strict_format, "cannot be enforced")):
        for _ in range(12):
            answer = ask(server, response_format=make(draw))
            assert answer.status_code == 400
            assert words in answer.json()["error"]["message"]
    assert set(HOSTILE_FORMATS) == {"slow", "huge", "strict", "forging"}


NATIVE = """
import logging, os
from ridgeline.server.logs import start_logging
start_logging(process="engine", log_prompts={shows})
os.write(2, b"[12:00:00] /project/cpp/x.cc:12: Warning: a secret\\n" + {forged!r}.encode() + b"\\n")
os.abort()
"""


@pytest.mark.parametrize("shows", [False, True])
def test_native_output_is_one_line_of_the_log(shows: bool) -> None:
    """With the last words of a process that dies; quoted text of requests only where it may be."""
    forged = json.dumps({"level": "error", "event": FORGED_EVENT})
    code = NATIVE.format(shows=shows, forged=f"{forged}\n\x1b[2J\x9b" + "x" * 9000)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert done.stdout == b""
    (line,) = done.stderr.decode().splitlines()
    entry = json.loads(line)
    assert (entry["event"], entry["process"]) == ("native output", "engine")
    assert (entry["source"], entry["level"]) == ("x.cc:12", "warning")
    assert line.isprintable()
    assert len(line) < 9000
    assert ("a secret" in line) == shows
    assert (FORGED_EVENT in line) == shows
    assert ("withheld" in entry) != shows


@pytest.mark.slow
def test_a_schema_forges_no_line_of_the_log(tmp_path: Path) -> None:
    """From the command line on: what the compiler warns of is in the log, and no text of it."""
    write_model(tmp_path)
    command = [sys.executable, "-m", "ridgeline", "serve", str(tmp_path), "--port", "0"]
    process = subprocess.Popen(
        [*command, "--device", "cpu", "--memory-share", "0.05", "--served-name", "tiny"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split()[0]
        draw = random.Random(8)
        for _ in range(12):
            body = chat(response_format=forging_format(draw), max_tokens=4)
            assert httpx.post(url + PATH, json=body, timeout=60).status_code in (200, 400)
    finally:
        process.terminate()
        _, err = process.communicate(timeout=30)
    entries = [json.loads(line) for line in err.splitlines()]
    native = [entry for entry in entries if entry["event"] == "native output"]
    assert native
    assert all(entry["source"].partition(":")[0].endswith(".cc") for entry in native)
    assert FORGED_EVENT not in err
