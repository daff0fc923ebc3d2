"""Kernels in C++ for this machine's CPU: built once, by whoever comes first."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ridgeline.kernels import host_library


def test_who_wants_the_same_waits_for_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    monkeypatch.setattr(host_library, "find_compiler", lambda: "c++")
    monkeypatch.setattr(host_library, "compiler_version", lambda _: "1")
    built, waiting = list[str](), threading.Event()

    def compile(compiler: str, op: str, target: Path) -> None:
        waiting.wait(0.2)  # the others come meanwhile
        built.append(op)
        target.write_bytes(b"library")

    monkeypatch.setattr(host_library, "_compile", compile)
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(host_library.build, ["rms_norm"] * 4))
    assert built == ["rms_norm"]
    assert len(set(paths)) == 1
    assert paths[0].read_bytes() == b"library"
    assert not list(paths[0].parent.glob(".*"))  # nothing half written is left


def test_different_sources_are_built_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    monkeypatch.setattr(host_library, "find_compiler", lambda: "c++")
    monkeypatch.setattr(host_library, "compiler_version", lambda _: "1")
    both = threading.Barrier(2, timeout=60)

    def compile(compiler: str, op: str, target: Path) -> None:
        both.wait()
        target.write_bytes(b"library")

    monkeypatch.setattr(host_library, "_compile", compile)
    with ThreadPoolExecutor(2) as pool:
        assert len(set(pool.map(host_library.build, ["rms_norm", "rotary"]))) == 2


def test_where_files_cannot_be_locked_each_builds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError("no locks available")

    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    monkeypatch.setattr(host_library, "find_compiler", lambda: "c++")
    monkeypatch.setattr(host_library, "compiler_version", lambda _: "1")
    monkeypatch.setattr(host_library.fcntl, "flock", refused)
    monkeypatch.setattr(
        host_library, "_compile", lambda compiler, op, target: target.write_bytes(b"library")
    )
    assert host_library.build("rms_norm").read_bytes() == b"library"
