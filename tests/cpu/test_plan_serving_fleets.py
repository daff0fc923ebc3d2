"""Fleets that are planned: sums of many steps are those of single ones, windows included; replicas
by the load start when they say; prompts and decoding apart, with a link that carries one prompt
at a time; two kinds of GPU; and what a user gets of it on the command line.
"""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.cli.main import main
from ridgeline.data.workload import Workload, WorkloadRequest
from ridgeline.engine.scheduling.counting import CountingScheduler
from ridgeline.engine.scheduling.scheduler import SchedulerConfig
from ridgeline.engine.scheduling.state import Ask
from ridgeline.errors import UsageError
from ridgeline.models.shapes import describe_shape
from ridgeline.planning.clusters.parsing import parse_cluster
from ridgeline.planning.serving.fleets.asks import ask_of
from ridgeline.planning.serving.fleets.disaggregated import KvLink, SplitFleet, link_between
from ridgeline.planning.serving.fleets.fleet import Fleet
from ridgeline.planning.serving.fleets.replica import SimulatedReplica
from ridgeline.planning.serving.fleets.scaling import Scaling
from ridgeline.planning.serving.fleets.served import RequestLog, ServiceLevel
from ridgeline.planning.serving.options import ServingOption, Ways
from ridgeline.planning.serving.setup import EngineSetup, engine_setup, grouped
from ridgeline.planning.serving.step_times import (
    BaseTime,
    PredictedTimes,
    SteadySteps,
    StepTicks,
    Tuning,
)
from ridgeline.planning.serving.sustained import sustained
from ridgeline.recipe import Recipe


@pytest.fixture(scope="module")
def setup() -> EngineSetup:
    pool = parse_cluster("H200").pools[0]
    return engine_setup(describe_shape("tiny").config, Recipe(), sustained(pool))


ticks = st.integers(0, 10**6)


@given(ticks, ticks, ticks, st.integers(-50, 50), st.integers(0, 300))
def test_many_steps_take_what_single_ones_take(
    device: int, more: int, launches: int, host: int, count: int
) -> None:
    series = SteadySteps(device, more, launches, host)
    singly = sum(max(device + number * more, launches) + host for number in range(count))
    assert series.total(count) == singly


class WindowedTimes(PredictedTimes):
    """Steps of layers of which some see 24 tokens and others 70."""

    def __init__(self) -> None:
        self.windows, self.tuning = [None, 24, 70], Tuning()

    def step(self, tokens: int, samples: int, keys: Any, pairs: int, longest: int = 0) -> StepTicks:
        return StepTicks(self.of_rows(tokens).ticks(keys) + 5 * pairs, 0)

    def of_rows(self, rows: int) -> BaseTime:
        return BaseTime(1000 + 3 * rows, 1600, 7, [1, 3, 2])


rows = st.lists(
    st.tuples(st.integers(1, 90), st.integers(2, 60), st.integers(0, 9000)), min_size=1, max_size=8
)


@settings(max_examples=60, deadline=None)
@given(rows, st.booleans())
def test_windows_that_fill_are_the_same_at_once(
    requests: list[tuple[int, int, int]], overlap: bool
) -> None:
    found = []
    for jumps in (False, True):
        log, config = RequestLog(), SchedulerConfig(num_pages=40, page_size=16, token_budget=64)
        replica = SimulatedReplica(config, WindowedTimes(), log, overlap=overlap, jumps=jumps)
        now = 0
        for number, (prompt, output, wait) in enumerate(requests):
            now += wait
            replica.advance(now)
            log.note_arrival(number, 0.0, output)
            replica.submit(Ask(number, [number + 1] * prompt, output, arrival=now), now)
        replica.advance(math.inf)
        found.append((log.times, replica.now, replica.busy, replica.stats))
    assert found[0] == found[1]
    assert len(found[0][0]) == len(requests)


def test_prompts_that_come_whole_cost_their_last_token() -> None:
    scheduler = CountingScheduler(SchedulerConfig(num_pages=64, page_size=16), receives=True)
    scheduler.submit(Ask("a", [1] * 100, 20, output=[1]))
    step = scheduler.count()
    assert step is not None
    assert (step.num_tokens, step.num_samples, step.num_pairs) == (1, 1, 0)
    assert step.positions == [100]
    assert scheduler.stats().num_pages_used == 7  # for 101 tokens
    scheduler.bring(step.step_id)
    following = scheduler.count()
    assert following is not None
    assert following.positions == [101]


def traffic(
    count: int = 40, every_s: float = 0.002, prompt: int = 300, output: int = 30
) -> Workload:
    requests = tuple(
        WorkloadRequest(prompt + 7 * number % 90, output + number % 5, number * every_s)
        for number in range(count)
    )
    return Workload("made", requests)


@pytest.mark.parametrize("link", [KvLink(400e9), KvLink(20e6)], ids=["quick", "slow"])
def test_apart_every_request_is_answered_at_the_same_times(
    setup: EngineSetup, link: KvLink
) -> None:
    workload, logs = traffic(), []
    for jumps in (False, True):
        fleet = SplitFleet([setup], [setup] * 2, link, jumps=jumps)
        logs.append(fleet.run(workload).times)
    assert logs[0] == logs[1]
    assert len(logs[0]) == len(workload.requests)
    prompts = Fleet([setup]).run(
        Workload("first", tuple(WorkloadRequest(r.num_prompt_tokens, 1, r.arrival_s)
                                for r in workload.requests))
    )  # fmt: skip
    assert {number: one.first for number, one in logs[0].items()} == {
        number: one.first for number, one in prompts.times.items()
    }


def test_a_link_carries_one_prompt_at_a_time(setup: EngineSetup) -> None:
    """Of requests at once the last waits for all the others."""
    workload = Workload("at once", (WorkloadRequest(200, 5),) * 12)
    quick, slow = (SplitFleet([setup], [setup], KvLink(speed)) for speed in (1e12, 1e7))
    quick.run(workload)
    ends = sorted(one.end for one in slow.run(workload).times.values())
    one_s = 200 * setup.kv_bytes_per_token / 1e7 + KvLink(1e7).latency_s
    assert ends[-1] >= 12 * one_s
    gaps = [later - sooner for sooner, later in pairwise(ends)]
    assert gaps == pytest.approx([one_s] * 11, rel=0.02)
    assert slow.mean_wait_s == pytest.approx(5.5 * one_s, rel=0.02)
    assert quick.mean_wait_s < one_s / 50  # for its latency


def test_links_are_those_of_the_cluster() -> None:
    inside = link_between(parse_cluster("8xH200").pools)
    across = link_between(parse_cluster("16xH200@ib400").pools)
    assert inside.bytes_s == pytest.approx(0.8 * 450e9)
    assert across.bytes_s == pytest.approx(0.8 * 50e9)
    with pytest.raises(UsageError, match="network"):
        link_between(parse_cluster("8xH200@none+8xH100@none").pools)


def test_replicas_start_after_the_time_that_a_start_takes(setup: EngineSetup) -> None:
    workload = traffic(400, 0.0008)
    scaling = Scaling(most=3, target=1, start_s=0.1, patience_s=0.05)
    fleet = Fleet([setup] * 3, scaling=scaling, policy="least-loaded")
    log = fleet.run(workload)
    assert len(log.times) == 400
    assert set(fleet.sent) == {0, 1, 2}
    later = [ask_of(workload, n).arrival for n, place in enumerate(fleet.sent) if place]
    assert min(later) >= 0.1
    everywhere = Fleet([setup] * 3, policy="least-loaded")
    assert everywhere.run(workload).report().ttft.p99 <= log.report().ttft.p99
    assert fleet.replica_seconds < everywhere.replica_seconds


def test_as_many_at_least_as_at_most_is_a_plain_fleet(setup: EngineSetup) -> None:
    workload = traffic(60)
    plain = Fleet([setup] * 2)
    scaled = Fleet([setup] * 2, scaling=Scaling(most=2, target=1, start_s=5.0, least=2))
    assert plain.run(workload).times == scaled.run(workload).times
    assert plain.replica_seconds == scaled.replica_seconds


def test_replicas_stop_where_fewer_do_and_are_paid_until_they_have_answered(
    setup: EngineSetup,
) -> None:
    burst = [WorkloadRequest(50, 40) for _ in range(30)]
    quiet = [WorkloadRequest(20, 4, 1.0 + number) for number in range(20)]
    scaling = Scaling(most=2, target=8, start_s=0.001, patience_s=3.0)
    fleet = Fleet([setup] * 2, scaling=scaling)
    log = fleet.run(Workload("burst", tuple(burst + quiet)))
    span = log.report().duration_s
    assert span < fleet.replica_seconds < 1.5 * span
    assert len(set(fleet.sent[-5:])) == 1


@pytest.mark.parametrize("least", [0, 4])
def test_scaling_that_cannot_be_is_refused(setup: EngineSetup, least: int) -> None:
    with pytest.raises(UsageError, match="replicas"):
        Fleet([setup] * 2, scaling=Scaling(most=3, target=1, start_s=1.0, least=least))


def test_one_request_stands_for_many(setup: EngineSetup) -> None:
    count, size = 512, 8
    every = Workload("alike", (WorkloadRequest(100, 50),) * count)
    some = Workload("alike", (WorkloadRequest(100, 50),) * (count // size))
    whole = Fleet([setup]).run(every).report()
    part = Fleet([grouped(setup, size)]).run(some).report().times_as_many(size)
    assert part.num_requests == count
    assert part.output_tokens_per_s == pytest.approx(whole.output_tokens_per_s, rel=0.01)
    assert part.tpot.mean == pytest.approx(whole.tpot.mean, rel=0.01)


def test_what_does_instead_was_planned_again() -> None:
    """Of every option that does not fit: the one that is named does."""
    config = describe_shape("llama-3.1-70b").config
    workload, slo = traffic(3), ServiceLevel(tpot_s=0.02)
    ways = Ways(config, parse_cluster("2xH100"), workload, Recipe(), slo)
    for edit in ways.edits():
        ways.option(edit)
    assert ways.rejections
    fits = {}
    for scheme in (None, "fp8", "int4-g128"):
        for kv in ("auto", "fp8"):
            for tensor in (1, 2):
                edit = {"scheme": scheme, "kv.dtype": kv, "parallel.tensor": tensor}
                name = f"{scheme or 'bf16'}, KV {'bf16' if kv == 'auto' else kv}, TP {tensor}"
                fits[f"{name} does"] = isinstance(ways.option(edit), ServingOption)
    for rejection in ways.rejections:
        assert fits[rejection.remedy], rejection


def trace(folder: Path, rows: int = 40) -> str:
    path = folder / "trace.jsonl"
    lines = [
        json.dumps({"timestamp": 2 * row, "input_length": 150 + row, "output_length": 12 + row % 7})
        for row in range(rows)
    ]
    path.write_text("\n".join(lines))
    return str(path)


NARROW = ["--scheme", "int8", "--kv-dtype", "bf16", "--max-batch", "32", "--token-budget", "512",
          "--for", "serve"]  # fmt: skip


def test_fleets_on_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["--gpus", "2xH200+1xH100", "--workload", trace(tmp_path), "--ttft-ms", "50"]
    wishes = ["--autoscale", "1", "--start-s", "0.02", "--disaggregate", "auto",
              "--out", str(tmp_path)]  # fmt: skip
    assert main(["plan", "tiny", *words, *NARROW, *wishes, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["best"]["replicas"] == 3
    kinds = [fleet["kind"] for fleet in document["fleets"]]
    assert kinds == ["all replicas", "autoscaled", "disaggregated"]
    always, scaled, split = document["fleets"]
    assert scaled["gpu_hours"] < always["gpu_hours"]
    assert scaled["words"].startswith("1 to 3 replicas")
    assert "replicas for prompts" in split["words"]
    assert all(fleet["num_requests"] == 40 for fleet in document["fleets"])
    assert "Other fleets" in (tmp_path / "plan.html").read_text()
    assert json.loads((tmp_path / "plan.json").read_text())["fleets"] == document["fleets"]


def test_requests_that_no_context_holds_are_left_out_and_counted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = Path(trace(tmp_path, 4))
    long = {"timestamp": 3, "input_length": 50_000, "output_length": 5}
    path.write_text(path.read_text() + "\n" + json.dumps(long))
    words = ["--gpus", "1xH200", "--workload", str(path), "--tensor-parallel", "1"]
    assert main(["plan", "tiny", *words, *NARROW, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["num_left_out"] == 1
    assert document["workload"]["requests"] == 4


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--scale-target", "3"], "goes with --autoscale"),
        (["--link-gb-s", "50"], "goes with --disaggregate"),
        (["--disaggregate", "half"], "or auto"),
        (["--disaggregate", "2"], "give --disaggregate 1 to 1"),
        (["--autoscale", "3"], "give 1 to 2"),
        (["--autoscale", "1", "--scale-target", "-2"], "positive target"),
        (["--disaggregate", "1", "--link-gb-s", "0"], "positive number"),
    ],
)
def test_fleets_that_cannot_be_are_one_line(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    usual = ["--gpus", "2xH200", "--workload", trace(tmp_path, 2), "--tensor-parallel", "1"]
    assert main(["plan", "tiny", *usual, *NARROW, *words]) == 2
    error = capsys.readouterr().err.strip()
    assert text in error
    assert "\n" not in error
