"""`bench engine`: what it reports is what happened."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import TEMPLATE, make_folder, refused
from engines import engine_for, tiny

from ridgeline.bench import engine as bench
from ridgeline.bench import start
from ridgeline.bench.compare import memory_share
from ridgeline.bench.engine import EngineRun, Percentiles, as_record, limit_of, run_workload
from ridgeline.bench.peers import peer_runs, transformers_peer
from ridgeline.cli import main
from ridgeline.cli.bench import engine as bench_engine
from ridgeline.data.workload import Workload, WorkloadRequest
from ridgeline.engine import Engine
from ridgeline.engine.execution.step_watch import StepWatch
from ridgeline.engine.sampling.outputs import Delta
from ridgeline.errors import HardwareError, UsageError
from ridgeline.hardware import Hardware, detect
from ridgeline.hardware.facts import Ceiling
from ridgeline.models.cost import Chunk, step_cost
from ridgeline.recipe import Recipe

READ, MATRIX = 1e9, 1e10  # of a machine that was never built: B/s, FLOP/s
Capture = pytest.CaptureFixture[str]


def hardware() -> Hardware:
    ceilings = {
        "read_bandwidth": Ceiling(READ, "B/s", "measured"),
        "matrix_fp32": Ceiling(MATRIX, "FLOP/s", "measured"),
    }
    return replace(detect("cpu"), ceilings=ceilings)


def workload(*requests: tuple[int, int], arrivals: tuple[float, ...] = ()) -> Workload:
    arrivals = arrivals or (0.0,) * len(requests)
    return Workload(
        "some",
        tuple(
            WorkloadRequest(prompt, output, arrival_s=arrival)
            for (prompt, output), arrival in zip(requests, arrivals, strict=True)
        ),
    )


def test_counts_and_times() -> None:
    engine = engine_for(tiny("llama-tied"), num_pages=32, max_batch=4)
    run = run_workload(engine, workload((20, 5), (33, 9), (7, 1)), hardware())
    assert (run.num_requests, run.num_prompt_tokens, run.num_output_tokens) == (3, 60, 15)
    assert run.not_finished == ()
    assert run.num_steps == 9  # all prompts fit the first one
    assert run.mean_batch == pytest.approx(15 / 9)
    assert run.batch_share == pytest.approx(15 / 9 / 4)
    assert run.first_token is not None
    assert run.request is not None
    assert run.per_output_token is not None
    assert 0 < run.first_token.p50 <= run.request.p99 <= run.wall_s
    assert run.per_output_token.p99 < run.wall_s
    assert run.gap is not None
    assert 0 < run.gap.p50 < run.wall_s / 8
    assert 0 < run.peak_page_share <= 7 / 32
    assert run.output_tokens_per_s == pytest.approx(15 / run.wall_s)
    assert run.cpu_s > 0


def test_each_round_begins_with_an_empty_prefix_cache() -> None:
    engine = engine_for(tiny("llama-tied"))
    same = replace(workload((40, 2), (40, 2)), requests=(workload((40, 2)).requests[0],) * 2)
    prompt = tuple(range(3, 43))
    same = replace(same, requests=tuple(replace(r, prompt=prompt) for r in same.requests))
    hits = [run_workload(engine, same, hardware()).hit_tokens for _ in range(2)]
    assert hits[0] == hits[1] == 39  # the second computes one token of it; in each round


def test_times_count_from_the_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that is added late, because a step was on its way, has waited all the same."""
    engine = engine_for(tiny("llama-tied"))
    run_workload(engine, workload((5, 2)), hardware())
    add = engine.add

    def slow_add(*args: Any, **options: Any) -> Any:
        bench.time.sleep(0.2)
        return add(*args, **options)

    monkeypatch.setattr(engine, "add", slow_add)
    late = run_workload(engine, workload((5, 2), (5, 2), arrivals=(0.0, 0.01)), hardware())
    assert late.first_token is not None
    assert late.first_token.p99 > 0.15


def test_what_takes_too_long_is_cancelled_and_judged_by_what_it_has() -> None:
    engine = engine_for(tiny("llama-tied"), num_pages=32, max_batch=2)
    run_workload(engine, workload((5, 2)), hardware())
    some = workload((5, 2), (5, 400), (5, 400), (5, 2), arrivals=(0.0, 0.0, 0.0, 60.0))
    run = run_workload(engine, some, hardware(), limit_s=0.1)
    assert run.wall_s < 30
    assert (run.num_requests, run.num_output_tokens) == (4, 2)
    assert [line.split(": ")[1] for line in run.not_finished] == ["cancelled", "cancelled"]
    assert run.latencies[3] == (None, None)  # it did not come any more
    assert all(later is not None and later > 0 for _, later in run.latencies[:3])
    assert engine.stats.num_pages_used == 0


def test_what_waits_when_time_is_up_is_counted_and_not_left_for_the_next_run() -> None:
    engine = engine_for(tiny("llama-tied"), num_pages=32, max_batch=1)
    run = run_workload(engine, workload(*[(5, 400)] * 4), hardware(), limit_s=0.05)
    assert len(run.not_finished) == 4
    after = run_workload(engine, workload(*[(5, 2)] * 4), hardware(), with_limit=False)
    assert after.not_finished == ()
    assert after.limit_s is None
    assert [latency.first_s is not None for latency in after.latencies] == [True] * 4


def test_a_stream_that_stalls_behind_its_first_token_has_waited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is no request of one token, which keeps every bound on later ones."""
    engine = engine_for(tiny("llama-tied"), num_pages=32, max_batch=2)
    run_workload(engine, workload((5, 2)), hardware())
    step = engine.step

    def stalling() -> Any:
        events = step()
        if any(isinstance(event, Delta) for event in events):
            bench.time.sleep(0.5)
        return events

    monkeypatch.setattr(engine, "step", stalling)
    run = run_workload(engine, workload((5, 400)), hardware(), limit_s=0.3)
    ((_, later),) = run.latencies
    assert later is not None
    assert later > 0.2
    alone = run_workload(engine, workload((5, 1)), hardware())
    assert [per_token for _, per_token in alone.latencies] == [None]


def test_arrivals_are_waited_for() -> None:
    engine = engine_for(tiny("llama-tied"))
    run = run_workload(engine, workload((5, 2), (5, 2), arrivals=(0.0, 0.3)), hardware())
    assert run.wall_s > 0.3
    assert run.num_steps == 4  # the first one was done before the second came


def test_the_limit_is_the_sum_over_steps() -> None:
    engine = engine_for(tiny("llama-tied"), prefix_cache=False)
    run = run_workload(engine, workload((20, 3)), hardware())
    expected = 0.0
    for chunk in (Chunk(20, 0), Chunk(1, 20), Chunk(1, 21)):
        cost = step_cost(engine.model.config, [chunk], weight_bytes=4, kv_bytes=4)
        expected += max(cost.bytes / READ, cost.flops / MATRIX)
    assert run.limit_s == pytest.approx(expected)
    assert run.share_of_limit == pytest.approx(expected / run.wall_s)
    unknown = replace(hardware(), ceilings={})
    assert limit_of([], engine.local.costs, unknown) == 0.0
    assert run_workload(engine, workload((20, 3)), unknown).share_of_limit is None


def test_what_does_not_finish_is_named() -> None:
    engine = engine_for(tiny("llama-tied"), num_pages=2)
    run = run_workload(engine, workload((10, 4), (60, 4)), hardware())
    assert len(run.not_finished) == 1
    assert "1: refused" in run.not_finished[0]
    assert run.num_output_tokens == 4


def test_gaps_lie_between_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([1.0, 2.0, 2.5, 4.0, 4.1, 5.0])
    monkeypatch.setattr(
        "ridgeline.engine.execution.step_watch.time.perf_counter", lambda: next(clock)
    )
    watch = StepWatch(torch.device("cpu"))
    plan: Any = object()
    watch.end(plan)  # nothing ran
    for _ in range(3):
        watch.begin()
        watch.end(plan)
    assert watch.gaps_s() == pytest.approx([0.5, 0.1])


def test_percentiles() -> None:
    assert Percentiles.of([]) is None
    found = Percentiles.of([float(value) for value in range(101)])
    assert found == (50.0, 90.0, 99.0)


def test_record_holds_the_median_round_and_the_spread(tmp_path: Path) -> None:
    engine = engine_for(tiny("llama-tied"))
    run = run_workload(engine, workload((5, 2)), hardware())
    runs: list[EngineRun] = [replace(run, wall_s=seconds) for seconds in (1.0, 4.0, 2.0)]
    record = as_record("bench-engine", runs, hardware())
    value = record.values["output_tokens_per_s"]
    assert value.value == 1.0
    assert value.spread == pytest.approx((2.0 - 0.5) / 1.0)
    assert value.num_samples == 3
    assert record.values["first_token_p50"].unit == "s"
    assert json.loads(record.save(tmp_path).read_text())["name"] == "bench-engine"


@pytest.mark.slow
def test_a_new_process_is_timed_to_its_first_token(folder: Path, tmp_path: Path) -> None:
    plain = Recipe(kernels="reference")  # nothing is built: that is test_host_kernels.py's
    found = start.time_start(folder, plain, "cpu", cold=True)
    assert 0.3 < found.ready_s <= found.first_token_s < 60
    with pytest.raises(HardwareError, match=r"ended early: .*no \.safetensors"):
        start.time_start(tmp_path, Recipe(), "cpu")


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"), TEMPLATE, max_position_embeddings=4096)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one two"}\n{"prompt": "three"}\n')
    return path


@pytest.mark.slow
def test_a_start_is_timed_once_the_measured_engine_is_gone(
    folder: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def engines() -> int:
        return sum(type(each) is Engine for each in gc.get_objects())

    gc.collect()
    before, seen = engines(), []

    def timed(*_: object, **__: object) -> start.Start:
        seen.append(engines() - before)
        return start.Start(1.0, 2.0)

    monkeypatch.setattr(bench_engine, "time_start", timed)
    argv = ["bench", "engine", str(folder), "--workload", str(prompts), "--output-tokens", "2"]
    assert main([*argv, "--device", "cpu", "--start", "warm", "--json"]) == 0
    assert seen == [0]


@pytest.fixture(autouse=True)
def no_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    def known(found: Hardware, *_: Any) -> Hardware:
        return replace(found, ceilings=hardware().ceilings)

    for name in ("engine", "compare"):
        monkeypatch.setattr(f"ridgeline.cli.bench.{name}.measure", known)


def test_a_model_a_workload_and_a_peer(
    folder: Path, prompts: Path, tmp_path: Path, capsys: Capture
) -> None:
    argv = ["bench", "engine", str(folder), "--workload", str(prompts), "--output-tokens", "4"]
    argv += ["--peer", "transformers", "--rounds", "2", "--device", "cpu", "--max-context", "512"]
    assert main([*argv, "--json", "--save", str(tmp_path / "results")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_output_tokens"] == 8
    assert len(found["rounds"]) == 2
    assert [peer["name"] for peer in found["peers"]] == ["one by one", "padded batch"]
    for peer in found["peers"]:
        assert peer["num_output_tokens"] == 8
        assert peer["speedup"] == pytest.approx(
            found["output_tokens_per_s"] / peer["output_tokens_per_s"]
        )
    record = json.loads(Path(found["record"]).read_text())
    assert "transformers_padded_batch" in record["values"]
    assert main(argv) == 0
    shown = capsys.readouterr().out
    for text in ("output tokens/s", "of the limit", "transformers one by one", "first token"):
        assert text in shown


def test_variants_take_turns(
    folder: Path, prompts: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds of one variant lie between those of the others, and rates are held against the
    fastest plain one.
    """
    seconds = iter([4.0, 1.0, 0.5, 2.0, 1.0, 0.25, 8.0, 2.0, 1.0])
    turns: list[tuple[str, str | None]] = []

    def timed(engine: Any, *about: Any) -> EngineRun:
        turns.append((engine.recipe.dtype, engine.recipe.scheme))
        taken = next(seconds)
        return replace(run_workload(engine, *about), wall_s=taken, cpu_s=taken / 10)

    monkeypatch.setattr("ridgeline.bench.compare.run_workload", timed)
    argv = ["bench", "engine", str(folder), "--workload", str(prompts), "--output-tokens", "4"]
    argv += ["--compare", "fp32,bf16,int8", "--rounds", "3", "--device", "cpu", "--dtype", "fp32"]
    argv += ["--max-context", "512", "--quantize-all"]
    assert main([*argv, "--json", "--save", str(tmp_path / "results")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert turns == [("fp32", None), ("bf16", None), ("fp32", "int8")] * 3
    (found,) = found["comparisons"]
    assert found["base"] == "bf16"
    rows = {row["name"]: row for row in found["variants"]}
    assert rows["int8"]["rounds"] == [16.0, 32.0, 8.0]
    assert [rows[name]["median"] for name in rows] == [2.0, 8.0, 16.0]
    assert [rows[name]["speedup"] for name in rows] == [0.25, 1.0, 2.0]
    assert (rows["int8"]["best"], rows["int8"]["best_speedup"]) == (32.0, 4.0)
    assert rows["int8"]["per_cpu_s"] == pytest.approx(160.0)
    assert rows["int8"]["cpu_speedup"] == pytest.approx(2.0)
    record = json.loads(Path(rows["int8"]["record"]).read_text())
    assert record["values"]["times_bf16"]["value"] == 2.0
    assert record["values"]["output_tokens_per_s"]["num_samples"] == 3
    assert "int8" in Path(rows["int8"]["record"]).name
    seconds = iter([1.0] * 9)
    assert main(argv) == 0
    shown = capsys.readouterr().out
    for text in ("alternating rounds", "int8, rest fp32", "1.00x", "variant, fp32"):
        assert text in shown


@pytest.mark.slow
def test_each_category_is_compared_by_itself(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "prompts.jsonl"
    kinds = ["talk", "sums", "talk", "sums", "songs"]
    lines = [{"prompt": "one two three one two three one two", "category": kind} for kind in kinds]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    argv = ["bench", "engine", str(folder), "--workload", str(path), "--output-tokens", "24"]
    argv += ["--device", "cpu", "--max-context", "512", "--dtype", "fp32", "--max-batch", "1"]
    both = [*argv, "--compare", "fp32,fp32+lookup", "--category", "sums, talk", "--requests", "1"]
    assert main([*both, "--json", "--save", str(tmp_path / "results")]) == 0
    found = json.loads(capsys.readouterr().out)["comparisons"]
    assert [each["workload"] for each in found] == ["prompts sums", "prompts talk"]
    for each in found:
        plain, lookup = each["variants"]
        assert (plain["speculation"], plain["drafted_tokens"]) == ("none", 0)
        assert lookup["speculation"] == "prompt-lookup"
        assert 0 <= lookup["accepted_tokens"] <= lookup["drafted_tokens"]
        assert each["workload"].replace(" ", "-") in Path(lookup["record"]).name
    assert main(both) == 0
    assert "tokens drafted" in capsys.readouterr().out
    assert main([*argv, "--category", "songs", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_requests"] == 1
    for wrong, says in (("song", "songs, sums, talk"), ("songs,talk", "give one category")):
        assert main([*argv, "--category", wrong]) == UsageError.exit_code
        assert says in capsys.readouterr().err


def test_engines_share_the_memory() -> None:
    free, taken = 1.0, []
    for index in range(4):
        taken.append(free * memory_share(0.9, index, 4))
        free -= taken[-1]
    assert taken == pytest.approx([0.225] * 4)


def test_a_shape_that_is_kept(tmp_path: Path, capsys: Capture) -> None:
    kept, trace = tmp_path / "kept", tmp_path / "trace.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        + "".join(f"2026-01-01 00:00:0{second}.0,20,{4 + second}\n" for second in range(3))
    )
    argv = ["bench", "engine", "--shape", "tiny", "--workload", str(trace), "--requests", "2"]
    argv += ["--speedup", "10"]
    argv += ["--device", "cpu", "--json"]
    assert main([*argv, "--save-model", str(kept)]) == 0
    first = json.loads(capsys.readouterr().out)
    assert (first["num_requests"], first["num_output_tokens"]) == (2, 9)
    assert first["wall_s"] > 0.1
    argv[argv.index("--shape") : argv.index("--workload")] = [str(kept)]
    assert main(argv) == 0
    assert json.loads(capsys.readouterr().out)["num_output_tokens"] == 9


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "give either a model, or --shape"),
        (["demo", "--shape", "tiny"], "give either a model, or --shape"),
        (["--shape", "tinny"], "'tinny' tiny"),
        (["demo", "--save-model", "x"], "--shape"),
        (["--shape", "tiny", "--workload", "cpuu"], "'cpuu' cpu"),
        (["--shape", "tiny", "--start", "cold"], "--save-model"),
        (["--shape", "tiny", "--rounds", "0"], "--rounds at least 1"),
        (["--shape", "tiny", "--at-once", "--speedup", "2"], "remove one"),
        (["--shape", "tiny", "--kv-dtype", "fp9"], "kv_dtype is 'fp9' one of fp8"),
        (["--shape", "tiny", "--max-context", "100", "--workload", "cpu"], "--fitting"),
        (["--shape", "tiny", "--peer", "vllm"], "--peer 'vllm' transformers"),
        (["--shape", "tiny", "--compare", "int8"], "--compare 'int8' at least two bf16,int8"),
        (["--shape", "tiny", "--compare", "fp32,fp32"], "fp32 twice"),
        (["--shape", "tiny", "--compare", "fp32,fp32+tail"], "+tail +head +lookup"),
        (["--shape", "tiny", "--compare", "fp32,int3"], "scheme 'int3' known"),
        (["--shape", "tiny", "--compare", "fp32,int8", "--scheme", "int8"], "--scheme --compare"),
        (["demo", "--compare", "fp32,int8", "--peer", "transformers"], "--peer --compare"),
    ],
)
def test_refused(argv: list[str], says: str, capsys: Capture) -> None:
    refused(capsys, UsageError, says, "bench", "engine", *argv, "--device", "cpu")


def test_the_peer_makes_as_many_tokens_as_it_is_asked_for(folder: Path) -> None:
    peer = transformers_peer(folder, "fp32", "cpu")
    some = replace(workload((5, 3), (9, 6)), name="two")
    names = [(run.name, run.num_output_tokens) for run in peer_runs(peer, some)]
    assert names == [("one by one", 9), ("padded batch", 9)]
