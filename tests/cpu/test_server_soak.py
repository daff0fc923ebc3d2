"""The soak and the hostile run (tests/soak, `make soak`) in a short form: a tiny model, seconds
instead of minutes. Memory is looked at in the long ones alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import make_folder
from live_server import TEMPLATE
from soak.clients import soak
from soak.hostile import besiege
from soak.server_process import ServerProcess, memory_flags

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder: Path = tmp_path_factory.mktemp("model")
    make_folder(folder, TEMPLATE, max_position_embeddings=2048)
    flags = ("--device", "cpu", "--page-size", "16", *memory_flags(300 << 20))
    with ServerProcess(str(folder), *flags, "--client-timeout", "5") as server:
        yield server
        assert server.stop() == 0


def test_hostile_requests(server: ServerProcess) -> None:
    found = besiege(server, 150)
    assert found["problems"] == []
    assert sum(found["statuses"].values()) == 150


def test_many_clients_and_a_killed_engine(server: ServerProcess) -> None:
    found = soak(server, seconds=4.0, num_clients=16, fills=False)
    assert found["problems"] == []
    assert found["counts"]["stream: answered"] > 10
    assert found["restarts"] >= 1
