"""A layer's kernels are chosen by the time of the layer, each among those chosen before it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ridgeline.bench.kernels import decode_layer, tune_layer
from ridgeline.hardware import detect
from ridgeline.kernels import autotune

DEVICE = torch.device("cuda", 0)


def launch(**_: Any) -> float:
    """A layer of two kernels whose second one depends on what the first one is."""
    first = autotune.chosen("first", "k", DEVICE)
    second = autotune.chosen("second", "k", DEVICE)
    assert first is not None
    assert second is not None
    autotune.chosen("alone", "k", DEVICE)
    a, b = first["block"], second["block"]
    return {(1, 1): 5.0, (2, 1): 4.0, (1, 2): 9.0, (2, 2): 3.0}[a, b]


@pytest.fixture
def hardware(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    hardware = detect("cpu")
    monkeypatch.setattr(autotune, "_device_name", lambda index: hardware.name)
    for cached in (autotune.load, autotune._ranked, autotune._beaten_by):
        cached.cache_clear()
    op = SimpleNamespace(name="decode_layer", launch=launch, cost=lambda **_: None)
    monkeypatch.setattr(decode_layer, "OP", op)
    monkeypatch.setattr(tune_layer, "input_sets", lambda *_: [{}])
    monkeypatch.setattr(tune_layer, "share_of_ceiling", lambda *_: (None, "memory"))
    monkeypatch.setattr(
        tune_layer,
        "time_calls",
        lambda function, sets, *_: SimpleNamespace(median_s=function(**sets[0])),
    )
    return hardware


def test_each_is_chosen_among_those_before_it(hardware: Any) -> None:
    for op in ("first", "second"):
        configs = [{"block": 1}, {"block": 2}]
        autotune.tune(op, "k", configs, lambda config: float(config["block"]), hardware.name)
    autotune.tune("alone", "k", [{"block": 1}], lambda config: 1.0, hardware.name)
    assert launch() == 5.0
    rows = tune_layer.tune_in_place(hardware, only="decode_layer 1x1024 bf16 as")
    assert [row.op for row in rows] == ["first in place", "second in place"]
    assert [row.seconds for row in rows] == [4.0, 3.0]
    assert [row.num_tried for row in rows] == [2, 2]
    assert launch() == 3.0
    assert tune_layer.tune_in_place(hardware, only="no such layer") == []
