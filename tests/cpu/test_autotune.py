"""Tuned choices: measured once, kept by device and compiler, never thrown away by a new
configuration.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ridgeline.kernels import autotune

DEVICE = "Test Device 1"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    autotune.load.cache_clear()
    autotune._ranked.cache_clear()
    autotune._beaten_by.cache_clear()


def test_the_fastest_is_chosen_and_old_times_stay() -> None:
    timed: list[int] = []

    def seconds(config: autotune.Config) -> float:
        timed.append(config["block"])
        return 1.0 / config["block"]

    autotune.tune("op", "M=1", [{"block": 16}, {"block": 32}], seconds, DEVICE)
    assert autotune._ranked(DEVICE, "op", "M=1")[0] == {"block": 32}
    autotune.tune("op", "M=1", [{"block": 16}, {"block": 32}, {"block": 64}], seconds, DEVICE)
    assert timed == [16, 32, 64]
    assert autotune._ranked(DEVICE, "op", "M=1")[0] == {"block": 64}
    assert autotune._ranked(DEVICE, "op", "M=2") == []
    assert autotune._ranked("Another", "op", "M=1") == []


def test_a_configuration_that_fails_is_never_chosen_nor_tried_again() -> None:
    tries = []

    def seconds(config: autotune.Config) -> float:
        tries.append(config)
        if config["block"] == 999:
            raise RuntimeError("out of shared memory")
        return 2.0

    for _ in range(2):
        autotune.tune("op", "k", [{"block": 999}, {"block": 8}], seconds, DEVICE)
    assert len(tries) == 2
    assert autotune._ranked(DEVICE, "op", "k")[0] == {"block": 8}


def test_a_peer_that_is_faster_takes_over_and_is_no_configuration() -> None:
    times = {"cublas": 1.0, 8: 2.0, 16: 3.0}

    def seconds(config: Any) -> float:
        return times[config if isinstance(config, str) else config["block"]]

    autotune.tune("op", "k", [{"block": 16}, {"block": 8}, "cublas"], seconds, DEVICE)
    assert autotune._beaten_by(DEVICE, "op", "k") == "cublas"
    assert autotune._ranked(DEVICE, "op", "k")[0] == {"block": 8}
    autotune.tune("op", "k", [{"block": 4}], lambda config: 0.5, DEVICE)
    assert autotune._beaten_by(DEVICE, "op", "k") is None
    assert autotune._beaten_by(DEVICE, "op", "other") is None


def test_a_broken_file_is_measured_anew() -> None:
    path = autotune.user_file(DEVICE)
    path.parent.mkdir(parents=True)
    path.write_text("[1, 2")
    assert autotune.load(DEVICE) == {}
    autotune.tune("op", "k", [{"block": 8}], lambda config: 1.0, DEVICE)
    assert autotune._ranked(DEVICE, "op", "k")[0] == {"block": 8}


def test_the_file_names_device_and_compiler() -> None:
    name = autotune.user_file("NVIDIA H200").name
    assert name.startswith("nvidia-h200-triton-")
