"""Bodies as popular clients send them pass unchanged, through the whole chain.

Each file of client_bodies/ names the source it was taken from: its keys, and the values that the
client itself sets. Texts, names of tools and numbers that a user chooses are our own. None was
found for what Open WebUI's page sends with a chat: its own server takes fields out on the way.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live_server import LiveServer, live_server

from ridgeline.server.protocol import PATHS

BODIES = sorted((Path(__file__).parent / "client_bodies").glob("*.json"))
CLIENTS = {"Open WebUI", "Continue", "Cline", "Aider", "Codex", "SillyTavern", "guidellm"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(tmp_path_factory.mktemp("bodies"), max_context=512) as made:
        yield made


def read(path: Path) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(path.read_text())
    return made


def test_each_client_has_a_body_with_its_source() -> None:
    bodies = [read(path) for path in BODIES]
    assert {body["client"] for body in bodies} == CLIENTS
    for body in bodies:
        for source in body["sources"]:
            assert source["repository"].count("/") == 1
            assert source["path"]
            assert len(source["commit"]) == 40


@pytest.mark.parametrize("path", BODIES, ids=lambda path: path.stem)
def test_the_body_passes(server: LiveServer, path: Path) -> None:
    given = read(path)
    response = server.post(PATHS[given["route"]], given["body"])
    assert response.status_code == 200, response.text
    if not given["body"]["stream"]:
        assert response.json()["usage"]["completion_tokens"] > 0
        return
    events = [
        json.loads(line[6:])
        for line in response.text.splitlines()
        if line.startswith("data: ") and line != "data: [DONE]"
    ]
    assert "error" not in events[-1]
    if given["body"].get("stream_options", {}).get("include_usage"):
        assert events[-1]["usage"]["completion_tokens"] > 0
