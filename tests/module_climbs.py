"""Climbs of modules in tests: looked at briefly, rates from a fake clock, caches of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ridgeline import records
from ridgeline.hardware import Ceiling, Hardware
from ridgeline.ladder.modules import OptimizedModule, bench, optimize
from ridgeline.ladder.modules.forms import linears
from ridgeline.profiling.modules import run, tracing
from ridgeline.profiling.modules.form import ModuleForm

Rate = Callable[[ModuleForm], float]
NO_COMPILE = ("compile",)


def hardware(kind: Any = "cpu", **more: float) -> Hardware:
    values = {"read_bandwidth": 1e10, "matrix_fp32": 1e11, "matrix_bf16": 4e11} | more
    ceilings = {name: Ceiling(value, "1", "measured") for name, value in values.items()}
    facts = ("test", kind, "cpu", f"a {kind}", "x", 2**30, 1, "0")
    return Hardware(*facts, ceilings=ceilings)


def look_briefly(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prediction errors are kept in `folder`; the kernels of the host are not built, and the clocks
    of a GPU that is none are not read.
    """
    monkeypatch.setattr(records, "read_clocks", lambda _: None)
    monkeypatch.setattr(run, "TARGET_S", 0.01)
    monkeypatch.setattr(tracing, "NUM_DIVIDED", 1)
    monkeypatch.setenv("RIDGELINE_CACHE", str(folder / "cache"))
    monkeypatch.setattr(bench.ModuleBench, "glance_s", lambda *_: 1e-3)
    monkeypatch.setattr(linears, "prepare", lambda: False)


def set_rates(monkeypatch: pytest.MonkeyPatch, rate: Rate) -> None:
    """Calls a second, by the form of what is called."""
    monkeypatch.setattr(bench.ModuleBench, "rate", lambda self, side, _: rate(side.form))


def optimized(module: nn.Module, inputs: Any, **options: Any) -> OptimizedModule:
    result = optimize(module, inputs, **{"hardware": hardware(), "skip": NO_COMPILE, **options})
    assert isinstance(result, OptimizedModule)
    return result


def statuses(result: OptimizedModule) -> dict[str, str]:
    return {rung.name: rung.status for rung in result.rungs}


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(128, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


class SharedWeight(nn.Module):
    """Two branches with one weight: autocast's copy of it must not be another stream's."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.first, self.second = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.first(self.up(x)) + self.second(self.up(x * 2))
