"""A look at a state's steps: it divides them, costs no answer, and where it fails nothing else."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import engine_for, tiny

from ridgeline.data.workload import Workload, WorkloadRequest
from ridgeline.engine import Sampling
from ridgeline.hardware import detect
from ridgeline.ladder.measuring.looking import engine_steps, looked_at, naive_steps, steadied
from ridgeline.ladder.measuring.observation import Observation
from ridgeline.ladder.measuring.part import WorkloadPart
from ridgeline.ladder.measuring.running import EngineRuns, Round
from ridgeline.ladder.processes.bench_processes import Processes
from ridgeline.ladder.processes.loaded import LoadedState
from ridgeline.ladder.state import ClimbSubject, baseline
from ridgeline.models.cost import MeanStep
from ridgeline.models.shapes import describe_shape
from ridgeline.profiling import dividing
from ridgeline.profiling.predicting.prediction import PhaseTime
from ridgeline.profiling.tracing.division import Division, OpTime
from ridgeline.recipe import Recipe, Speculation, with_auto
from ridgeline.timing import Timing

SHORT = Workload("short", tuple(WorkloadRequest(12, 6) for _ in range(3)))
PHASES = [
    PhaseTime("prefill", 3, 0.04, MeanStep(1, 12, 1, 78, 12)),
    PhaseTime("decode", 15, 0.02, MeanStep(1, 1, 1, 15, 15)),
]


def a_round(first_s: float, token_s: float | None) -> Round:
    return Round(40.0, 1.5, first_s, token_s, 1.0, 0.3, 1.0)


def test_an_engine_is_as_it_was() -> None:
    engine = engine_for(tiny("llama-tied"), kernels="fused")
    prompt, sampling = [[7, 8, 9] * 8], Sampling(max_tokens=6, ignore_eos=True)
    before = engine.generate(prompt, sampling)[0].tokens
    runs = EngineRuns(engine, "latency", detect("cpu"))
    found = looked_at(runs.phases(SHORT), [], engine_steps(engine), True)
    for phase in found.phases:
        assert sum(phase.division.values()) == pytest.approx(phase.step_s)
        assert phase.division["matrices"] > 0
    assert found.slowed == 1.0
    assert not engine.has_work
    assert engine.runner.notes is None
    pool = engine.scheduler.cache.pool
    assert pool.num_free == pool.num_pages
    assert engine.generate(prompt, sampling)[0].tokens == before


def test_the_plain_loop_is_divided_too() -> None:
    model = tiny("llama-tied")
    filled = with_auto(Recipe(kernels="reference"), model.config, torch.float32, "cpu")
    found = looked_at(PHASES, [], naive_steps(model, filled), True)
    assert [sum(phase.division.values()) for phase in found.phases] == pytest.approx([0.04, 0.02])


def test_drafted_tokens_are_not_run_by_themselves() -> None:
    engine = engine_for(tiny("llama-tied"), speculation=Speculation(method="prompt-lookup"))
    assert engine_steps(engine) is None
    assert looked_at(PHASES, [a_round(1.0, 1.0)] * 5, None, True).phases == tuple(PHASES)


@pytest.mark.parametrize("error", [RuntimeError("no tracer"), AssertionError("odd"), KeyError(1)])
def test_what_cannot_be_divided_stays_whole(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> Any:
        raise error

    with caplog.at_level(logging.INFO):
        assert looked_at(PHASES, [], fail, True).phases == tuple(PHASES)
    assert "not divided" in caplog.text


def test_a_step_takes_what_it_takes_in_the_middle_of_its_rounds() -> None:
    rounds = [a_round(0.03, 0.02), a_round(0.05, 0.09), a_round(0.031, 0.021)]
    assert [phase.step_s for phase in steadied(PHASES, rounds)] == [0.031, 0.021]
    assert steadied(PHASES, rounds[:2]) == tuple(PHASES)
    one_token = [a_round(0.03, None)] * 4
    assert [phase.step_s for phase in steadied(PHASES, one_token)] == [0.03, 0.02]


def test_a_gpus_kernels_take_what_they_take() -> None:
    """Traced with a host that needed 17 ms for the step, in a workload where it needed 20."""
    ops = (OpTime("head", "matrices", 8e-3, 1), OpTime("attention", "attention", 1e-3, 1))
    traced = Division(17e-3, ops, 0.0, 6e-3, 2e-3, 290)

    def fitted(
        division: Division, pieces: int, step_s: float, on_cpu: bool = False, **more: Any
    ) -> dict[str, float]:
        phase = PhaseTime("decode", 1, step_s, PHASES[0].work, **more)
        return dividing._fitted(division, pieces, phase, on_cpu).parts

    on_gpu = fitted(traced, 1, 20e-3)
    assert on_gpu["matrices"] == 8e-3
    assert (on_gpu["gaps"], on_gpu["host"]) == pytest.approx((8.25e-3, 2.75e-3))
    on_cpu = fitted(traced, 1, 20e-3, on_cpu=True)
    assert on_cpu["matrices"] == pytest.approx(8e-3 * 20 / 17)
    short = fitted(traced, 1, 4.5e-3)  # below its kernels
    assert sum(short.values()) == pytest.approx(4.5e-3)
    by_events = fitted(traced, 1, 20e-3, device_s=12e-3)
    assert by_events["matrices"] == 8e-3
    assert (by_events["gaps"], by_events["host"]) == pytest.approx((3e-3, 8e-3))
    drawn_out = fitted(traced, 1, 20e-3, device_s=4.5e-3)
    assert (drawn_out["gaps"], drawn_out["host"]) == pytest.approx((0.0, 15.5e-3))
    assert drawn_out["matrices"] == pytest.approx(4e-3)
    assert sum(drawn_out.values()) == pytest.approx(20e-3)
    halves = fitted(traced, 2, 10e-3)  # a prompt in two steps
    assert halves["matrices"] == pytest.approx(4e-3)


def test_what_seems_slower_is_timed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gpu:
        device = torch.device("cuda", 0)

    def slowed(*times: float) -> float:
        left = list(times)
        monkeypatch.setattr(dividing, "time_loop", lambda *a, **k: Timing(0, left.pop(0), 0, 0, 3))
        return dividing._slowed(Gpu(), lambda: None, 3, 1.0)  # type: ignore[arg-type]

    assert slowed(1.02) == 1.02
    assert slowed(1.4, 1.03) == 1.03
    assert slowed(1.4, 1.3, 1.35) == 1.3


@pytest.mark.parametrize(("slowed", "is_kept"), [(1.02, True), (1.4, False)])
def test_a_process_that_a_look_slowed_is_not_measured_again(
    tmp_path: Path, slowed: float, is_kept: bool
) -> None:
    class Fake:
        is_alive = True

        def ask(self, do: str, **_: Any) -> dict[str, Any]:
            return {"phases": [], "slowed": slowed}

        def close(self, at_once: bool = False) -> None:
            self.is_alive = False

    state = baseline("cpu")
    subject = ClimbSubject("tiny", None, "tiny", describe_shape("tiny").config, "cpu")
    with Processes(subject, SHORT, "latency", detect("cpu"), tmp_path) as bench:
        seen = Observation(state.recipe, 1, 4.0, 4.0)
        running = LoadedState(state, Fake(), seen, WorkloadPart(1), 1, [a_round(1.0, 1.0)])  # type: ignore[arg-type]
        bench._running[state.key] = running
        assert bench.look(state).figures is not None
        assert running.process.is_alive == is_kept
