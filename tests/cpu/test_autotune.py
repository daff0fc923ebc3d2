"""Tuned choices: measured once, kept by device and compiler, never thrown away by a new
configuration.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

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

    def seconds(config: autotune.KernelConfig) -> float:
        timed.append(config["block"])
        return 1.0 / config["block"]

    autotune.tune("op", "M=1", [{"block": 16}, {"block": 32}], seconds, DEVICE)
    assert autotune._ranked(DEVICE, "op", "M=1")[0] == {"block": 32}
    autotune.tune("op", "M=1", [{"block": 16}, {"block": 32}, {"block": 64}], seconds, DEVICE)
    assert timed == [16, 32, 64]
    assert autotune._ranked(DEVICE, "op", "M=1")[0] == {"block": 64}
    assert autotune._ranked(DEVICE, "op", "M=2") == []
    assert autotune._ranked("Another", "op", "M=1") == []


def test_times_are_taken_again_where_they_hold_no_longer() -> None:
    """Also of a configuration that is not asked for: its old time would be held against the new."""
    first = {8: 1.0, 16: 2.0, 32: 4.0}
    autotune.tune("op", "k", [{"block": 8}, {"block": 16}], lambda c: first[c["block"]], DEVICE)
    second = {8: 9.0, 16: 8.0, 32: 7.0}
    configs = [{"block": 16}, {"block": 32}]
    times = autotune.tune("op", "k", configs, lambda c: second[c["block"]], DEVICE, again=True)
    assert sorted(times.values()) == [7.0, 8.0, 9.0]
    assert autotune._ranked(DEVICE, "op", "k") == [{"block": 32}, {"block": 16}, {"block": 8}]


def test_a_configuration_that_fails_is_never_chosen_nor_tried_again() -> None:
    tries = []

    def seconds(config: autotune.KernelConfig) -> float:
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


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    monkeypatch.setattr(autotune, "_device_name", lambda index: DEVICE)
    return torch.device("cuda", 0)


def test_what_was_measured_in_place_comes_first(device: torch.device) -> None:
    times = {8: 1.0, 16: 2.0, 32: 3.0}
    configs = [{"block": block} for block in times]
    autotune.tune("op", "k", configs, lambda config: times[config["block"]], DEVICE)
    assert autotune.chosen("op", "k", device) == {"block": 8}
    in_place = {8: 9.0, 16: 8.0}
    autotune.tune(
        "op" + autotune.IN_PLACE,
        "k",
        configs[:2],
        lambda config: in_place[config["block"]],
        DEVICE,
    )
    assert autotune.chosen("op", "k", device) == {"block": 16}
    assert autotune.chosen("op", "k", device, lambda config: config["block"] != 16) == {"block": 8}
    assert autotune.chosen("op", "k", device, lambda config: config["block"] > 16) == {"block": 32}


def test_what_is_asked_is_noted_and_an_answer_can_be_forced(device: torch.device) -> None:
    configs = [{"block": 8}, {"block": 16}]
    autotune.tune("op", "k", configs, lambda config: 1.0 / config["block"], DEVICE)
    with autotune.asking() as asked:
        autotune.chosen("op", "k", device)
        autotune.chosen("op", "other", device)
    assert asked == {("op", "k"): [{"block": 16}, {"block": 8}], ("op", "other"): []}
    with autotune.forced("op", "k", {"block": 8}):
        assert autotune.chosen("op", "k", device) == {"block": 8}
    assert autotune.chosen("op", "k", device) == {"block": 16}
    autotune.chosen("op", "third", device)
    assert ("op", "third") not in asked


def test_a_place_behind_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also past what was measured in place; an op that is not named keeps its own choice."""
    monkeypatch.setattr(autotune, "_device_name", lambda index: DEVICE)
    device, configs = torch.device("cuda", 0), [{"block": 16}, {"block": 32}, {"block": 64}]
    for op in ("op", "other"):
        autotune.tune(op, "k", configs, lambda config: 1.0 / config["block"], DEVICE)
    autotune.tune("op" + autotune.IN_PLACE, "k", configs[:1], lambda config: 1.0, DEVICE)
    assert autotune.chosen("op", "k", device) == {"block": 16}
    with autotune.at_places({"op": 1}):
        assert autotune.chosen("op", "k", device) == {"block": 32}
        assert autotune.chosen("other", "k", device) == {"block": 64}
        assert autotune.chosen("op", "unmeasured", device) is None
        with autotune.at_places({"op": 9}):
            assert autotune.chosen("op", "k", device) == {"block": 16}  # the last
        large = lambda config: config["block"] > 16  # noqa: E731
        assert autotune.chosen("op", "k", device, large) == {"block": 32}
        with autotune.untuned():
            assert autotune.chosen("op", "k", device) is None
    assert autotune.chosen("op", "k", device) == {"block": 16}
