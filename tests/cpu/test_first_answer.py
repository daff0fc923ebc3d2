"""When the first answer is there: before anything is looked at, with kernels that were compiled
while CUDA C++ was built.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scripted_search import DEFAULTS, GUESSED, FakeBench, by_label, from_defaults, label, statuses

from ridgeline.data.workload import Workload, WorkloadRequest
from ridgeline.hardware import detect
from ridgeline.ladder.measuring.part import WorkloadPart, first_part
from ridgeline.ladder.measuring.spec import WorkerSpec, write_workload
from ridgeline.ladder.measuring.worker import RecipeWorker, Workers
from ridgeline.ladder.processes import bench_processes, compiling
from ridgeline.ladder.processes.bench_processes import Processes
from ridgeline.ladder.state import ClimbState, ClimbSubject, applied, baseline
from ridgeline.models.shapes import describe_shape

SHORT = Workload("short", tuple(WorkloadRequest(12, 6) for _ in range(4)))
ENGINE = applied(baseline("cpu"), {"loop": "engine"})
LOOK_S = 100.0


class SlowToLook(FakeBench):
    def look(self, state: ClimbState) -> Any:
        self.now += LOOK_S
        return super().look(state)

    def keep(self, state: ClimbState) -> Any:
        self.now += LOOK_S
        return super().keep(state)


def test_the_first_answer_does_not_wait_for_looks() -> None:
    bench = SlowToLook(by_label)
    progress = from_defaults(
        bench, guess=GUESSED[:1], gains={"bf16": 1.5}, look_first=False, quality=False
    )
    assert bench.asked[:4] == ["open", "compare bf16", "look fp32", "keep bf16"]
    assert progress.first_answer_s == 10 * bench.round_s
    guess = progress.outcomes[0]
    assert (guess.name, guess.status) == ("first-guess", "kept")
    assert guess.predicted is not None
    assert guess.predicted.speedup == 1.5
    assert progress.measured[0] == guess
    assert label(progress.best) == "bf16"


def test_looked_at_first_it_is_predicted_before_it_runs() -> None:
    bench = SlowToLook(by_label)
    progress = from_defaults(bench, guess=GUESSED[:1], gains={"bf16": 1.5}, quality=False)
    assert bench.asked[:4] == ["open", "look fp32", "compare bf16", "keep bf16"]
    assert progress.first_answer_s == LOOK_S + 10 * bench.round_s
    assert progress.outcomes[0].predicted is not None


@pytest.mark.parametrize("stopped", ["look", "keep"])
def test_ctrl_c_while_steps_are_looked_at_leaves_the_answer(stopped: str) -> None:
    bench = FakeBench(by_label)

    def interrupted(state: ClimbState) -> Any:
        raise KeyboardInterrupt

    setattr(bench, stopped, interrupted)
    progress = from_defaults(bench, guess=GUESSED[:1], look_first=False)
    assert progress.is_stopped
    assert label(progress.best) == "bf16"
    assert progress.observation.filled.dtype == "bf16"
    assert statuses(progress)["first-guess"] == "kept"


def test_a_guess_that_is_slower_leaves_the_start_looked_at() -> None:
    speeds = {"fp32": 20.0, "bf16": 10.0}
    bench = FakeBench(lambda state: speeds[label(state)])
    progress = from_defaults(bench, guess=GUESSED[:1], look_first=False)
    assert progress.best == DEFAULTS
    assert bench.asked.count("look fp32") == 1
    assert progress.first_answer_s is not None


def spec_of(workload: Path, shape: str = "tiny") -> WorkerSpec:
    write_workload(SHORT, workload)
    return WorkerSpec(
        None, shape, "cpu", "engine", ENGINE.recipe, "throughput", str(workload), num_pages=64
    )


def test_kernels_are_compiled_by_one_layer_of_each_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []

    def noted(worker: RecipeWorker, part: WorkloadPart) -> Any:
        assert worker.runs is not None
        ran.append((worker.runs.engine.config, part))  # type: ignore[union-attr]
        return replace_run(worker, part)

    replace_run = RecipeWorker._run
    monkeypatch.setattr(RecipeWorker, "_run", noted)
    arguments = {
        "spec": spec_of(tmp_path / "workload.json").to_json(),
        "part": first_part(SHORT, 4).to_json(),
        "seconds": 0.01,
    }
    Workers().answer({"do": "compile", **arguments})
    config, whole = ran[0][0], describe_shape("tiny").config
    assert config.layers == tuple(dict.fromkeys(whole.layers))
    assert config.num_layers < whole.num_layers
    assert replace(config, layers=whole.layers) == whole
    assert ran[0][1].count == 4


class StandIn:
    """A worker, as far as it is asked here."""

    def __init__(self, asked: list[str]) -> None:
        self.asked, self.is_alive = asked, True

    def begin(self, do: str, **arguments: Any) -> None:
        self.asked.append(do)

    def close(self, at_once: bool = False) -> None:
        self.asked.append("ended")


@pytest.mark.slow
def test_compiling_ends_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes memory; and nobody waits where CUDA C++ was built before."""
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    subject = ClimbSubject("tiny", None, "tiny", describe_shape("tiny").config, "cpu")
    asked = list[str]()
    with Processes(subject, SHORT, "throughput", detect("cpu"), tmp_path) as bench:
        bench.round_s = 0.05
        bench.compile_ahead([ENGINE])
        assert not bench._compiling.is_running  # nothing is built
        bench._builder = bench._new_process()
        monkeypatch.setattr(bench._compiling, "_new_process", lambda: StandIn(asked))
        bench.compile_ahead([ENGINE, applied(ENGINE, {"dtype": "bf16"})])
        assert asked == ["compile", "compile"]

        def load(seat: Any, *arguments: Any) -> Any:
            assert asked == ["compile", "compile", "build", "ended", "ended"]
            return plain_load(seat, *arguments)

        def ask(seat: Any, do: str, **arguments: Any) -> Any:
            if do == "build":
                asked.append(do)
                return {"problem": None}
            return plain_ask(seat, do, **arguments)

        seat_class = bench_processes.WorkerSeat
        plain_load, plain_ask = seat_class.load, seat_class.ask
        monkeypatch.setattr(seat_class, "load", load)
        monkeypatch.setattr(seat_class, "ask", ask)
        bench.open(ENGINE)
        assert not bench._compiling.is_running
        built = compiling.cache_dir() / "extensions" / "a" / "a.so"
        built.parent.mkdir(parents=True)
        built.touch()
        bench.compile_ahead([ENGINE])
        assert not bench._compiling.is_running
