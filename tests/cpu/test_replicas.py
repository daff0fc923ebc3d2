"""Several replicas as one engine: whatever dies, every request is answered as if nothing had."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engines import prompts_of
from lost_processes import DEADLY, StandIn
from test_supervisor import LIMITS, RECIPE, SETTINGS, assert_same, plain_engine, run, saved_model

from ridgeline.engine import Engine, Output, Sampling
from ridgeline.engine.loading.saved import Beside
from ridgeline.engine.process.supervisor import MAX_BARREN
from ridgeline.engine.process.worker import Add, Cancel, EngineOrder
from ridgeline.engine.replicas import starting as replicated
from ridgeline.engine.replicas.pool import Pool
from ridgeline.engine.replicas.ray_worker import Needs, RemoteHeartbeat, _moved
from ridgeline.engine.scheduling.state import Ask
from ridgeline.errors import HardwareError, MissingPackageError, UsageError
from ridgeline.parallel.starting.ray_cluster import load_ray
from ridgeline.quantization import load_model
from ridgeline.recipe import Parallel, Recipe

PROMPTS = prompts_of([9, 30, 14, 22, 5, 41, 17, 11])
GREEDY = Sampling(max_tokens=14, ignore_eos=True)
Dies = Callable[[int, int, list[int], int], bool]  # replica, process, positions, rows


@pytest.fixture
def pooled(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    """Makes an engine whose replicas are in this process."""

    def make(dies: Dies, num: int = 2) -> Engine:
        order = EngineOrder(Path("unread"), RECIPE, "cpu", None, None)
        starters = [
            StandIn.maker(plain_engine, lambda *about, number=number: dies(number, *about))
            for number in range(num)
        ]
        pool = Pool(order, starters)
        pool.patience_s = 0.0
        return Engine.over(pool, Beside(plain_engine().tokenizer))

    return make


def pool_of(engine: Engine) -> Pool:
    assert isinstance(engine._backend, Pool)
    return engine._backend


def never(*_: Any) -> bool:
    return False


def test_replicas_share_the_work(pooled: Callable[..., Engine]) -> None:
    engine = pooled(never)
    expected = plain_engine().generate(PROMPTS, GREEDY)
    for found, right in zip(run(engine, PROMPTS, [GREEDY] * 8), expected, strict=True):
        assert_same(found, right)
    steps = [replica.progress.num_steps for replica in pool_of(engine).replicas]
    assert min(steps) > 0
    assert engine.progress.num_steps == sum(steps)
    assert engine.stats.num_pages_used == 0
    assert engine.stats.prompt_tokens == sum(map(len, PROMPTS))
    assert not engine.has_work


@pytest.mark.parametrize("settings", SETTINGS[:3], ids=["greedy", "penalties", "three outputs"])
def test_requests_of_a_replica_that_dies_go_on_elsewhere(
    pooled: Callable[..., Engine], settings: Sampling
) -> None:
    """The first replica dies in its first step, with half of the requests."""
    expected = plain_engine().generate(PROMPTS, settings)
    engine = pooled(lambda replica, process, positions, num_rows: replica + process == 0)
    for found, right in zip(run(engine, PROMPTS, [settings] * 8), expected, strict=True):
        assert_same(found, right)
    assert engine.num_restarts == 1
    assert pool_of(engine).replicas[0].stats.prompt_tokens == 0  # nothing waited for it


def test_who_ends_two_replicas_ends_no_third(pooled: Callable[..., Engine]) -> None:
    prompts = prompts_of([9, 41, 14, 22])
    long = replace(GREEDY, max_tokens=20)
    expected = plain_engine().generate(prompts, long)
    engine = pooled(lambda replica, process, positions, rows: max(positions) == DEADLY, num=3)
    outputs = run(engine, prompts, [long] * 4)
    for index in (0, 2, 3):
        assert_same(outputs[index], expected[index])
    assert outputs[1].status == "failed"
    assert "each time this request was running" in outputs[1].reason
    assert engine.num_restarts == 3  # where it was first, where it went, and when it was tried
    deaths = [replica.num_restarts for replica in pool_of(engine).replicas]
    assert sorted(deaths) == [0, 1, 2]


def test_a_replica_that_cannot_live_is_given_up_alone(
    pooled: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = pooled(lambda replica, *_: replica == 0)
    pool = pool_of(engine)
    expected = plain_engine().generate(PROMPTS, GREEDY)
    for _ in range(MAX_BARREN + 1):
        for found, right in zip(run(engine, PROMPTS, [GREEDY] * 8), expected, strict=True):
            assert_same(found, right)
    assert pool.replicas[0].broken is not None
    assert engine.broken is None
    assert engine.is_up
    restarts = engine.num_restarts
    monkeypatch.setattr("ridgeline.engine.replicas.pool.REVIVE_S", 0.0)
    engine.step()
    assert engine.num_restarts == restarts + 1  # tried once more


def test_all_replicas_gone_is_said(pooled: Callable[..., Engine]) -> None:
    engine = pooled(lambda *_: True)
    outputs = run(engine, PROMPTS, [GREEDY] * 8)
    assert {output.status for output in outputs} == {"failed"}
    while engine.broken is None:
        run(engine, PROMPTS[:2], [GREEDY] * 2)
    with pytest.raises(HardwareError, match="in a row"):
        engine.add([5])
    engine.revive()
    assert engine.broken is None


def test_requests_are_cancelled_where_they_are(pooled: Callable[..., Engine]) -> None:
    engine = pooled(never)
    ids = [engine.add(prompt, GREEDY) for prompt in PROMPTS]
    with pytest.raises(UsageError, match="is in use"):
        engine.add(PROMPTS[0], request_id=ids[0])
    engine.step()
    assert all(engine.cancel(request_id) for request_id in ids[::2])
    assert not engine.cancel(ids[0])
    assert not engine.cancel("nobody")
    events: list[Any] = []
    while engine.has_work:
        events += engine.step()
    ended = {event.request_id: event.status for event in events if isinstance(event, Output)}
    assert ended == {key: "finished" if key in ids[1::2] else "cancelled" for key in ids}


def test_the_one_that_is_stuck_is_restarted(pooled: Callable[..., Engine]) -> None:
    engine = pooled(never)
    engine.add(PROMPTS[0], replace(GREEDY, max_tokens=60), request_id="a")
    engine.step()
    busy = next(replica for replica in pool_of(engine).replicas if replica.has_work)
    time.sleep(0.05)
    assert engine.progress.idle_s < 10
    engine.restart()
    while engine.has_work:
        engine.step()
    assert busy.num_restarts == 1


def test_times_are_moved_to_the_other_clock() -> None:
    job = plain_engine().job([5, 6], GREEDY)
    ask = Ask(1, [5, 6], 3, arrival=100.0, deadline=110.0)
    moved = _moved(Add(ask, job), 7.0)
    assert isinstance(moved, Add)
    assert (moved.ask.arrival, moved.ask.deadline) == (107.0, 117.0)
    endless = _moved(Add(replace(ask, deadline=None), job), 7.0)
    assert isinstance(endless, Add)
    assert endless.ask.deadline is None
    assert _moved(Cancel(3), 7.0) == Cancel(3)


def test_what_was_told_grows_old() -> None:
    heartbeat = RemoteHeartbeat()
    before = heartbeat.progress.idle_s
    time.sleep(0.02)
    assert heartbeat.progress.idle_s >= before + 0.02
    assert heartbeat.in_steps() == set()


# --- with Ray -------------------------------------------------------------------------------------


def test_ray_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingPackageError, match=r"ridgeline\[ray\]"):
        load_ray()


def test_what_a_replica_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    assert replicated.needs_of(Recipe(), "cpu", 3) == Needs(2, 0)
    found = replace(replicated.detect("cpu"), device_type="cuda")
    monkeypatch.setattr(replicated, "detect", lambda device: found)
    group = Recipe(parallel=Parallel(tensor=4))
    assert replicated.needs_of(group, "cuda", 2).num_gpus == 4


def test_a_saved_recipe_says_what_a_replica_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, recipes = saved_model(tmp_path), []

    def noted(recipe: Recipe, *_: Any) -> Needs:
        recipes.append(recipe)
        raise HardwareError("no cluster")

    monkeypatch.setattr(replicated, "needs_of", noted)
    for recipe in (Recipe(parallel=Parallel(tensor=2)), Recipe()):
        recipe.save(path)
        with pytest.raises(HardwareError, match="no cluster"):
            Engine.replicated(path, num_replicas=2, device="cpu")
        assert recipes[-1] == recipe


def test_mistakes_are_said_before_anything_starts(tmp_path: Path) -> None:
    for num in (0, -1, 5000):
        with pytest.raises(UsageError, match="--replicas"):
            Engine.replicated(tmp_path, num_replicas=num)
    with pytest.raises(UsageError, match="Ray chooses"):
        Engine.replicated(tmp_path, num_replicas=2, device="cuda:1")


@pytest.fixture
def ray() -> Iterator[Any]:
    ray = pytest.importorskip("ray")
    yield ray
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("tensor", [1, 2])
def test_a_replica_is_killed_under_load(tensor: int, ray: Any, tmp_path: Path) -> None:
    """Two replicas in processes that Ray has placed, each of which may start ranks; one is killed
    with requests in it.
    """
    path = saved_model(tmp_path)
    plain = replace(RECIPE, limits=replace(LIMITS, max_batch=8, memory_share=0.1))
    recipe = replace(plain, parallel=Parallel(tensor=tensor))
    long = replace(GREEDY, max_tokens=40)
    alone = Engine(load_model(path, dtype="fp32", device="cpu"), plain, num_pages=64)
    expected = alone.generate(PROMPTS * 2, long)
    with Engine.replicated(path, recipe, num_replicas=2, device="cpu", num_pages=64) as engine:
        with pytest.raises(HardwareError, match="replicas need"):
            replicated.check_room(Needs(1, 64), 2)
        for number, prompt in enumerate(PROMPTS * 2):
            engine.add(prompt, long, request_id=number)
        outputs: dict[Any, Output] = {}
        killed = False
        while engine.has_work:
            for event in engine.step():
                if isinstance(event, Output):
                    outputs[event.request_id] = event
                elif not killed:
                    killed = True
                    pool_of(engine).replicas[0].worker.kill()
        assert engine.num_restarts == 1
        for number, right in enumerate(expected):
            assert (outputs[number].status, outputs[number].tokens) == ("finished", right.tokens)
        end = time.monotonic() + 60
        while not all(replica.is_up for replica in pool_of(engine).replicas):
            engine.step()
            time.sleep(0.05)  # the new process has its turn
            assert time.monotonic() < end, "it did not come back"
        (again,) = engine.generate([PROMPTS[0]], long)
        assert again.tokens == expected[0].tokens
