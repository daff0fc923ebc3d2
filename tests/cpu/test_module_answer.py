"""The order of a module's climb: the predicted best together first, then single changes around it,
then what each change gives. Rates and time come from a fake clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

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
    replace_compiler,
    run_by,
    statuses,
)
from test_module_profile import traced, work
from torch import nn

from ridgeline.ladder.modules import OptimizedModule, bench, climb, first_answer
from ridgeline.ladder.modules.forms.building import Built, build
from ridgeline.ladder.modules.rungs import Candidate
from ridgeline.ladder.modules.together import best_together, compiled_last, form_of, without
from ridgeline.profiling.modules.changes import CHANGES
from ridgeline.profiling.modules.form import ModuleForm


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    look_briefly(tmp_path, monkeypatch)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[Rate], Clock]:
    return partial(run_by, monkeypatch)


def kept(result: OptimizedModule) -> list[str]:
    return [rung.name for rung in result.rungs if rung.status == "kept"]


def test_the_best_together_is_measured_first(clock: Callable[[Rate], Clock]) -> None:
    time = clock(each_helps)
    result = climbed()
    first = time.timed[:2]
    assert first[0] == ModuleForm()
    assert first[1].dtype == "bf16"
    assert first[1].scheme == "int8"  # int4 is outside the bound, which is known before it is timed
    assert all(form.scheme != "int4-g128" for form in time.timed)
    assert result.form == ModuleForm(grad=False, dtype="bf16", scheme="int8")
    assert result.speedup is not None
    assert result.speedup.value == pytest.approx(4.5)
    note = next(note for note in result.climb.notes if note.startswith("first answer after"))
    assert "bf16" in note
    assert "predicted" in note
    refused = {rung.name: rung for rung in result.rungs}["int4"]
    assert refused.status == "dropped"
    assert "relative error is" in refused.reason


def test_the_ladder_is_explained_last_and_multiplies(clock: Callable[[Rate], Clock]) -> None:
    time = clock(each_helps)
    result = climbed()
    rungs = [rung for rung in result.rungs if rung.status == "kept"]
    assert [rung.name for rung in rungs] == ["inference", "bf16", "int8"]
    assert [rung.name for rung in result.rungs[:3]] == ["inference", "bf16", "int8"]
    values = [rung.achieved.value for rung in rungs if rung.achieved]
    assert values == pytest.approx([1.5, 2.0, 1.5])
    assert result.speedup is not None
    assert math.prod(values) == pytest.approx(result.speedup.value)
    assert all(rung.predicted is not None for rung in rungs)
    assert time.timed[-1] in (result.form, form_of([CHANGES["inference"], CHANGES["bf16"]]))


def test_nothing_is_switched_off_because_time_ran_out(clock: Callable[[Rate], Clock]) -> None:
    time = clock(each_helps)
    result = climbed(budget_s=3.0)  # less than the first answer takes
    first = time.timed[1]
    assert len(time.timed) == 12  # one comparison and its warming up
    assert result.form == first
    assert first.dtype == "bf16"
    assert result.speedup is not None
    assert result.speedup.value > 2.9
    for rung in result.rungs:
        if rung.status == "kept":
            assert rung.achieved is None
            assert rung.predicted is not None
            assert "predicted, not measured: the budget of 3 s is spent" in rung.reason
    names = ", ".join(kept(result))
    assert f"what these give is predicted, not measured: {names}" in result.climb.notes
    rest = [rung for rung in result.rungs if rung.status == "not reached"]
    assert all("the budget of 3 s is spent" in rung.reason for rung in rest)
    assert all(rung.predicted is not None for rung in rest)
    assert not result.form.edit_from(first)
    assert "3.00×" in result.climb.headline or "4.50×" in result.climb.headline


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_compiler(monkeypatch, lambda module, mode: module)


@pytest.mark.usefixtures("no_compiler")
def test_autotuning_is_a_candidate_on_a_cpu(clock: Callable[[Rate], Clock]) -> None:
    rates = {None: 100.0, "default": 120.0, AUTOTUNED: 135.0}
    clock(lambda form: rates[form.compile])
    result = climbed(skip=set(CHANGES) - {"inference", "compile", "autotune"})
    assert result.form.compile == AUTOTUNED
    clock(lambda form: rates[form.compile] if form.compile == AUTOTUNED else 100.0)
    assert climbed(skip=set(CHANGES) - {"compile", "autotune"}).form.compile == AUTOTUNED


@pytest.mark.usefixtures("no_compiler")
def test_one_line_of_torch_is_not_faster_than_the_answer(clock: Callable[[Rate], Clock]) -> None:
    """bf16 helps a little and spoils what compiling gives: both together are a bad neighbour."""

    def rate(form: ModuleForm) -> float:
        if form.dtype or form.autocast:
            return 90.0 if form.compile else 110.0
        return {None: 100.0, "default": 105.0, AUTOTUNED: 135.0}[form.compile]

    time = clock(rate)
    result = climbed(skip=set(CHANGES) - {"bf16", "compile", "autotune"})
    assert result.form == ModuleForm(compile=AUTOTUNED)
    assert ModuleForm(compile=AUTOTUNED) in time.timed
    assert result.speedup is not None
    assert result.speedup.value == pytest.approx(1.35)


def test_single_changes_come_by_predicted_gain(clock: Callable[[Rate], Clock]) -> None:
    time = clock(lambda form: 100.0)
    result = climbed()
    assert result.form == ModuleForm()
    tried = [rung for rung in result.rungs if rung.achieved is not None]
    gains = [rung.predicted.speedup for rung in tried if rung.predicted is not None]
    assert gains == sorted(gains, reverse=True)
    assert len(time.timed) >= 12 * (1 + len(tried))


def test_what_harms_the_first_answer_is_taken_back(clock: Callable[[Rate], Clock]) -> None:
    clock(lambda form: each_helps(form) * (0.6 if form.scheme else 1.0))
    result = climbed()
    assert (result.form.dtype, result.form.scheme) == ("bf16", None)
    rung = {rung.name: rung for rung in result.rungs}["int8"]
    assert rung.status == "dropped"
    assert rung.achieved is not None
    assert rung.achieved.value == pytest.approx(0.9)
    assert result.speedup is not None
    assert result.speedup.value == pytest.approx(3.0)


def test_what_alters_outputs_and_gives_nothing_is_taken_back(
    clock: Callable[[Rate], Clock], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = (CHANGES["inference"], CHANGES["bf16"])
    monkeypatch.setattr(first_answer, "best_together", lambda *_: both)
    clock(lambda form: 100.0 if form.grad else 150.0)
    result = climbed()
    assert result.form == ModuleForm(grad=False)
    assert "as fast without it" in {r.name: r.reason for r in result.rungs}["bf16"]


def test_a_first_answer_that_is_slower_is_not_taken(clock: Callable[[Rate], Clock]) -> None:
    clock(lambda form: 50.0 if form.dtype else 100.0 if form.grad else 150.0)
    result = climbed()
    assert result.form.dtype is None
    assert result.form.grad is False
    assert statuses(result)["bf16"] == "dropped"


def test_what_is_hopelessly_slow_is_left_out_before_it_is_timed(
    clock: Callable[[Rate], Clock], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as bf16 on a CPU that has none, where the prediction expected twice the speed."""

    def glance(_: bench.ModuleBench, side: Built) -> float:
        return 0.05 if side.form.dtype else 1e-3

    monkeypatch.setattr(bench.ModuleBench, "glance_s", glance)
    time = clock(each_helps)
    result = climbed()
    assert all(form.dtype is None for form in time.timed)
    rung = {rung.name: rung for rung in result.rungs}["bf16"]
    assert rung.status == "dropped"
    assert rung.reason == "far slower in a first call: 50 ms instead of 1 ms"
    assert result.form == ModuleForm(grad=False, scheme="int8")


def test_a_first_answer_within_noise_gets_more_rounds(clock: Callable[[Rate], Clock]) -> None:
    noisy = iter([100.0, 80.0, 220.0, 90.0, 210.0, 120.0])  # the first warms up

    def rate(form: ModuleForm) -> float:
        return 100.0 if form == ModuleForm() else next(noisy, 130.0)

    clock(rate)
    result = climbed(skip=set(CHANGES) - {"bf16"})
    assert kept(result) == ["bf16"]
    assert result.speedup is not None
    assert result.speedup.value == pytest.approx(1.3)


def test_an_answer_that_does_not_hold_is_given_up(clock: Callable[[Rate], Clock]) -> None:
    """The machine has changed since: never below the module as it was given."""
    calls = []

    def rate(form: ModuleForm) -> float:
        calls.append(form)
        fast = 80.0 if len(calls) > 12 else 300.0
        return 100.0 if form == ModuleForm() else fast

    time = clock(rate)
    result = climbed(skip=set(CHANGES) - {"bf16"})
    assert time.timed
    assert result.form == ModuleForm()
    assert result.speedup is None
    assert any("none is kept" in note for note in result.climb.notes)
    assert kept(result) == []


@pytest.mark.usefixtures("no_compiler")
def test_an_answer_that_is_given_up_leaves_what_compiling_alone_gives(
    clock: Callable[[Rate], Clock],
) -> None:
    holds = True

    def rate(form: ModuleForm) -> float:
        if form.dtype or form.autocast:
            return 300.0 if holds else 50.0
        return {None: 100.0, "default": 105.0, AUTOTUNED: 135.0}[form.compile]

    def slower_from_here(self: climb.Climber, label: str) -> None:
        nonlocal holds
        holds = holds and label != "the answer, against the original"

    clock(rate)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(climb.Climber, "_show", slower_from_here)
        result = climbed(skip=set(CHANGES) - {"bf16", "compile", "autotune"})
    assert any("none is kept" in note for note in result.climb.notes)
    assert result.form == ModuleForm(compile=AUTOTUNED)
    assert result.speedup is not None
    assert result.speedup.value == pytest.approx(1.35)


def test_ctrl_c_leaves_the_best_so_far(
    clock: Callable[[Rate], Clock], monkeypatch: pytest.MonkeyPatch
) -> None:
    time = clock(each_helps)

    def stopped(module: nn.Module, form: ModuleForm, *rest: Any) -> Built:
        if time.timed:  # after the first answer
            raise KeyboardInterrupt
        return build(module, form, *rest)

    monkeypatch.setattr(bench, "build", stopped)
    result = climbed()
    assert result.form == time.timed[1]
    assert result.form.dtype == "bf16"
    assert result.speedup is not None
    assert "stopped by the user: what was done is kept" in result.climb.notes
    reasons = [rung.reason for rung in result.rungs if rung.status == "kept" and not rung.achieved]
    assert all("predicted, not measured: stopped by the user" in reason for reason in reasons)
    assert {"bf16", "int8"} <= set(kept(result))


def test_ctrl_c_at_the_last_comparison_leaves_the_answer(
    clock: Callable[[Rate], Clock], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its speed is then that of the steps that led to it."""
    time = clock(each_helps)
    monkeypatch.setattr(first_answer, "best_together", lambda *_: (CHANGES["bf16"],))
    shown = climb.Climber._show

    def stopping(self: climb.Climber, label: str) -> None:
        shown(self, label)
        if label == "the answer, against the original":
            raise KeyboardInterrupt

    monkeypatch.setattr(climb.Climber, "_show", stopping)
    result = climbed()
    assert result.form == ModuleForm(grad=False, dtype="bf16", scheme="int8")
    assert result.speedup is not None
    assert result.speedup.value == pytest.approx(4.5)  # 2 by the first answer, then 1.5 twice
    assert "stopped by the user: what was done is kept" in result.climb.notes
    assert any("not timed again" in note for note in result.climb.notes)
    assert time.timed[-1] != ModuleForm()


def test_ctrl_c_before_any_answer_leaves_the_original(
    clock: Callable[[Rate], Clock], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock(each_helps)

    def stopped(*_: Any) -> Built:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "build", stopped)
    result = climbed()
    assert result.form == ModuleForm()
    assert {rung.status for rung in result.rungs} == {"not reached", "not applicable"}


def test_a_part_that_cannot_run_alone_is_explained_by_prediction(
    clock: Callable[[Rate], Clock], monkeypatch: pytest.MonkeyPatch
) -> None:
    time = clock(each_helps)

    def particular(module: nn.Module, form: ModuleForm, *rest: Any) -> Built:
        if time.timed and form == ModuleForm(grad=False, dtype="bf16"):  # after the first answer
            raise RuntimeError("not without codes")
        return build(module, form, *rest)

    monkeypatch.setattr(bench, "build", particular)
    result = climbed()
    assert result.form == ModuleForm(grad=False, dtype="bf16", scheme="int8")
    rungs = {rung.name: rung for rung in result.rungs}
    assert rungs["inference"].achieved is not None
    assert rungs["bf16"].status == "kept"
    assert rungs["bf16"].achieved is None
    assert "predicted, not measured: without the others RuntimeError" in rungs["bf16"].reason


def test_forms_of_several_changes() -> None:
    names = ("graphs", "int8", "compile", "bf16", "inference")
    changes = [CHANGES[name] for name in names]
    form = form_of(changes)
    assert form == ModuleForm(
        grad=False, compile="default", dtype="bf16", graphs=True, scheme="int8"
    )
    assert without(form, CHANGES["bf16"]).dtype is None
    assert [each.name for each in compiled_last(changes)] == [
        "inference", "bf16", "int8", "compile", "graphs",
    ]  # fmt: skip


def test_what_is_free_is_in_every_first_answer() -> None:
    """No count tells that torch takes other kernels for attention without autograd."""
    given = work(traced(0.01, flops=2e6), kind="cpu")
    candidate = Candidate(Wide(), ModuleForm(), given, ((torch.randn(8, 128),), {}), {})  # type: ignore[arg-type]
    refused = set(CHANGES) - {"inference", "compile"}
    assert [change.name for change in best_together(candidate, refused)] == ["inference"]
    assert best_together(candidate, set(CHANGES)) == ()


def test_what_another_replaced_is_not_in_the_set() -> None:
    product = traced(0.01, flops=2e6, num_bytes=10**8, weight_bytes=10**8)
    given = work(product, kind="cpu")
    module = Wide()
    candidate = Candidate(module, ModuleForm(), given, ((torch.randn(8, 128),), {}), {})  # type: ignore[arg-type]
    names = [change.name for change in best_together(candidate, {"compile"})]
    assert len({name for name in names if name in ("int8", "int4")}) <= 1
    assert not {"bf16", "autocast-bf16"} <= set(names)
