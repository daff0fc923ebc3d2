"""A model with which nothing is wrong, and copies of it to spoil.

The tests beside this show one thing: every mistake a user can make is answered in one line with its
own exit code, never with a crash.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_models
from command_line import make_folder
from gguf_files import write_gguf


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with which nothing is wrong."""
    return make_folder(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy of it, to spoil."""
    return Path(shutil.copytree(whole, tmp_path / "model"))


@pytest.fixture(scope="session")
def whole_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_gguf(tiny_models.make_model("llama-mha"), path)
    return path


@pytest.fixture(autouse=True)
def no_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ridgeline.cli.generate.measure", lambda hardware, *_: hardware)


@pytest.fixture
def as_nobody() -> Iterator[Path]:
    """A folder of this user's; root, whom permissions do not hold back, becomes someone else."""
    place = Path(tempfile.mkdtemp())
    place.chmod(0o777)
    was_root = os.geteuid() == 0
    if was_root:
        os.seteuid(65534)
    try:
        yield place
    finally:
        if was_root:
            os.seteuid(0)
        for path in (place, *place.rglob("*")):
            path.chmod(0o700)
        shutil.rmtree(place)
