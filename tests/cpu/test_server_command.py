"""`ridgeline serve` from its first line to its exit code."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from clock import check_elapsed
from command_line import refused
from live_server import chat, events_of, write_model
from server_faults import FAULTS

from ridgeline.cli import main, serve
from ridgeline.errors import MissingPackageError, UsageError
from ridgeline.recipe import Recipe

KEY = "the-key-of-the-file"
SCRIPT = Path(__file__).parent.parent / "breakable_cli.py"


@contextmanager
def started(folder: Path, *flags: str) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, FAULTS: str(folder), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(SCRIPT), "serve", str(folder), "--port", "0", "--device", "cpu"]
    process = subprocess.Popen(
        [*command, "--memory-share", "0.05", *flags],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_from_start_to_drain(tmp_path: Path) -> None:
    """After SIGTERM what runs may end, what is too long is told so, nobody new comes in."""
    write_model(tmp_path)
    (tmp_path / "slow").touch()
    (tmp_path / "keys").write_text(KEY + "\n")
    flags = ("--api-key-file", str(tmp_path / "keys"), "--drain-seconds", "2")
    with started(tmp_path, *flags) as process:
        assert_drains(process, tmp_path.name)


def assert_drains(process: subprocess.Popen[str], model: str) -> None:
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.fullmatch(
        r"(http://127\.0\.0\.1:\d+) serves (\S+): weights .* KiB, "
        r"KV pages .* [MG]iB \(.* tokens\), context 2,048; ready in \d+\.\d s\n",
        line,
    )
    assert found, line + (process.communicate(timeout=20)[1] if not line else "")
    url, name = found[1], found[2]
    assert name == model
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=url, headers=headers, timeout=20) as client:
        bodies: list[Any] = [chat(max_tokens=number, model=name) for number in (8, 1000)]
        path = "/v1/chat/completions"
        streams = [
            client.send(
                client.build_request("POST", path, json={**body, "stream": True}), stream=True
            )
            for body in bodies
        ]
        os.killpg(process.pid, signal.SIGTERM)  # as service managers do: the engine gets it too
        began = time.monotonic()
        short = list(streams[0].iter_lines())
        assert "data: [DONE]" in short
        refused_now = client.post(path, json=bodies[0])
        assert refused_now.status_code == 503
        assert refused_now.json()["error"]["code"] == "shutting_down"
        assert "retry-after" in refused_now.headers
        events = list(events_of(streams[1].iter_lines()))
        assert len(events) > 10
        assert events[-1]["error"]["code"] == "shutting_down"
    out, err = process.communicate(timeout=20)
    assert process.returncode == 0, err
    check_elapsed(time.monotonic() - began, 15, at_least=1.5)
    assert "0 restarts" in out
    lines = [json.loads(line) for line in err.splitlines()]
    assert [line["status"] for line in lines if line["event"] == "request"] == [200, 503, 200]
    assert "hello" not in err


def test_what_cannot_start_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        refused(capsys, UsageError, "cannot listen", "serve", "demo", "--port", port)
    refused(capsys, UsageError, "at least 8", "serve", "demo", "--api-key", "short")
    missing = str(tmp_path / "none")
    refused(capsys, UsageError, "cannot read", "serve", "demo", "--api-key-file", missing)
    refused(capsys, UsageError, "did you mean '--max-waiting'", "serve", "demo", "--max-wait", "1")
    monkeypatch.setitem(sys.modules, "ridgeline.server.serving", None)
    monkeypatch.delitem(sys.modules, "ridgeline.cli.serve", raising=False)
    refused(capsys, MissingPackageError, "ridgeline[serve]", "serve", "demo")


def test_json_is_one_document_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an engine that is none, and serving that ends at once."""
    write_model(tmp_path)
    monkeypatch.setattr(
        serve.Engine, "supervised", lambda *_, **__: SimpleNamespace(num_restarts=2)
    )
    served = SimpleNamespace(run=lambda on_ready: on_ready())
    monkeypatch.setattr(serve, "Serving", lambda *_: served)
    monkeypatch.setattr(serve, "start_logging", lambda: None)
    assert main(["serve", str(tmp_path), "--port", "0", "--served-name", "mine", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["model"], document["restarts"]) == ("mine", 2)


@pytest.mark.slow
def test_the_engine_begins_early_and_ends_with_a_signal(tmp_path: Path) -> None:
    """As users start it; the engine's process is there before this one knows what to load."""
    write_model(tmp_path)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    flags = ("--port", "0", "--device", "cpu", "--memory-share", "0.05")
    process = subprocess.Popen(
        [sys.executable, "-m", "ridgeline", "serve", str(tmp_path), *flags],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split(" ")[0]
        answer = httpx.post(
            url + "/v1/chat/completions", json=chat(max_tokens=2, model=tmp_path.name), timeout=30
        )
        assert answer.status_code == 200
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
        assert process.returncode == 0, err
        assert "0 restarts" in out
    finally:
        process.kill()
        process.wait()


def test_replicas_are_asked_for_with_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, dict[str, Any]]] = []
    replicated, plain = (
        lambda *_, kind=kind, **about: made.append((kind, about)) for kind in ("several", "one")
    )
    monkeypatch.setattr(serve.Engine, "replicated", replicated)
    monkeypatch.setattr(serve.Engine, "supervised", plain)
    for number in (3, None):
        serve.make_engine(
            Namespace(model="demo", device="cpu", replicas=number), Path("model"), Recipe()
        )
    assert [(kind, about.get("num_replicas")) for kind, about in made] == [
        ("several", 3),
        ("one", None),
    ]
    assert made[1][1]["early"] is None  # everything is imported here: nothing was begun
