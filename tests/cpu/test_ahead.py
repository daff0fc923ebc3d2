"""Graphs captured while nobody asks: which, in what order, and never at a request's cost."""

from __future__ import annotations

from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
from engines import engine_for, tiny

from ridgeline.engine.execution.ahead import Ahead, plans
from ridgeline.engine.execution.graph_kinds import (
    DECODE_SIZES,
    PROMPT_SIZES,
    GraphLimits,
    graph_kind,
)
from ridgeline.engine.execution.rehearsal import JOBS
from ridgeline.engine.process import worker


def keys(max_batch: int, max_context: int, max_tokens: int) -> list[Any]:
    found = []
    limits = GraphLimits(max_tokens, max_context, max_batch)
    for plan in plans(limits):
        length = 1 + max(plan.first_positions[: plan.num_decode_rows], default=0)
        found.append(graph_kind(plan, limits, length))
    return found


def test_each_step_is_of_another_graph_and_the_likeliest_come_first() -> None:
    found = keys(max_batch=2048, max_context=131072, max_tokens=2048)
    assert None not in found
    assert len(set(found)) == len(found) == 2 * len(DECODE_SIZES) + len(PROMPT_SIZES)
    assert [key.shape.num_tokens for key in found[:3]] == [1, 2, 4]
    assert {key.max_length for key in found if key.shape.num_decode_rows} == {1024, 4096}


def test_nothing_that_the_limits_rule_out() -> None:
    found = keys(max_batch=8, max_context=512, max_tokens=64)
    assert [key.shape.num_tokens for key in found] == [1, 2, 4, 8, 16, 32, 64]
    assert {key.max_length for key in found} == {512}


class FakeRunner:
    """Captures whatever it launches."""

    max_batch, max_context = 512, 8192

    def __init__(self) -> None:
        self.graphs = SimpleNamespace(
            captured={},
            refused=set(),
            used_bytes=0,
            budget_bytes=1 << 30,
            limits=GraphLimits(512, self.max_context, self.max_batch),
        )
        self.watch, self.watched = "somebody", []
        self.error: Exception | None = None

    def launch(self, plan: Any, jobs: Any, known: Any) -> Any:
        assert jobs is JOBS
        if self.error is not None:
            raise self.error
        self.watched.append(self.watch)
        length = 1 + max(plan.first_positions[: plan.num_decode_rows], default=0)
        key = graph_kind(plan, self.graphs.limits, length)
        assert key not in self.graphs.captured
        self.graphs.captured[key] = True
        return plan

    def collect(self, plan: Any) -> None:
        pass


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> FakeRunner:
    monkeypatch.setattr("ridgeline.engine.execution.ahead.Runner", FakeRunner)
    return FakeRunner()


def test_half_of_the_graphs_are_left_to_requests(
    runner: FakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ridgeline.engine.execution.ahead.NUM_GRAPHS", 40)
    ahead = Ahead(runner)  # type: ignore[arg-type]
    count = 0
    while ahead.one():
        count += 1
    assert count == 20
    assert runner.watched == [None] * count  # no work of the server's
    assert runner.watch == "somebody"


def test_it_ends_where_the_memory_for_graphs_does(runner: FakeRunner) -> None:
    ahead = Ahead(runner)  # type: ignore[arg-type]
    assert ahead.one()
    runner.graphs.used_bytes = runner.graphs.budget_bytes
    assert not ahead.one()


def test_graphs_that_are_there_are_not_made_again(runner: FakeRunner) -> None:
    everything = keys(512, 8192, 512)
    runner.graphs.captured = dict.fromkeys(everything[:5])
    runner.graphs.refused = {everything[5]}
    assert Ahead(runner).one()  # type: ignore[arg-type]
    assert list(runner.graphs.captured)[5] == everything[6]


def test_a_failure_ends_it_and_nothing_else(runner: FakeRunner) -> None:
    ahead, runner.error = Ahead(runner), RuntimeError("no memory")  # type: ignore[arg-type]
    assert ahead.one()
    assert not ahead.one()
    assert runner.watch == "somebody"


def test_without_graphs_there_is_nothing_to_do() -> None:
    assert not Ahead(engine_for(tiny("llama-tied")).runner).one()


def test_a_command_comes_before_any_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "QUIET_S", 0.01)
    inbox: SimpleQueue[Any] = SimpleQueue()
    made = []

    def one() -> bool:
        made.append(1)
        if len(made) == 3:
            inbox.put("a command")
        return True

    ahead: Any = SimpleNamespace(one=one)
    assert worker._next(inbox, ahead) == "a command"
    assert len(made) == 3
    inbox.put("another")
    assert worker._next(inbox, ahead) == "another"
    busy: Any = SimpleNamespace(has_work=True)
    worker._obey_all(busy, inbox, [], SimpleNamespace(), ahead)  # type: ignore[arg-type]
    assert len(made) == 3  # nothing ahead of time while others run
