"""`optimize --check`: what a climb left is measured again, on a machine that may be busier."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from local_climbs import Local, usual_speed
from local_climbs import command as command
from local_climbs import local as local
from local_climbs import model as model

from ridgeline.cli import main
from ridgeline.errors import (
    CHECK_FAILED_EXIT_CODE,
)
from ridgeline.ladder.climbing import last_comparison
from ridgeline.ladder.climbing.check import unpaired
from ridgeline.ladder.measuring import control
from ridgeline.ladder.measuring.control import Control
from ridgeline.ladder.measuring.part import WorkloadPart
from ridgeline.ladder.reporting.result import Climb
from ridgeline.ladder.searching.budget import Budget
from ridgeline.timing import Timing


def test_the_guard_measures_what_the_record_was_measured_on(
    local: type[Local],
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """There was time for rounds of a part and one run of the whole, which is slower."""
    monkeypatch.setattr(Local, "part", WorkloadPart(2, share=0.5))
    monkeypatch.setattr(Local, "whole_share", 0.8)
    left_s = last_comparison.LAST_LOOKS_S + 3.0  # 1.2 s are one run of the whole on each side
    monkeypatch.setattr(Budget, "rest_s", property(lambda _: left_s))
    monkeypatch.setattr(last_comparison, "plain_loop_s", lambda *_: 0.0)
    assert main([*command, "--budget", "1h", "--json"]) == 0
    result = Climb.from_json(json.loads((tmp_path / "out" / "climb.json").read_text()))
    assert "rates are of the whole workload, once on each side" in result.notes
    assert result.after.figures.output_tokens_per_s == pytest.approx(32.0, rel=0.01)
    capsys.readouterr()
    assert main(["optimize", "--check", str(tmp_path / "out"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["speed"]["value"] == pytest.approx(1.0, rel=0.01)


def test_the_guard_passes_and_fails(
    local: type[Local], command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--json"]) == 0
    check = ["optimize", "--check", str(tmp_path / "out"), "--device", "cpu", "--json"]
    assert main(check) == 0
    capsys.readouterr()
    Local.speed = staticmethod(lambda spec: 0.8 * usual_speed(spec))  # type: ignore[assignment]
    assert main(check) == CHECK_FAILED_EXIT_CODE
    slower = json.loads(capsys.readouterr().out)
    assert "0.80 of the record" in slower["problems"][0]
    Local.speed = staticmethod(usual_speed)
    saved = json.loads((tmp_path / "out" / "check.json").read_text())
    saved["quality"] |= {"mean_kl": 1e-9, "mean_kl_high": 1e-9}
    (tmp_path / "out" / "check.json").write_text(json.dumps(saved))
    assert main(check) == CHECK_FAILED_EXIT_CODE
    assert "mean KL" in json.loads(capsys.readouterr().out)["problems"][0]
    assert main([*check, "--quality", "off"]) == 0


def test_a_busy_machine_does_not_fail_the_guard(
    local: type[Local],
    command: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """0.54 of the record, where a control that has nothing to do with the recipe fell too."""
    assert main([*command, "--json"]) == 0
    file = tmp_path / "out" / "check.json"
    saved = json.loads(file.read_text())
    assert saved["control"] == [100.0] * len(saved["rates"])
    check = ["optimize", "--check", str(tmp_path / "out"), "--device", "cpu", "--quality", "off"]
    Local.speed = staticmethod(lambda spec: 0.54 * usual_speed(spec))  # type: ignore[assignment]
    assert main(check) == CHECK_FAILED_EXIT_CODE  # as a quiet machine has it
    monkeypatch.setattr(Control, "sample", lambda self: 60.0)
    capsys.readouterr()
    assert main(check) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "a fixed computation runs at 0.60 of its speed then" in shown
    assert main([*check, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["speed"]["value"] == pytest.approx(0.9, rel=0.01)
    assert result["control"]["value"] == pytest.approx(0.6)
    # Samples that differ as much: how busy it was during a round is not known.
    samples = cycle([60.0, 120.0, 100.0])
    monkeypatch.setattr(Control, "sample", lambda self: next(samples))
    assert main(check) == 0
    assert "samples of one fixed computation differ by a factor of 2.0" in " ".join(
        capsys.readouterr().out.split()
    )
    # A recipe that lost more than the machine did still fails.
    Local.speed = staticmethod(lambda spec: 0.25 * usual_speed(spec))  # type: ignore[assignment]
    assert main(check) == CHECK_FAILED_EXIT_CODE
    # Nor does a record of earlier days, which has none, hide what is slower.
    del saved["control"]
    file.write_text(json.dumps(saved))
    capsys.readouterr()
    assert main(check) == CHECK_FAILED_EXIT_CODE
    assert "the record has no control" in " ".join(capsys.readouterr().out.split())


def test_what_the_guard_cannot_know_of_the_machine_is_told(
    local: type[Local],
    command: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A record of a busier machine, and a control for which there is no memory."""
    assert main([*command, "--json"]) == 0
    check = ["optimize", "--check", str(tmp_path / "out"), "--device", "cpu", "--quality", "off"]
    monkeypatch.setattr(Control, "sample", lambda self: 150.0)
    Local.speed = staticmethod(lambda spec: 1.2 * usual_speed(spec))  # type: ignore[assignment]
    capsys.readouterr()
    assert main([*check, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["speed"]["value"] == pytest.approx(1.2, rel=0.01)  # nothing is divided out
    [remark] = result["remarks"]
    assert "at 1.50 of its speed then" in remark
    assert "hide" in remark

    def fails(self: Control) -> float:
        raise torch.AcceleratorError("CUDA error: out of memory")

    monkeypatch.setattr(Control, "sample", fails)
    assert main([*check, "--json"]) == 0
    [remark] = json.loads(capsys.readouterr().out)["remarks"]
    assert remark.startswith("the control could not be timed here")


def test_the_control_is_timed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another program takes from any pass counts: a median would leave the slowest out."""
    monkeypatch.setattr(control, "SAMPLE_S", 0.02)
    timed = Control("cpu")
    timed.time(2)
    assert len(timed.rates) == 2
    assert min(timed.rates) > 0
    num_passes = timed._num_passes

    def held_up(step: Callable[[], object], num_steps: int, **_: Any) -> Timing:
        assert num_steps == 1
        return Timing.from_samples([0.5])

    monkeypatch.setattr(control, "time_loop", held_up)
    assert timed.sample() == num_passes / 0.5


def test_the_guards_interval_widens_with_noise() -> None:
    calm, wild = unpaired([10, 10.1, 9.9], [9, 9.1, 8.9]), unpaired([10, 15, 6], [9, 13, 5])
    assert calm.high < 1.0 < wild.high
    assert calm.value == pytest.approx(0.9, rel=0.01)
    assert unpaired([10, 10], [10, 10]).value == 1.0
