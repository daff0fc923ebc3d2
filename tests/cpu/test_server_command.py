"""`ridgeline serve` from its first line to its exit code."""

from __future__ import annotations

import json
import os
import re
import shutil
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
from certificates import make_certificate
from clock import check_elapsed
from command_line import refused
from live_server import chat, events_of, until, write_model
from server_faults import FAULTS

from ridgeline.cli import main, serve
from ridgeline.errors import MissingPackageError, UsageError
from ridgeline.recipe import Recipe
from ridgeline.server.config import ServerConfig
from ridgeline.server.engine_process import setup_for
from ridgeline.server.short_turns import TURN_S

KEY = "the-key-of-the-file"
CHAT = "/v1/chat/completions"
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
    """After SIGTERM what runs may end, what is too long is told so, nobody new comes in. Before, a
    SIGHUP makes it read its keys again.
    """
    write_model(tmp_path)
    (tmp_path / "slow").touch()
    keys = tmp_path / "keys"
    keys.write_text("the-key-before\n")
    flags = ["--api-key-file", str(keys), "--drain-seconds", "2", "--probe-port", "0"]
    trust = None
    if shutil.which("openssl"):
        certificate = make_certificate(tmp_path)
        flags += ["--tls-cert", str(certificate.cert), "--tls-key", str(certificate.key)]
        trust = certificate.trust
    with started(tmp_path, *flags) as process:
        url = url_when_ready(process, tmp_path.name)
        assert url.startswith("http://" if trust is None else "https://")
        headers = {"authorization": f"Bearer {KEY}"}
        with httpx.Client(
            base_url=url, headers=headers, timeout=20, verify=trust or True
        ) as client:
            assert client.get("/v1/models").status_code == 401
            keys.write_text(KEY + "\n")
            os.killpg(process.pid, signal.SIGHUP)  # the engine gets it too, and goes on
            until(lambda: client.get("/v1/models").status_code == 200)
            assert_drains(process, client, tmp_path.name)
    for name in ("server", "engine"):
        turn_s, num_kept = (tmp_path / f"turns-{name}").read_text().split()
        assert float(turn_s) == TURN_S
        assert int(num_kept) > 10_000


def url_when_ready(process: subprocess.Popen[str], model: str) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    match = re.fullmatch(
        r"(https?://127\.0\.0\.1:\d+) serves (\S+): weights .* KiB, "
        r"KV pages .* [MG]iB \(.* tokens\), context 2,048; ready in \d+\.\d s\n",
        line,
    )
    assert match, line + (process.communicate(timeout=20)[1] if not line else "")
    assert match[2] == model
    return match[1]


def assert_drains(process: subprocess.Popen[str], client: httpx.Client, name: str) -> None:
    bodies: list[Any] = [chat(max_tokens=number, model=name) for number in (8, 1000)]
    streams = [
        client.send(client.build_request("POST", CHAT, json={**body, "stream": True}), stream=True)
        for body in bodies
    ]
    os.killpg(process.pid, signal.SIGTERM)  # as service managers do: the engine gets it too
    began = time.monotonic()
    short = list(streams[0].iter_lines())
    assert "data: [DONE]" in short
    refused_now = client.post(CHAT, json=bodies[0])
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
    statuses = [
        line["status"] for line in lines if line["event"] == "request" and line["path"] == CHAT
    ]
    assert statuses == [200, 503, 200]
    probe_url = next(line["probe_url"] for line in lines if line["event"] == "ready")
    assert probe_url.startswith("http://127.0.0.1:")
    assert KEY not in err
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
    pem = str(tmp_path / "none.pem")
    tls = ("--tls-cert", pem, "--tls-key", pem)
    refused(capsys, UsageError, "cannot use --tls-cert", "serve", "demo", *tls)
    origin = ("--allow-origin", "example.org")
    refused(capsys, UsageError, "is not an origin", "serve", "demo", *origin)
    monkeypatch.setenv("RIDGELINE_API_KEY", "")
    refused(capsys, UsageError, "RIDGELINE_API_KEY is set but empty", "serve", "demo")
    monkeypatch.delenv("RIDGELINE_API_KEY")
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
    served = SimpleNamespace(
        url="http://127.0.0.1:1", probe_url=None, run=lambda on_ready: on_ready()
    )
    monkeypatch.setattr(serve, "Serving", lambda *_: served)
    monkeypatch.setattr(serve, "start_logging", lambda **_: None)
    for flags in (("--served-model-name", "mine", "ours"), ("--served-name", "mine")):
        assert main(["serve", str(tmp_path), "--port", "0", *flags, "--json"]) == 0
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
            Namespace(model="demo", device="cpu", replicas=number),
            Path("model"),
            Recipe(),
            setup_for(ServerConfig()),
        )
    assert [(kind, about.get("num_replicas")) for kind, about in made] == [
        ("several", 3),
        ("one", None),
    ]
    assert made[1][1]["early"] is None  # everything is imported here: nothing was begun
