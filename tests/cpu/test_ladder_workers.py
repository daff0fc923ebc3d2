"""The process of a rung: what it measures, and what becomes of the climb when it dies, hangs or is
refused. Tiny random models; processes are forked, where their start is not what is tested.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_processes import ForkedWorker

from ridgeline.data.workload import Workload, WorkloadRequest, named_workload
from ridgeline.engine import Engine, Sampling
from ridgeline.hardware import detect
from ridgeline.ladder.measuring import process
from ridgeline.ladder.measuring.part import WorkloadPart, first_part, longer
from ridgeline.ladder.measuring.process import COMMAND, Process, WorkerError
from ridgeline.ladder.measuring.running import EngineRuns, NaiveRuns, Round
from ridgeline.ladder.measuring.spec import WorkerSpec, read_workload, write_workload
from ridgeline.ladder.measuring.worker import RecipeWorker, Workers
from ridgeline.ladder.order import common_prefix_share
from ridgeline.ladder.processes.bench_processes import Processes
from ridgeline.ladder.processes.sizes import WorkerSizes
from ridgeline.ladder.rungs import ClimbFacts, fuse
from ridgeline.ladder.searching.budget import Budget
from ridgeline.ladder.searching.progress import Options
from ridgeline.ladder.searching.search import ClimbSearch
from ridgeline.ladder.state import ClimbState, ClimbSubject, applied, baseline
from ridgeline.models.shapes import describe_shape, random_model
from ridgeline.recipe import KV

SHORT = Workload("short", tuple(WorkloadRequest(12, 6) for _ in range(4)))
BASE = baseline("cpu")
ENGINE = applied(BASE, {"loop": "engine"})


def script(text: str) -> tuple[str, ...]:
    return (sys.executable, "-c", f"import os, signal, sys, time\n{text}")


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("sys.stdin.readline(); os.kill(os.getpid(), signal.SIGKILL)", "died", "SIGKILL"),
        ("sys.stderr.write('no room\\n'); sys.exit(3)", "died", "code 3: no room"),
        ("sys.stderr.write('no room\\nnoted: 9 s\\n'); sys.exit(3)", "died", "code 3: no room"),
        ("sys.stderr.write('noted: 9 s\\n'); sys.exit(3)", "died", "code 3: it said nothing"),
        ("time.sleep(60)", "hung", "within 1 s"),
        (
            'sys.stdin.readline(); print(\'{"error": "too large", "kind": "memory"}\', flush=True)',
            "memory",
            "too large",
        ),
    ],
)
def test_a_worker_that_fails_says_how_and_is_gone(
    tmp_path: Path, text: str, kind: str, words: str
) -> None:
    process = Process(tmp_path / "log", script(text))
    with pytest.raises(WorkerError, match=words) as caught:
        process.ask("load", limit_s=1.0 if kind == "hung" else 30.0)
    assert caught.value.kind == kind
    assert not process.is_alive


def ask_worker(tmp_path: Path, state: ClimbState, goal: Any = "latency") -> RecipeWorker:
    write_workload(SHORT, tmp_path / "workload.json")
    spec = WorkerSpec(
        None, "tiny", "cpu", state.loop, state.recipe, goal, str(tmp_path / "workload.json")
    )
    worker = RecipeWorker()
    worker.answer({"do": "load", "spec": spec.to_json()})
    return worker


@pytest.mark.parametrize("goal", ["latency", "throughput"])
@pytest.mark.parametrize("state", [BASE, ENGINE], ids=["naive", "engine"])
def test_rounds_count_every_token_once(tmp_path: Path, state: ClimbState, goal: Any) -> None:
    worker = ask_worker(tmp_path, state, goal)
    found = worker.answer({"do": "round", "part": WorkloadPart(4).to_json()})
    assert found["output_tokens_per_s"] * found["wall_s"] == pytest.approx(24)
    phases = worker.answer({"do": "phases", "part": WorkloadPart(4).to_json()})["phases"]
    prefill, decode = phases
    steps_at_once = 4 if goal == "throughput" and state.loop == "engine" else 1
    assert prefill["work"]["tokens"] == 12 * steps_at_once
    assert decode["work"]["rows"] == steps_at_once
    assert decode["num_steps"] * steps_at_once == 4 * 5
    assert decode["work"]["keys"] == steps_at_once * (13 + 17) / 2
    for phase in phases:
        assert sum(phase["division"].values()) == pytest.approx(phase["step_s"], rel=1e-3)
        assert phase["division"]["matrices"] > 0
        assert phase["num_kernels"]
    points = worker.answer({"do": "curve", "batches": [1, 2], "seconds": 9.0})["points"]
    assert {point["batch"] for point in points} == ({1} if state.loop == "naive" else {1, 2})


def test_warming_up_finds_a_part_of_the_time_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short request that takes 10 ms, whatever the machine has to do beside."""
    worker = ask_worker(tmp_path, BASE)
    run = worker._run
    monkeypatch.setattr(worker, "_run", lambda part: replace(run(part), wall_s=0.01 * part.repeats))
    asked = {"do": "warm", "part": first_part(SHORT, 1).to_json(), "seconds": 0.12}
    assert WorkloadPart.from_json(worker.answer(asked)["part"]) == WorkloadPart(
        1, share=1.0, repeats=12
    )


@pytest.mark.parametrize(
    ("device_type", "shares"), [("cpu", [0.25, 0.25, 1.0]), ("cuda", [0.25, 0.25, 1.0, 1.0, 0.45])]
)
def test_lengths_are_run_before_they_count_where_they_may_be_other_kernels(
    device_type: str, shares: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, ran = RecipeWorker(), list[WorkloadPart]()
    worker.runs = NaiveRuns(random_model("tiny", torch.float32, "cpu"), detect("cpu"))
    worker.runs.hardware = replace(detect("cpu"), device_type=device_type)

    def run(part: WorkloadPart) -> Round:
        """A second for the whole, of which the quarter lets expect 0.4."""
        ran.append(part)
        seconds = part.repeats * (1.0 if part.share == 1.0 else 0.1)
        return Round(1.0, seconds, None, None, None, None, 1.0)

    monkeypatch.setattr(worker, "_run", run)
    found = worker.do_warm(WorkloadPart(1, share=0.25).to_json(), seconds=0.45)
    assert [part.share for part in ran] == shares
    assert found["part"] == WorkloadPart(1, share=0.45).to_json()


def test_a_worker_answers_errors_by_kind(tmp_path: Path) -> None:
    recipe = replace(ENGINE.recipe, kernels="fused", graphs=True)
    with pytest.raises(ValueError, match="GPU"):
        ask_worker(tmp_path, ClimbState(recipe, "engine"))


def test_a_model_that_answers_otherwise_the_second_time_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = NaiveRuns(random_model("tiny", torch.float32, "cpu"), detect("cpu"))
    assert runs.same_logits([1, 2, 3])
    plain = runs.model.logits
    monkeypatch.setattr(runs.model, "logits", lambda x: plain(x) + torch.rand(1))
    assert not runs.same_logits([1, 2, 3])


def test_parts_keep_requests_and_proportions() -> None:
    workload = named_workload("throughput")
    part = WorkloadPart(512, 0.25).of(workload)
    assert len(part.requests) == 512
    assert part.num_output_tokens / workload.num_output_tokens == pytest.approx(0.25, rel=0.01)
    assert part.num_prompt_tokens / workload.num_prompt_tokens == pytest.approx(0.25, rel=0.01)
    assert part.requests[3].prompt == workload.requests[3].prompt[: len(part.requests[3].prompt)]  # type: ignore[index, arg-type]
    assert WorkloadPart(512).of(workload) == workload
    assert "25%" in WorkloadPart(512, 0.25).words(workload)
    (alone,) = WorkloadPart(1).of(workload).requests
    means = workload.num_prompt_tokens / 512, workload.num_output_tokens / 512
    assert alone.num_prompt_tokens == pytest.approx(means[0], rel=0.1)
    assert alone.num_output_tokens == pytest.approx(means[1], rel=0.1)


def test_a_part_grows_to_its_whole_length_and_then_repeats() -> None:
    assert longer(WorkloadPart(1, 0.1), 1.0, 4.0) == WorkloadPart(1, 0.4, 1)
    assert longer(WorkloadPart(1, 0.5), 1.0, 6.0) == WorkloadPart(1, 1.0, 3)
    assert longer(WorkloadPart(1, 0.5), 4.0, 1.0) == WorkloadPart(1, 0.125, 1)
    assert longer(WorkloadPart(1, 1.0), 1e-9, 10.0).repeats <= 16


def test_prompts_that_begin_alike_are_counted() -> None:
    assert common_prefix_share(named_workload("shared-prefix"), 10_240) > 0.9
    assert common_prefix_share(named_workload("throughput"), 10_240) == 0.0


def test_a_workload_survives_its_file(tmp_path: Path) -> None:
    for workload in (named_workload("cpu"), SHORT):
        write_workload(workload, tmp_path / "w.json")
        assert read_workload(str(tmp_path / "w.json")) == workload


@pytest.fixture
def forked_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first process is started as it is for a user, those that follow are forked."""
    usual, started = process.start, list[Any]()

    def start(command: Sequence[str], environment: Mapping[str, str], errors: int) -> Any:
        is_first = not started
        started.append(command)
        if is_first:
            return usual(command, environment, errors)
        return ForkedWorker(environment, errors)

    monkeypatch.setattr(process, "start", start)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(command: Sequence[str], environment: Mapping[str, str], errors: int) -> ForkedWorker:
        assert command == COMMAND
        return ForkedWorker(environment, errors)

    monkeypatch.setattr(process, "start", start)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Processes]:
    subject = ClimbSubject("tiny", None, "tiny", describe_shape("tiny").config, "cpu")
    about = (subject, SHORT, "latency", detect("cpu"), tmp_path)
    with Processes(*about, round_s=0.05) as found:  # type: ignore[arg-type]
        yield found


@pytest.mark.slow
@pytest.mark.usefixtures("forked_later")
def test_a_rung_whose_process_is_killed_is_recorded_and_the_climb_goes_on(
    bench: Processes,
) -> None:
    """For real: SIGKILL while its rounds run."""
    facts = ClimbFacts(bench.subject.config, bench.hardware, "latency", "setting")
    fused = replace(fuse.RUNGS[-1], name="again")  # plain kernels: nothing has to be built
    options = Options(quality=False, stages=((fuse.RUNGS[-1],), (fused,)))
    search = ClimbSearch(facts, bench, Budget(None), options)
    bench.round_s = 0.05
    killer = threading.Thread(target=kill_second, args=(bench,))
    killer.start()
    found = search.run()
    killer.join()
    assert found.outcomes[0].status == "failed"
    assert "SIGKILL" in found.outcomes[0].reason
    assert found.outcomes[1].achieved is not None  # measured, by a new process
    assert found.start_observation.figures is not None


def kill_second(bench: Processes) -> None:
    """The candidate's process, once there are two; and later the best's, which is then replaced."""
    deadline = time.monotonic() + 120
    while len(bench._running) < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
    for running in list(bench._running.values()):
        os.kill(running.process.process.pid, signal.SIGKILL)


def test_two_that_do_not_fit_are_measured_in_turns(
    bench: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = []

    class Fake:
        def __init__(self, state: ClimbState) -> None:
            self.state = state

        def ask(self, do: str, **_: Any) -> dict[str, Any]:
            assert do == "round"
            rate = 10.0 if self.state == BASE else 20.0
            return {"output_tokens_per_s": rate, "wall_s": 1.0, "mean_batch": 1.0} | dict.fromkeys(
                ("first_token_s", "per_output_token_s", "request_s", "share_of_limit")
            )

        is_alive = True

        def close(self, at_once: bool = False) -> None: ...

    def start(state: ClimbState) -> Any:
        from ridgeline.ladder.processes.loaded import LoadedState

        if bench._running:
            raise WorkerError("memory", "no room for two")
        most.append(state)
        return LoadedState(state, Fake(state), None, WorkloadPart(1), 1)  # type: ignore[arg-type]

    monkeypatch.setattr(bench, "_start", start)
    found = bench.compare(BASE, ENGINE, lambda speedup: True)
    assert found.value == pytest.approx(2.0)
    assert most == [BASE, ENGINE, BASE, ENGINE]
    other = applied(ENGINE, {"kv.page_size": KV().page_size * 2})
    assert bench.compare(ENGINE, other, lambda speedup: True).value == pytest.approx(1.0)


@pytest.mark.usefixtures("forked")
def test_whole_runs_have_the_whole_memory_where_half_does_not_hold_their_pages(
    bench: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside each other they would run with fewer requests at once than when they are served."""
    loaded, most = list[tuple[str, bool]](), list[int]()
    whole = bench._loaded

    def noted(state: ClimbState, seat: Any, spec: Any) -> Any:
        loaded.append((state.key, bench._one_at_a_time))
        most.append(len(bench._running) + 1)
        return whole(state, seat, spec)

    monkeypatch.setattr(bench, "_loaded", noted)
    other = applied(ENGINE, {"dtype": "bf16"})
    both = bench.compare_part(ENGINE, other, WorkloadPart(2), 1)
    assert [len(rates) for rates in both] == [1, 1]
    assert loaded == [(ENGINE.key, False), (other.key, False)]
    assert max(most) == 2
    bench.let_go()
    loaded.clear(), most.clear()
    needed = bench.sizes.num_pages(ENGINE)
    monkeypatch.setattr(WorkerSizes, "num_pages", lambda *_: needed + 10**9)  # than there are
    bench.run_part(ENGINE, WorkloadPart(2))  # which tells that they are too few
    bench.let_go()
    loaded.clear(), most.clear()
    assert [len(rates) for rates in bench.compare_part(ENGINE, other, WorkloadPart(2), 2)] == [2, 2]
    assert loaded == [(ENGINE.key, True), (other.key, True)]
    assert max(most) == 1


@pytest.mark.usefixtures("forked")
def test_what_is_measured_soon_is_loaded_beside_the_first(bench: Processes) -> None:
    """It is there when the first rounds run, in a process of its own; what is compared instead of
    it lets it go.
    """
    ahead = applied(ENGINE, {"dtype": "bf16"})
    bench.load_ahead(ahead)
    bench.open(ENGINE)
    seats = {key: running.process for key, running in bench._running.items()}
    assert seats.keys() == {ENGINE.key, ahead.key}
    assert seats[ENGINE.key].process is not seats[ahead.key].process
    assert all(seat.process.ledger is bench.ledger for seat in seats.values())
    other = applied(ENGINE, {"limits.max_batch": 2})
    bench.compare(ENGINE, other, lambda speedup: True)
    assert bench._running.keys() == {ENGINE.key, other.key}
    assert not seats[ahead.key].is_alive


@pytest.mark.usefixtures("forked")
def test_one_that_fails_ahead_is_loaded_again_when_it_is_needed(bench: Processes) -> None:
    ahead = applied(ENGINE, {"dtype": "bf16"})
    bench.load_ahead(ahead)
    assert bench._ahead is not None
    bench._ahead[0].process.kill()
    bench.open(ENGINE)
    assert list(bench._running) == [ENGINE.key]
    assert bench.compare(ENGINE, ahead, lambda speedup: True).value > 0


def test_a_recipe_with_other_limits_runs_the_same_weights(tmp_path: Path) -> None:
    """In the same process: the same tokens, its own pages and limits, and codes by name; the first
    may be dropped, and a third run the second's weights.
    """
    state = applied(ENGINE, {"scheme": "int8", "quantize_all": True})
    wider = applied(state, {"limits.max_batch": 2, "kv.page_size": 32})
    assert wider.weights_key == state.weights_key
    assert applied(state, {"dtype": "bf16"}).weights_key != state.weights_key
    write_workload(SHORT, tmp_path / "workload.json")

    def spec(state: ClimbState) -> dict[str, Any]:
        workload = str(tmp_path / "workload.json")
        return WorkerSpec(
            None, "tiny", "cpu", "engine", state.recipe, "throughput", workload
        ).to_json()

    workers = Workers()
    first = workers.answer({"do": "load", "seat": "a", "spec": spec(state)})
    second = workers.answer({"do": "load", "seat": "b", "sharing": "a", "spec": spec(wider)})
    assert first["recipe"]["scheme"] == second["recipe"]["scheme"] == "int8"
    assert second["recipe"]["limits"]["max_batch"] == 2
    assert second["recipe"]["kv"]["page_size"] == 32
    assert second["bytes_per_weight"] == first["bytes_per_weight"] < 4.0
    engines = [engine_of(workers, name) for name in "ab"]
    assert engines[0].model.embed.weight is engines[1].model.embed.weight
    texts = [engine.generate([[1, 2, 3]], Sampling(max_tokens=6))[0].tokens for engine in engines]
    assert texts[0] == texts[1]
    held = weakref.ref(engines[0].runner.kv)
    del engines
    workers.answer({"do": "drop", "seat": "a"})
    assert held() is None  # pages are given back, weights are not
    third = workers.answer({"do": "load", "seat": "c", "sharing": "b", "spec": spec(state)})
    assert third["recipe"] == first["recipe"]
    found = workers.answer({"do": "round", "seat": "c", "part": WorkloadPart(4).to_json()})
    assert found["output_tokens_per_s"] > 0


def engine_of(workers: Workers, name: str) -> Engine:
    runs = workers.by_name[name].runs
    assert isinstance(runs, EngineRuns)
    return runs.engine


@pytest.mark.usefixtures("forked")
def test_states_of_the_same_weights_share_a_process(tmp_path: Path) -> None:
    """And one that cannot be loaded there leaves the other as it was."""
    subject = ClimbSubject("tiny", None, "tiny", describe_shape("tiny").config, "cpu")
    wider = applied(ENGINE, {"limits.max_batch": 2})
    refused = applied(ENGINE, {"graphs": True})  # on a CPU
    with Processes(subject, SHORT, "throughput", detect("cpu"), tmp_path) as bench:
        bench.round_s = 0.05
        bench.open(ENGINE)
        first = bench._running[ENGINE.key].process.process
        bench.compare(ENGINE, wider, lambda speedup: True)
        assert bench._running[wider.key].process.process is first
        observation = bench.keep(wider)
        assert observation.filled.limits.max_batch == 2
        assert list(bench._running) == [wider.key]
        assert first.is_alive
        with pytest.raises(WorkerError):
            bench.compare(wider, refused, lambda speedup: True)
        assert bench._running[wider.key].process.is_alive
        bench.drop(wider)
        assert not first.is_alive
