"""The time that a module's climb is given: what would not fit is not begun, and what takes without
end is stopped. Compilers are stand-ins, and time comes from a fake clock.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path
from time import sleep

import pytest
import torch
from module_climbs import (
    AUTOTUNED,
    Clock,
    Rate,
    Wide,
    climbed,
    each_helps,
    look_briefly,
    optimized,
    replace_compiler,
    run_by,
    statuses,
)
from torch import Tensor, nn

from ridgeline.ladder.modules import bench
from ridgeline.ladder.modules.deadline import OutOfTimeError, time_limit
from ridgeline.profiling.modules.changes import CHANGES
from ridgeline.profiling.modules.form import ModuleForm


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    look_briefly(tmp_path, monkeypatch)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[Rate], Clock]:
    return partial(run_by, monkeypatch)


def test_a_budget_is_kept(clock: Callable[[Rate], Clock]) -> None:
    for budget_s in (13.0, 26.0, 40.0, 70.0):
        time = clock(each_helps)
        climbed(budget_s=budget_s)
        assert time.now_s <= max(budget_s, 12.0) + 1e-9


@pytest.mark.parametrize(("budget_s", "begun_s"), [(8.0, 0.0), (30.0, 22.0)])
def test_compiling_that_takes_too_long_is_left_for_later(
    budget_s: float,
    begun_s: float,
    clock: Callable[[Rate], Clock],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not in the first answer, and not begun when it would end too late."""
    replace_compiler(monkeypatch, lambda module, mode: module)
    time = clock(each_helps)
    time.now_s = begun_s
    result = climbed(budget_s=budget_s, skip=())
    assert all(form.compile is None for form in time.timed)
    assert statuses(result)["compile"] == "not reached"


def compiler_that_takes(seconds: dict[str, float], time: Clock) -> Callable[..., nn.Module]:
    """By torch.compile's mode, of the climb's own clock, in a first call."""

    def compiled(module: nn.Module, mode: str) -> nn.Module:
        time.now_s += seconds[mode]
        return module

    return compiled


def test_autotuning_that_would_not_fit_is_not_begun(
    clock: Callable[[Rate], Clock], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What compiling took before tells what autotuning will take."""
    time = clock(lambda form: 120.0 if form.compile else 100.0)
    seconds = {"default": 30.0, AUTOTUNED: 60.0}
    replace_compiler(monkeypatch, compiler_that_takes(seconds, time))
    for budget_s, status in ((80.0, "not reached"), (200.0, "dropped")):
        time.now_s = 0.0
        result = climbed(budget_s=budget_s, skip=set(CHANGES) - {"compile", "autotune"})
        assert statuses(result) == {"compile": "kept", "autotune": status}
        assert time.now_s <= budget_s


def compiler_without_end(time: Clock) -> Callable[..., nn.Module]:
    """Until somebody interrupts it, other than by an error that it takes for one of its own."""

    def compiled(module: nn.Module, mode: str) -> nn.Module:
        try:
            for _ in range(6000):
                sleep(0.01)
        except Exception:
            return module
        finally:
            time.now_s += 0.2
        raise AssertionError("nobody stopped it")

    return compiled


@pytest.mark.parametrize("more", [(), ("bf16",)])
def test_compiling_without_end_is_stopped(
    more: tuple[str, ...], clock: Callable[[Rate], Clock], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "STARTING_S", 0.0)
    monkeypatch.setattr(bench, "COMPILE_S", 0.1)
    time = clock(each_helps)
    replace_compiler(monkeypatch, compiler_without_end(time))
    names = {"compile", "autotune", *more}
    result = climbed(budget_s=24.4, skip=set(CHANGES) - names)  # two comparisons and a little
    assert statuses(result)["compile"] == statuses(result)["autotune"] == "not reached"
    reasons = {rung.name: rung.reason for rung in result.rungs}
    assert reasons["compile"].startswith("compiling was stopped after")
    assert result.form == ModuleForm(dtype="bf16" if more else None)
    assert time.now_s <= 24.4


def test_a_first_call_that_takes_far_too_long_is_stopped(
    clock: Callable[[Rate], Clock], monkeypatch: pytest.MonkeyPatch
) -> None:
    """bf16 on a CPU without it takes hundreds of times as long: nobody waits for one call."""
    monkeypatch.setattr(bench, "FIRST_CALL_S", 0.05)

    class Slow(Wide):
        def forward(self, x: Tensor) -> Tensor:
            if x.dtype == torch.bfloat16:
                for _ in range(6000):
                    sleep(0.01)
            return super().forward(x)

    clock(each_helps)
    result = optimized(Slow(), torch.randn(8, 128), max_error=0.05)
    rungs = {rung.name: rung for rung in result.rungs}
    assert rungs["bf16"].status == "dropped"
    assert rungs["bf16"].reason.startswith("a first call was stopped after")
    assert rungs["autocast-bf16"].status == "not applicable"
    assert result.form == ModuleForm(grad=False, scheme="int8")


def test_a_limit_leaves_others_timers_alone() -> None:
    rang = []
    before = signal.signal(signal.SIGALRM, lambda *_: rang.append(True))
    try:
        signal.setitimer(signal.ITIMER_REAL, 1000.0)
        with pytest.raises(OutOfTimeError, match="sleeping was stopped"):
            sleep_limited()
        with time_limit(1000.0, "nothing"):
            pass
        with pytest.raises(KeyError), time_limit(1000.0, "what raises"):
            raise KeyError("its own")
        assert 900.0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 1000.0
        signal.raise_signal(signal.SIGALRM)
        assert rang == [True]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def test_a_limit_in_another_thread_lets_it_end() -> None:
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(limited_sum).result() == 6


def sleep_limited() -> None:
    with time_limit(0.01, "sleeping"):
        for _ in range(6000):
            sleep(0.01)


def limited_sum() -> int:
    with time_limit(1e-6, "a sum"):
        return sum((1, 2, 3))


def test_an_import_is_never_cut_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a module would stay for whoever imports it next."""
    (tmp_path / "slow_to_import.py").write_text("import time\ntime.sleep(0.5)\nwhole = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(OutOfTimeError):
        import_limited()
    assert sys.modules["slow_to_import"].whole


def import_limited() -> None:
    with time_limit(0.01, "importing"):
        import_module("slow_to_import")
        sleep(60)
