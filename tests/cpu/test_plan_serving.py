"""Planning how to serve: the simulated scheduler decides as the real one, quiet rounds taken at
once give the same times bit by bit, and the answer's file is what `ridgeline serve` runs.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.data.workload import Workload, WorkloadRequest
from ridgeline.engine.scheduling.counting import CountingScheduler
from ridgeline.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from ridgeline.engine.scheduling.state import Ask
from ridgeline.engine.scheduling.step_plan import StepPlan
from ridgeline.models.shapes import describe_shape
from ridgeline.planning.clusters.parsing import parse_cluster
from ridgeline.planning.serving.asks import ask_of
from ridgeline.planning.serving.fleet import Fleet
from ridgeline.planning.serving.replica import SimulatedReplica
from ridgeline.planning.serving.served import RequestLog
from ridgeline.planning.serving.setup import EngineSetup, engine_setup
from ridgeline.planning.serving.step_times import PredictedTimes
from ridgeline.planning.serving.sustained import sustained
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
        replica.advance(ask.arrival)
        log.note_arrival(index, ask.arrival, ask.max_tokens)
        replica.submit(ask, ask.arrival)
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
    assert (one.now, one.busy_s) == (other.now, other.busy_s)
    assert len(plain.times) + len(plain.refused) == len(rows)


def real_times(
    workload: Workload, config: SchedulerConfig, times: PredictedTimes
) -> dict[Any, float]:
    """When each request ends by the engine's own scheduler, its loop written out once more."""
    scheduler, ended = Scheduler(config), {}
    out: deque[tuple[StepPlan, float]] = deque()
    coming = deque(ask_of(workload, index) for index in range(len(workload.requests)))
    now = free = 0.0
    while True:
        while coming and coming[0].arrival <= now:
            scheduler.submit(coming.popleft())
        plan = scheduler.plan(now)
        if plan is not None:
            decodes, rows = plan.num_decode_rows, len(plan.num_tokens)
            keys = sum(plan.first_positions[row] + 1 for row in range(decodes))
            pairs = sum(
                plan.num_tokens[row] * plan.first_positions[row]
                + plan.num_tokens[row] * (plan.num_tokens[row] + 1) // 2
                for row in range(decodes, rows)
            )
            samples = len(plan.sample_keys)
            free = max(now, free) + times.seconds(len(plan.token_ids), samples, [keys], pairs)
            out.append((plan, free))
        if out and (plan is None or len(out) == 2):
            done, end = out.popleft()
            now = max(now, end)
            numbers = [2 * key[0] + 2**20 + 1 for key in done.sample_keys]
            scheduler.receive(done.step_id, numbers)
        elif plan is None:
            if not coming:
                return ended
            now = max(now, coming[0].arrival)
        for end_of in scheduler.take_ended():
            if end_of.status == "finished":
                ended[end_of.request_id] = now


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
