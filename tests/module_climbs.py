"""Climbs of modules in tests: looked at briefly, rates from a fake clock, caches of their own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ridgeline import records
from ridgeline.hardware import Ceiling, Hardware
from ridgeline.ladder.modules import OptimizedModule, bench, climb, optimize
from ridgeline.ladder.modules.forms import linears
from ridgeline.ladder.modules.forms.building import Built
from ridgeline.profiling.modules import run, tracing
from ridgeline.profiling.modules.form import ModuleForm

Rate = Callable[[ModuleForm], float]
ROUND_S = 1.0  # of a climb by a clock of its own
AUTOTUNED = "max-autotune-no-cudagraphs"
NO_COMPILE = ("compile", "autotune")


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


class Clock:
    """Of the climb: every side of a round takes as long as it is to."""

    def __init__(self) -> None:
        self.now_s, self.timed = 0.0, list[ModuleForm]()

    def rate(self, rate: Rate) -> Callable[..., float]:
        def timed(_: bench.ModuleBench, side: Built, round_s: float) -> float:
            self.now_s += round_s
            self.timed.append(side.form)
            return rate(side.form)

        return timed


def run_by(monkeypatch: pytest.MonkeyPatch, rate: Rate) -> Clock:
    """Rates and the time that a climb has spent, by a clock of its own."""
    made = Clock()
    monkeypatch.setattr(bench.ModuleBench, "rate", made.rate(rate))
    monkeypatch.setattr(bench.ModuleBench, "spent_s", property(lambda _: made.now_s))
    return made


def each_helps(form: ModuleForm) -> float:
    rate = 100.0 if form.grad else 150.0
    return rate * (2.0 if form.dtype else 1.0) * (1.5 if form.scheme else 1.0)


def climbed(**options: Any) -> OptimizedModule:
    return optimized(Wide(), torch.randn(8, 128), max_error=0.05, round_s=ROUND_S, **options)


def replace_compiler(
    monkeypatch: pytest.MonkeyPatch, compiled: Callable[[nn.Module, str], nn.Module]
) -> None:
    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(climb, "many_recompiles", nullcontext)
