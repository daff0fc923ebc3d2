"""Rounds of a replica where nothing is short, in closed form: the same times to the tick as the
scheduler planned step by step, in open and closed loops, and where pages run short on the way and
the scheduler takes over with requests and steps under way.
"""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from ridgeline.engine.scheduling.counting import SchedulerState
from ridgeline.engine.scheduling.scheduler import SchedulerConfig
from ridgeline.engine.scheduling.state import Ask
from ridgeline.models.shapes import describe_shape
from ridgeline.planning.clusters.parsing import parse_cluster
from ridgeline.planning.serving.fleets.calm import CalmRounds
from ridgeline.planning.serving.fleets.replica import SimulatedReplica
from ridgeline.planning.serving.fleets.served import RequestLog
from ridgeline.planning.serving.setup import engine_setup
from ridgeline.planning.serving.step_times import PredictedTimes, SteadySteps, seconds_of, ticks_of
from ridgeline.planning.serving.sustained import sustained
from ridgeline.recipe import Recipe

Coming = list[tuple[int, int, int]]  # prompt tokens, output tokens, arrival in ticks


@pytest.fixture(scope="module")
def times() -> PredictedTimes:
    pool = parse_cluster("H200").pools[0]
    return engine_setup(describe_shape("tiny").config, Recipe(), sustained(pool)).times


def drawn_config(draw: random.Random) -> SchedulerConfig:
    budget = draw.choice([8, 16, 33, 64, 200])
    return SchedulerConfig(
        num_pages=draw.choice([8, 12, 20, 40, 80, 300]),
        page_size=draw.choice([4, 16]),
        token_budget=budget,
        max_batch=draw.randint(1, min(8, budget)),
        prefix_cache=False,
    )


def drawn_requests(draw: random.Random) -> Coming:
    made, now, mean_s = [], 0, draw.choice([0, 1e-4, 1e-3, 1e-2])
    for _ in range(draw.randint(1, 40)):
        made.append((draw.randint(1, 90), draw.choice([1, draw.randint(1, 60)]), now))
        now += ticks_of(draw.expovariate(1) * mean_s) if draw.random() < 0.7 else 0
    return made


def run_open(replica: SimulatedReplica, log: RequestLog, coming: Coming) -> None:
    for number, (prompt, output, at) in enumerate(coming):
        replica.advance(at)
        arrive(replica, log, number, prompt, output, at)
    replica.advance(math.inf)


def run_closed(replica: SimulatedReplica, log: RequestLog, coming: Coming, clients: int) -> None:
    now = 0
    for number, (prompt, output, _) in enumerate(coming):
        while replica.num_requests >= clients:
            ended = replica.advance_to_end(math.inf)
            assert ended is not None
            now = ended
        arrive(replica, log, number, prompt, output, now)
    replica.advance(math.inf)


def arrive(
    replica: SimulatedReplica, log: RequestLog, number: int, prompt: int, output: int, at: int
) -> None:
    log.note_arrival(number, seconds_of(at), output)
    ask = Ask(number, [number + 1] * prompt, output, arrival=seconds_of(at))
    replica.submit(ask, at)


@pytest.fixture
def handed_over(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What was under way where the scheduler took over."""
    found: Counter[str] = Counter()
    given_up = CalmRounds.given_up

    def noted(calm: CalmRounds) -> tuple[SchedulerState, object]:
        state, out = given_up(calm)
        found["running"] += bool(state.running)
        found["steps out"] += bool(state.running and state.pieces is not None)
        found["prompts out"] += bool(state.pieces)
        found["prompts begun"] += any(one.position < len(one.ask.prompt) for one in state.running)
        found["waiting"] += bool(state.waiting)
        return state, out

    monkeypatch.setattr(CalmRounds, "given_up", noted)
    return found


def test_calm_rounds_give_the_scheduler_s_times(
    times: PredictedTimes, handed_over: Counter[str]
) -> None:
    for seed in range(250):
        draw = random.Random(seed)
        config, coming = drawn_config(draw), drawn_requests(draw)
        overlap, clients = draw.random() < 0.5, draw.choice([0, 0, 1, 3, 6])
        found = []
        for jumps in (False, True):
            log = RequestLog()
            replica = SimulatedReplica(config, times, log, overlap=overlap, jumps=jumps)
            if clients:
                run_closed(replica, log, coming, clients)
            else:
                run_open(replica, log, coming)
            found.append((log.times, log.refused, replica.now, replica.busy, replica.stats))
        assert found[0] == found[1], seed
    assert all(handed_over[what] >= 10 for what in handed_over), handed_over


def test_a_calm_trace_never_needs_the_scheduler(
    times: PredictedTimes, handed_over: Counter[str]
) -> None:
    config = SchedulerConfig(num_pages=48, page_size=16, max_batch=4, prefix_cache=False)
    log = RequestLog()
    replica = SimulatedReplica(config, times, log)
    run_open(replica, log, [(50, 30, ticks_of(2e-4 * each)) for each in range(60)])
    assert len(log.times) == 60
    assert replica.num_requests == 0
    assert not handed_over


def test_pages_of_prompts_are_looked_up_over_several_steps(times: PredictedTimes) -> None:
    """A step looks up 1,024 of them."""
    config = SchedulerConfig(9000, 1, token_budget=8000, max_batch=40, prefix_cache=False)
    found = []
    for jumps in (False, True):
        log = RequestLog()
        run_open(SimulatedReplica(config, times, log, jumps=jumps), log, [(90, 5, 0)] * 40)
        found.append(log.times)
    assert found[0] == found[1]
    assert len({one.first for one in found[0].values()}) > 1


@pytest.mark.parametrize("seed", range(3))
def test_as_many_steps_as_a_time_holds(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(500):
        device, more = draw.randint(1, 10**12), draw.choice([0, draw.randint(0, 10**9)])
        series = SteadySteps(device, more, draw.randint(0, 2 * 10**12), draw.randint(0, 10**9))
        wanted = draw.randint(-5, 10**15)
        count = series.num_until(wanted)
        assert series.total(count) >= wanted or not count
        assert not count or series.total(count - 1) < wanted
