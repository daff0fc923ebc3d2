"""Planning how to serve: the simulated scheduler decides as the real one, quiet rounds taken at
once give the same times bit by bit, and the answer's file is what `ridgeline serve` runs.
"""

from __future__ import annotations

import json
import math
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.cli import serve
from ridgeline.cli.arguments.parser import Parser
from ridgeline.cli.main import main
from ridgeline.data.workload import Workload, WorkloadRequest, named_workload
from ridgeline.engine import Engine
from ridgeline.engine.memory.plan import itemise
from ridgeline.engine.scheduling.counting import CountingScheduler
from ridgeline.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from ridgeline.engine.scheduling.state import Ask
from ridgeline.engine.scheduling.step_plan import StepPlan
from ridgeline.models.shapes import describe_shape
from ridgeline.planning.clusters.parsing import parse_cluster
from ridgeline.planning.serving.answer import write_plans
from ridgeline.planning.serving.fleets.asks import ask_of
from ridgeline.planning.serving.fleets.fleet import Fleet
from ridgeline.planning.serving.fleets.replica import SimulatedReplica
from ridgeline.planning.serving.fleets.served import RequestLog, RunReport
from ridgeline.planning.serving.setup import EngineSetup, engine_setup, usual_free_bytes
from ridgeline.planning.serving.step_times import PredictedTimes, seconds_of, ticks_of
from ridgeline.planning.serving.sustained import sustained
from ridgeline.planning.serving.tunings import sureness, tuning_for
from ridgeline.recipe import Recipe, edited_at_once

MILLISECOND = 1e-3


def tiny_setup(**edit: Any) -> EngineSetup:
    pool = parse_cluster("H200").pools[0]
    recipe = edited_at_once(Recipe(), {key.replace("__", "."): edit[key] for key in edit})
    return engine_setup(describe_shape("tiny").config, recipe, sustained(pool))


@pytest.fixture(scope="module")
def times() -> PredictedTimes:
    return tiny_setup().times


requests = st.lists(
    st.tuples(
        st.integers(1, 90),  # prompt tokens
        st.integers(1, 60),  # output tokens
        st.integers(0, 40),  # milliseconds since the one before
        st.integers(0, 2),  # which beginning it shares
    ),
    min_size=1,
    max_size=14,
)
configs = st.builds(
    SchedulerConfig,
    num_pages=st.integers(10, 60),
    page_size=st.just(16),
    token_budget=st.integers(8, 64),
    max_batch=st.integers(1, 8),
    prefix_cache=st.booleans(),
)


def workload_of(rows: list[tuple[int, int, int, int]], shared: bool) -> Workload:
    """Prompts as blocks of 16 tokens; with `shared`, the first ones are those of others."""
    arrival, made = 0.0, []
    for number, (prompt, output, wait, beginning) in enumerate(rows):
        arrival += wait * MILLISECOND
        blocks = -(-prompt // 16)
        own = [1000 * (number + 1) + block for block in range(blocks)]
        hashes = [beginning * 100 + block for block in range(blocks - 1)] + own[-1:]
        made.append(
            WorkloadRequest(prompt, output, arrival, block_hashes=tuple(hashes if shared else own))
        )
    return Workload("random", tuple(made), block_tokens=16)


def replayed(
    workload: Workload, config: SchedulerConfig, times: PredictedTimes, overlap: bool, jumps: bool
) -> tuple[RequestLog, SimulatedReplica]:
    log = RequestLog()
    replica = SimulatedReplica(config, times, log, overlap=overlap, jumps=jumps)
    for index in range(len(workload.requests)):
        ask = ask_of(workload, index)
        replica.advance(ticks_of(ask.arrival))
        log.note_arrival(index, ask.arrival, ask.max_tokens)
        replica.submit(ask, ticks_of(ask.arrival))
    replica.advance(math.inf)
    return log, replica


@settings(max_examples=120, deadline=None)
@given(requests, configs, st.booleans(), st.booleans())
def test_quiet_rounds_at_once_give_the_same_times(
    times: PredictedTimes, rows: Any, config: SchedulerConfig, shared: bool, overlap: bool
) -> None:
    workload = workload_of(rows, shared)
    plain, one = replayed(workload, config, times, overlap, jumps=False)
    jumped, other = replayed(workload, config, times, overlap, jumps=True)
    assert jumped.times == plain.times
    assert jumped.refused == plain.refused
    assert one.stats == other.stats
    assert (one.now, one.busy) == (other.now, other.busy)
    assert len(plain.times) + len(plain.refused) == len(rows)


def real_times(
    workload: Workload, config: SchedulerConfig, times: PredictedTimes
) -> dict[Any, float]:
    """When each request ends by the engine's own scheduler, its loop written out once more."""
    scheduler, ended = Scheduler(config), {}
    out: deque[tuple[StepPlan, int]] = deque()
    coming = deque(ask_of(workload, index) for index in range(len(workload.requests)))
    now = free = 0
    while True:
        while coming and ticks_of(coming[0].arrival) <= now:
            scheduler.submit(coming.popleft())
        plan = scheduler.plan()
        if plan is not None:
            decodes, rows = plan.num_decode_rows, len(plan.num_tokens)
            keys = sum(plan.first_positions[row] + 1 for row in range(decodes))
            pairs = sum(
                plan.num_tokens[row] * plan.first_positions[row]
                + plan.num_tokens[row] * (plan.num_tokens[row] + 1) // 2
                for row in range(decodes, rows)
            )
            longest = max((plan.first_positions[row] + 1 for row in range(decodes)), default=0)
            samples = len(plan.sample_keys)
            taken = times.step(len(plan.token_ids), samples, [keys], pairs, longest)
            free, now = max(now, free) + taken.device, now + taken.launches
            free = max(free, now)
            out.append((plan, free))
        if out and (plan is None or len(out) == 2):
            done, end = out.popleft()
            now = max(now, end)
            numbers = [2 * key[0] + 2**20 + 1 for key in done.sample_keys]
            scheduler.receive(done.step_id, numbers)
        elif plan is None:
            if not coming:
                return ended
            now = max(now, ticks_of(coming[0].arrival))
        for end_of in scheduler.take_ended():
            if end_of.status == "finished":
                ended[end_of.request_id] = seconds_of(now)


@settings(max_examples=60, deadline=None)
@given(requests, configs, st.booleans())
def test_it_decides_as_the_engine_does(
    times: PredictedTimes, rows: Any, config: SchedulerConfig, shared: bool
) -> None:
    workload = workload_of(rows, shared)
    served, _ = replayed(workload, config, times, overlap=True, jumps=True)
    ends = {number: one.end for number, one in served.times.items()}
    assert ends == real_times(workload, config, times)


def test_a_closed_loop_keeps_as_many_requests_as_clients() -> None:
    """Several that end in one step are all replaced."""
    workload = Workload("equal", (WorkloadRequest(32, 20),) * 40)
    fleet = Fleet([tiny_setup()])
    report = fleet.run_closed(workload, concurrency=8).report()
    mean_present = report.requests_per_s * report.e2e.mean
    assert mean_present == pytest.approx(8, rel=0.02)


def test_quiet_rounds_are_refused_where_more_happens() -> None:
    scheduler = CountingScheduler(SchedulerConfig(num_pages=64, page_size=16))
    scheduler.submit(Ask("a", [1] * 20, 50))
    assert scheduler.num_quiet(100) == 0  # a prompt is waiting
    step = scheduler.count()
    assert step is not None
    assert step.prompts_ended == ["a"]
    assert scheduler.num_quiet(100) == 0  # the step that is out has a prompt
    scheduler.bring(step.step_id)
    assert scheduler.num_quiet(100) == 48  # all but the last
    assert scheduler.num_quiet(7) == 7
    scheduler.take_quiet(48)
    assert scheduler.num_quiet(100) == 0
    last = scheduler.count()
    assert last is not None
    assert scheduler.bring(last.step_id)
    assert [end.status for end in scheduler.take_ended()] == ["finished"]
    assert scheduler.stats().num_pages_used == 0


def answered(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["plan", *words, "--for", "serve", "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def trace(folder: Path, rows: int = 30, prompt: int = 200, output: int = 20) -> str:
    path = folder / "trace.jsonl"
    lines = (
        {"timestamp": 20 * row, "input_length": prompt + row, "output_length": output + row % 7}
        for row in range(rows)
    )
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


def test_the_plan_is_what_serve_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Command line to command line: the file's recipe is the one that was simulated."""
    document = answered(
        capsys, "tiny", "--gpus", "2xH200", "--workload", trace(tmp_path), "--ttft-ms", "50",
        "--tpot-ms", "5", "--out", str(tmp_path), "--scheme", "int8",
    )  # fmt: skip
    assert document["met"]
    assert document["command"].startswith(f"ridgeline serve tiny --recipe {tmp_path}/plan-1.json")
    plan = Recipe.load(tmp_path / "plan-1.json")
    assert plan.scheme == "int8"
    assert plan.limits.max_context == 1024  # the workload's longest request has 255 tokens
    parser = Parser()
    serve.add_arguments(parser)
    args = parser.parse_args(["demo", "--recipe", str(tmp_path / "plan-1.json"), "--device", "cpu"])
    assert Recipe.load(args.recipe) == plan
    best = document["best"]
    assert best["kv_pages"] == memory_pages(plan)
    for point in document["frontier"]:
        beaten = [
            other
            for other in document["frontier"]
            if other["tokens_per_s_per_gpu"] > point["tokens_per_s_per_gpu"]
            and other["tokens_per_s_per_user"] > point["tokens_per_s_per_user"]
        ]
        assert beaten == []


def memory_pages(recipe: Recipe) -> int:
    """By the engine's own plan."""
    setup = engine_setup(
        describe_shape("tiny").config, recipe, sustained(parse_cluster("H200").pools[0])
    )
    free = usual_free_bytes(setup.hardware)
    return itemise(setup.config, setup.recipe, free).num_pages


@pytest.mark.slow
def test_serve_starts_from_a_plan(tmp_path: Path) -> None:
    """The engine loads what the plan says."""
    write_plans(tmp_path, {"plans": [{"recipe": {"version": 1, "scheme": "int8"}}]})
    engine = Engine("demo", Recipe.load(tmp_path / "plan-1.json"), device="cpu")
    assert engine.recipe.scheme == "int8"
    engine.close()


BAD = {
    "no lengths": (["--workload", "LENGTHLESS"], 2, "a workload has"),
    "nothing is as quick": (["--tpot-ms", "0.0001"], 2, "the closest is"),
    "fits nowhere": (["llama-3.1-405b", "--gpus", "1xH100"], 9, "fits no way on 1xH100"),
    "no such GPU": (["--gpus", "8xH1000"], 2, "is unknown"),
    "no GPU": (["--gpus", "0xH100"], 2, "give at least 1"),
    "negative": (["--ttft-ms", "-3"], 2, "positive time"),
    "too long": (["--workload", "LONG"], 2, "the model reaches"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(
    case: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words, code, text = BAD[case]
    (tmp_path / "lengthless.csv").write_text("TIMESTAMP,ContextTokens\n2023-11-16 18:15:46,3\n")
    long = trace(tmp_path, prompt=5000)
    paths = {"LENGTHLESS": str(tmp_path / "lengthless.csv"), "LONG": long}
    words = [paths.get(word, word) for word in words]
    model = words.pop(0) if not words[0].startswith("--") else "tiny"
    usual = ["--workload", trace(tmp_path, 3)] if "--workload" not in words else []
    gpus = ["--gpus", "1xH200"] if "--gpus" not in words else []
    if case == "too long":
        trace(tmp_path, prompt=5000)
    assert main(["plan", model, "--for", "serve", *gpus, *usual, *words]) == code
    error = capsys.readouterr().err.strip()
    assert text in error
    assert "\n" not in error


def test_a_level_that_too_few_keep_says_how_close_it_comes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """One request alone keeps it; all at once do not."""
    path = tmp_path / "burst.jsonl"
    row = {"timestamp": 0, "input_length": 4000, "output_length": 8}
    path.write_text("\n".join([json.dumps(row)] * 40))
    document = answered(
        capsys, "llama-3.1-8b", "--gpus", "1xH200", "--workload", str(path), "--ttft-ms", "300",
        "--scheme", "fp8", "--max-batch", "64", "--token-budget", "8192", "--kv-dtype", "fp8",
    )  # fmt: skip
    assert not document["met"]
    assert "TTFT p90" in document["closest"]


# Of records in results/: the edit of a recipe, the workload, tokens/s, TPOT at the median, TTFT at
# the median and its p99, all in ms; our engine on the H200, 2026-11-17.
LARGE: dict[str, Any] = {"limits.token_budget": 16384, "kv.prefix_cache": False}
SMALL: dict[str, Any] = {"limits.token_budget": 4096}
FP8: dict[str, Any] = {"scheme": "fp8", "kv.dtype": "fp8"}
RECORDS = {
    "bf16-throughput-2": (LARGE, "throughput", 25.27, 3398.1, 6750.6),
    "fp8-kv-fp8-throughput-4": (LARGE | FP8, "throughput", 17.94, 2249.2, 4454.9),
    "fp8-kv-fp8-throughput-3": (FP8 | SMALL, "throughput", 17.93, 2543.0, 5363.3),
    "bf16-batch-1-3": ({}, "batch-1", 3.79, 6.4, 6.4),
    "fp8-head-batch-1-3": ({"scheme": "fp8", "head": "int8"}, "batch-1", 2.19, 5.3, 5.3),
}  # fmt: skip


# More of them, that nothing was fitted to.
BUDGET: dict[str, Any] = {"limits.token_budget": 16384}
OTHERS = {
    "bf16-throughput-1": ({"kv.prefix_cache": False}, "throughput", 25.69, 3394.7, 6991.0),
    "fp8-kv-fp8-throughput-1": (FP8, "throughput", 18.28, 2385.7, 4783.0),
    "fp8-kv-fp8-throughput-2": (FP8 | BUDGET, "throughput", 17.61, 2220.7, 4401.6),
    "fp8-kv-fp8-throughput-5": (FP8 | LARGE, "throughput", 17.52, 2186.3, 4335.1),
    "bf16-prefill": (BUDGET, "prefill", None, 556.7, 743.6),
    "fp8-prefill": ({"scheme": "fp8"} | BUDGET, "prefill", None, 349.1, 464.6),
}  # fmt: skip


def simulated_record(edit: dict[str, Any], mix: str) -> RunReport:
    config = describe_shape("llama-3.1-8b").config
    hardware = sustained(parse_cluster("H200").pools[0])
    setup = engine_setup(config, edited_at_once(Recipe(), edit), hardware, tuning_for("H200"))
    return Fleet([setup]).run(named_workload(mix)).report()


@pytest.mark.slow
def test_figures_are_as_sure_as_is_said() -> None:
    """Four of five of all our records lie within."""
    sure, inside = sureness("H200", 1), []
    for edit, mix, tpot, ttft, ttft_p99 in (RECORDS | OTHERS).values():
        report = simulated_record(edit, mix)
        if tpot is not None:
            inside.append(abs(1e3 * report.tpot.p50 / tpot - 1) <= sure.tpot)
        inside.append(abs(1e3 * report.ttft.p50 / ttft - 1) <= sure.ttft)
        inside.append(abs(1e3 * report.ttft.p99 / ttft_p99 - 1) <= sure.ttft)
    assert sum(inside) / len(inside) >= 0.8, inside


@pytest.mark.parametrize("name", RECORDS)
def test_it_agrees_with_our_engine_on_the_h200(name: str) -> None:
    edit, mix, tpot, ttft, ttft_p99 = RECORDS[name]
    report = simulated_record(edit, mix)
    assert 1e3 * report.tpot.p50 == pytest.approx(tpot, rel=0.06)
    if mix == "throughput":
        assert 1e3 * report.ttft.p50 == pytest.approx(ttft, rel=0.12)
        assert 1e3 * report.ttft.p99 == pytest.approx(ttft_p99, rel=0.2)
